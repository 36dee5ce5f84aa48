# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Absorbed decode as two Triton kernels: a part for every fixed number of rows, and the parts combined in order.

`_part`: a program takes 64 (query, head) pairs, the M of the matrix unit, through the 1,024 rows of one part of one sequence. The tile of rows is read from
memory once and is the keys of one product and the values of the next, both from shared memory, while the next tile is on its way. The programs of the
other heads come right after, so that they find the rows in L2. Part boundaries are at multiples of 1,024 rows from the sequence's start whatever
its length, so a query's bits do not depend on how many parts there are, nor on the batch. `_combine` adds up the parts in order, in fp32.

The two conditions in `_part`'s loop are also what lets both halves of the program split the keys between them: a product whose result reaches another
product in one straight line of code is computed by both (the compiler then keeps rows of scores within a warp), which costs half as much again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from driftline.kernels.mla_decode.shapes import Sizes

__all__ = ["CONFIGURATIONS", "DEFAULT", "Configuration", "decode", "takes"]


class Configuration(NamedTuple):
    """Rows of a part; rows of a tile; warps and stages of `_part`."""

    part: int
    tile: int
    warps: int
    stages: int


DEFAULT = Configuration(part=1024, tile=32, warps=8, stages=3)
CONFIGURATIONS = (DEFAULT, Configuration(1024, 32, 8, 4), Configuration(1024, 64, 8, 2), Configuration(2048, 32, 8, 3), Configuration(2048, 64, 8, 2))
"""What runs, and what the benchmark's sweep times beside it. Another part or tile is another order of sums: other bits."""

_PAIRS = 64
"""(query, head) pairs of a program: the fewest rows that Hopper's matrix unit takes, and the most whose 512 sums fit the registers."""

_AHEAD = 8
"""Parts that `_combine` reads before it adds the first."""


@triton.jit(do_not_specialize=["window"])
def _part(q, pages, table, lengths, sums, maxima, totals, rows, window, table_width, parts, scale, HEADS: tl.constexpr, PAGE: tl.constexpr,
          PART: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr, LATENT: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + sequence)
    start = part * PART
    if start >= length:
        return
    WIDTH: tl.constexpr = LATENT + SHARED
    row = tile * PAIRS + tl.arange(0, PAIRS)
    live = row < rows
    d = tl.arange(0, LATENT)
    e = tl.arange(0, SHARED)
    k = tl.arange(0, TILE)
    query = q + (sequence * rows + row) * WIDTH
    q_latent = tl.load(query[:, None] + d[None, :], mask=live[:, None], other=0.0)
    q_shared = tl.load(query[:, None] + (LATENT + e)[None, :], mask=live[:, None], other=0.0)
    everyone = length - window + 1
    limit = everyone + row // HEADS
    acc = tl.zeros((PAIRS, LATENT), tl.float32)
    top = tl.full((PAIRS,), float("-inf"), tl.float32)
    total = tl.zeros((PAIRS,), tl.float32)
    stop = tl.minimum(start + PART, length)
    table += sequence * table_width
    # The page of the next tile is read one tile ahead: the copy of its rows must not wait for it.
    if PAGE % TILE == 0:
        page = tl.load(table + start // PAGE)
    else:
        page = tl.load(table + (start + k) // PAGE, mask=start + k < length, other=0)
    for at in tl.range(start, stop, TILE, num_stages=STAGES):
        inside = at + k < length
        if PAGE % TILE == 0:
            here = pages + (page.to(tl.int64) * PAGE + at % PAGE) * WIDTH + k * WIDTH
            page = tl.load(table + (at + TILE) // PAGE, mask=at + TILE < stop, other=0)
        else:
            here = pages + (page.to(tl.int64) * PAGE + (at + k) % PAGE) * WIDTH
            page = tl.load(table + (at + TILE + k) // PAGE, mask=at + TILE + k < stop, other=0)
        latent = tl.load(here[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        shared = tl.load(here[:, None] + (LATENT + e)[None, :], mask=inside[:, None], other=0.0)
        score = tl.dot(q_shared, tl.trans(shared))
        if at + TILE > length:
            score = tl.where(inside[None, :], score, float("-inf"))
        score = tl.dot(q_latent, tl.trans(latent), score)
        if at + TILE > everyone:
            score = tl.where((at + k)[None, :] < limit[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1) * scale)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(tl.fma(score, scale, -finite[:, None]))
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * shrink[:, None])
        top = higher
    to = (sequence * parts + part) * rows + row
    tl.store(sums + to[:, None] * LATENT + d[None, :], acc, mask=live[:, None])
    tl.store(maxima + to, top, mask=live)
    tl.store(totals + to, total, mask=live)


@triton.jit
def _combine(sums, maxima, totals, lengths, out, rows, parts, PART: tl.constexpr, PARTS: tl.constexpr, LATENT: tl.constexpr, AHEAD: tl.constexpr):
    row = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.cdiv(tl.load(lengths + sequence), PART), parts)
    d = tl.arange(0, LATENT)
    first = sequence * parts * rows + row
    every = tl.arange(0, PARTS)
    top = tl.max(tl.load(maxima + first + every * rows, mask=every < count, other=float("-inf")), axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros((LATENT,), tl.float32)
    total = tl.sum(tl.zeros((LATENT,), tl.float32), axis=0)
    for begin in range(0, count, AHEAD):
        for i in tl.static_range(AHEAD):
            here = begin + i < count
            lanes = 0 * d + begin + i < count
            at = first + (begin + i) * rows
            weight = tl.exp2(tl.load(maxima + at, mask=here, other=float("-inf")) - top)
            acc = tl.fma(tl.load(sums + at * LATENT + d, mask=lanes, other=0.0), weight, acc)
            total = tl.fma(tl.load(totals + at, mask=here, other=0.0), weight, total)
    value = tl.where(total > 0.0, acc / tl.where(total > 0.0, total, 1.0), 0.0)
    tl.store(out + (sequence * rows + row) * LATENT + d, value.to(out.dtype.element_ty))


def takes(sizes: Sizes, dtype: torch.dtype) -> bool:
    """Whether the kernels are for these sizes."""
    def power(n: int, low: int, high: int) -> bool:
        return low <= n <= high and n & (n - 1) == 0

    return dtype == torch.bfloat16 and power(sizes.latent, 16, 512) and power(sizes.shared, 16, 64) and power(sizes.page, 1, 2**16)


def decode(
    q: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, sizes: Sizes, scale: float, out_dtype: torch.dtype,
    configuration: Configuration = DEFAULT,
) -> torch.Tensor:
    """As the package's `mla_decode`, of what `takes` allows. Two launches; nothing is waited for."""
    q, pages, table, lengths = (t.contiguous() for t in (q, pages, table, lengths))
    rows, parts = sizes.window * sizes.heads, max(1, triton.cdiv(sizes.longest, configuration.part))
    out = torch.empty(*q.shape[:-1], sizes.latent, dtype=out_dtype, device=q.device)
    if out.numel() == 0:
        return out
    sums = torch.empty(sizes.batch, parts, rows, sizes.latent, dtype=torch.float32, device=q.device)
    maxima, totals = (torch.empty(sizes.batch, parts, rows, dtype=torch.float32, device=q.device) for _ in range(2))
    _part[(triton.cdiv(rows, _PAIRS), parts, sizes.batch)](
        q, pages, table, lengths, sums, maxima, totals, rows, sizes.window, table.shape[1], parts, scale / math.log(2), HEADS=sizes.heads, PAGE=sizes.page,
        PART=configuration.part, PAIRS=_PAIRS, TILE=configuration.tile, LATENT=sizes.latent, SHARED=sizes.shared, STAGES=configuration.stages,
        num_warps=configuration.warps, enable_fp_fusion=True,
    )
    _combine[(rows, sizes.batch)](
        sums, maxima, totals, lengths, out, rows, parts, PART=configuration.part, PARTS=triton.next_power_of_2(parts), LATENT=sizes.latent, AHEAD=_AHEAD,
        num_warps=4, enable_fp_fusion=True,
    )
    return out
