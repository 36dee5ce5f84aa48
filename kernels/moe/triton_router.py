# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""The router as Triton kernels: scores in fp32 with no TF32, top-k with ties to the lowest index, gates; and the gradients, sparse.

A logit is a sum over chunks of 128 of D, taken in order: within a chunk the matrix unit adds exact products of bfloat16, and the chunk's sum is added to the
total in fp32, rounded to nearest, which the matrix unit alone does not do (its accumulator cuts). An fp32 operand is the exact sum of three bfloat16 planes;
two fp32 operands take the six products of planes that reach fp32's last bit. So x and weight in bfloat16 cost one product of the matrix unit, one of
them in fp32 three, both six; TF32 would keep 11 bits of each.

Few rows leave most of the device idle, so there the chunks go to programs of their own and `_select` adds their sums, in the same order: the same
bits, and the choice between the two is by shape alone. A row's scores, ids and gates depend on that row only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from driftline.kernels.moe.plan import plan

__all__ = ["gradients", "select"]

CHUNK = 128
"""Columns of D whose products the matrix unit sums before fp32 does. Part of the contract: it decides bits."""

PARTIAL_BYTES = 32 << 20
"""Chunks go to programs of their own while their sums fit in this."""


class Tile(NamedTuple):
    rows: int
    experts: int
    warps: int
    stages: int


TILE = Tile(128, 128, 8, 3)
"""The pinned configuration of the score kernel, for any number of rows."""

TILES = (TILE, Tile(64, 128, 4, 2), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3))
"""What a sweep times."""

_PRODUCTS = {(1, 1): ((0, 0),), (1, 3): ((0, 0), (0, 1), (0, 2)), (3, 1): ((0, 0), (1, 0), (2, 0)),
             (3, 3): ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0))}
_COLUMNS, _WARPS = 1024, 4

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter multiplies the bits of bfloat16 as integers; there operands are widened first."""


@triton.jit
def _split(wide, planes, elements, BLOCK: tl.constexpr):
    """An fp32 as three bfloat16 that sum to it exactly: 8 bits each, and each remainder is exact."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    rest = tl.load(wide + at, mask=inside, other=0).to(tl.float32)
    for plane in tl.static_range(3):
        part = rest.to(tl.bfloat16)
        tl.store(planes + plane * elements + at, part, mask=inside)
        rest -= part.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _scores(x, weight, out, rows, experts, depth, one, X_PLANES: tl.constexpr, W_PLANES: tl.constexpr, PRODUCTS: tl.constexpr, EVEN: tl.constexpr,
            SPLIT: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """out fp32 [rows, experts]; with SPLIT [chunks * PRODUCTS, rows, experts], one chunk a program. *_PLANES: the plane of each product, two bits each.

    `one` is 1.0: without a factor that the compiler cannot know, it would let the matrix unit add the chunks too.
    """
    blocks = tl.cdiv(experts, EXPERTS)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(0) % blocks * EXPERTS + tl.arange(0, EXPERTS)
    k = tl.arange(0, CHUNK)
    of_x = x + row.to(tl.int64)[:, None] * depth + k[None, :]
    of_w = weight + expert.to(tl.int64)[None, :] * depth + k[:, None]
    x_plane, w_plane = rows.to(tl.int64) * depth, experts.to(tl.int64) * depth
    at = row.to(tl.int64)[:, None] * experts + expert[None, :]
    there = (row < rows)[:, None] & (expert < experts)[None, :]
    first = 0
    last = tl.cdiv(depth, CHUNK) * PRODUCTS
    if SPLIT:
        first = tl.program_id(1) * PRODUCTS
        last = first + PRODUCTS
    total = tl.zeros((ROWS, EXPERTS), tl.float32)
    for step in range(first, last):
        start = step // PRODUCTS * CHUNK
        which = step % PRODUCTS * 2
        from_x = of_x + start + ((X_PLANES >> which) & 3) * x_plane
        from_w = of_w + start + ((W_PLANES >> which) & 3) * w_plane
        if EVEN:
            a = tl.load(from_x, mask=(row < rows)[:, None], other=0)
            b = tl.load(from_w, mask=(expert < experts)[None, :], other=0)
        else:
            a = tl.load(from_x, mask=(row < rows)[:, None] & (start + k < depth)[None, :], other=0)
            b = tl.load(from_w, mask=(expert < experts)[None, :] & (start + k < depth)[:, None], other=0)
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        part = tl.dot(a, b)
        if SPLIT:
            tl.store(out + step * rows.to(tl.int64) * experts + at, part, mask=there)
        else:
            total += part * one
    if not SPLIT:
        tl.store(out + at, total, mask=there)


@triton.jit
def _ordered(value):
    """An fp32 as an int32 of the same order: both zeros are one, every NaN lies below everything but MIN (taken) and is never preferred."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value == value, bits, -2147483647)


@triton.jit(do_not_specialize=["rows", "parts"])
def _select(sums, bias, ids, gates, picked, rows, experts, parts, scaling, TOP: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, REPLAY: tl.constexpr,
            UNROLL: tl.constexpr):
    """One row a program. sums fp32 [parts, rows, experts]; ids int64, gates and picked fp32 [rows, TOP]; ids are read with REPLAY, else written."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < experts
    from_row = sums + row * experts + expert
    step = rows.to(tl.int64) * experts
    logit = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, parts, UNROLL):
        for i in tl.static_range(UNROLL):
            logit += tl.load(from_row + (first + i) * step, mask=inside & (expert * 0 + (first + i) < parts), other=0)
    score = 1.0 / (1.0 + tl.exp(-logit))
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int64)
    values = tl.zeros((SLOTS,), tl.float32)
    total = 0.0
    if not REPLAY:
        key = _ordered(score + tl.load(bias + expert, mask=inside, other=0).to(tl.float32))
        key = tl.where(inside, key, -2147483648)
    for i in tl.static_range(TOP):
        if REPLAY:
            best = tl.load(ids + row * TOP + i).to(tl.int32)
        else:
            best = tl.argmax(key, axis=0, tie_break_left=True)
            key = tl.where(expert == best, -2147483648, key)
        value = tl.sum(tl.where((expert == best) & inside, score, 0.0), axis=0)
        total += value
        chosen = tl.where(slot == i, best.to(tl.int64), chosen)
        values = tl.where(slot == i, value, values)
    to = row * TOP + slot
    if not REPLAY:
        tl.store(ids + to, chosen, mask=slot < TOP)
    tl.store(picked + to, values, mask=slot < TOP)
    tl.store(gates + to, values / (total + 1e-20) * scaling, mask=slot < TOP)


@triton.jit
def _slopes(picked, d_gates, slopes, scaling, TOP: tl.constexpr, SLOTS: tl.constexpr):
    """dlogit_i = s_i (1 - s_i) (scaling dgate_i - sum_j gate_j dgate_j) / sum s, one row a program."""
    slot = tl.arange(0, SLOTS)
    at = tl.program_id(0).to(tl.int64) * TOP + slot
    s = tl.load(picked + at, mask=slot < TOP, other=0)
    d = tl.load(d_gates + at, mask=slot < TOP, other=0).to(tl.float32)
    total = tl.sum(s, axis=0) + 1e-20
    mean = tl.sum(d * s, axis=0) / total
    tl.store(slopes + at, (d - mean) * scaling / total * s * (1.0 - s), mask=slot < TOP)


@triton.jit
def _d_rows(slopes, ids, weight, out, experts, depth, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """dx[n] = sum over slots, in order, of dlogit * weight[id]."""
    blocks = tl.cdiv(depth, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP):
        expert = tl.load(ids + row * TOP + i)
        lane = expert + col * 0
        held = tl.load(weight + expert * depth + col, mask=(col < depth) & (lane >= 0) & (lane < experts), other=0).to(tl.float32)
        total += tl.load(slopes + row * TOP + i) * held
    tl.store(out + row * depth + col, total.to(out.dtype.element_ty), mask=col < depth)


@triton.jit
def _d_weight(slopes, pairs, starts, x, out, depth, TOP: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """dweight[e] = sum over the expert's pairs, in order, of dlogit * x[token]; zero for an expert without any."""
    blocks = tl.cdiv(depth, BLOCK)
    expert = tl.program_id(0) // blocks
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    first, last = tl.load(starts + expert), tl.load(starts + expert + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(first, last, UNROLL):
        for i in tl.static_range(UNROLL):
            at = tl.minimum(begin + i, last - 1)
            pair = tl.load(pairs + at)
            token = (pair // TOP).to(tl.int64)
            held = tl.load(x + token * depth + col, mask=(col < depth) & (col * 0 + (begin + i) < last), other=0).to(tl.float32)
            total += tl.load(slopes + pair) * held
    tl.store(out + expert.to(tl.int64) * depth + col, total.to(out.dtype.element_ty), mask=col < depth)


def _planes(matrix: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The matrix as bfloat16 planes that sum to it, and how many."""
    matrix = matrix.contiguous()
    if matrix.dtype is torch.bfloat16:
        return matrix, 1
    planes = torch.empty((3, *matrix.shape), dtype=torch.bfloat16, device=matrix.device)
    if matrix.numel():
        _split[(triton.cdiv(matrix.numel(), 1024),)](matrix, planes, matrix.numel(), BLOCK=1024, num_warps=4, enable_fp_fusion=True)
    return planes, 3


def scores(x: torch.Tensor, weight: torch.Tensor, tile: Tile = TILE, *, split: bool | None = None) -> torch.Tensor:
    """x [N, D], weight [E, D] in bfloat16, float16 or float32: fp32 [parts, N, E] whose sum over parts, in order, is x @ weight^T."""
    (a, of_a), (b, of_b) = _planes(x), _planes(weight)
    (rows, depth), experts = x.shape, weight.shape[0]
    products = _PRODUCTS[of_a, of_b]
    parts = triton.cdiv(depth, CHUNK) * len(products)
    if split is None:
        split = parts * rows * experts * 4 <= PARTIAL_BYTES
    out = torch.empty((parts if split else 1, rows, experts), dtype=torch.float32, device=x.device)
    if rows:
        grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(experts, tile.experts), parts // len(products) if split else 1)
        _scores[grid](a, b, out, rows, experts, depth, 1.0, X_PLANES=sum(p << 2 * i for i, (p, _) in enumerate(products)),
                      W_PLANES=sum(p << 2 * i for i, (_, p) in enumerate(products)), PRODUCTS=len(products), EVEN=depth % CHUNK == 0, SPLIT=split,
                      ROWS=tile.rows, EXPERTS=tile.experts, CHUNK=CHUNK, num_warps=tile.warps, num_stages=min(tile.stages, 2) if split else tile.stages, enable_fp_fusion=True)
    return out


def select(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, scaling: float, ids: torch.Tensor | None,
           *, tile: Tile = TILE, split: bool | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids int64, gates fp32 and the picked scores fp32, each [N, k]; given ids are kept. An id that is no expert has a gate of zero."""
    rows, experts = x.shape[0], weight.shape[0]
    sums = scores(x, weight, tile, split=split)
    replay = ids is not None
    chosen = ids.to(torch.int64).contiguous() if ids is not None else torch.empty((rows, top_k), dtype=torch.int64, device=x.device)
    gates, picked = (torch.empty((rows, top_k), dtype=torch.float32, device=x.device) for _ in range(2))
    if rows:
        _select[(rows,)](sums, bias.contiguous(), chosen, gates, picked, rows, experts, sums.shape[0], scaling, TOP=top_k, SLOTS=triton.next_power_of_2(top_k),
                         BLOCK=triton.next_power_of_2(experts), REPLAY=replay, UNROLL=8 if sums.shape[0] > 1 else 1, num_warps=_WARPS, enable_fp_fusion=True)
    return chosen, gates, picked


def gradients(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, picked: torch.Tensor, d_gates: torch.Tensor, scaling: float,
              to_x: bool, to_weight: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx [N, D], dweight [E, D]) in the operands' dtypes, None where not wanted; sums in fp32, over slots and over an expert's pairs in order."""
    (rows, depth), (experts, _), top_k = x.shape, weight.shape, ids.shape[1]
    x, weight = x.contiguous(), weight.contiguous()
    slopes = torch.empty((rows, top_k), dtype=torch.float32, device=x.device)
    if rows:
        _slopes[(rows,)](picked, d_gates.contiguous(), slopes, scaling, TOP=top_k, SLOTS=triton.next_power_of_2(top_k), num_warps=1, enable_fp_fusion=True)
    d_x = d_weight = None
    if to_x:
        d_x = torch.empty_like(x)
        if rows:
            _d_rows[(rows * triton.cdiv(depth, _COLUMNS),)](slopes, ids, weight, d_x, experts, depth, TOP=top_k, BLOCK=_COLUMNS, num_warps=_WARPS,
                                                            enable_fp_fusion=True)
    if to_weight:
        d_weight = torch.empty_like(weight)
        table = plan(ids, experts, 64)
        _d_weight[(experts * triton.cdiv(depth, _COLUMNS),)](slopes, table.pairs, table.starts, x, d_weight, depth, TOP=top_k, BLOCK=_COLUMNS, UNROLL=4,
                                                             num_warps=_WARPS, enable_fp_fusion=True)
    return d_x, d_weight
