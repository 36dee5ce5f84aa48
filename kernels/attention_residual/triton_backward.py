# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,assignment,var-annotated"
"""The gradients of the attention residual: everything is recomputed from one read of the sources, and each gradient is written once, by one program.

With n = norm * query, r_i = rsqrt(mean v_i^2 + eps), t_i = <v_i, n>, p = softmax(r t) and do the gradient of o = sum_i p_i v_i:

    ds_i = p_i (<v_i, do> - sum_j p_j <v_j, do>)
    dv_i = p_i do + ds_i r_i n - ds_i t_i r_i^3 / D v_i
    dn   = sum over tokens and sources of ds_i r_i v_i;  dquery = dn * norm;  dnorm = dn * query

With an output norm, y = (o r_o) * w: do is y's gradient taken back through it, of an o that is mixed again here. A program walks its tokens in order and
keeps its own sums over them, of dn and of the output weight's gradient; a second kernel adds the programs' sums in the programs' order. The number of
programs follows from the number of tokens and sources, so the order of every sum does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from driftline.kernels.attention_residual.rows import Rows
from driftline.kernels.attention_residual.triton import (
    BACKWARD,
    OPAQUE_SHIFT,
    Launch,
    _add2,
    _add3,
    columns,
    direction,
    launch_of,
    narrowed,
    options,
    put_piece,
    put_tile,
    row_piece,
    softmax,
    sources_at,
    tile_piece,
    widened,
)

__all__ = ["Sums", "Unfinished", "add_up", "backward", "sums_for"]

_COLUMNS, _ROWS = 32, 64


@triton.jit
def _add1(a, b):
    return a + b


@triton.jit
def _sum_piece(sums, begun, more, lane, c: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr):
    """Add to a stretch of this program's row of sums, which lies in memory. `begun` is 0 while nothing has been written there, then 1."""
    held = tl.load(sums + c * CHUNK + lane, mask=c * CHUNK + lane < begun * D, other=0.0)
    put_piece(sums, held + more, lane, c, D, CHUNK)


@triton.jit(do_not_specialize=["tokens", "rows", "kept"])
def _unmix(values, strides, grads, grad_strides, prefix, prefix_stride, dprefix, do, do_stride, dmoved, dmoved_stride, query, norm, output_weight, dn_rows,
           dw_rows, tokens, rows, kept, eps, output_eps, shift, R: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, GRAD_ROW: tl.constexpr,
           VECTOR: tl.constexpr, THREADS: tl.constexpr, BANK: tl.constexpr, KEPT: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
           ALIGNED: tl.constexpr):
    CHUNK: tl.constexpr = VECTOR * THREADS
    PIECES: tl.constexpr = (D + CHUNK - 1) // CHUNK
    lane = columns(THREADS, VECTOR)
    source = tl.arange(0, R)
    there = (source < rows)[:, None, None]
    adding = (source < kept)[:, None, None]
    program = tl.program_id(0)
    dn_row = dn_rows + program * D
    dw_row = dw_rows + program * D
    for token in range(program, tokens, tl.num_programs(0)):
        at = tl.cast(token, tl.int64)
        cells = sources_at(values, strides, at, lane, R, ROW, VECTOR, ALIGNED)
        v = ()
        u = ()
        for c in tl.static_range(PIECES):
            v += (tile_piece(cells, there, lane, c, D, CHUNK, "evict_first"),)
            u += (row_piece(prefix + at * prefix_stride, lane, c, D, CHUNK, "evict_first"),)
        dy = do + at * do_stride
        # With an output norm this row holds what was mixed until the gradient overwrites it: each thread reads what it wrote itself.
        out1 = dprefix + at * D
        square = tl.zeros([R, THREADS], tl.float32)
        dot = tl.zeros([R, THREADS], tl.float32)
        along = tl.zeros([R, THREADS], tl.float32)
        square1 = tl.zeros([THREADS], tl.float32)
        dot1 = tl.zeros([THREADS], tl.float32)
        along1 = tl.zeros([THREADS], tl.float32)
        for c in tl.static_range(PIECES):
            n = direction(query, norm, lane, c, D, CHUNK)
            x = v[c].to(tl.float32)
            y = u[c].to(tl.float32)
            square += tl.sum(x * x, axis=2)
            dot += tl.sum(x * n[None, :, :], axis=2)
            square1 += tl.sum(y * y, axis=1)
            dot1 += tl.sum(y * n, axis=1)
            g = row_piece(dy, lane, c, D, CHUNK, "").to(tl.float32)
            if NORM:
                g *= row_piece(output_weight, lane, c, D, CHUNK, "evict_last").to(tl.float32)
            along += tl.sum(x * g[None, :, :], axis=2)
            along1 += tl.sum(y * g, axis=1)
        square_sum, dot_sum, along_sum = tl.reduce((square, dot, along), 1, _add3)
        square_sum1, dot_sum1, along_sum1 = tl.reduce((square1, dot1, along1), 0, _add3)
        r = tl.rsqrt(square_sum / D + eps)
        r1 = tl.rsqrt(square_sum1 / D + eps)
        p, p1 = softmax(dot_sum * r, dot_sum1 * r1, source, rows)
        scale = 1.0
        back = 0.0
        if NORM:
            # do = scale w dy - back o, so <v, do> needs <v, o> beside the <v, w dy> that is there; <o, w dy> is a sum of those.
            tilt = tl.zeros([R, THREADS], tl.float32)
            tilt1 = tl.zeros([THREADS], tl.float32)
            power = tl.zeros([THREADS], tl.float32)
            for c in tl.static_range(PIECES):
                x = widened(v[c], shift, False)
                y = widened(u[c], shift, False)
                o = narrowed(tl.sum(x * p[:, None, None], axis=0) + y * p1, u[c].dtype)
                put_piece(out1, o, lane, c, D, CHUNK)
                o = o.to(tl.float32)
                tilt += tl.sum(x * o[None, :, :], axis=2)
                tilt1 += tl.sum(y * o, axis=1)
                power += tl.sum(o * o, axis=1)
            tilt_sum = tl.reduce(tilt, 1, _add1)
            tilt_sum1, power_sum = tl.reduce((tilt1, power), 0, _add2)
            scale = tl.rsqrt(power_sum / D + output_eps)
            back = scale * scale * scale * (tl.sum(p * along_sum, axis=0) + p1 * along_sum1) / D
            along_sum = scale * along_sum - back * tilt_sum
            along_sum1 = scale * along_sum1 - back * tilt_sum1
        mean = tl.sum(p * along_sum, axis=0) + p1 * along_sum1
        ds = p * (along_sum - mean)
        ds1 = p1 * (along_sum1 - mean)
        turn = ds * r
        turn1 = ds1 * r1
        pull_in = (turn * dot_sum * r * r / D)[:, None, None]
        pull_in1 = turn1 * dot_sum1 * r1 * r1 / D
        share = p[:, None, None]
        turned = turn[:, None, None]
        out = cells
        if BANK:
            out = sources_at(grads, grad_strides, at, lane, R, GRAD_ROW, VECTOR, ALIGNED)
        begun = tl.minimum(token - program, 1)
        for c in tl.static_range(PIECES):
            n = direction(query, norm, lane, c, D, CHUNK)
            g = row_piece(dy, lane, c, D, CHUNK, "evict_first").to(tl.float32)
            x = widened(v[c], shift, True)
            y = widened(u[c], shift, True)
            if NORM:
                o = row_piece(out1, lane, c, D, CHUNK, "").to(tl.float32)
                more = g * narrowed(o * scale, u[c].dtype).to(tl.float32)
                _sum_piece(dw_row, begun, more, lane, c, D, CHUNK)
                g = scale * (g * row_piece(output_weight, lane, c, D, CHUNK, "evict_last").to(tl.float32)) - back * o
            more = tl.sum(x * turned, axis=0) + y * turn1
            _sum_piece(dn_row, begun, more, lane, c, D, CHUNK)
            if BANK:
                dx = share * g[None, :, :] + turned * n[None, :, :] - pull_in * x
                if KEPT:
                    dx += tile_piece(out, adding, lane, c, D, CHUNK, "evict_first").to(tl.float32)
                put_tile(out, dx, there, lane, c, D, CHUNK)
            dx1 = p1 * g + turn1 * n - pull_in1 * y
            if ADD:
                dx1 += row_piece(dmoved + at * dmoved_stride, lane, c, D, CHUNK, "evict_first").to(tl.float32)
            put_piece(out1, dx1, lane, c, D, CHUNK)


@triton.jit
def _column_sums(rows, count, column, mask, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    step = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, count, ROWS):
        total += tl.load(rows + (first + step)[:, None] * D + column[None, :], mask=(first + step < count)[:, None] & mask[None, :], other=0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["count"])
def _finish(dn_rows, dw_rows, count, query, norm, dquery, dnorm, dweight, D: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < D
    dn = _column_sums(dn_rows, count, column, mask, D, ROWS, COLUMNS)
    q = tl.load(query + column, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(norm + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(dquery + column, narrowed(dn * w, dquery.dtype.element_ty), mask=mask)
    tl.store(dnorm + column, narrowed(dn * q, dnorm.dtype.element_ty), mask=mask)
    if NORM:
        dw = _column_sums(dw_rows, count, column, mask, D, ROWS, COLUMNS)
        tl.store(dweight + column, narrowed(dw, dweight.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Sums:
    """Gradients of one aggregation that are not the sources': dprefix [N, D], dquery [D], dnorm [D], dweight [D] (None without an output norm)."""

    dprefix: torch.Tensor
    dquery: torch.Tensor
    dnorm: torch.Tensor
    dweight: torch.Tensor | None


@dataclass(frozen=True)
class Unfinished:
    """Room for `Sums` and, in fp32, for the programs' own sums [programs, D]."""

    sums: Sums
    dn_rows: torch.Tensor
    dw_rows: torch.Tensor

    @property
    def dprefix(self) -> torch.Tensor:
        return self.sums.dprefix

    def nothing(self) -> Sums:
        """Of no tokens."""
        for gradient in (self.sums.dquery, self.sums.dnorm, self.sums.dweight):
            if gradient is not None:
                gradient.zero_()
        return self.sums


def sums_for(prefix: torch.Tensor, query: torch.Tensor, norm_weight: torch.Tensor, output_weight: torch.Tensor | None, programs: int) -> Unfinished:
    """Nothing in it is written yet."""
    tokens, width = prefix.shape
    dprefix = torch.empty(tokens, width, dtype=prefix.dtype, device=prefix.device)
    dn_rows = torch.empty(programs, width, dtype=torch.float32, device=prefix.device)
    dw_rows = dn_rows if output_weight is None else torch.empty_like(dn_rows)
    dweight = None if output_weight is None else torch.empty_like(output_weight)
    return Unfinished(Sums(dprefix, torch.empty_like(query), torch.empty_like(norm_weight), dweight), dn_rows, dw_rows)


def add_up(unfinished: Unfinished, query: torch.Tensor, norm_weight: torch.Tensor) -> Sums:
    """The programs' sums, added in the programs' order; one launch."""
    programs, width = unfinished.dn_rows.shape
    sums = unfinished.sums
    _finish[(triton.cdiv(width, _COLUMNS),)](
        unfinished.dn_rows, unfinished.dw_rows, programs, query, norm_weight, sums.dquery, sums.dnorm, sums.dweight, D=width, NORM=sums.dweight is not None,
        ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4, enable_fp_fusion=True,
    )
    return sums


def backward(
    sources: torch.Tensor | Sequence[torch.Tensor], gradients: torch.Tensor | Sequence[torch.Tensor] | None, kept: int, prefix: torch.Tensor, do: torch.Tensor,
    dmoved: torch.Tensor | None, query: torch.Tensor, norm_weight: torch.Tensor, eps: float, output_weight: torch.Tensor | None, output_eps: float,
    launch: Launch | None = None,
) -> Sums:
    """As `reference.aggregate_backward`, two launches. The gradients of the sources go into `gradients`, laid out as the sources are: the first `kept` are
    added to, the others overwritten; None: they are not wanted. `prefix` is the one after the delta."""
    tokens, width = prefix.shape
    count = sources.shape[1] if isinstance(sources, torch.Tensor) else len(sources)
    norm = output_weight is not None
    r, pinned = launch_of(BACKWARD, count, norm)
    launch = launch or pinned
    rows = Rows(sources, r, prefix)
    into = rows if gradients is None else Rows(gradients, r, prefix)
    programs = max(1, min(tokens, launch.programs))
    sums = sums_for(prefix, query, norm_weight, output_weight, programs)
    if not tokens:
        return sums.nothing()
    _unmix[(programs,)](
        rows.tensors, rows.strides, into.tensors, into.strides, prefix, prefix.stride(0), sums.dprefix, do, do.stride(0), dmoved,
        0 if dmoved is None else dmoved.stride(0), query, norm_weight, output_weight, sums.dn_rows, sums.dw_rows, tokens, count, kept, eps, output_eps,
        OPAQUE_SHIFT, R=r, D=width, ROW=rows.row, GRAD_ROW=into.row, VECTOR=launch.vector, THREADS=32 * launch.warps,
        BANK=gradients is not None and count > 0, KEPT=kept > 0, ADD=dmoved is not None, NORM=norm, ALIGNED=rows.even and into.even, **options(launch),
    )
    return add_up(sums, query, norm_weight)
