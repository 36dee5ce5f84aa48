"""Servers of other systems, vLLM and SGLang, as rollout engines."""

from driftline.services.rollout.external.engine import ExternalEngine, FileWeights, Finished
from driftline.services.rollout.external.files import HandOver
from driftline.services.rollout.external.opening import open_engine
from driftline.services.rollout.external.server import (
    Sampled,
    Server,
    ServerRefused,
    ServerUnavailable,
    Wanted,
)
from driftline.services.rollout.external.sglang import Sglang
from driftline.services.rollout.external.vllm import Vllm

__all__ = ["ExternalEngine", "FileWeights", "Finished", "HandOver", "Sampled", "Server", "ServerRefused", "ServerUnavailable", "Sglang", "Vllm", "Wanted", "open_engine"]
