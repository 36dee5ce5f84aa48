"""How the rows of an expert's two products are rounded, and nothing else: the same rule for the learner and for a rollout, named by one switch.

K3 publishes MXFP4 weights with MXFP8 activations (groups of 32, E8M0 scales); engines on Hopper run bfloat16 activations, or FP8 with an fp32 scale
per 128. A result should say which of these it used.
"""

from __future__ import annotations

from enum import Enum

import torch

from driftline.kernels.mxfp4.reference import grouped

__all__ = ["FP8_LARGEST", "Activations", "quantise", "round_to_mxfp8", "rounded"]

FP8_LARGEST = 448.0
_LEAST = 1e-30
"""A row of zeros has this as its largest magnitude, so that its scale is a number."""


class Activations(Enum):
    """SAME: as they are, bfloat16. FP8_128: E4M3 with one fp32 scale a row and 128 columns. FP8_32: E4M3 with one power of two a row and 32 columns (MXFP8)."""

    SAME = "same"
    FP8_128 = "fp8_128"
    FP8_32 = "fp8_32"


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., K], K a multiple of 128, to (E4M3 [.., K], scale fp32 [.., K / 128]); x is about values * scale. scale = largest / 448, and values are x * (448 /
    largest) rounded to nearest even, both quotients and the product in fp32. Raises ValueError."""
    if x.shape[-1] % 128:
        raise ValueError(f"x has {x.shape[-1]} columns; groups of 128 need a multiple of 128")
    groups = grouped(x.float(), 128)
    largest = groups.abs().amax(-1).clamp(min=_LEAST)
    most = torch.full_like(largest, FP8_LARGEST)  # torch divides by a number, and a number, by way of reciprocals, which round once more
    values = groups * (most / largest)[..., None]
    return values.to(torch.float8_e4m3fn).flatten(-2), largest / most


def round_to_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """x [.., K], K a multiple of 32, rounded to E4M3 times the least power of two by which a group's largest magnitude fits 448, in fp32: a bfloat16 holds the
    result. Powers below 2^-100 are 2^-100. Raises ValueError."""
    if x.shape[-1] % 32:
        raise ValueError(f"x has {x.shape[-1]} columns; groups of 32 need a multiple of 32")
    groups = grouped(x.float(), 32)
    bits = groups.abs().amax(-1).view(torch.int32)
    power = ((bits >> 23) + ((bits & 0x7FFFFF) > 0x600000).int() - 8).clamp(min=27)
    up, down = (p.int().view(torch.float32)[..., None] for p in (power << 23, (254 - power) << 23))
    return ((groups * down).to(torch.float8_e4m3fn).float() * up).flatten(-2)


def rounded(x: torch.Tensor, activations: Activations) -> torch.Tensor:
    """What the products see of x, in x's dtype or fp32: the reference of the kernels' roundings. Not differentiable except SAME."""
    match activations:
        case Activations.SAME:
            return x
        case Activations.FP8_32:
            return round_to_mxfp8(x).to(x.dtype)
        case Activations.FP8_128:
            values, scale = quantise(x)
            return (grouped(values.float(), 128) * scale[..., None]).flatten(-2).to(torch.promote_types(x.dtype, torch.float32))
