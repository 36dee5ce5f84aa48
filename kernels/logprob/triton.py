# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Log-probability and entropy of a row without its logits: a product whose tiles leave three numbers a row behind instead of themselves.

`_statistics` makes a tile of logits (rows x 256 tokens of the vocabulary) and keeps of each row the largest, the sum of the exponentials below it and
their mean's numerator; the tile that holds the row's token also keeps its logit. `_combine` takes a row's tiles together in the order of the vocabulary.
Every row meets the same columns whatever their number is, so its bits are its own.

`_gradient` makes the same tile again and writes the gradient to its logits, in a part of the vocabulary at a time; two products per part take it to
`hidden` and `weight`. Their accumulators are carried from part to part in fp32, so the parts' width, which the number of rows decides, is not in the bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from driftline.kernels.linear.tiles import FLOAT32, Tile
from driftline.kernels.linear.triton import described, matmul, product, swizzled

__all__ = ["TILES", "forward", "gradients", "part_width", "tile_for"]

TILES: dict[int, tuple[Tile, ...]] = {2: (Tile(64, 256, 64, warps=4, stages=4), Tile(128, 256, 64, warps=8, stages=4)), 4: FLOAT32[:1]}
"""By the operands' bytes an element. Rows that fit the first take it, others the last. Both go through the vocabulary in the same columns and add these up
by the same tree, so the choice is not in a row's bits. `benchmarks/kernels/logprob.py --sweep` times others."""

ROWS_AT_ONCE = 8192
"""Rows that one launch takes: what bounds the workspace of both ways."""

WORKSPACE = 2**29
"""Bytes of logits' gradients that are held at a time, but for 1,024 tokens' at least."""

_GROUP = 8
_COMBINE_ROWS, _COMBINE_TILES, _COMBINE_WARPS = 16, 128, 4


@triton.jit
def _scaled(acc, inverse, ROUND: tl.constexpr, DTYPE: tl.constexpr):
    """Logits over temperature; first rounded to what a model that writes its logits would hold, if ROUND."""
    if ROUND:
        acc = acc.to(DTYPE).to(tl.float32)
    return acc * inverse[:, None]


@triton.jit
def _both(s, m, other_s, other_m):
    return s + other_s, m + other_m


@triton.jit(do_not_specialize=["rows", "depth"])
def _statistics(hidden, weight, ids, inverse, highest, total, moment, picked, rows, vocabulary, depth, ROUND: tl.constexpr, EVEN: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr):
    row, column = swizzled(tl.program_id(0), rows, vocabulary, BM, BN, GROUP)
    r = row + tl.arange(0, BM)
    c = column + tl.arange(0, BN)
    acc = product(hidden, weight, tl.zeros((BM, BN), tl.float32), row, column, depth, True, True, BK, PRECISION)
    token = tl.load(ids + r, mask=r < rows, other=-1).to(tl.int32)
    x = _scaled(acc, tl.load(inverse + r, mask=r < rows, other=1.0), ROUND, hidden.dtype)
    if not EVEN:
        x = tl.where((c < vocabulary)[None, :], x, float("-inf"))
    mine = (r < rows) & (token >= column) & (token < column + BN) & (token < vocabulary)
    tl.store(picked + r, tl.sum(tl.where(c[None, :] == token[:, None], x, 0.0), axis=1), mask=mine)
    top = tl.max(x, axis=1)
    below = x - top[:, None]
    e = tl.exp(below)
    if not EVEN:
        below = tl.where((c < vocabulary)[None, :], below, 0.0)
    s, m = tl.reduce((e, e * below), 1, _both)
    at = (column // BN).to(tl.int64) * rows + r
    tl.store(highest + at, top, mask=r < rows)
    tl.store(total + at, s, mask=r < rows)
    tl.store(moment + at, m, mask=r < rows)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _combine(highest, total, moment, picked, logprob, entropy, normaliser, rows, tiles, ROWS: tl.constexpr, TILES: tl.constexpr):
    """log-probability = (x - top) - log s and entropy = log s - E[x - top], with s = sum exp(x - top): both relative to the largest, where they are exact."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, TILES)
    top = tl.full((TILES, ROWS), float("-inf"), tl.float32)
    for first in range(0, tiles, TILES):
        inside = (first + t < tiles)[:, None] & (r < rows)[None, :]
        at = (first + t).to(tl.int64)[:, None] * rows + r[None, :]
        top = tl.maximum(top, tl.load(highest + at, mask=inside, other=float("-inf")))
    best = tl.max(top, axis=0)
    s = tl.zeros((TILES, ROWS), tl.float32)
    m = tl.zeros((TILES, ROWS), tl.float32)
    for first in range(0, tiles, TILES):
        inside = (first + t < tiles)[:, None] & (r < rows)[None, :]
        at = (first + t).to(tl.int64)[:, None] * rows + r[None, :]
        below = tl.load(highest + at, mask=inside, other=0.0) - tl.where(inside, best[None, :], 0.0)
        share = tl.exp(below)
        of_tile = tl.load(total + at, mask=inside, other=0.0)
        s += share * of_tile
        m += share * (tl.load(moment + at, mask=inside, other=0.0) + of_tile * below)
    sum_s = tl.sum(s, axis=0)
    log_s = tl.log(sum_s)
    chosen = tl.load(picked + r, mask=r < rows, other=0.0)
    tl.store(logprob + r, chosen - best - log_s, mask=r < rows)
    tl.store(entropy + r, log_s - tl.sum(m, axis=0) / sum_s, mask=r < rows)
    tl.store(normaliser + r, best + log_s, mask=r < rows)


@triton.jit(do_not_specialize=["rows", "depth", "first"])
def _gradient(hidden, weight, ids, inverse, normaliser, upstream, out, rows, width, depth, stride, first, ROUND: tl.constexpr, BM: tl.constexpr,
              BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr):
    """d logprob / d logit_j = (1 [j is the token] - p_j) / temperature, times what came from above; tokens from `first` on, `width` of them."""
    row, column = swizzled(tl.program_id(0), rows, width, BM, BN, GROUP)
    r = row + tl.arange(0, BM)
    c = column + tl.arange(0, BN)
    acc = product(hidden, weight, tl.zeros((BM, BN), tl.float32), row, column, depth, True, True, BK, PRECISION)
    scale = tl.load(inverse + r, mask=r < rows, other=1.0)
    p = tl.exp(_scaled(acc, scale, ROUND, hidden.dtype) - tl.load(normaliser + r, mask=r < rows, other=0.0)[:, None])
    token = tl.load(ids + r, mask=r < rows, other=-1).to(tl.int32) - first
    up = tl.load(upstream + r, mask=r < rows, other=0.0) * scale
    d = up[:, None] * (tl.where(c[None, :] == token[:, None], 1.0, 0.0) - p)
    tl.store(out + r.to(tl.int64)[:, None] * stride + c[None, :], d.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (c < width)[None, :])


def tile_for(rows: int, element_size: int) -> Tile:
    """The pinned tile for so many rows."""
    few, *_ = tiles = TILES[element_size]
    return few if rows <= few.rows else tiles[-1]


def _options(dtype: torch.dtype, tile: Tile) -> dict[str, object]:
    return {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "PRECISION": "ieee" if dtype == torch.float32 else "tf32", "GROUP": _GROUP,
            "num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}


def _operands(hidden: torch.Tensor, weight: torch.Tensor, tile: Tile):
    return described(hidden, tile.rows, tile.depth), described(weight, tile.columns, tile.depth)


def forward(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, inverse: torch.Tensor, *, round_logits: bool = False,
            tile: Tile | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob, entropy, log of the normaliser), each fp32 [N]. `inverse` fp32 [N]: one over the temperatures. Of an id outside the vocabulary the
    log-probability is NaN. `tile`: other than the pinned one, for a benchmark."""
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    tile = tile or tile_for(rows, hidden.element_size())
    tiles = tile.count(1, vocabulary)
    logprob, entropy, normaliser = (torch.empty(rows, dtype=torch.float32, device=hidden.device) for _ in range(3))
    held = min(rows, ROWS_AT_ONCE)
    statistics = torch.empty(3, tiles * held, dtype=torch.float32, device=hidden.device)
    for start in range(0, rows, ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        count = hidden[part].shape[0]
        picked = torch.full((count,), float("nan"), dtype=torch.float32, device=hidden.device)
        _statistics[(tile.count(count, vocabulary),)](
            *_operands(hidden[part], weight, tile), ids[part], inverse[part], *statistics, picked, count, vocabulary, hidden.shape[1], ROUND=round_logits,
            EVEN=vocabulary % tile.columns == 0, **_options(hidden.dtype, tile),
        )
        _combine[(triton.cdiv(count, _COMBINE_ROWS),)](
            *statistics, picked, logprob[part], entropy[part], normaliser[part], count, tiles, ROWS=_COMBINE_ROWS, TILES=_COMBINE_TILES,
            num_warps=_COMBINE_WARPS, enable_fp_fusion=True,
        )
    return logprob, entropy, normaliser


def part_width(rows: int, element_size: int) -> int:
    """Tokens of the vocabulary whose gradients are held at a time: a multiple of 1,024."""
    return max(1024, WORKSPACE // (max(1, min(rows, ROWS_AT_ONCE)) * element_size) // 1024 * 1024)


def gradients(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, inverse: torch.Tensor, normaliser: torch.Tensor, upstream: torch.Tensor, *,
              to_hidden: bool, to_weight: bool, round_logits: bool = False, width: int | None = None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(d hidden [N, D], d weight [V, D]) in their dtypes, None where not asked for. `upstream` fp32 [N]: to the log-probabilities.

    Held beside them: the gradients to part of the logits (WORKSPACE bytes), a sum of [rows, D] in fp32 where there are several parts, and, above
    ROWS_AT_ONCE rows, the same of [part, D] for the weight. Without `to_weight` the rows are taken one block after another and [ROWS_AT_ONCE, D] is enough.
    """
    vocabulary, d = weight.shape
    blocks = [slice(start, min(start + ROWS_AT_ONCE, hidden.shape[0])) for start in range(0, hidden.shape[0], ROWS_AT_ONCE)]
    width = min(width or part_width(hidden.shape[0], hidden.element_size()), -(-vocabulary // 16) * 16)
    space = hidden.new_empty(min(hidden.shape[0], ROWS_AT_ONCE), width)
    d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if to_hidden else None
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if to_weight else None
    if d_weight is not None and not blocks:
        d_weight.zero_()
    for span in [blocks] if to_weight else [[block] for block in blocks]:
        sums = [_sum(d_hidden[block], vocabulary > width) if d_hidden is not None else None for block in span]
        for first in range(0, vocabulary, width):
            some = weight[first : first + width]
            target = d_weight[first : first + width] if d_weight is not None else None
            of_weight = _sum(target, len(span) > 1) if target is not None else None
            for i, block in enumerate(span):
                count = block.stop - block.start
                of_logits = space[:count, : some.shape[0]]
                tile = tile_for(count, hidden.element_size())
                _gradient[(tile.count(count, some.shape[0]),)](
                    *_operands(hidden[block], some, tile), ids[block], inverse[block], normaliser[block], upstream[block], of_logits, count,
                    some.shape[0], d, of_logits.stride(0), first, ROUND=round_logits, **_options(hidden.dtype, tile),
                )
                into = sums[i]
                if into is not None:
                    matmul(of_logits, some, into, b_rows=False, accumulate=first > 0)
                if of_weight is not None:
                    matmul(of_logits, hidden[block], of_weight, a_rows=False, b_rows=False, accumulate=i > 0)
            if target is not None and of_weight is not None and of_weight is not target:
                target.copy_(of_weight)
        if d_hidden is not None:
            for block, into in zip(span, sums, strict=True):
                if into is not None and into.dtype != d_hidden.dtype:
                    d_hidden[block].copy_(into)
    return d_hidden, d_weight


def _sum(target: torch.Tensor, in_parts: bool) -> torch.Tensor:
    """Where a product that goes into `target` is summed up: there, unless it comes in parts and `target` cannot hold a part in full."""
    return target if not in_parts or target.dtype == torch.float32 else torch.empty_like(target, dtype=torch.float32)
