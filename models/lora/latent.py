"""The adapter of an up-projection that attention uses in halves, apart from it: what its update adds to latent queries and to values.

MLA's `kv_b_proj` [H (nope + v), rank] is never applied as it stands where keys are latents: its key half goes into the queries and its value half into the results.
An update folded into the weight would be rounded with it, and one below the weight's last bit would be lost; beside it nothing is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from driftline.kernels.linear import linear
from driftline.kernels.linear.heads import head_linear
from driftline.models.lora.adapter import Update

__all__ = ["LatentTerm", "LatentUpdate", "latent_update"]


class LatentTerm(Protocol):
    """What is added to the products with the base's two halves. `uniform`: one adapter for all rows, so the layer itself may be applied to any of them."""

    @property
    def uniform(self) -> bool: ...

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """q [.., H, nope] to [.., H, rank]: through the key half, transposed."""

    def values(self, o: torch.Tensor) -> torch.Tensor:
        """o [.., H, rank] to [.., H, v]: through the value half."""


@dataclass(frozen=True)
class LatentUpdate:
    """One adapter's term. a [r, rank]; b [H, nope + v, r]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    nope: int
    uniform: bool = True

    @classmethod
    def of(cls, update: Update, heads: int, nope: int) -> LatentUpdate:
        return cls(update.a, update.b.view(heads, -1, update.rank), update.scale, nope)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """scale (q B_k) A."""
        return linear(head_linear(q, self.b[:, : self.nope].mT), self.a.t()) * self.scale

    def values(self, o: torch.Tensor) -> torch.Tensor:
        """scale (o A^T) B_v^T."""
        return head_linear(linear(o, self.a), self.b[:, self.nope :]) * self.scale


def latent_update(projection: nn.Linear, heads: int, nope: int) -> LatentTerm | None:
    """The term of this projection's adapter, with its gradient; None when it has none."""
    make = getattr(projection, "latent_update", None)
    term: LatentTerm | None = None if make is None else make(heads, nope)
    return term
