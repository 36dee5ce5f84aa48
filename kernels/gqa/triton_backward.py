# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Attention of grouped queries, backward: every gradient is one program's sum in a fixed order; there are no atomics.

Probabilities are computed again from the saved log-sum. `_queries`: a program a tile of rows (query, head of a group), over the keys in order, as the forward.
`_keys`: a program a tile of keys, over the group's heads and of each over the queries in order, so that they add to their key in one sum; scores transposed,
the tile of keys being the M of all five products. Tiles begin at multiples from a sequence's first query and first key, so a sequence's gradients do not depend
on the pack.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from driftline.kernels.gqa.layout import Layout, Sizes
from driftline.kernels.gqa.triton_forward import (
    block,
    how,
    key_rows,
    live_rows,
    loaded,
    numbers_at,
    operands,
    whole_heads,
)
from driftline.kernels.linear.triton import described

__all__ = ["KEYS", "KEYS_DEFAULT", "QUERIES", "QUERIES_DEFAULT", "Configuration", "backward"]


class Configuration(NamedTuple):
    """Rows (of `_keys`: queries) and keys of a tile, warps, stages."""

    rows: int
    keys: int
    warps: int
    stages: int


QUERIES_DEFAULT = Configuration(rows=128, keys=64, warps=8, stages=3)
QUERIES = (QUERIES_DEFAULT, Configuration(128, 64, 8, 2), Configuration(128, 128, 8, 2))
KEYS_DEFAULT = Configuration(rows=64, keys=128, warps=8, stages=2)
KEYS = (KEYS_DEFAULT, Configuration(64, 128, 8, 3), Configuration(32, 128, 8, 3), Configuration(32, 128, 8, 2))
"""What runs (the defaults), and what the benchmark's sweep times beside it."""

_PREPARED = 32
"""Rows that a program of `_prepare` sums."""


@triton.jit
def _prepare(out, grad, delta, starts_q, tiles, stride, HEADS: tl.constexpr, VALUE: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    begin = tl.load(starts_q + sequence)
    row = tl.load(tiles + 2 * tile + 1) + tl.arange(0, ROWS)
    live = row < tl.load(starts_q + sequence + 1) - begin
    f = tl.arange(0, V)
    at = (begin.to(tl.int64) + row)[:, None] * (HEADS * VALUE) + head * VALUE + f[None, :]
    inside = live_rows(live, f, VALUE, V)
    product = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) * tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + head.to(tl.int64) * stride + numbers_at(begin, sequence) + row, tl.sum(product, axis=1), mask=live)


@triton.jit
def _queries(q, keys, values, rows, grad, lse, delta, starts_q, starts_k, seen, tiles, dq, count, stride, scale, factor, HEADS: tl.constexpr,
             GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, D: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
             STAGES: tl.constexpr, HOW: tl.constexpr):
    tile = count - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(starts_q + sequence)
    begin_k = tl.load(starts_k + sequence)
    length = tl.load(starts_q + sequence + 1) - begin
    j = tl.arange(0, KEYS)
    d = tl.arange(0, D)
    f = tl.arange(0, V)
    row_q = first + tl.arange(0, ROWS)
    live = row_q < length * GROUP
    token = begin.to(tl.int64) + row_q // GROUP
    head_q = head * GROUP + row_q % GROUP
    at_query = token[:, None] * (HEADS * WIDTH) + head_q[:, None] * WIDTH + d[None, :]
    query = tl.load(q + at_query, mask=live_rows(live, d, WIDTH, D), other=0.0)
    g = tl.load(grad + token[:, None] * (HEADS * VALUE) + head_q[:, None] * VALUE + f[None, :], mask=live_rows(live, f, VALUE, V), other=0.0)
    numbers = head_q.to(tl.int64) * stride + numbers_at(begin, sequence) + row_q // GROUP
    top = tl.load(lse + numbers, mask=live, other=float("inf"))
    mean = tl.load(delta + numbers, mask=live, other=0.0)
    limit = tl.load(seen + token, mask=live, other=0)
    everyone = tl.load(seen + begin + first // GROUP)
    stop = tl.load(seen + begin + (tl.minimum(first + ROWS, length * GROUP) - 1) // GROUP)
    acc = tl.zeros((ROWS, D), tl.float32)
    for at in tl.range(0, stop, KEYS, num_stages=STAGES):
        key = loaded(keys, rows, begin_k, at, j, stop, head, HEADS // GROUP, WIDTH, D, HOW)
        value = loaded(values, rows, begin_k, at, j, stop, head, HEADS // GROUP, VALUE, V, HOW)
        score = tl.dot(query, tl.trans(key))
        if at + KEYS > everyone:
            score = tl.where((at + j)[None, :] < limit[:, None], score, float("-inf"))
        p = tl.exp2(tl.fma(score, scale, -top[:, None]))
        ds = (p * (tl.dot(g, tl.trans(value)) - mean[:, None])).to(key.dtype)
        acc = tl.dot(ds, key, acc)
    tl.store(dq + at_query, (acc * factor).to(dq.dtype.element_ty), mask=live_rows(live, d, WIDTH, D))


@triton.jit
def _keys(q, keys, values, rows, grad, lse, delta, starts_q, starts_k, counts, seen, tiles, dk, dv, scale, factor, HEADS: tl.constexpr,
          GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, D: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
          STAGES: tl.constexpr, HOW: tl.constexpr, EVEN: tl.constexpr, COPIED: tl.constexpr):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(starts_q + sequence)
    begin_k = tl.load(starts_k + sequence)
    length = tl.load(starts_q + sequence + 1) - begin
    held = tl.load(counts + sequence)
    j = tl.arange(0, KEYS)
    i = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    f = tl.arange(0, V)
    key = loaded(keys, rows, begin_k, first, j, held, head, HEADS // GROUP, WIDTH, D, HOW)
    value = loaded(values, rows, begin_k, first, j, held, head, HEADS // GROUP, VALUE, V, HOW)
    d_key = tl.zeros((KEYS, D), tl.float32)
    d_value = tl.zeros((KEYS, V), tl.float32)
    earliest = 0
    if length > 0:
        # A query sees at most one key more than the one before it. From the tile of queries, at a multiple of ROWS, that may see any of these keys.
        earliest = tl.maximum(first + 1 - tl.load(seen + begin), 0) // ROWS * ROWS
    ahead = held - length + 1
    numbers = numbers_at(begin, sequence)
    each = tl.maximum(tl.cdiv(length - earliest, ROWS), 0)
    at = earliest
    head_q = head * GROUP
    for _ in tl.range(0, each * GROUP, num_stages=STAGES):
        live = at + i < length
        if COPIED:
            query = q.load([begin + at, head_q * WIDTH])
            g = grad.load([begin + at, head_q * VALUE])
        else:
            token = begin.to(tl.int64) + at + i
            query = tl.load(q + token[:, None] * (HEADS * WIDTH) + head_q * WIDTH + d[None, :], mask=live_rows(live, d, WIDTH, D), other=0.0)
            g = tl.load(grad + token[:, None] * (HEADS * VALUE) + head_q * VALUE + f[None, :], mask=live_rows(live, f, VALUE, V), other=0.0)
        top = tl.where(live, lse.load([head_q, numbers + at]).reshape(ROWS), float("inf"))
        mean = tl.where(live, delta.load([head_q, numbers + at]).reshape(ROWS), 0.0)
        score = tl.dot(key, tl.trans(query))
        if EVEN:
            if first + KEYS > at + ahead:
                score = tl.where((first + j)[:, None] < (at + i + ahead)[None, :], score, float("-inf"))
        else:
            limit = tl.load(seen + begin + at + i, mask=live, other=0)
            score = tl.where((first + j)[:, None] < limit[None, :], score, float("-inf"))
        p = tl.exp2(tl.fma(score, scale, -top[None, :]))
        d_value = tl.dot(p.to(g.dtype), g, d_value)
        ds = (p * (tl.dot(value, tl.trans(g)) - mean[None, :])).to(query.dtype)
        d_key = tl.dot(ds, query, d_key)
        at += ROWS
        head_q = tl.where(at < length, head_q, head_q + 1)
        at = tl.where(at < length, at, earliest)
    inside = first + j < held
    row_k = key_rows(rows, begin_k, first, j, inside, HOW == "named")
    at_key = row_k[:, None] * (HEADS // GROUP * WIDTH) + head * WIDTH + d[None, :]
    at_value = row_k[:, None] * (HEADS // GROUP * VALUE) + head * VALUE + f[None, :]
    tl.store(dk + at_key, (d_key * factor).to(dk.dtype.element_ty), mask=live_rows(inside, d, WIDTH, D))
    tl.store(dv + at_value, d_value.to(dv.dtype.element_ty), mask=live_rows(inside, f, VALUE, V))


def backward(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor, sizes: Sizes,
    scale: float, of_queries: Configuration = QUERIES_DEFAULT, of_keys: Configuration = KEYS_DEFAULT,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dkeys, dvalues) in the inputs' dtype, zeros for keys that no sequence has. out, lse: as `forward` gave them; grad [..., H, Dv], contiguous, in any
    floating-point dtype: rounded to q's once, before it is used. Beside the gradients: 4 bytes a query and head, and that rounded gradient."""
    grad = grad.to(q.dtype)
    dq = torch.empty_like(q)
    # Of keys named row by row, or bounded by a sequence's own count, not all may be anyone's.
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    if sizes.keys == 0 or sizes.queries == 0:
        return dq.zero_(), dk, dv
    delta = torch.empty_like(lse)
    tiles = layout.query_tiles(1, _PREPARED)
    _prepare[(tiles.shape[0], sizes.heads)](
        out, grad, delta, layout.starts_q, tiles, delta.stride(0), HEADS=sizes.heads, VALUE=sizes.value, V=block(sizes.value), ROWS=_PREPARED, num_warps=4,
        enable_fp_fusion=True,
    )
    widths = {"HEADS": sizes.heads, "GROUP": sizes.group, "WIDTH": sizes.width, "VALUE": sizes.value, "D": block(sizes.width), "V": block(sizes.value),
              "enable_fp_fusion": True}
    named = q if layout.rows is None else layout.rows
    tiles = layout.key_tiles(sizes.keys if layout.rows is None else layout.rows.shape[0], of_keys.keys)
    copied = whole_heads(sizes)
    flat = (t.view(sizes.queries, -1) for t in (q, grad))
    boxes = [described(t, of_keys.rows, width) if copied else t for t, width in zip(flat, (sizes.width, sizes.value), strict=True)]
    _keys[(tiles.shape[0], sizes.key_heads)](
        boxes[0], *operands(keys, values, layout, sizes, of_keys.keys), named, boxes[1], *(described(t, 1, of_keys.rows) for t in (lse, delta)),
        layout.starts_q, layout.starts_k, layout.counts, layout.seen, tiles, dk, dv, scale / math.log(2), scale, ROWS=of_keys.rows, KEYS=of_keys.keys,
        STAGES=of_keys.stages, EVEN=layout.even,
        HOW=how(layout, sizes).value, COPIED=copied, num_warps=of_keys.warps, **widths,
    )
    tiles = layout.query_tiles(sizes.group, of_queries.rows)
    _queries[(tiles.shape[0], sizes.key_heads)](
        q, *operands(keys, values, layout, sizes, of_queries.keys), named, grad, lse, delta, layout.starts_q, layout.starts_k, layout.seen, tiles,
        dq, tiles.shape[0], delta.stride(0), scale / math.log(2), scale, ROWS=of_queries.rows, KEYS=of_queries.keys, STAGES=of_queries.stages,
        HOW=how(layout, sizes).value, num_warps=of_queries.warps, **widths,
    )
    return dq, dk, dv
