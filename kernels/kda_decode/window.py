"""What a draft window leaves behind until it is known how much of it was accepted: its raw inputs, so that folding is decoding again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["LONGEST_WINDOW", "Window"]

LONGEST_WINDOW = 16
"""Tokens of one window. K3's gate lets a token decay by at most 5 nats, and a window lies in shared memory whole."""


@dataclass(frozen=True)
class Window:
    """The raw inputs of each slot's last window: k, z [slots, capacity, H, K], v [slots, capacity, H, V], beta [slots, capacity, H], in the dtypes that
    the operator is given. k before its norm, z before `dt_bias`, beta before its sigmoid; `replay_decode` writes them, nobody else.

    What it holds of a slot means nothing by itself: `accepted` says how many of its tokens are to be folded, 0 for a slot that is new or was folded."""

    k: torch.Tensor
    v: torch.Tensor
    z: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def empty(cls, slots: int, capacity: int, heads: int, dim: int = 128, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> Window:
        """Room for `capacity` tokens a slot (drafts + 1). Raises ValueError for a capacity outside 1..16."""
        if not 1 <= capacity <= LONGEST_WINDOW:
            raise ValueError(f"capacity is {capacity}; a window holds 1 to {LONGEST_WINDOW} tokens: draft fewer")
        k, v, z = (torch.zeros(slots, capacity, heads, dim, dtype=dtype, device=device) for _ in range(3))
        return cls(k, v, z, torch.zeros(slots, capacity, heads, dtype=dtype, device=device))

    @property
    def capacity(self) -> int:
        return self.k.shape[1]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.k, self.v, self.z, self.beta))
