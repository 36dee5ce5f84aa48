# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Causal attention over packed sequences, backward: every gradient is one program's sum in a fixed order; there are no atomics.

Probabilities are computed again from the saved log-sum. `_queries`: a program a tile of queries and a head, over the keys in order, as the forward.
`_keys`: a program a tile of keys and a head, over the queries in order, scores transposed so that the tile of keys is the M of all five products.
The gradient of the shared key is the sum over heads of fp32 parts, in their order (`_shared`, which also writes the zeros of rows behind the last sequence's
keys). `_prepare` rounds the output's gradient to bfloat16, which is what
both products take, and sums it, rounded, with the output: so a row's score gradients add up to zero as they must.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from driftline.kernels.linear.triton import described
from driftline.kernels.mla_prefill.shapes import Sizes
from driftline.kernels.mla_prefill.triton_forward import extent, numbers_at, row_numbers, tiles_of

__all__ = ["KEYS", "KEYS_DEFAULT", "QUERIES", "QUERIES_DEFAULT", "Configuration", "backward"]


class Configuration(NamedTuple):
    """Queries and keys of a tile, warps, stages."""

    queries: int
    keys: int
    warps: int
    stages: int


QUERIES_DEFAULT = Configuration(queries=128, keys=64, warps=8, stages=3)
QUERIES = (QUERIES_DEFAULT, Configuration(128, 64, 8, 2), Configuration(128, 32, 8, 4))
KEYS_DEFAULT = Configuration(queries=32, keys=128, warps=8, stages=3)
KEYS = (KEYS_DEFAULT, Configuration(32, 128, 8, 2), Configuration(32, 64, 4, 3))
"""What runs (the defaults), and what the benchmark's sweep times beside it."""


@triton.jit
def _prepare(out, grad, rounded, delta, starts, starts_k, tiles, stride, HEADS: tl.constexpr, VALUE: tl.constexpr, QUERIES: tl.constexpr):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    first, begin, _, length, _, _ = extent(tiles, tile, sequence, starts, starts_k)
    row = first + tl.arange(0, QUERIES)
    at = (begin.to(tl.int64) + row)[:, None] * (HEADS * VALUE) + head * VALUE + tl.arange(0, VALUE)[None, :]
    live = row < length
    g = tl.load(grad + at, mask=live[:, None], other=0.0).to(rounded.dtype.element_ty)
    tl.store(rounded + at, g, mask=live[:, None])
    total = tl.sum(tl.load(out + at, mask=live[:, None], other=0.0).to(tl.float32) * g.to(tl.float32), axis=1)
    tl.store(delta + head.to(tl.int64) * stride + numbers_at(begin, sequence) + row, total, mask=live)


@triton.jit
def _queries(q, kv, k_shared, grad, lse, delta, stride, starts, starts_k, tiles, dq, count, scale, factor, HEADS: tl.constexpr, NOPE: tl.constexpr,
             SHARED: tl.constexpr, VALUE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):
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
    at_query = top_row * (HEADS * (NOPE + SHARED)) + head * (NOPE + SHARED) + row[:, None] * (HEADS * (NOPE + SHARED))
    q_nope = tl.load(q + at_query + n[None, :], mask=live[:, None], other=0.0)
    q_shared = tl.load(q + at_query + (NOPE + e)[None, :], mask=live[:, None], other=0.0)
    g = tl.load(grad + top_row * (HEADS * VALUE) + head * VALUE + row[:, None] * (HEADS * VALUE) + f[None, :], mask=live[:, None], other=0.0)
    of_row = head.to(tl.int64) * stride + numbers_at(begin, sequence) + first + row
    top = tl.load(lse + of_row, mask=live, other=float("inf"))
    mean = tl.load(delta + of_row, mask=live, other=0.0)
    position = first + row + ahead
    d_nope = tl.zeros((QUERIES, NOPE), tl.float32)
    d_shared = tl.zeros((QUERIES, SHARED), tl.float32)
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
        p = tl.exp2(tl.fma(score, scale, -top[:, None]))
        ds = (p * (tl.dot(g, tl.trans(v)) - mean[:, None])).to(k.dtype)
        d_nope = tl.dot(ds, k, d_nope)
        d_shared = tl.dot(ds, r, d_shared)
    tl.store(dq + at_query + n[None, :], (d_nope * factor).to(dq.dtype.element_ty), mask=live[:, None])
    tl.store(dq + at_query + (NOPE + e)[None, :], (d_shared * factor).to(dq.dtype.element_ty), mask=live[:, None])


@triton.jit
def _keys(q, kv, k_shared, grad, lse, delta, starts, starts_k, tiles, dkv, d_shared_parts, scale, factor, HEADS: tl.constexpr, NOPE: tl.constexpr,
          SHARED: tl.constexpr, VALUE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    first, begin, begin_k, length, length_k, ahead = extent(tiles, tile, sequence, starts, starts_k)
    row = tl.arange(0, KEYS)
    i = tl.arange(0, QUERIES)
    n = tl.arange(0, NOPE)
    e = tl.arange(0, SHARED)
    f = tl.arange(0, VALUE)
    live = first + row < length_k
    top_row = begin_k.to(tl.int64) + first
    at_key = top_row * (HEADS * (NOPE + VALUE)) + head * (NOPE + VALUE) + row[:, None] * (HEADS * (NOPE + VALUE))
    k = tl.load(kv + at_key + n[None, :], mask=live[:, None], other=0.0)
    v = tl.load(kv + at_key + (NOPE + f)[None, :], mask=live[:, None], other=0.0)
    r = tl.load(k_shared + top_row * SHARED + row[:, None] * SHARED + e[None, :], mask=live[:, None], other=0.0)
    d_nope = tl.zeros((KEYS, NOPE), tl.float32)
    d_shared = tl.zeros((KEYS, SHARED), tl.float32)
    d_value = tl.zeros((KEYS, VALUE), tl.float32)
    numbers = numbers_at(begin, sequence)
    # From the first tile of queries, in multiples of QUERIES from the sequence's first, that sees any of these keys.
    earliest = tl.maximum(first - ahead, 0) // QUERIES * QUERIES
    for at in tl.range(earliest, length, QUERIES, num_stages=STAGES):
        inside = at + i < length
        here = begin.to(tl.int64) + at
        query = q + here * (HEADS * (NOPE + SHARED)) + head * (NOPE + SHARED) + i[:, None] * (HEADS * (NOPE + SHARED))
        q_nope = tl.load(query + n[None, :], mask=inside[:, None], other=0.0)
        q_shared = tl.load(query + (NOPE + e)[None, :], mask=inside[:, None], other=0.0)
        g = tl.load(grad + here * (HEADS * VALUE) + head * VALUE + i[:, None] * (HEADS * VALUE) + f[None, :], mask=inside[:, None], other=0.0)
        top = tl.where(inside, lse.load([head, numbers + at]).reshape(QUERIES), float("inf"))
        mean = tl.where(inside, delta.load([head, numbers + at]).reshape(QUERIES), 0.0)
        score = tl.dot(r, tl.trans(q_shared))
        score = tl.dot(k, tl.trans(q_nope), score)
        if at + ahead < first + KEYS - 1:
            score = tl.where((first + row)[:, None] <= (at + i + ahead)[None, :], score, float("-inf"))
        p = tl.exp2(tl.fma(score, scale, -top[None, :]))
        d_value = tl.dot(p.to(g.dtype), g, d_value)
        ds = (p * (tl.dot(v, tl.trans(g)) - mean[None, :])).to(g.dtype)
        d_nope = tl.dot(ds, q_nope, d_nope)
        d_shared = tl.dot(ds, q_shared, d_shared)
    tl.store(dkv + at_key + n[None, :], (d_nope * factor).to(dkv.dtype.element_ty), mask=live[:, None])
    tl.store(dkv + at_key + (NOPE + f)[None, :], d_value.to(dkv.dtype.element_ty), mask=live[:, None])
    at_part = top_row * (HEADS * SHARED) + head * SHARED + row[:, None] * (HEADS * SHARED)
    tl.store(d_shared_parts + at_part + e[None, :], d_shared * factor, mask=live[:, None])


@triton.jit(do_not_specialize=["sequences"])
def _shared(parts, starts_k, sequences, out, dkv, rows, HEADS: tl.constexpr, NOPE: tl.constexpr, SHARED: tl.constexpr, VALUE: tl.constexpr,
            ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    end = tl.load(starts_k + sequences)
    owned = (row < end)[:, None] & inside
    e = tl.arange(0, SHARED)[None, :]
    total = tl.zeros((ROWS, SHARED), tl.float32)
    for head in range(HEADS):
        total += tl.load(parts + row[:, None] * (HEADS * SHARED) + head * SHARED + e, mask=owned, other=0.0)
    tl.store(out + row[:, None] * SHARED + e, total.to(out.dtype.element_ty), mask=inside)
    if tl.program_id(0) * ROWS + ROWS > end:
        # No tile of `_keys` has these rows.
        rest = (row >= end)[:, None] & inside
        for head in range(HEADS):
            at = dkv + row[:, None] * (HEADS * (NOPE + VALUE)) + head * (NOPE + VALUE)
            tl.store(at + tl.arange(0, NOPE)[None, :], tl.zeros((ROWS, NOPE), dkv.dtype.element_ty), mask=rest)
            tl.store(at + (NOPE + tl.arange(0, VALUE))[None, :], tl.zeros((ROWS, VALUE), dkv.dtype.element_ty), mask=rest)


def backward(
    q: torch.Tensor, kv: torch.Tensor, k_shared: torch.Tensor, starts: torch.Tensor, starts_k: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    grad: torch.Tensor, sizes: Sizes, scale: float, of_queries: Configuration = QUERIES_DEFAULT, of_keys: Configuration = KEYS_DEFAULT,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dkv, dk_shared) in the inputs' dtype, zeros for keys that no sequence has. Beside them: the gradient in that dtype, 4 bytes a query and head, and 4 * shared a key and head."""
    rounded = torch.empty(grad.shape, dtype=q.dtype, device=q.device)
    delta = row_numbers(sizes, starts)
    dq, dkv, dk_shared = (torch.empty_like(t) for t in (q, kv, k_shared))
    if sizes.keys == 0 or sizes.queries == 0:
        return dq.zero_(), dkv.zero_(), dk_shared.zero_()
    of_tiles = tiles_of(starts, sizes.queries, of_queries.queries)
    _prepare[(of_tiles.shape[0], sizes.heads)](
        out, grad, rounded, delta, starts, starts_k, of_tiles, delta.stride(0), HEADS=sizes.heads, VALUE=sizes.value, QUERIES=of_queries.queries, num_warps=8,
        enable_fp_fusion=True,
    )
    widths = {"HEADS": sizes.heads, "NOPE": sizes.nope, "SHARED": sizes.shared, "VALUE": sizes.value, "enable_fp_fusion": True}
    tiles = tiles_of(starts_k, sizes.keys, of_keys.keys)
    parts = torch.empty(sizes.keys, sizes.heads, sizes.shared, dtype=torch.float32, device=q.device)
    _keys[(tiles.shape[0], sizes.heads)](
        q, kv, k_shared, rounded, *(described(numbers, 1, of_keys.queries) for numbers in (lse, delta)), starts, starts_k, tiles, dkv, parts, scale / math.log(2), scale, QUERIES=of_keys.queries, KEYS=of_keys.keys,
        STAGES=of_keys.stages, num_warps=of_keys.warps, **widths,
    )
    _shared[(triton.cdiv(sizes.keys, 16),)](
        parts, starts_k, starts_k.numel() - 1, dk_shared, dkv, sizes.keys, ROWS=16, num_warps=4, **widths,
    )
    _queries[(of_tiles.shape[0], sizes.heads)](
        q, kv, k_shared, rounded, lse, delta, lse.stride(0), starts, starts_k, of_tiles, dq, of_tiles.shape[0], scale / math.log(2), scale, QUERIES=of_queries.queries,
        KEYS=of_queries.keys, STAGES=of_queries.stages, num_warps=of_queries.warps, **widths,
    )
    return dq, dkv, dk_shared
