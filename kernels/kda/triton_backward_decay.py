# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""What every kernel of the backward computes alike from the raw inputs of one chunk: where it lies, its unit keys, its gates and their decays.

A chunk is 64 tokens of one head in four blocks of 16; the gates of 16 tokens span at most 80 nats, those of the whole chunk 320, more than fp32
holds. So e^(G_i - G_j), i >= j, is always a row factor times a column factor that are safe one by one, anchored at the start of the row's block:

    row i of block b:      rise_i = 2^(the sum of g from the block's start to i)
    column j, for rows of block b:   2^(the sum of g after j, up to the block's start), and 2^-(the sum from the start to j) inside the block

The latter is at most e^80; rows are scaled by 2^58 and columns by 2^-58, exactly, which centres both in the range. Every such sum over tokens is
a product with a matrix of 0, 1 and -1 (`sums`), the gates being rounded to fp16, 2^-12 of each: a decay is off by 2^-12 of its own logarithm, less than
the operands that it scales. So a sum costs a matrix instruction and not one shuffle.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = [
    "AFTER",
    "BLOCK",
    "CHUNK",
    "DOWN",
    "INTERPRETED",
    "LOG2E",
    "LOWER",
    "RISE",
    "SINCE",
    "START",
    "TAIL",
    "UNTIL",
    "UP",
    "UPPER",
    "WIDTH",
    "Sums",
    "add_dot",
    "as_stored",
    "dot",
    "gates",
    "length",
    "matrix",
    "narrow",
    "place",
    "rows",
    "sigmoid",
    "split",
    "summed",
    "sums",
]

CHUNK = 64
"""Tokens of a chunk. Chunks begin at multiples of it from each sequence's start."""

BLOCK = 16
"""Tokens of a block: at 5 nats each they stay inside fp32."""

WIDTH = 128
"""Channels of a key and of a value."""

UP = tl.constexpr(2.0**58)
"""e^40 to the nearest power of two: half of 16 x 5 nats."""

DOWN = tl.constexpr(2.0**-58)

LOG2E = tl.constexpr(1.4426950408889634)

RISE, TAIL, LOWER, UPPER, START, AFTER = (tl.constexpr(n) for n in range(6))
"""Where in `Sums.gates` what is."""

SINCE, UNTIL = tl.constexpr(0), tl.constexpr(1)
"""Where in `Sums.shares` what is."""


class Sums(NamedTuple):
    """gates fp16 [6, 64, 64], shares bf16 [2, 64, 64]: sums over tokens (columns) for each token (row). r, b: the row and its block, s, c: the
    column and its block.

    RISE c = b, s <= r.  TAIL c = b, s > r.  LOWER 2 <= c < b.
    UPPER b < c < 2.  START c < b.  AFTER c > b.  SINCE s >= r.  UNTIL s < r."""

    gates: torch.Tensor
    shares: torch.Tensor


@cache
def sums(device: torch.device) -> Sums:
    r, s = torch.arange(CHUNK)[:, None], torch.arange(CHUNK)[None, :]
    b, c = r // BLOCK, s // BLOCK
    rise, half = (b == c) & (s <= r), CHUNK // BLOCK // 2
    gates = torch.stack([x.float() for x in (rise, (b == c) & (s > r), (half <= c) & (c < b), (b < c) & (c < half), c < b, c > b)])
    shares = torch.stack([s >= r, s < r])
    return Sums(gates.to(device=device, dtype=torch.float16), shares.to(device=device, dtype=torch.bfloat16))


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter multiplies the bits of bfloat16 as integers; there the operands are widened first, which is exact. And it narrows by cutting off, where the device rounds to nearest."""


@triton.jit
def narrow(x):
    """fp32 to bfloat16, to nearest, ties to even, two to an instruction."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def widen(x):
    """bfloat16 to fp32, an instruction each."""
    if INTERPRETED:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=&r,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def as_stored(x, pointer):
    """fp32 in the type that the pointer points to."""
    if INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:
        return narrow(x)
    else:
        return x.to(pointer.dtype.element_ty)


@triton.jit
def dot(left, right):
    """left @ right of bfloat16 or fp16, summed in fp32."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(left, right)


@triton.jit
def add_dot(left, right, so_far):
    """so_far + left @ right of bfloat16, summed in fp32."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), so_far, input_precision="ieee")
    else:
        return tl.dot(left, right, so_far)


@triton.jit
def place(chunk, steps, chunks_each, owner, first, bounds, VARLEN: tl.constexpr, CHUNK: tl.constexpr):
    """The chunk's first row among all rows (int64) and how many of its rows exist: 64 or fewer, none for a chunk nobody owns."""
    if VARLEN:
        sequence = tl.load(owner + chunk)
        inside = sequence >= 0
        sequence = tl.maximum(sequence, 0)
        begin = tl.load(bounds + sequence).to(tl.int64) + (chunk - tl.load(first + sequence)).to(tl.int64) * CHUNK
        valid = tl.where(inside, tl.load(bounds + sequence + 1).to(tl.int64) - begin, 0)
    else:
        begin = (chunk // chunks_each).to(tl.int64) * steps + (chunk % chunks_each) * CHUNK
        valid = (steps - (chunk % chunks_each) * CHUNK).to(tl.int64)
    return begin, tl.minimum(valid, CHUNK).to(tl.int32)


@triton.jit
def rows(tensor, begin, valid, head, heads, channel, WIDE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """[64, WIDE] from `channel` on of a [rows, heads, 128] tensor, zero where there is no row."""
    row = tl.arange(0, CHUNK)[:, None]
    base = tensor + ((begin * heads + head) * WIDTH + channel)
    return tl.load(base + (row * (heads * WIDTH) + tl.arange(0, WIDE)[None, :]), mask=row < valid, other=0.0)


@triton.jit
def sigmoid(x):
    """To 2^-21, in five instructions: a division takes three times as many."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def length(tensor, begin, valid, head, heads, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """One over each row's length [64], eps inside the root."""
    x = rows(tensor, begin, valid, head, heads, 0, WIDTH, CHUNK, WIDTH).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)


@triton.jit
def gates(z, dt_bias, speed, begin, valid, head, heads, channel, WIDE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """exp(A_log) (z + dt_bias) [64, WIDE]: the gate before its sigmoid. Rows that are not there are to be masked afterwards."""
    bias = tl.load(dt_bias + head * WIDTH + channel + tl.arange(0, WIDE)).to(tl.float32)
    return speed * (rows(z, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH).to(tl.float32) + bias[None, :])


@triton.jit
def split(x):
    """fp32 as two bfloat16 whose sum is x to 2^-16: its upper half, cut off, and the rest."""
    high = (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return narrow(high), narrow(x - high)


@triton.jit
def matrix(matrices, which: tl.constexpr, CHUNK: tl.constexpr):
    """One of `sums`."""
    return tl.load(matrices + (which * CHUNK * CHUNK + tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]))


@triton.jit
def summed(matrices, which: tl.constexpr, gate, CHUNK: tl.constexpr):
    """The sums over tokens that matrix `which` says, of a gate [64, WIDE] in fp16: fp32."""
    return dot(matrix(matrices, which, CHUNK), gate)
