"""Which rows an expert gets, as tables on the device: the order is that of the ids alone, and nothing is waited for.

Pair s = n * k + slot is token n's choice in that slot. Pairs are sorted by expert, equal experts by pair, so a plan is a function of the ids: no atomics, no
dependence on the schedule. Every table's length is known from shapes; a tile that does not exist has the expert -1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from driftline.kernels.dispatch import runs_triton

__all__ = ["Plan", "most_tiles", "plan"]

_COUNTED = 1024
"""Up to so many pairs and experts a plan on a GPU is counted in one launch; a sort's launches would take longer than a decode step's products."""


class Plan(NamedTuple):
    """pairs, rows int32 [N * k], starts int32 [E + 1], tile_expert, tile_start int32 [most_tiles(N * k, E, block)], all on the device of the ids.

    Sorted row r belongs to pair `pairs[r]`, and `rows[pairs[r]] == r`. Expert e has the rows `starts[e]:starts[e + 1]`; `starts[E]` counts the pairs that have
    an expert (an id outside 0..E-1 has none: its row lies after all others). Tile t covers at most `block` rows of `tile_expert[t]`, from `tile_start[t]` to the
    nearer of `tile_start[t] + block` and the expert's end; tiles are in the order of their rows, and those that exist come first.
    """

    pairs: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    tile_expert: torch.Tensor
    tile_start: torch.Tensor
    block: int


def most_tiles(pairs: int, experts: int, block: int) -> int:
    """The most tiles that any ids can need: as many experts as possible with one row, the remaining rows in whole tiles."""
    touched = min(pairs, experts)
    return touched + (pairs - touched) // block


def plan(ids: torch.Tensor, experts: int, block: int) -> Plan:
    """ids [N, k], any integer dtype; `experts` E >= 1; `block` >= 1 rows a tile. Raises ValueError for anything else."""
    if ids.ndim != 2 or ids.is_floating_point():
        raise ValueError(f"ids has shape {tuple(ids.shape)} and dtype {ids.dtype}; give one row of integer expert ids a token, [N, k]")
    if experts < 1:
        raise ValueError(f"experts={experts}; there must be at least one")
    if block < 1:
        raise ValueError(f"block={block}; a tile has at least one row")
    count = ids.numel()
    if count >= 2**31:
        raise ValueError(f"ids has {count} pairs, and the tables hold fewer than 2^31; split the tokens into microbatches")
    if 0 < count <= _COUNTED and experts <= _COUNTED and runs_triton(ids):
        from driftline.kernels.moe import triton_plan

        return Plan(*triton_plan.tables(ids.contiguous(), experts, block, most_tiles(count, experts, block)), block)
    device = ids.device
    flat = ids.reshape(-1).to(torch.int32)
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    ordered, pairs = torch.sort(flat, stable=True)
    rows = torch.empty_like(flat)
    rows[pairs] = torch.arange(count, dtype=torch.int32, device=device)
    numbers = torch.arange(experts + 1, dtype=torch.int32, device=device)
    starts = torch.searchsorted(ordered, numbers, out_int32=True)
    needed = (starts[1:] - starts[:-1] + (block - 1)) // block
    ends = needed.cumsum(0, dtype=torch.int32)
    tile = torch.arange(most_tiles(count, experts, block), dtype=torch.int32, device=device)
    expert = torch.searchsorted(ends, tile, right=True, out_int32=True)
    exists = expert < experts
    held = torch.where(exists, expert, 0).long()
    start = starts[held] + (tile - (ends - needed)[held]) * block
    return Plan(pairs.to(torch.int32), rows, starts, torch.where(exists, expert, -1), torch.where(exists, start, 0), block)
