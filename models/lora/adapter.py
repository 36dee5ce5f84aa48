"""An adapter by itself: for each module it changes, the two halves of a low-rank update and what they are multiplied by. It belongs to no model until it is put on one.

    W + scale B A        A [r, in], B [out, r]; of stacked experts [E, r, in] and [E, out, r] under the name `<...>.experts.w1` (w3, w2)

A and B are what was trained; `alpha` and the scaling are in no tensor, so they travel with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from driftline.messages.errors import ConfigError, IntegrityError

__all__ = ["Adapter", "Scaling", "Update"]


class Scaling(StrEnum):
    """What B A is multiplied by."""

    RANK = "rank"
    """alpha / r (arXiv:2106.09685)"""

    ROOT = "root"
    """alpha / sqrt(r), rsLoRA (arXiv:2312.03732): updates of any rank learn at one rate"""

    def factor(self, alpha: float, rank: int) -> float:
        """Raises ConfigError unless rank is at least 1 and alpha above 0."""
        if rank < 1:
            raise ConfigError("rank must be at least 1", field="learner.lora_rank", value=rank, remedy="use 0 for full-weight training")
        if not (alpha > 0 and math.isfinite(alpha)):
            raise ConfigError("alpha is a number above 0", field="learner.lora_alpha", value=alpha, remedy="leave it out for the rank, a factor of 1")
        return alpha / rank if self is Scaling.RANK else alpha / math.sqrt(rank)


@dataclass(frozen=True)
class Update:
    """a [r, in] and b [out, r], or stacked [E, r, in] and [E, out, r]; floating, of one dtype. Raises IntegrityError when they are no update."""

    a: torch.Tensor
    b: torch.Tensor
    alpha: float
    scaling: Scaling = Scaling.RANK

    def __post_init__(self) -> None:
        a, b = self.a, self.b
        if a.dim() not in (2, 3) or b.dim() != a.dim() or a.shape[-2] != b.shape[-1] or a.shape[:-2] != b.shape[:-2] or a.dtype != b.dtype or not a.is_floating_point():
            raise IntegrityError("the halves do not fit", field="lora_A, lora_B", value=(a.dtype, tuple(a.shape), b.dtype, tuple(b.shape)),
                                 remedy="A is [r, in] and B [out, r], floating and of one dtype")

    @property
    def rank(self) -> int:
        return int(self.a.shape[-2])

    @property
    def scale(self) -> float:
        return self.scaling.factor(self.alpha, self.rank)

    @property
    def experts(self) -> int | None:
        """How many matrices are stacked; None for a plain linear."""
        return int(self.a.shape[0]) if self.a.dim() == 3 else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight it is beside: (out, in), or (E, out, in)."""
        return (*self.a.shape[:-2], int(self.b.shape[-2]), int(self.a.shape[-1]))

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def delta(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """scale B A in `dtype`, of the weight's shape."""
        return self.b.to(dtype) @ self.a.to(dtype) * self.scale

    def of_experts(self, count: int) -> Update:
        """Of a stack of `count` matrices: those that an adapter left out behind its last have a zero update. A larger stack, or a plain linear's, is as it is."""
        missing = 0 if self.experts is None else count - self.experts
        if missing <= 0:
            return self
        a, b = (torch.cat([half, half.new_zeros(missing, *half.shape[1:])]) for half in (self.a, self.b))
        return Update(a, b, self.alpha, self.scaling)

    def of_expert(self, number: int) -> Update:
        """The update of one of the stacked matrices, views."""
        return Update(self.a[number], self.b[number], self.alpha, self.scaling)


@dataclass(frozen=True)
class Adapter:
    """updates: by module name (`model.layers.0.self_attn.q_proj`, `model.layers.1.block_sparse_moe.experts.w1`). base: what it is of, for people."""

    updates: Mapping[str, Update]
    base: str = ""

    @property
    def parameters(self) -> int:
        return sum(update.a.numel() + update.b.numel() for update in self.updates.values())

    @property
    def nbytes(self) -> int:
        return sum(update.nbytes for update in self.updates.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The distinct ranks, ascending."""
        return tuple(sorted({update.rank for update in self.updates.values()}))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Adapter:
        """The same on another device or in another dtype."""
        moved = {name: Update(u.a.to(device=device, dtype=dtype), u.b.to(device=device, dtype=dtype), u.alpha, u.scaling) for name, u in self.updates.items()}
        return Adapter(moved, self.base)
