"""A policy of many small tensors, and packs so small that each shard has its own: an interrupted transfer has a middle."""

from __future__ import annotations

import numpy as np
import pytest
from policy_cases import Policy, copy_of

from driftline.policy_store import HostTensor, State, packing


class Wide(Policy):
    def __init__(self, tensors: int = 12, elements: int = 300, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.state: State = {f"layers.{number:02d}": self._tensor(elements) for number in range(tensors)}

    def _tensor(self, elements: int) -> HostTensor:
        weights = (self.rng.standard_normal(elements, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return HostTensor.from_numpy(weights, "bfloat16")

    def step(self, share: float = 0.05) -> State:
        """Every tensor moves, so every shard of a delta has bytes."""
        for name, tensor in self.state.items():
            bits = tensor.numpy().copy()
            moved = self.rng.random(bits.size) < share
            moved[self.rng.integers(bits.size)] = True
            bits[moved] ^= 1
            self.state[name] = HostTensor.from_numpy(bits, "bfloat16")
        return copy_of(self.state)


def tiny_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PACK_BYTES", 1)
