# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Tiles of expert matrices as bfloat16, whatever form they lie in: the exact value, or a rounding of it where bfloat16's range ends.

A tile is rows of a matrix [N, K] and a stretch of its K, so K is always the contiguous axis, whether or not the product sums over it. MXFP4 becomes bfloat16 by
integers: the three magnitude bits of a nibble, put where bfloat16 has the end of its exponent and its first mantissa bit, are the value times 2^-126,
E2M1's subnormal included; one product with 2^(scale - 1) gives the value exactly. That factor ends at scale 128, weights of at most 12: a larger scale gives
infinity, which nothing takes for a weight.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl

from driftline.kernels.mxfp4.weights import ExpertWeight, Fp8Weight, Mxfp4Weight

__all__ = ["BFLOAT16", "FP8", "INTERPRETED", "MXFP4", "TO_BFLOAT16", "Form", "form", "in_order", "row_pointers", "row_steps", "stored", "tile"]


class Form(IntEnum):
    BFLOAT16 = 0
    MXFP4 = 1
    FP8 = 2


BFLOAT16, MXFP4, FP8 = (tl.constexpr(int(f)) for f in Form)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter multiplies the bits of bfloat16 as integers and has no assembly; there operands are widened first."""

TO_BFLOAT16 = tl.constexpr("""
{
.reg .b32 t, a, b;
prmt.b32 t, $4, 0, 0x4140;
shl.b32 a, t, 12; and.b32 a, a, 0x80008000;
shl.b32 b, t, 6; lop3.b32 a, b, 0x01C001C0, a, 0xEA;
mul.rn.bf16x2 $0, a, $5;
shl.b32 a, t, 8; and.b32 a, a, 0x80008000;
shl.b32 b, t, 2; lop3.b32 a, b, 0x01C001C0, a, 0xEA;
mul.rn.bf16x2 $2, a, $5;
prmt.b32 t, $4, 0, 0x4342;
shl.b32 a, t, 12; and.b32 a, a, 0x80008000;
shl.b32 b, t, 6; lop3.b32 a, b, 0x01C001C0, a, 0xEA;
mul.rn.bf16x2 $1, a, $6;
shl.b32 a, t, 8; and.b32 a, a, 0x80008000;
shl.b32 b, t, 2; lop3.b32 a, b, 0x01C001C0, a, 0xEA;
mul.rn.bf16x2 $3, a, $6;
}
""")
"""Four bytes ($4) and their factors, two to a word ($5, $6): the low nibbles ($0, $1) and the high ones ($2, $3) as bfloat16, two to a word."""


def form(weight: ExpertWeight) -> Form:
    """Which form; ValueError for a tensor that is not bfloat16."""
    if isinstance(weight, Mxfp4Weight):
        return Form.MXFP4
    if isinstance(weight, Fp8Weight):
        return Form.FP8
    if weight.dtype is not torch.bfloat16:
        raise ValueError(f"weight: {weight.dtype} on a GPU; give bfloat16, an Mxfp4Weight or an Fp8Weight")
    return Form.BFLOAT16


def stored(weight: ExpertWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """The two tensors that a kernel gets, contiguous: values and scale (the values again, unread, where there is no scale)."""
    values, scale = (weight, weight) if isinstance(weight, torch.Tensor) else weight
    return values.contiguous(), scale.contiguous()


@triton.jit
def row_pointers(values, scale, row, width, FORM: tl.constexpr):
    """Where rows (int64 numbers among all experts' rows) begin, in the values and in the scales."""
    if FORM == MXFP4:
        return values + row * (width // 2), scale + row * (width // 32)
    elif FORM == FP8:
        return values + row * width, scale + row * (width // 128)
    else:
        return values + row * width, scale + row * 0


@triton.jit
def _nibbles(packed, factor):
    """(low nibbles, high nibbles) of bytes at each byte's scale, bfloat16; factor as `_factor` gives it."""
    if INTERPRETED:
        code = packed.to(tl.int32)
        low = ((code & 7) << 22 | (code & 8) << 28).to(tl.float32, bitcast=True)
        high = ((code & 0x70) << 18 | (code & 0x80) << 24).to(tl.float32, bitcast=True)
        wide = factor.to(tl.float32)
        return (low * wide).to(tl.bfloat16), (high * wide).to(tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(TO_BFLOAT16, "=&r,=&r,=&r,=&r,r,r,r", [packed, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)


@triton.jit
def _factor(scale):
    """2^(scale - 1) of E8M0 bytes as bfloat16: what a nibble's bits, read as 2^-126 of their value, are multiplied by. Infinite past 128."""
    return ((tl.minimum(scale.to(tl.int32), 129) + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def tile(of_values, of_scale, there, first, width, ROWS: tl.constexpr, COLS: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr, APART: tl.constexpr):
    """bfloat16 [ROWS, COLS]: columns first.. of the rows that begin at these pointers; zero where `there` is not, and past `width` unless EVEN.
    first and COLS: multiples of 32 for MXFP4; COLS a divisor of 128 that first is aligned to for FP8. APART: MXFP4's even columns come first, then the odd
    ones, as the bytes have them: for columns that are an output's, put in order once by `in_order` and not in every step."""
    if FORM == MXFP4:
        c = tl.arange(0, COLS // 2)
        g = tl.arange(0, COLS // 32)
        mask, near = there[:, None] & (c >= 0)[None, :], there[:, None] & (g >= 0)[None, :]
        if not EVEN:
            mask, near = mask & (first + 2 * c < width)[None, :], near & (first + 32 * g < width)[None, :]
        packed = tl.load(of_values[:, None] + (first // 2 + c)[None, :], mask=mask, other=0)
        factor = _factor(tl.load(of_scale[:, None] + (first // 32 + g)[None, :], mask=near, other=0))
        spread = tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, COLS // 32, 16)), (ROWS, COLS // 2))
        low, high = _nibbles(packed, spread)
        both = tl.join(low, high)
        if APART:
            both = tl.permute(both, (0, 2, 1))
        return tl.reshape(both, (ROWS, COLS))
    else:
        c = tl.arange(0, COLS)
        mask = there[:, None] & (c >= 0)[None, :]
        if not EVEN:
            mask = mask & (first + c < width)[None, :]
        held = tl.load(of_values[:, None] + (first + c)[None, :], mask=mask, other=0.0)
        if FORM == FP8:
            scale = tl.load(of_scale + first // 128, mask=there, other=0.0)
            held = (held.to(tl.float32) * scale[:, None]).to(tl.bfloat16)
        return held


@triton.jit
def in_order(total, ROWS: tl.constexpr, COLS: tl.constexpr, FORM: tl.constexpr):
    """A product with tiles that were APART, its columns in their order."""
    if FORM == MXFP4:
        return tl.reshape(tl.permute(tl.reshape(total, (ROWS, 2, COLS // 2)), (0, 2, 1)), (ROWS, COLS))
    else:
        return total


@triton.jit
def row_steps(width, FORM: tl.constexpr):
    """How far apart rows lie, in the values and in the scales."""
    if FORM == MXFP4:
        return width // 2, width // 32
    elif FORM == FP8:
        return width, width // 128
    else:
        return width, width * 0
