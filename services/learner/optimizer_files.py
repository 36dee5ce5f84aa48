"""Optimizer state beside the policy: one file per version, written before the version is published, tied to it by digest.

A learner killed at any moment finds the state of the version that is the head; a file of a version that was never published has another digest or a newer
number and is ignored.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from driftline.policy_store.tensor import State, state_digest
from driftline.services.learner.trainer import Trainer

__all__ = ["OptimizerFiles"]

_NAME = re.compile(r"^optimizer-(\d{8})\.json$")


class OptimizerFiles:
    def __init__(self, root: Path) -> None:
        self.root = root

    def save(self, trainer: Trainer, version: int, state: State) -> None:
        """Write the state of `version`, whose policy is `state`. The small file that names it comes last and makes it count."""
        self.root.mkdir(parents=True, exist_ok=True)
        trainer.save_optimizer(self._tensors(version))
        partial = self.root / f".optimizer-{version:08d}.partial"
        partial.write_text(json.dumps({"version": version, "digest": state_digest(state)}))
        partial.replace(self._label(version))

    def load(self, trainer: Trainer, version: int, digest: str) -> bool:
        """Restore the state saved for exactly this version and policy; False if there is none."""
        label = self._label(version)
        try:
            named = json.loads(label.read_text())
        except (OSError, json.JSONDecodeError):
            return False
        if named != {"version": version, "digest": digest} or not self._tensors(version).is_file():
            return False
        trainer.load_optimizer(self._tensors(version))
        return True

    def keep_newest(self, count: int) -> None:
        versions = sorted(int(m[1]) for p in self.root.glob("optimizer-*.json") if (m := _NAME.match(p.name)))
        for version in versions[:-count]:
            self._label(version).unlink(missing_ok=True)
            self._tensors(version).unlink(missing_ok=True)

    def _label(self, version: int) -> Path:
        return self.root / f"optimizer-{version:08d}.json"

    def _tensors(self, version: int) -> Path:
        return self.root / f"optimizer-{version:08d}.safetensors"
