# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""The plan of a decode step in one launch: at a handful of tokens, the launches of a sort cost as much as a layer's smallest product.

A pair's row is how many pairs come before it: those of a lower expert, and those of its own with a lower number. Counted, not sorted, so it takes pairs
squared: for few of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["tables"]

_ROWS, _CHUNK, _TILE_CHUNK = 64, 128, 32
_WARPS = 16


@triton.jit
def _held(ids, at, count, experts):
    """Experts of pairs; those that have none, and those past the end, come last."""
    expert = tl.load(ids + at, mask=at < count, other=-1).to(tl.int32)
    return tl.where((expert >= 0) & (expert < experts), expert, experts)


@triton.jit
def _rank(ids, pairs, rows, count, experts, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = _held(ids, mine, count, experts)[:, None]
    before = tl.zeros((ROWS,), tl.int32)
    for first in range(0, count, CHUNK):
        other = first + tl.arange(0, CHUNK)
        theirs = _held(ids, other, count, experts)[None, :]
        earlier = (theirs < expert) | ((theirs == expert) & (other[None, :] < mine[:, None]))
        before += tl.sum((earlier & (other < count)[None, :]).to(tl.int32), axis=1)
    tl.store(rows + mine, before, mask=mine < count)
    tl.store(pairs + before, mine, mask=mine < count)


@triton.jit
def _tiles(ids, starts, tile_expert, tile_start, count, experts, tiles, block, EXPERTS: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr):
    """EXPERTS >= experts, TILES >= tiles."""
    e = tl.arange(0, EXPERTS)
    start = tl.zeros((EXPERTS,), tl.int32)
    rows = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, count, CHUNK):
        other = first + tl.arange(0, CHUNK)
        theirs = tl.where(other < count, _held(ids, other, count, experts), EXPERTS + 1)[None, :]
        start += tl.sum((theirs < e[:, None]).to(tl.int32), axis=1)
        rows += tl.sum((theirs == e[:, None]).to(tl.int32), axis=1)
    rows = tl.where(e < experts, rows, 0)
    tl.store(starts + e, start, mask=e < experts)
    tl.store(starts + experts, tl.sum(rows, axis=0))
    needed = (rows + block - 1) // block
    tile = tl.cumsum(needed, axis=0) - needed
    for i in range(tl.max(needed, axis=0)):
        tl.store(tile_expert + tile + i, e, mask=needed > i)
        tl.store(tile_start + tile + i, start + i * block, mask=needed > i)
    t = tl.arange(0, TILES)
    unused = (t >= tl.sum(needed, axis=0)) & (t < tiles)
    tl.store(tile_expert + t, tl.full((TILES,), -1, tl.int32), mask=unused)
    tl.store(tile_start + t, tl.zeros((TILES,), tl.int32), mask=unused)


@triton.jit(do_not_specialize=["count", "tiles"])
def _tables(ids, pairs, rows, starts, tile_expert, tile_start, count, experts, tiles, block, ROWS: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
            TILES: tl.constexpr, TILE_CHUNK: tl.constexpr):
    """The last program makes the experts' tables, the others the rows of ROWS pairs each."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        _tiles(ids, starts, tile_expert, tile_start, count, experts, tiles, block, EXPERTS, TILES, TILE_CHUNK)
    else:
        _rank(ids, pairs, rows, count, experts, ROWS, CHUNK)


def tables(ids: torch.Tensor, experts: int, block: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """pairs, rows, starts, tile_expert, tile_start of a `Plan`: at least one id, contiguous. Its work is pairs times pairs or experts."""
    count = ids.numel()
    pairs, rows, starts, tile_expert, tile_start = (torch.empty(n, dtype=torch.int32, device=ids.device) for n in (count, count, experts + 1, tiles, tiles))
    _tables[(triton.cdiv(count, _ROWS) + 1,)](
        ids, pairs, rows, starts, tile_expert, tile_start, count, experts, tiles, block, ROWS=_ROWS, CHUNK=_CHUNK, EXPERTS=triton.next_power_of_2(experts),
        TILES=triton.next_power_of_2(tiles), TILE_CHUNK=_TILE_CHUNK, num_warps=_WARPS, enable_fp_fusion=False)
    return pairs, rows, starts, tile_expert, tile_start
