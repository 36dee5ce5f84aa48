"""Between MXFP4 and other forms, exactly: unpacking loses nothing, packing what was unpacked gives the same values, the transcode to FP8 counts what it cannot hold.

Sources: OCP Microscaling formats 1.0 (E2M1, E8M0); the rule that chooses a scale is that of compressed-tensors' `mxfp4-pack-quantized`, so a merged and
repacked checkpoint changes only where a value changed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from driftline.kernels.mxfp4.weights import GROUP, PROMOTION, Fp8Weight, Mxfp4Weight

__all__ = ["FP8_SPAN", "LARGEST_SCALE", "Transcoded", "check", "dequantised", "grouped", "pack", "to_fp8", "unpack"]

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

LARGEST_SCALE = 128
"""The kernels decode by one product with 2^(scale - 1), a bfloat16: a larger scale, which would be of weights above 12, becomes NaN there, never a wrong number."""

FP8_SPAN = 14
"""A group whose scale is at most 2^14 below the largest of its 128 fits E4M3 beside it: 0.5 * 2^-14 * 2^6 = 2^-9, the least subnormal."""

_PIECE = 1 << 20
"""Elements that are unpacked at a time, by way of 8-byte codes and values."""

_LIFT = 6
"""6 * 2^6 = 384, the largest product that still fits E4M3's 448."""


class Transcoded(NamedTuple):
    """weight; flushed int64 []: groups of 32 that lie more than 2^14 below their 128, hold something, and are now zero. 0: the transcode lost nothing."""

    weight: Fp8Weight
    flushed: torch.Tensor


def check(packed: torch.Tensor, scale: torch.Tensor) -> None:
    """Raises ValueError when the two are not one stack of MXFP4 matrices."""
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"packed is {packed.dtype} and scale {scale.dtype}; both are uint8 as they lie in the checkpoint")
    if packed.ndim < 2 or packed.shape[-1] % (GROUP // 2) or scale.shape != (*packed.shape[:-1], packed.shape[-1] // (GROUP // 2)):
        raise ValueError(f"packed {tuple(packed.shape)} and scale {tuple(scale.shape)} do not belong together; give [.., N, K / 2] and [.., N, K / {GROUP}]")


def grouped(x: torch.Tensor, size: int, axis: int = -1) -> torch.Tensor:
    """One axis in groups of `size`, which divides it: [.., K, ..] to [.., K / size, size, ..]."""
    axis = axis % x.ndim
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])


def _codes(packed: torch.Tensor) -> torch.Tensor:
    """int64 [.., K], the low nibble first."""
    wide = packed.long()
    return torch.stack((wide & 15, wide >> 4), -1).flatten(-2)


def unpack(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """packed uint8 [.., N, K / 2], scale uint8 [.., N, K / 32] to [.., N, K] of `dtype`; exact in bfloat16 and wider within their exponents.
    Scale 255 makes NaN. Beside the result it needs the memory of a few rows, whatever the stack's size. Raises ValueError."""
    check(packed, scale)
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64, device=packed.device)
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype, device=packed.device)
    rows = max(1, _PIECE // max(1, out.shape[-1]))
    for codes, exponents, values in zip(*(torch.split(t.flatten(0, -2), rows) for t in (packed, scale, out)), strict=True):
        factor = torch.where(exponents == 255, torch.nan, torch.exp2(exponents.double() - 127))
        values.copy_((grouped(table[_codes(codes)], GROUP) * factor[..., None]).flatten(-2))
    return out


def pack(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., N, K] of a floating dtype, K a multiple of 32, to (packed uint8 [.., N, K / 2], scale uint8 [.., N, K / 32]).

    The exponent is that of a group's largest magnitude after one that reaches 1.75 of its binade has moved up, less 2; values go to the nearest, ties to the
    even code, what is larger than 6 to 6. Packing an unpacked tensor and unpacking it again gives the tensor. Raises ValueError.
    """
    if x.ndim < 2 or x.shape[-1] % GROUP or not x.is_floating_point():
        raise ValueError(f"x has shape {tuple(x.shape)} and dtype {x.dtype}; give a floating [.., N, K] with K a multiple of {GROUP}")
    groups = grouped(x.float(), GROUP)
    bits = groups.abs().amax(-1).view(torch.int32) + (1 << 21)
    scale = ((bits >> 23) - 2).clamp(0, 254)
    magnitude = groups.double().abs() * torch.exp2(127.0 - scale.double())[..., None]
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for i, edge in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (magnitude > edge) if i % 2 == 0 else (magnitude >= edge)
    code += 8 * torch.signbit(groups).to(torch.uint8)
    nibbles = grouped(code.flatten(-2), 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4, scale.to(torch.uint8)


def to_fp8(weight: Mxfp4Weight) -> Transcoded:
    """[E, N, K] with K a multiple of 128: E4M3 values times 2^(largest scale of the 128 - 133). Exact but for `flushed`. Raises ValueError."""
    check(*weight)
    if weight.shape[-1] % PROMOTION:
        raise ValueError(f"K = {weight.shape[-1]} is not a multiple of {PROMOTION}, the stretch of one FP8 scale; keep such a weight in MXFP4")
    exponents = grouped(weight.scale.long(), PROMOTION // GROUP)
    largest = exponents.amax(-1)
    below = largest[..., None] - exponents
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32, device=weight.device)
    values = grouped(grouped(table[_codes(weight.packed)], GROUP), PROMOTION // GROUP, axis=-2)
    fits = below <= FP8_SPAN
    moved = torch.where(fits[..., None], values * torch.exp2((_LIFT - below).float())[..., None], 0.0)
    flushed = (~fits & (values != 0).any(-1)).sum()
    scale = torch.where(largest == 255, torch.nan, torch.exp2((largest - 127 - _LIFT).double())).float()
    return Transcoded(Fp8Weight(moved.flatten(-3).to(torch.float8_e4m3fn), scale), flushed)


def dequantised(weight: torch.Tensor | Mxfp4Weight | Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
    """[E, N, K] of `dtype`; a tensor passes as it is."""
    if isinstance(weight, Mxfp4Weight):
        return unpack(weight.packed, weight.scale, dtype)
    if isinstance(weight, Fp8Weight):
        wide = grouped(weight.values.double(), PROMOTION) * weight.scale.double()[..., None]
        return wide.flatten(-2).to(dtype)
    return weight
