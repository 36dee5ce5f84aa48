# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""What every kernel of the backward computes alike from the raw inputs of one chunk: where it lies, its unit keys, its gates and their decays.

A chunk is 64 tokens of one head; the gates of 16 of them span at most 80 nats, those of the whole chunk 320, more than fp32 holds. So decays are
kept as factors that are safe one by one. With `local` the inclusive sum of g (in bits) inside a token's block of 16, `total` the block's own sum:

    rise = 2^(local + SHIFT)            from the block's start to the token
    tail = 2^(total - local - SHIFT)    from the token to the block's end
    back = 2^(-local - SHIFT)           from the token to the block's start, for pairs of one block only

Each e^(G_i - G_j), i >= j, is then a product of one row factor, one column factor and factors of whole blocks that are at most 1: `rise_i back_j`
inside a block, `rise_i tail_j` between neighbours, and `rise_i tail_j` times the blocks between otherwise. SHIFT is exact (a power of two), and
centres `rise` and `back` in fp32's and bfloat16's range. No factor depends on a later token than the block it belongs to.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["BLOCK", "CHUNK", "SHIFT", "WIDTH", "add_dot", "as_stored", "columns", "decays", "dot", "gates", "later_rows", "length", "narrow", "place", "rows", "sigmoid"]

CHUNK = 64
"""Tokens of a chunk. Chunks begin at multiples of it from each sequence's start."""

BLOCK = 16
"""Tokens of a block: at 5 nats each they stay inside fp32."""

WIDTH = 128
"""Channels of a key and of a value."""

SHIFT = tl.constexpr(58.0)
"""Half of 16 x 5 nats, in bits."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter multiplies the bits of bfloat16 as integers; there the operands are widened first, which is exact. And it narrows by cutting off, where the device rounds to nearest."""


@triton.jit
def narrow(x):
    """fp32 to bfloat16, to nearest, ties to even."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def as_stored(x, pointer):
    """fp32 in the type that the pointer points to."""
    if pointer.dtype.element_ty == tl.bfloat16:
        return narrow(x)
    else:
        return x.to(pointer.dtype.element_ty)


@triton.jit
def dot(left, right):
    """left @ right of bfloat16, summed in fp32."""
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
    at = (begin * heads + head) * WIDTH + row.to(tl.int64) * heads * WIDTH + channel + tl.arange(0, WIDE)[None, :]
    return tl.load(tensor + at, mask=row < valid, other=0.0)


@triton.jit
def sigmoid(x):
    """To 2^-21, in five instructions: a division takes three times as many."""
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * x))
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
def decays(gate, WIDE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """From g in bits [64, WIDE]: local [4, 16, WIDE]; and of each block [4, WIDE] its total, what lies before it and what after it, inside the chunk."""
    blocks = tl.reshape(gate, [CHUNK // BLOCK, BLOCK, WIDE])
    local = tl.cumsum(blocks, axis=1)
    total = tl.sum(blocks, axis=1)
    before = tl.cumsum(total, axis=0) - total
    after = tl.sum(total, axis=0)[None, :] - before - total
    return local, total, before, after


@triton.jit
def columns(tail, back, total, before, block: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The column side of every pair whose row is in `block`: [64, WIDE] bf16, zero for later blocks. tail, back [4, 16, WIDE]."""
    which = tl.arange(0, CHUNK // BLOCK)[:, None]
    anchor = tl.sum(tl.where(which == block, before, 0.0), axis=0)[None, :]
    between = tl.exp2(tl.where(which < block, anchor - before - total, float("-inf")))
    return narrow(tl.reshape(tl.where((which == block)[:, :, None], back, tail * between[:, None, :]), [CHUNK, WIDE]))


@triton.jit
def later_rows(rise, total, before, block: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The row side of every pair whose column is in `block` and whose row is in a later one: [64, WIDE] bf16, zero elsewhere. rise [4, 16, WIDE]."""
    which = tl.arange(0, CHUNK // BLOCK)[:, None]
    anchor = tl.sum(tl.where(which == block, before + total, 0.0), axis=0)[None, :]
    between = tl.exp2(tl.where(which > block, before - anchor, float("-inf")))
    return narrow(tl.reshape(rise * between[:, None, :], [CHUNK, WIDE]))
