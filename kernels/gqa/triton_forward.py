# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Attention of grouped queries in one form for any number of new tokens: keys in parts of `PART`, a part in tiles of `KEYS`, parts added up in order.

A row of a tile is a query and a head of a group: heads that share keys share their tiles. `_forward` takes a tile of rows through all of its keys and adds
each part to those before it as it is done; `_part` and `_combine` do the same with a program for every part, for a few new tokens and many keys. Both take
a tile by `tile_of_keys` and add a part by `added`, so a query's bits do not depend on which of them computed it, nor on the size of the tile it is a row of.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from driftline.kernels.gqa.layout import Layout, Sizes
from driftline.kernels.linear.triton import described

__all__ = [
    "CONFIGURATIONS", "DEFAULT", "KEYS", "PART", "Configuration", "Way", "added", "block", "decode", "decodes", "forward", "how", "key_rows", "live_rows",
    "loaded", "numbers_at", "operands", "row_numbers", "takes", "whole_heads",
]

PART = 1024
"""Keys of a part, and the order of sums: another is other bits."""

KEYS = 64
"""Keys of a tile: as PART."""


class Configuration(NamedTuple):
    """Rows of a tile, 16 a warp, so that each row of scores lies in one warp whatever their number; warps, stages."""

    rows: int
    warps: int
    stages: int


DEFAULT = Configuration(rows=64, warps=4, stages=3)

CONFIGURATIONS = (DEFAULT, Configuration(64, 4, 2), Configuration(64, 4, 4), Configuration(128, 8, 3), Configuration(128, 8, 4))
"""What runs, and what the benchmark's sweep times beside it: all give the same bits."""

_COMBINED = 8
"""Rows that a program of `_combine` adds up."""


@triton.jit
def numbers_at(begin, sequence):
    """Where a sequence's numbers begin in each head's: behind those of the sequences before it, at a multiple of 4, which is 16 bytes."""
    return (begin + 3 * sequence + 3) // 4 * 4


@triton.jit
def live_rows(live, d, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The mask of rows of WIDTH elements, held in BLOCK."""
    if WIDTH == BLOCK:
        inside = live[:, None]
    else:
        inside = live[:, None] & (d < WIDTH)[None, :]
    return inside


@triton.jit
def key_rows(rows, begin, at, j, inside, INDEXED: tl.constexpr):
    """Which rows of the keys are keys at + j of a sequence whose keys begin at `begin`."""
    if INDEXED:
        row = tl.load(rows + begin.to(tl.int64) + at + j, mask=inside, other=0).to(tl.int64)
    else:
        row = begin.to(tl.int64) + at + j
    return row


@triton.jit
def loaded(matrix, rows, begin, at, j, stop, head, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HOW: tl.constexpr):
    """Keys or values at .. at + j of a sequence, of one head; zeros from `stop` on, but by the copy engine, which brings what lies there."""
    if HOW == "copied":
        tile = matrix.load([begin + at, head * WIDTH])
    else:
        d = tl.arange(0, BLOCK)
        inside = at + j < stop
        row = key_rows(rows, begin, at, j, inside, HOW == "named")
        tile = tl.load(matrix + row[:, None] * (KEY_HEADS * WIDTH) + head * WIDTH + d[None, :], mask=live_rows(inside, d, WIDTH, BLOCK), other=0.0)
    return tile


@triton.jit
def tile_of_keys(query, key, value, acc, top, total, at, seen, everyone, scale, KEYS: tl.constexpr):
    """A tile of keys from `at` added to (acc, top, total) of a part. Rows that see none of it stay as they are, to the bit."""
    score = tl.dot(query, tl.trans(key))
    if at + KEYS > everyone:
        score = tl.where((at + tl.arange(0, KEYS))[None, :] < seen[:, None], score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, axis=1) * scale)
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(tl.fma(score, scale, -finite[:, None]))
    shrink = tl.exp2(top - finite)
    total = tl.fma(total, shrink, tl.sum(p, axis=1))
    acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None])
    return acc, higher, total


@triton.jit
def added(whole_acc, whole_top, whole_total, acc, top, total):
    """A part added to those before it. One whose keys a row does not see changes nothing of it, to the bit."""
    higher = tl.maximum(whole_top, top)
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    before = tl.exp2(whole_top - finite)
    mine = tl.exp2(top - finite)
    whole_acc = tl.fma(acc, mine[:, None], whole_acc * before[:, None])
    return whole_acc, higher, tl.fma(total, mine, whole_total * before)


@triton.jit
def _finished(acc, total):
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    return acc / divisor[:, None], some, divisor


@triton.jit
def _queries(q, seen, first, begin, length, head, r, HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """A tile of queries, how many keys each sees, and the first and the last of them."""
    d = tl.arange(0, D)
    row = first + r
    live = row < length * GROUP
    token = begin.to(tl.int64) + row // GROUP
    at_query = token[:, None] * (HEADS * WIDTH) + (head * GROUP + row % GROUP)[:, None] * WIDTH + d[None, :]
    query = tl.load(q + at_query, mask=live_rows(live, d, WIDTH, D), other=0.0)
    limit = tl.load(seen + token, mask=live, other=0)
    everyone = tl.load(seen + begin + first // GROUP)
    stop = tl.load(seen + begin + (tl.minimum(first + r.shape[0], length * GROUP) - 1) // GROUP)
    return query, limit, everyone, stop


@triton.jit
def _forward(q, keys, values, rows, starts_q, starts_k, seen, tiles, out, lse, count, stride, scale, HEADS: tl.constexpr, GROUP: tl.constexpr,
             WIDTH: tl.constexpr, VALUE: tl.constexpr, D: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr,
             STAGES: tl.constexpr, HOW: tl.constexpr, SEVERAL: tl.constexpr):
    # The last tiles have the most keys and begin first.
    tile = count - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(starts_q + sequence)
    begin_k = tl.load(starts_k + sequence)
    length = tl.load(starts_q + sequence + 1) - begin
    r = tl.arange(0, ROWS)
    j = tl.arange(0, KEYS)
    f = tl.arange(0, V)
    query, limit, everyone, stop = _queries(q, seen, first, begin, length, head, r, HEADS, GROUP, WIDTH, D)
    whole_acc = tl.zeros((ROWS, V), tl.float32)
    whole_top = tl.full((ROWS,), float("-inf"), tl.float32)
    whole_total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, V), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SEVERAL:
        for start in range(0, stop, PART):
            acc = tl.zeros((ROWS, V), tl.float32)
            top = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            for at in tl.range(start, tl.minimum(start + PART, stop), KEYS, num_stages=STAGES):
                key = loaded(keys, rows, begin_k, at, j, stop, head, HEADS // GROUP, WIDTH, D, HOW)
                value = loaded(values, rows, begin_k, at, j, stop, head, HEADS // GROUP, VALUE, V, HOW)
                acc, top, total = tile_of_keys(query, key, value, acc, top, total, at, limit, everyone, scale, KEYS)
            whole_acc, whole_top, whole_total = added(whole_acc, whole_top, whole_total, acc, top, total)
    else:
        for at in tl.range(0, stop, KEYS, num_stages=STAGES):
            key = loaded(keys, rows, begin_k, at, j, stop, head, HEADS // GROUP, WIDTH, D, HOW)
            value = loaded(values, rows, begin_k, at, j, stop, head, HEADS // GROUP, VALUE, V, HOW)
            acc, top, total = tile_of_keys(query, key, value, acc, top, total, at, limit, everyone, scale, KEYS)
        whole_acc, whole_top, whole_total = added(whole_acc, whole_top, whole_total, acc, top, total)
    whole_acc, some, divisor = _finished(whole_acc, whole_total)
    row_q = first + r
    live = row_q < length * GROUP
    token = begin.to(tl.int64) + row_q // GROUP
    at_out = token[:, None] * (HEADS * VALUE) + (head * GROUP + row_q % GROUP)[:, None] * VALUE + f[None, :]
    tl.store(out + at_out, whole_acc.to(out.dtype.element_ty), mask=live_rows(live, f, VALUE, V))
    number = (head * GROUP + row_q % GROUP).to(tl.int64) * stride + numbers_at(begin, sequence) + row_q // GROUP
    tl.store(lse + number, tl.where(some, whole_top + tl.log2(divisor), float("inf")), mask=live)


@triton.jit
def _part(q, keys, values, rows, starts_q, starts_k, seen, tiles, sums, tops, totals, stride, scale, HEADS: tl.constexpr, GROUP: tl.constexpr,
          WIDTH: tl.constexpr, VALUE: tl.constexpr, D: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr,
          STAGES: tl.constexpr, HOW: tl.constexpr):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.program_id(2) * PART
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(starts_q + sequence)
    begin_k = tl.load(starts_k + sequence)
    length = tl.load(starts_q + sequence + 1) - begin
    r = tl.arange(0, ROWS)
    j = tl.arange(0, KEYS)
    f = tl.arange(0, V)
    query, limit, everyone, stop = _queries(q, seen, first, begin, length, head, r, HEADS, GROUP, WIDTH, D)
    if start >= stop:
        return
    acc = tl.zeros((ROWS, V), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for at in tl.range(start, tl.minimum(start + PART, stop), KEYS, num_stages=STAGES):
        key = loaded(keys, rows, begin_k, at, j, stop, head, HEADS // GROUP, WIDTH, D, HOW)
        value = loaded(values, rows, begin_k, at, j, stop, head, HEADS // GROUP, VALUE, V, HOW)
        acc, top, total = tile_of_keys(query, key, value, acc, top, total, at, limit, everyone, scale, KEYS)
    row_q = first + r
    live = row_q < length * GROUP
    to = (tl.program_id(2).to(tl.int64) * (HEADS // GROUP) + head) * stride + begin * GROUP + row_q
    tl.store(tops + to, top, mask=live)
    tl.store(totals + to, total, mask=live)
    tl.store(sums + to[:, None] * V + f[None, :], acc, mask=live[:, None])


@triton.jit
def _combine(sums, tops, totals, seen, out, count, stride, HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
             PART: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    f = tl.arange(0, V)
    live = row < count
    limit = tl.load(seen + row // GROUP, mask=live, other=0)
    acc = tl.zeros((ROWS, V), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(0, tl.max(limit, axis=0), PART):
        here = start < limit
        at = (tl.full((), start // PART, tl.int64) * (HEADS // GROUP) + head) * stride + row
        mine = tl.load(tops + at, mask=here, other=float("-inf"))
        share = tl.load(totals + at, mask=here, other=0.0)
        part = tl.load(sums + at[:, None] * V + f[None, :], mask=here[:, None], other=0.0)
        acc, top, total = added(acc, top, total, part, mine, share)
    acc, _, _ = _finished(acc, total)
    token = (row // GROUP).to(tl.int64)
    at_out = token[:, None] * (HEADS * VALUE) + (head * GROUP + row % GROUP)[:, None] * VALUE + f[None, :]
    tl.store(out + at_out, acc.to(out.dtype.element_ty), mask=live_rows(live, f, VALUE, V))


def takes(sizes: Sizes, dtype: torch.dtype) -> bool:
    """Whether the kernels are for these sizes."""
    return dtype == torch.bfloat16 and all(16 <= n <= 128 and n % 16 == 0 for n in (sizes.width, sizes.value))


def decodes(layout: Layout, sizes: Sizes) -> bool:
    """Whether `decode` is the faster of the two, by shape: few queries of many keys."""
    return layout.longest_q * sizes.group <= DEFAULT.rows and layout.longest_k > PART


def block(width: int) -> int:
    """The power of two that holds a head's elements."""
    return max(16, int(triton.next_power_of_2(width)))


def whole_heads(sizes: Sizes) -> bool:
    """Whether the copy engine takes the heads as they are: powers of two wide, and some."""
    return sizes.keys > 0 and all(n == block(n) for n in (sizes.width, sizes.value))


class Way(StrEnum):
    """How keys and values come: by the copy engine, which takes heads of a power of two in their order; else by address, in their order or named row by row."""

    COPIED = "copied"
    ORDERED = "ordered"
    NAMED = "named"


def how(layout: Layout, sizes: Sizes) -> Way:
    """The way of one call, by its shape and layout."""
    if layout.rows is not None:
        return Way.NAMED
    return Way.COPIED if whole_heads(sizes) else Way.ORDERED


def operands(keys: torch.Tensor, values: torch.Tensor, layout: Layout, sizes: Sizes, rows: int) -> tuple[Any, Any]:
    """Keys and values as the kernels take them, `rows` of them at a time."""
    if how(layout, sizes) is not Way.COPIED:
        return keys, values
    flat = (t.reshape(sizes.keys, sizes.key_heads * width) for t, width in ((keys, sizes.width), (values, sizes.value)))
    key, value = flat
    return described(key, rows, sizes.width), described(value, rows, sizes.value)


def _constants(sizes: Sizes, layout: Layout, configuration: Configuration) -> dict[str, Any]:
    return {"HEADS": sizes.heads, "GROUP": sizes.group, "WIDTH": sizes.width, "VALUE": sizes.value, "D": block(sizes.width), "V": block(sizes.value),
            "ROWS": configuration.rows, "KEYS": KEYS, "STAGES": configuration.stages, "HOW": how(layout, sizes).value, "num_warps": configuration.warps,
            "enable_fp_fusion": True}


def row_numbers(layout: Layout, sizes: Sizes) -> torch.Tensor:
    """Memory for a number a head and query, fp32 [H, queries and up to 3 between sequences]: each sequence's begin 16 bytes aligned, for the copy engine."""
    return torch.empty(sizes.heads, (sizes.queries + 3 * layout.sequences + 3) // 4 * 4 + 4, dtype=torch.float32, device=layout.seen.device)


def forward(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, sizes: Sizes, scale: float, out_dtype: torch.dtype,
    configuration: Configuration = DEFAULT, part: int = PART,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [..., H, Dv] in out_dtype, log2 of the sum of exp2 of the scores as `row_numbers`: infinite for a query that sees no key) of contiguous inputs."""
    out = torch.empty(*q.shape[:3], sizes.value, dtype=out_dtype, device=q.device)
    lse = row_numbers(layout, sizes)
    tiles = layout.query_tiles(sizes.group, configuration.rows)
    if out.numel():
        _forward[(tiles.shape[0], sizes.key_heads)](
            q, *operands(keys, values, layout, sizes, KEYS), q if layout.rows is None else layout.rows, layout.starts_q, layout.starts_k, layout.seen, tiles,
            out, lse, tiles.shape[0], lse.stride(0), scale / math.log(2), PART=part, SEVERAL=layout.longest_k > part,
            **_constants(sizes, layout, configuration),
        )
    return out, lse


def decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, sizes: Sizes, scale: float, out_dtype: torch.dtype,
    configuration: Configuration = DEFAULT, part: int = PART,
) -> torch.Tensor:
    """As `forward`, to the bit, with a program for every part of the keys; without the log-sums."""
    out = torch.empty(*q.shape[:3], sizes.value, dtype=out_dtype, device=q.device)
    if out.numel() == 0:
        return out
    tiles, rows, parts = layout.query_tiles(sizes.group, configuration.rows), sizes.queries * sizes.group, max(1, triton.cdiv(layout.longest_k, part))
    width = block(sizes.value)
    sums = torch.empty(parts, sizes.key_heads, rows, width, dtype=torch.float32, device=q.device)
    tops, totals = (torch.empty(parts, sizes.key_heads, rows, dtype=torch.float32, device=q.device) for _ in range(2))
    _part[(tiles.shape[0], sizes.key_heads, parts)](
        q, *operands(keys, values, layout, sizes, KEYS), q if layout.rows is None else layout.rows, layout.starts_q, layout.starts_k, layout.seen, tiles, sums,
        tops, totals, rows, scale / math.log(2), PART=part, **_constants(sizes, layout, configuration),
    )
    _combine[(triton.cdiv(rows, _COMBINED), sizes.key_heads)](
        sums, tops, totals, layout.seen, out, rows, rows, HEADS=sizes.heads, GROUP=sizes.group, VALUE=sizes.value, V=width, ROWS=_COMBINED, PART=part,
        num_warps=4, enable_fp_fusion=True,
    )
    return out
