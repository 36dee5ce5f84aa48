"""A small model that guesses a larger one's next tokens from its hidden states (arXiv:2503.01840). See docs/speculation.md."""

from driftline.models.drafter.config import DrafterConfig
from driftline.models.drafter.files import load_drafter, save_drafter
from driftline.models.drafter.model import Drafter
from driftline.models.drafter.taps import Taps

__all__ = ["Drafter", "DrafterConfig", "Taps", "load_drafter", "save_drafter"]
