"""The forms in which a stack of expert matrices lies in memory. A form is a type, so a kernel is chosen by it and never by what the tensors hold."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

__all__ = ["GROUP", "PROMOTION", "ExpertWeight", "Fp8Weight", "Mxfp4Weight"]

GROUP = 32
"""Elements of K that share one E8M0 scale (OCP Microscaling formats 1.0)."""

PROMOTION = 128
"""Elements of K that share one scale of an FP8 weight: the stretch over which Hopper's FP8 matrix unit accumulates before the sum goes to fp32."""


class Mxfp4Weight(NamedTuple):
    """E matrices [N, K] as K3's public checkpoints hold them.

    packed uint8 [E, N, K / 2]: the low nibble is the even K. A nibble is a sign (bit 3) and an E2M1 magnitude of {0, .5, 1, 1.5, 2, 3, 4, 6}.
    scale uint8 [E, N, K / 32]: E8M0, the factor 2^(scale - 127); 255 is NaN.
    """

    packed: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)"""
        experts, out, half = self.packed.shape
        return experts, out, half * 2

    @property
    def device(self) -> torch.device:
        return self.packed.device


class Fp8Weight(NamedTuple):
    """E matrices [N, K] of E4M3 with a power of two a row and 128 of K: values float8_e4m3fn [E, N, K], scale fp32 [E, N, K / 128]."""

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)"""
        experts, out, width = self.values.shape
        return experts, out, width

    @property
    def device(self) -> torch.device:
        return self.values.device


ExpertWeight: TypeAlias = torch.Tensor | Mxfp4Weight | Fp8Weight
"""[E, N, K] in one of the three forms; a tensor is bfloat16 for the kernels, any floating dtype for the reference."""
