"""What an attention layer asks of a state that is held elsewhere, in a pool: it gives the new tokens' inputs and gets what they see.

Such a state knows whose the tokens are and where their rows lie, so a layer passes nothing of that on; it is changed in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from driftline.models.latent_attention import Heads

__all__ = ["Decay", "Held", "HeldKda", "HeldKeyValues", "HeldLatents"]


class Decay(NamedTuple):
    """a_log [H] and dt_bias [H K]: parameters of a KDA layer's gate; lower_bound: of its decay, in nats."""

    a_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float

    def of(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """a_log and dt_bias in the states' dtype."""
        return self.a_log.to(dtype), self.dt_bias.to(dtype)


class HeldKda(Protocol):
    def advanced(self, raw: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, decay: Decay) -> torch.Tensor:
        """raw [B, T, 3 H K] before the convolution of `weight` [3 H K, W], z [B, T, H, K], beta [B, T, H]: o [B, T, H, K]."""


class HeldLatents(Protocol):
    def attended(self, q: torch.Tensor, new: torch.Tensor, heads: Heads) -> torch.Tensor:
        """q [B, T, H, nope + shared] and the new rows [B, T, rank + shared]: [B, T, H, value]."""


class HeldKeyValues(Protocol):
    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [B, T, H, D], k and v [B, T, Hkv, D], rotated: [B, T, H, D]."""


Held = HeldKda | HeldLatents | HeldKeyValues
