"""The rollout engine: what samples, from whole groups or single requests. See docs/rollout.md."""

from __future__ import annotations

from driftline.services.rollout.engine.engine import Engine
from driftline.services.rollout.engine.memory import EngineMemory
from driftline.services.rollout.engine.request import Completion, Progress, Request
from driftline.services.rollout.engine.scheduler import QueueFull

__all__ = ["Completion", "Engine", "EngineMemory", "Progress", "QueueFull", "Request"]
