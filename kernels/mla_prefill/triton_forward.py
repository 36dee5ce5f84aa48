# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Causal attention over packed sequences, forward: a program a tile of queries and a head, over the keys in order from the sequence's first.

A query's bits depend on that query and the keys it sees: tiles of keys begin at multiples of `keys` from the sequence's start, a tile that lies beyond a
query changes nothing of its sums, and rows of a tile do not meet. So prefill in pieces, other sequences in the pack and later tokens change no bits.
What runs where is found on the device (`tiles_of`): no lengths come to the host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from driftline.kernels.mla_prefill.shapes import Sizes

__all__ = ["CONFIGURATIONS", "DEFAULT", "Configuration", "extent", "forward", "numbers_at", "row_numbers", "takes", "tiles_of"]


class Configuration(NamedTuple):
    """Queries and keys of a tile, warps, stages."""

    queries: int
    keys: int
    warps: int
    stages: int


DEFAULT = Configuration(queries=128, keys=64, warps=8, stages=3)
CONFIGURATIONS = (DEFAULT, Configuration(128, 64, 8, 4), Configuration(128, 128, 8, 2), Configuration(64, 64, 4, 2))
"""What runs, and what the benchmark's sweep times beside it. Another number of keys is another order of sums: other bits."""


@triton.jit
def extent(tiles, tile, sequence, starts, starts_k):
    """A tile's first row in its sequence, where the sequence's queries and keys begin, how many there are of each, and how many keys precede its first query."""
    first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(starts + sequence)
    begin_k = tl.load(starts_k + sequence)
    length = tl.load(starts + sequence + 1) - begin
    length_k = tl.load(starts_k + sequence + 1) - begin_k
    return first, begin, begin_k, length, length_k, length_k - length


@triton.jit
def numbers_at(begin, sequence):
    """Where a sequence's numbers begin in each head's: after those of the sequences before it, at a multiple of 4, which is 16 bytes."""
    return (begin + 3 * sequence + 3) // 4 * 4


@triton.jit
def _forward(q, kv, k_shared, starts, starts_k, tiles, out, lse, lse_stride, count, scale, HEADS: tl.constexpr, NOPE: tl.constexpr, SHARED: tl.constexpr,
             VALUE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):
    # The last tiles have the most keys and begin first.
    tile = count - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    first, begin, begin_k, length, length_k, ahead = extent(tiles, tile, sequence, starts, starts_k)
    row = tl.arange(0, QUERIES)
    j = tl.arange(0, KEYS)
    n = tl.arange(0, NOPE)
    e = tl.arange(0, SHARED)
    f = tl.arange(0, VALUE)
    live = first + row < length
    top_row = begin.to(tl.int64) + first
    query = q + top_row * (HEADS * (NOPE + SHARED)) + head * (NOPE + SHARED) + row[:, None] * (HEADS * (NOPE + SHARED))
    q_nope = tl.load(query + n[None, :], mask=live[:, None], other=0.0)
    q_shared = tl.load(query + (NOPE + e)[None, :], mask=live[:, None], other=0.0)
    position = first + row + ahead
    acc = tl.zeros((QUERIES, VALUE), tl.float32)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    pair = kv + head * (NOPE + VALUE)
    for at in tl.range(0, tl.minimum(first + QUERIES + ahead, length_k), KEYS, num_stages=STAGES):
        inside = at + j < length_k
        here = begin_k.to(tl.int64) + at
        key = pair + here * (HEADS * (NOPE + VALUE)) + j[:, None] * (HEADS * (NOPE + VALUE))
        k = tl.load(key + n[None, :], mask=inside[:, None], other=0.0)
        r = tl.load(k_shared + here * SHARED + j[:, None] * SHARED + e[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(key + (NOPE + f)[None, :], mask=inside[:, None], other=0.0)
        score = tl.dot(q_shared, tl.trans(r))
        score = tl.dot(q_nope, tl.trans(k), score)
        if at + KEYS > first + ahead:
            score = tl.where((at + j)[None, :] <= position[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1) * scale)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(tl.fma(score, scale, -finite[:, None]))
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = higher
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    acc = acc / divisor[:, None]
    tl.store(out + top_row * (HEADS * VALUE) + head * VALUE + row[:, None] * (HEADS * VALUE) + f[None, :], acc.to(out.dtype.element_ty), mask=live[:, None])
    tl.store(lse + head.to(tl.int64) * lse_stride + numbers_at(begin, sequence) + first + row, tl.where(some, top + tl.log2(divisor), float("inf")), mask=live)


def takes(sizes: Sizes, dtype: torch.dtype) -> bool:
    """Whether the kernels are for these sizes."""
    return dtype == torch.bfloat16 and all(16 <= n <= 128 and n & (n - 1) == 0 for n in (sizes.nope, sizes.shared, sizes.value))


def tiles_of(starts: torch.Tensor, rows: int, tile: int) -> torch.Tensor:
    """int32 [at most rows / tile + sequences, 2] on the device of `starts`: (sequence, its first row) of every tile, -1 past the last. No lengths come to
    the host. The bound is of the rows alone: no tile but a sequence's last is short."""
    lengths = starts.diff()
    ends = ((lengths + (tile - 1)) // tile).cumsum(0)
    number = torch.arange(rows // tile + lengths.numel(), device=starts.device)
    sequence = torch.searchsorted(ends, number, right=True)
    held = sequence.clamp(max=lengths.numel() - 1)
    first = (number - (ends - (lengths + (tile - 1)) // tile)[held]) * tile
    return torch.stack([torch.where(sequence < lengths.numel(), sequence, -1), first], 1).to(torch.int32).contiguous()


def row_numbers(sizes: Sizes, starts: torch.Tensor) -> torch.Tensor:
    """Memory for a number a head and query, fp32 [H, T and up to 3 between sequences]: each sequence's begin 16 bytes aligned, for the copy engine."""
    return torch.empty(sizes.heads, (sizes.queries + 3 * starts.numel()) // 4 * 4 + 4, dtype=torch.float32, device=starts.device)


def forward(
    q: torch.Tensor, kv: torch.Tensor, k_shared: torch.Tensor, starts: torch.Tensor, starts_k: torch.Tensor, sizes: Sizes, scale: float,
    out_dtype: torch.dtype, configuration: Configuration = DEFAULT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, value] in out_dtype, log2 of the sum of exp2 of the scores as `row_numbers`: infinite for a query that sees no key) of
    contiguous inputs."""
    out = torch.empty(sizes.queries, sizes.heads, sizes.value, dtype=out_dtype, device=q.device)
    lse = row_numbers(sizes, starts)
    tiles = tiles_of(starts, sizes.queries, configuration.queries)
    if out.numel():
        _forward[(tiles.shape[0], sizes.heads)](
            q, kv, k_shared, starts, starts_k, tiles, out, lse, lse.stride(0), tiles.shape[0], scale / math.log(2), HEADS=sizes.heads, NOPE=sizes.nope, SHARED=sizes.shared,
            VALUE=sizes.value, QUERIES=configuration.queries, KEYS=configuration.keys, STAGES=configuration.stages, num_warps=configuration.warps,
            enable_fp_fusion=True,
        )
    return out, lse
