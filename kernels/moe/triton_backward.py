# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""The expert MLP's backward as Triton kernels over rows sorted by expert: three grouped products, each with its elementwise part in its epilogue.

    d_hidden   dh = W2^T dy                                                     sum over Z
    inner      g, u = W1 z, W3 z;  dgate = <h, dh>;  dg, du = gate dh * SiTU'   sum over Z, one product: rows of W1 and W3 alternate
    d_input    dz = W1^T dg + W3^T du                                           sum over I, W1 first

Nothing of the forward is kept: g and u are made again. dg takes dh's place in memory. A row's sums are taken over Z or I in order in one accumulator, and the
sum over I of dgate in blocks of `GATE_COLUMNS`, in order; so a row's bits depend on that row, its gate and its expert's weights, not on how many rows
there are, where it lies, or which tile height was chosen for the shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from driftline.kernels.moe.plan import Plan
from driftline.kernels.moe.triton_tiles import (
    INTERPRETED,
    Form,
    form,
    in_order,
    row_pointers,
    row_steps,
    stored,
    tile,
)
from driftline.kernels.mxfp4.weights import ExpertWeight
from driftline.kernels.situ_glu.triton import situ_partials

__all__ = ["CANDIDATES", "GATE_COLUMNS", "Blocks", "blocks_for", "d_gates", "d_hidden", "d_input", "inner", "inner_blocks_for", "sort_rows", "sum_slots"]

GATE_COLUMNS = 64
"""Columns of h whose products with dh one program sums. Part of the contract: it decides bits of the gates' gradients."""


class Blocks(NamedTuple):
    """rows of a plan's tile, columns of the output (of W1 and W3 together in `inner`: 2 GATE_COLUMNS there), depth of a step, warps, stages."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


FEW = 256
"""Rows an expert gets on average, up to which tiles are 64 high: at 146 (8,192 tokens of K3) tiles of 128 would be 43 % padding, of 64 24 %."""

PINNED: dict[tuple[Form, bool], Blocks] = {
    (Form.BFLOAT16, True): Blocks(64, 128, 64, 4, 3),
    (Form.BFLOAT16, False): Blocks(128, 256, 64, 8, 3),
    (Form.MXFP4, True): Blocks(64, 128, 64, 4, 3),
    (Form.MXFP4, False): Blocks(128, 128, 128, 4, 2),
    (Form.FP8, True): Blocks(64, 128, 64, 4, 3),
    (Form.FP8, False): Blocks(128, 128, 64, 4, 3),
}
"""By the weights' form and whether experts get few rows: shapes only; timed on an H200 (docs/kernels/moe_backward.md). Four warps on a tile of packed weights,
so that two or three programs share a multiprocessor and one unpacks while another multiplies. Both heights of a form give a row the same bits: warps lie
along the rows in each."""

INNER: dict[tuple[Form, bool], Blocks] = {(Form.BFLOAT16, False): Blocks(128, 128, 64, 4, 3)}
"""`inner`'s own, where it is not the other two products': its tile has 128 columns in any case, and then four warps are faster."""

CANDIDATES = (PINNED[Form.FP8, True], PINNED[Form.FP8, False], Blocks(128, 128, 64, 8, 3))
"""What a sweep times, of FP8."""


def blocks_for(kind: Form, pairs: int, experts: int) -> Blocks:
    return PINNED[kind, pairs <= FEW * experts]


def inner_blocks_for(kind: Form, pairs: int, experts: int) -> Blocks:
    """Of the same height as `blocks_for`."""
    key = kind, pairs <= FEW * experts
    return INNER.get(key, PINNED[key])


@triton.jit
def _place(tile_expert, tile_start, starts, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """This program's expert (-1: there is no such tile), sorted rows, which of them exist, and the number of its block of columns."""
    blocks = tl.cdiv(cols, COLS)
    which = tl.program_id(0) // blocks
    expert = tl.load(tile_expert + which)
    first = tl.load(tile_start + which)
    row = first + tl.arange(0, ROWS)
    return expert, row, row < tl.load(starts + tl.maximum(expert, 0) + 1), tl.program_id(0) % blocks


@triton.jit
def _dot(a, b, total):
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit
def _product(total, of_rows, row_there, of_values, of_scale, at, height, first_col, width, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
             FORM: tl.constexpr, EVEN: tl.constexpr):
    """total += rows [ROWS, height] @ M[:, first_col:], M [height, width] the expert's matrix from row `at` on: the sum is over the rows of M.
    The columns are as `in_order` takes them."""
    k = tl.arange(0, DEPTH)
    pointers, scales = row_pointers(of_values, of_scale, at + k, width, FORM)
    step, scale_step = row_steps(width, FORM)
    for begin in range(0, height, DEPTH):
        inside = begin + k < height
        if EVEN:
            inside = k >= 0
            a = tl.load(of_rows + (begin + k)[None, :], mask=row_there[:, None], other=0)
        else:
            a = tl.load(of_rows + (begin + k)[None, :], mask=row_there[:, None] & inside[None, :], other=0)
        b = tile(pointers, scales, inside, first_col, width, DEPTH, COLS, FORM, EVEN, True)
        total = _dot(a, b, total)
        pointers += DEPTH * step
        scales += DEPTH * scale_step
    return total


@triton.jit
def _d_hidden(dy, values, scale, out, pairs, tile_expert, tile_start, starts, outer, hidden, TOP: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr,
              ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr):
    """out bfloat16 [rows, I]: W2^T dy of the row's token, its gate not applied."""
    expert, row, there, block = _place(tile_expert, tile_start, starts, hidden, ROWS, COLS)
    if expert < 0:
        return
    token = (tl.load(pairs + row, mask=there, other=0) // TOP).to(tl.int64)
    total = _product(tl.zeros((ROWS, COLS), tl.float32), dy + token[:, None] * outer, there, values, scale, expert.to(tl.int64) * outer, outer,
                     block * COLS, hidden, ROWS, COLS, DEPTH, FORM, EVEN)
    total = in_order(total, ROWS, COLS, FORM)
    col = block * COLS + tl.arange(0, COLS)
    tl.store(out + row.to(tl.int64)[:, None] * hidden + col[None, :], total.to(tl.bfloat16), mask=there[:, None] & (col < hidden)[None, :])


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLS // 2)), (0, 2, 1)))


@triton.jit(do_not_specialize=["rows"])
def _inner(z, values_1, scale_1, values_3, scale_3, gates, dh, du, gated, gate_parts, pairs, tile_expert, tile_start, starts, rows, outer, hidden, beta,
           linear_beta, over_beta, over_linear_beta, TOP: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr,
           COLS: tl.constexpr, DEPTH: tl.constexpr):
    """In place of dh [rows, I]: dg. Also du [rows, I]; with KEEP gated [rows, I], the gate times h, for W2's gradient; gate_parts fp32 [blocks, rows]."""
    expert, row, there, block = _place(tile_expert, tile_start, starts, hidden, ROWS, COLS)
    if expert < 0:
        return
    pair = tl.load(pairs + row, mask=there, other=0)
    of_rows = z + (pair // TOP).to(tl.int64)[:, None] * outer
    # rows of W1 and W3 in turn: the matrix unit leaves g and u of one column side by side in one thread
    n = tl.arange(0, 2 * COLS)
    from_1 = n % 2 == 0
    col = block * COLS + n // 2
    at = expert.to(tl.int64) * hidden + col
    left, left_scale = row_pointers(values_1, scale_1, at, outer, FORM)
    right, right_scale = row_pointers(values_3, scale_3, at, outer, FORM)
    of_values, of_scale = tl.where(from_1, left, right), tl.where(from_1, left_scale, right_scale)
    if EVEN:
        of_values, of_scale = tl.multiple_of(of_values, 16), tl.multiple_of(of_scale, 4)
    k = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, 2 * COLS), tl.float32)
    for begin in range(0, outer, DEPTH):
        if EVEN:
            a = tl.load(of_rows + (begin + k)[None, :], mask=there[:, None], other=0)
        else:
            a = tl.load(of_rows + (begin + k)[None, :], mask=there[:, None] & (begin + k < outer)[None, :], other=0)
        b = tile(of_values, of_scale, col < hidden, begin, outer, 2 * COLS, DEPTH, FORM, EVEN, False)
        total = _dot(a, tl.trans(b), total)
    gate = tl.load(gates + pair, mask=there, other=0)[:, None]
    # a quarter of the columns after the other: all at once would not fit the registers
    left_half, right_half = _halves(total, ROWS, 2 * COLS)
    quarters = _halves(left_half, ROWS, COLS) + _halves(right_half, ROWS, COLS)
    sums = tl.zeros((ROWS,), tl.float32)
    for quarter in tl.static_range(4):
        g, u = tl.split(tl.reshape(quarters[quarter], (ROWS, COLS // 4, 2)))
        some = block * COLS + quarter * (COLS // 4) + tl.arange(0, COLS // 4)
        to = row.to(tl.int64)[:, None] * hidden + some[None, :]
        mask = there[:, None] & (some < hidden)[None, :]
        grad = tl.load(dh + to, mask=mask, other=0).to(tl.float32)
        h, by_g, by_u = situ_partials(g, u, beta, linear_beta, over_beta, over_linear_beta)
        h = h.to(tl.bfloat16).to(tl.float32)
        sums += tl.sum(tl.where(mask, h * grad, 0.0), axis=1)
        grad *= gate
        tl.store(dh + to, (by_g * grad).to(tl.bfloat16), mask=mask)
        tl.store(du + to, (by_u * grad).to(tl.bfloat16), mask=mask)
        if KEEP:
            tl.store(gated + to, (h * gate).to(tl.bfloat16), mask=mask)
    tl.store(gate_parts + block.to(tl.int64) * rows + row, sums, mask=there)


@triton.jit
def _d_input(dg, du, values_1, scale_1, values_3, scale_3, out, tile_expert, tile_start, starts, outer, hidden, FORM: tl.constexpr, EVEN: tl.constexpr,
             ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr):
    """out bfloat16 [rows, Z]: W1^T dg + W3^T du."""
    expert, row, there, block = _place(tile_expert, tile_start, starts, outer, ROWS, COLS)
    if expert < 0:
        return
    wide = row.to(tl.int64)[:, None]
    at = expert.to(tl.int64) * hidden
    total = tl.zeros((ROWS, COLS), tl.float32)
    total = _product(total, dg + wide * hidden, there, values_1, scale_1, at, hidden, block * COLS, outer, ROWS, COLS, DEPTH, FORM, EVEN)
    total = _product(total, du + wide * hidden, there, values_3, scale_3, at, hidden, block * COLS, outer, ROWS, COLS, DEPTH, FORM, EVEN)
    total = in_order(total, ROWS, COLS, FORM)
    col = block * COLS + tl.arange(0, COLS)
    tl.store(out + wide * outer + col[None, :], total.to(tl.bfloat16), mask=there[:, None] & (col < outer)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _d_gates(parts, table, starts, out, rows, blocks, experts, BLOCK: tl.constexpr):
    """out fp32 [pairs]: the sum over blocks, in order, at each pair's sorted row; zero for a pair without an expert."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(table + pair, mask=pair < rows, other=0)
    there = (pair < rows) & (row < tl.load(starts + experts))
    total = tl.zeros((BLOCK,), tl.float32)
    at = parts + row
    for _ in range(blocks):
        total += tl.load(at, mask=there, other=0)
        at += rows
    tl.store(out + pair, total, mask=pair < rows)


@triton.jit
def _sort_rows(x, out, pairs, columns, TOP: tl.constexpr, RENAMED: tl.constexpr, BLOCK: tl.constexpr):
    blocks = columns // BLOCK
    row = tl.program_id(0) // blocks
    token = (tl.load(pairs + row) // TOP).to(tl.int64)
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * columns + col)
    if RENAMED:
        value = tl.reshape(tl.permute(tl.reshape(value, (BLOCK // 32, 4, 2, 4)), (0, 3, 1, 2)), (BLOCK,))
    tl.store(out + row.to(tl.int64) * columns + col, value)


@triton.jit
def _sum_slots(parts, table, starts, out, outer, experts, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """out[n] = the fp32 sum over slots, in order, of the rows of parts at the token's sorted rows; a pair without an expert adds nothing."""
    blocks = tl.cdiv(outer, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    known = tl.load(starts + experts)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP):
        row = tl.load(table + token * TOP + slot)
        total += tl.load(parts + row.to(tl.int64) * outer + col, mask=(col < outer) & (row + col * 0 < known), other=0).to(tl.float32)
    tl.store(out + token * outer + col, total.to(out.dtype.element_ty), mask=col < outer)


def _even(outer: int, hidden: int, blocks: Blocks) -> bool:
    """Whether every tile of columns and every step is whole, so that no load needs a mask on them."""
    return all(size % step == 0 for size in (outer, hidden) for step in (blocks.cols, blocks.depth)) and hidden % GATE_COLUMNS == 0


def d_hidden(dy: torch.Tensor, w2: ExpertWeight, table: Plan, top_k: int, out: torch.Tensor, blocks: Blocks) -> None:
    """dy [N, Z], w2 [E, Z, I]; writes the rows that have an expert of out [N * k, I]. All bfloat16; the table's block is blocks.rows."""
    outer, hidden = w2.shape[1], w2.shape[2]
    values, scale = stored(w2)
    grid = (table.tile_expert.numel() * triton.cdiv(hidden, blocks.cols),)
    _d_hidden[grid](dy, values, scale, out, table.pairs, table.tile_expert, table.tile_start, table.starts, outer, hidden, TOP=top_k, FORM=int(form(w2)),
                    EVEN=_even(outer, hidden, blocks), ROWS=blocks.rows, COLS=blocks.cols, DEPTH=blocks.depth, num_warps=blocks.warps,
                    num_stages=blocks.stages, enable_fp_fusion=True)


def inner(z: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, gates: torch.Tensor, dh: torch.Tensor, du: torch.Tensor, gated: torch.Tensor | None,
          table: Plan, betas: tuple[float, float], blocks: Blocks) -> torch.Tensor:
    """z [N, Z], w1, w3 [E, I, Z], gates fp32 [N, k], dh, du and gated (or None) [N * k, I]. dh becomes dg. Returns the gates' parts for `d_gates`."""
    _, hidden, outer = w1.shape
    (values_1, scale_1), (values_3, scale_3) = stored(w1), stored(w3)
    rows, count = dh.shape[0], triton.cdiv(hidden, GATE_COLUMNS)
    parts = torch.empty((count, rows), dtype=torch.float32, device=z.device)
    beta, linear_beta = betas
    _inner[(table.tile_expert.numel() * count,)](
        z, values_1, scale_1, values_3, scale_3, gates, dh, du, dh if gated is None else gated, parts, table.pairs, table.tile_expert, table.tile_start,
        table.starts, rows, outer, hidden, beta, linear_beta, 1 / beta, 1 / linear_beta, TOP=gates.shape[1], FORM=int(form(w1)),
        EVEN=_even(outer, hidden, blocks), KEEP=gated is not None, ROWS=blocks.rows, COLS=GATE_COLUMNS, DEPTH=blocks.depth, num_warps=blocks.warps,
        num_stages=blocks.stages, enable_fp_fusion=True)
    return parts


def d_input(dg: torch.Tensor, du: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, table: Plan, out: torch.Tensor, blocks: Blocks) -> None:
    """dg, du [N * k, I], w1, w3 [E, I, Z]; writes the rows that have an expert of out [N * k, Z]."""
    _, hidden, outer = w1.shape
    (values_1, scale_1), (values_3, scale_3) = stored(w1), stored(w3)
    _d_input[(table.tile_expert.numel() * triton.cdiv(outer, blocks.cols),)](
        dg, du, values_1, scale_1, values_3, scale_3, out, table.tile_expert, table.tile_start, table.starts, outer, hidden, FORM=int(form(w1)),
        EVEN=_even(outer, hidden, blocks), ROWS=blocks.rows, COLS=blocks.cols, DEPTH=blocks.depth, num_warps=blocks.warps, num_stages=blocks.stages,
        enable_fp_fusion=True)


def sort_rows(x: torch.Tensor, table: Plan, top_k: int, out: torch.Tensor, *, renamed: bool = False) -> None:
    """out [N * k, C] = x[token of each sorted row], x [N, C], C a multiple of 256; renamed: in each 32 columns 8 q + 4 h + i lies at 8 i + 2 q + h, as the matrix
    unit sums packed weights' nibbles (q, i < 4; h < 2)."""
    block = 512 if out.shape[1] % 512 == 0 else 256
    _sort_rows[(out.shape[0] * (out.shape[1] // block),)](x, out, table.pairs, out.shape[1], TOP=top_k, RENAMED=renamed, BLOCK=block, num_warps=2,
                                                          enable_fp_fusion=True)


def d_gates(parts: torch.Tensor, table: Plan, out: torch.Tensor) -> None:
    """parts fp32 [blocks, N * k] of `inner`, out fp32 [N, k]."""
    count, rows = parts.shape
    _d_gates[(triton.cdiv(rows, 256),)](parts, table.rows, table.starts, out, rows, count, table.starts.numel() - 1, BLOCK=256, num_warps=4,
                                        enable_fp_fusion=True)


def sum_slots(parts: torch.Tensor, table: Plan, top_k: int, out: torch.Tensor) -> None:
    """parts bfloat16 [N * k, Z] in sorted order, out [N, Z]."""
    tokens, outer = out.shape
    _sum_slots[(tokens * triton.cdiv(outer, 1024),)](parts, table.rows, table.starts, out, outer, table.starts.numel() - 1, TOP=top_k, BLOCK=1024, num_warps=4,
                                                     enable_fp_fusion=True)
