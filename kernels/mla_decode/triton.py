# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined"
"""Absorbed decode as two kernels: a part for every fixed number of rows (Gluon), and the parts combined in order (Triton).

`_part`: a program takes 64 (query, head) pairs, the M of the matrix unit, through the rows of one part of one sequence, 64 a tile. A tile is read from
memory once and is the keys of one product and the values of the next, both from shared memory. Two tiles are there or on their way: the product of the
weights with this tile's values and that of the queries with the next tile's keys are issued together, and as soon as the first is done, the copy of the
tile after the next takes its place. Both halves of the program share the keys of the scores and the columns of the sums. The programs of the other heads
come right after, so that they find the rows in L2.

Part boundaries are at multiples of `PART` rows from the sequence's start whatever its length, so a query's bits do not depend on how many parts there
are, nor on the batch. `_combine` adds up the parts in order, in fp32.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from driftline.kernels.mla_decode.shapes import Sizes

__all__ = ["PART", "PARTS", "decode", "takes"]

PART = 2048
"""Rows of a part, for every shape. Another part is another order of sums: other bits."""

PARTS = (PART, 1024)
"""What the benchmark's sweep times."""

TILE = 64
"""Rows of a tile: two tiles of 64 rows and 64 queries fill shared memory."""

_PAIRS = 64
"""(query, head) pairs of a program: the fewest rows that Hopper's matrix unit takes, and the most whose 512 sums fit the registers."""

_AHEAD = 8
"""Parts that `_combine` reads before it adds the first."""

_wait = getattr(gl, "barrier", None) or gl.thread_barrier
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def _places(table, page, at, k, stop, PAGE: gl.constexpr, TILE: gl.constexpr):
    """Rows of the pool where rows at + k lie. page: that of row `at`, which is that of all where a page holds whole tiles."""
    if PAGE % TILE == 0:
        row = page.to(gl.int64) * PAGE + at % PAGE + k
    else:
        row = gl.load(table + (at + k) // PAGE, mask=at + k < stop, other=0).to(gl.int64) * PAGE + (at + k) % PAGE
    return row


@gluon.jit
def _ask(latents, shareds, pages, table, page, at, stop, PAGE: gl.constexpr, TILE: gl.constexpr, LATENT: gl.constexpr, SHARED: gl.constexpr):
    """Begin to bring a tile of rows into shared memory; zeros for those from `stop` on, which are not read."""
    WIDTH: gl.constexpr = LATENT + SHARED
    k = gl.arange(0, TILE, gl.SliceLayout(1, _WIDE))
    d = gl.arange(0, LATENT, gl.SliceLayout(0, _WIDE))
    _copy(latents, pages + (_places(table, page, at, k, stop, PAGE, TILE) * WIDTH)[:, None] + d[None, :], mask=(at + k < stop)[:, None])
    k = gl.arange(0, TILE, gl.SliceLayout(1, _NARROW))
    d = gl.arange(0, SHARED, gl.SliceLayout(0, _NARROW))
    _copy(shareds, pages + (_places(table, page, at, k, stop, PAGE, TILE) * WIDTH)[:, None] + (LATENT + d)[None, :], mask=(at + k < stop)[:, None])
    async_copy.commit_group()


@gluon.jit
def _page(table, at, stop, PAGE: gl.constexpr):
    return gl.load(table + at // PAGE, mask=at < stop, other=0)


@gluon.jit(do_not_specialize=["window"])
def _part(q, pages, table, lengths, sums, maxima, totals, rows, window, table_width, parts, scale, HEADS: gl.constexpr, PAGE: gl.constexpr,
          PART: gl.constexpr, PAIRS: gl.constexpr, TILE: gl.constexpr, LATENT: gl.constexpr, SHARED: gl.constexpr):
    WIDTH: gl.constexpr = LATENT + SHARED
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, TILE // 2, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, LATENT // 2, 16])
    first = gl.program_id(0) * PAIRS
    part = gl.program_id(1)
    sequence = gl.program_id(2).to(gl.int64)
    length = gl.load(lengths + sequence)
    start = part * PART
    if start < length:
        stop = gl.minimum(start + PART, length)
        table += sequence * table_width
        query_latent = gl.allocate_shared_memory(gl.bfloat16, [PAIRS, LATENT], _OPERAND)
        query_shared = gl.allocate_shared_memory(gl.bfloat16, [PAIRS, SHARED], _OPERAND)
        latents = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, LATENT], _OPERAND)
        shareds = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, SHARED], _OPERAND)
        weights = gl.allocate_shared_memory(gl.bfloat16, [PAIRS, TILE], _OPERAND)
        row = first + gl.arange(0, PAIRS, gl.SliceLayout(1, _WIDE))
        d = gl.arange(0, LATENT, gl.SliceLayout(0, _WIDE))
        _copy(query_latent, q + ((sequence * rows + row) * WIDTH)[:, None] + d[None, :], mask=(row < rows)[:, None])
        row = first + gl.arange(0, PAIRS, gl.SliceLayout(1, _NARROW))
        d = gl.arange(0, SHARED, gl.SliceLayout(0, _NARROW))
        _copy(query_shared, q + ((sequence * rows + row) * WIDTH)[:, None] + (LATENT + d)[None, :], mask=(row < rows)[:, None])
        _ask(latents.index(0), shareds.index(0), pages, table, _page(table, start, stop, PAGE), start, stop, PAGE, TILE, LATENT, SHARED)
        _ask(latents.index(1), shareds.index(1), pages, table, _page(table, start + TILE, stop, PAGE), start + TILE, stop, PAGE, TILE, LATENT, SHARED)
        row = first + gl.arange(0, PAIRS, gl.SliceLayout(1, SCORES))
        k = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
        everyone = length - window + 1
        limit = everyone + row // HEADS
        nothing = gl.zeros([PAIRS, TILE], gl.float32, SCORES)
        acc = gl.zeros([PAIRS, LATENT], gl.float32, SUMS)
        top = gl.full([PAIRS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, SCORES))
        async_copy.wait_group(1)
        fence_async_shared()
        _wait()
        score = warpgroup_mma(query_latent, latents.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = warpgroup_mma(query_shared, shareds.index(0).permute((1, 0)), score, is_async=True)
        score = warpgroup_mma_wait(0, [score])
        which = 0
        for at in range(start, stop, TILE):
            # The page of the tile that is asked for in this turn: its copy must not wait for it.
            page = _page(table, at + 2 * TILE, stop, PAGE)
            if at + TILE > everyone:
                score = gl.where((at + k)[None, :] < limit[:, None], score, float("-inf"))
            higher = gl.maximum(top, gl.max(score, axis=1) * scale)
            finite = gl.where(higher == float("-inf"), 0.0, higher)
            p = gl.exp2(score * scale - finite[:, None])
            shrink = gl.exp2(top - finite)
            top = higher
            weights.store(p.to(gl.bfloat16))
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
            # Behind this the weights are there, and the next tile: no other is on its way.
            async_copy.wait_group(0)
            fence_async_shared()
            _wait()
            acc = warpgroup_mma(weights, latents.index(which), acc, is_async=True)
            score = warpgroup_mma(query_latent, latents.index(1 - which).permute((1, 0)), nothing, use_acc=False, is_async=True)
            score = warpgroup_mma(query_shared, shareds.index(1 - which).permute((1, 0)), score, is_async=True)
            total = total * shrink + gl.sum(p, axis=1)
            acc = warpgroup_mma_wait(2, [acc])
            # Both halves are through with this tile.
            _wait()
            _ask(latents.index(which), shareds.index(which), pages, table, page, at + 2 * TILE, stop, PAGE, TILE, LATENT, SHARED)
            score = warpgroup_mma_wait(0, [score])
            which = 1 - which
        to = (sequence * parts + part) * rows
        gl.store(maxima + to + row, top, mask=row < rows)
        gl.store(totals + to + row, total, mask=row < rows)
        row = first + gl.arange(0, PAIRS, gl.SliceLayout(1, SUMS))
        d = gl.arange(0, LATENT, gl.SliceLayout(0, SUMS))
        gl.store(sums + (to + row)[:, None] * LATENT + d[None, :], acc, mask=(row < rows)[:, None])


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
    return dtype == torch.bfloat16 and sizes.latent in (64, 128, 256, 512) and sizes.shared == 64 and sizes.page & (sizes.page - 1) == 0


def decode(
    q: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, sizes: Sizes, scale: float, out_dtype: torch.dtype, part: int = PART,
) -> torch.Tensor:
    """As the package's `mla_decode`, of what `takes` allows. Two launches; nothing is waited for."""
    q, pages, table, lengths = (t.contiguous() for t in (q, pages, table, lengths))
    rows, parts = sizes.window * sizes.heads, max(1, triton.cdiv(sizes.longest, part))
    out = torch.empty(*q.shape[:-1], sizes.latent, dtype=out_dtype, device=q.device)
    if out.numel() == 0:
        return out
    sums = torch.empty(sizes.batch, parts, rows, sizes.latent, dtype=torch.float32, device=q.device)
    maxima, totals = (torch.empty(sizes.batch, parts, rows, dtype=torch.float32, device=q.device) for _ in range(2))
    _part[(triton.cdiv(rows, _PAIRS), parts, sizes.batch)](
        q, pages, table, lengths, sums, maxima, totals, rows, sizes.window, table.shape[1], parts, scale / math.log(2), HEADS=sizes.heads, PAGE=sizes.page,
        PART=part, PAIRS=_PAIRS, TILE=TILE, LATENT=sizes.latent, SHARED=sizes.shared, num_warps=8, enable_fp_fusion=True,
    )
    _combine[(rows, sizes.batch)](
        sums, maxima, totals, lengths, out, rows, parts, PART=part, PARTS=triton.next_power_of_2(parts), LATENT=sizes.latent, AHEAD=_AHEAD,
        num_warps=4, enable_fp_fusion=True,
    )
    return out
