# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined,assignment,var-annotated"
"""The gradients of the attention residual in Gluon, staged as in `staged.py`: the gradient of the mixture comes along with the sources.

The formulas are those of `triton_backward.py`. A program keeps its sums over its tokens, of dn and of the output weight's gradient, in registers or in
shared memory; they leave the multiprocessor once, and `add_up` adds the programs' sums in the programs' order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from driftline.kernels.attention_residual.rows import Rows, apart, is_even
from driftline.kernels.attention_residual.staged import (
    _CHUNK,
    _PLAIN1,
    _VECTOR,
    _WARPS,
    BACKWARD,
    OPAQUE,
    WARPS,
    Launch,
    add2,
    add4,
    ask,
    barrier,
    beside,
    directions,
    dot,
    launch_of,
    parts,
    slots,
    softmax,
    taken,
    under,
    widened,
)
from driftline.kernels.attention_residual.triton_backward import Sums, add_up, sums_for

__all__ = ["backward"]


@gluon.jit
def _ask_ahead(row, count):
    """L2 is asked for `count` bytes from the pointer on, by one thread. Nothing waits for it and nothing depends on it."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [row.to(gl.int64, bitcast=True), count], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def _cells(grads, strides, at, source, columns, R: gl.constexpr, ROW: gl.constexpr):
    """Pointers [R, 1024] to the first stretch of the gradients of a token's sources."""
    if ROW > 0:
        cells = grads[0] + at * strides[0] + (source[:, None] * ROW + columns[None, :])
    else:
        cells = (grads[0] + at * strides[0]) + (source[:, None] * 0 + columns[None, :])
        for i in gl.static_range(1, R):
            cells = gl.where(source[:, None] == i, (grads[i] + at * strides[i]) + (source[:, None] * 0 + columns[None, :]), cells)
    return cells


@gluon.jit
def _kept(cells, source, kept, c: gl.constexpr):
    return gl.load(cells + c * _CHUNK, mask=(source < kept)[:, None], other=0.0, eviction_policy="evict_first")


@gluon.jit(do_not_specialize=["tokens", "rows", "kept"])
def _unmix_staged(values, strides, grads, grad_strides, prefix, prefix_stride, dprefix, do, do_stride, dmoved, dmoved_stride, query, norm, output_weight, dn_rows,
                  dw_rows, tokens, rows, kept, eps, output_eps, shift, mask, shift2, mask2, R: gl.constexpr, D: gl.constexpr, ROW: gl.constexpr,
                  GRAD_ROW: gl.constexpr, BANK: gl.constexpr, KEPT: gl.constexpr, ADD: gl.constexpr, NORM: gl.constexpr, SHARED: gl.constexpr,
                  AHEAD: gl.constexpr, EARLY: gl.constexpr):
    PIECES: gl.constexpr = D // _CHUNK
    TILE: gl.constexpr = gl.BlockedLayout([R, _VECTOR], [1, 32], [1, _WARPS], [1, 0])
    LINE: gl.constexpr = gl.SliceLayout(0, TILE)
    kind: gl.constexpr = prefix.dtype.element_ty
    columns = gl.arange(0, _CHUNK, LINE)
    source = gl.arange(0, R, gl.SliceLayout(1, TILE))
    tiles, lines, others = slots(kind, rows, R, PIECES, True, TILE)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    for c in gl.static_range(PIECES - 1):
        ask(tiles[c], lines[c], others[c], values, strides, prefix, prefix_stride, do, do_stride, first, tokens, rows, c, R, ROW, True)
    directed = directions(query, norm, columns, PIECES)
    dn = ()
    dw = ()
    for _ in gl.static_range(PIECES):
        zero = gl.zeros([_CHUNK], gl.float32, LINE)
        if SHARED:
            dn = dn + (gl.allocate_shared_memory(gl.float32, [_CHUNK], _PLAIN1, zero),)  # noqa: RUF005
            if NORM:
                dw = dw + (gl.allocate_shared_memory(gl.float32, [_CHUNK], _PLAIN1, zero),)  # noqa: RUF005
        else:
            dn = dn + (zero,)  # noqa: RUF005
            if NORM:
                dw = dw + (zero,)  # noqa: RUF005
    for token in range(first, tokens, step):
        at = gl.cast(token, gl.int64)
        if AHEAD:
            if KEPT:
                _ask_ahead(grads[0] + at * grad_strides[0], kept * (D * grads[0].dtype.element_ty.primitive_bitwidth // 8))
            if ADD:
                _ask_ahead(dmoved + at * dmoved_stride, rows * 0 + D * (kind.primitive_bitwidth // 8))
        v = ()
        u = ()
        d = ()
        for c in gl.static_range(PIECES):
            async_copy.wait_group(PIECES - 2)
            # The stretch is there for every warp, and every warp has taken the one before.
            barrier()
            xb = tiles[c].load(TILE)
            yb = lines[c].load(LINE)
            gb = others[c].load(LINE)
            ask(tiles[c - 1], lines[c - 1], others[c - 1], values, strides, prefix, prefix_stride, do, do_stride, token + (c + PIECES - 1) // PIECES * step,
                tokens, rows, (c + PIECES - 1) % PIECES, R, ROW, True)
            x = xb.to(gl.float32)
            y = yb.to(gl.float32)
            g = gb.to(gl.float32)
            if NORM:
                g = g * gl.load(output_weight + c * _CHUNK + columns).to(gl.float32)
            n = directed[c].load(LINE)
            xs = parts(x)
            ys = parts(y)
            gs = parts(g)
            if c == 0:
                square, turned_to, along, square1, turned_to1, along1 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            square = dot(xs, xs, square, c == 0)
            turned_to = dot(xs, parts(under(n, x)), turned_to, c == 0)
            along = dot(xs, parts(under(g, x)), along, c == 0)
            square1 = dot(ys, ys, square1, c == 0)
            turned_to1 = dot(ys, parts(n), turned_to1, c == 0)
            along1 = dot(ys, gs, along1, c == 0)
            v = v + (xb,)  # noqa: RUF005
            u = u + (yb,)  # noqa: RUF005
            d = d + (gb,)  # noqa: RUF005
        if BANK:
            cells = _cells(grads, grad_strides, at, source, columns, R, GRAD_ROW)
            if KEPT and EARLY:
                held = _kept(cells, source, kept, 0)
        row = gl.arange(0, R, gl.SliceLayout(1, square.type.layout))[:, None]
        ones = beside(along1, square, row, 2, gl.zeros_like(square))
        ones = beside(square1, square, row, 0, beside(turned_to1, square, row, 1, ones))
        square_sum, turned_sum, along_sum, sums = gl.reduce((square, turned_to, along, ones), 1, add4)
        sums = gl.convert_layout(sums, gl.SliceLayout(1, TILE))
        square_sum1 = taken(sums, source, 0)
        turned_sum1 = taken(sums, source, 1)
        along_sum1 = taken(sums, source, 2)
        square_sum = gl.convert_layout(square_sum, gl.SliceLayout(1, TILE))
        turned_sum = gl.convert_layout(turned_sum, gl.SliceLayout(1, TILE))
        along_sum = gl.convert_layout(along_sum, gl.SliceLayout(1, TILE))
        r = gl.rsqrt(square_sum / D + eps)
        r1 = gl.rsqrt(square_sum1 / D + eps)
        p, p1 = softmax(turned_sum * r, turned_sum1 * r1, source, rows)
        scale = 1.0
        back = 0.0
        o = ()
        if NORM:
            # do = scale w dy - back o, so <v, do> needs <v, o> beside the <v, w dy> that is there; <o, w dy> is a sum of those.
            for c in gl.static_range(PIECES):
                x = widened(v[c], shift2, mask2)
                y = widened(u[c], shift2, mask2)
                rounded = (gl.sum(x * p[:, None], axis=0) + y * p1).to(kind)
                o = o + (rounded,)  # noqa: RUF005
                w = rounded.to(gl.float32)
                ws = parts(w)
                if c == 0:
                    tilt, tilt1, power = 0.0, 0.0, 0.0
                tilt = dot(parts(x), parts(under(w, x)), tilt, c == 0)
                tilt1 = dot(parts(y), ws, tilt1, c == 0)
                power = dot(ws, ws, power, c == 0)
            row2 = gl.arange(0, R, gl.SliceLayout(1, tilt.type.layout))[:, None]
            tilt_sum, sums2 = gl.reduce((tilt, beside(tilt1, tilt, row2, 0, beside(power, tilt, row2, 1, gl.zeros_like(tilt)))), 1, add2)
            sums2 = gl.convert_layout(sums2, gl.SliceLayout(1, TILE))
            tilt_sum1 = taken(sums2, source, 0)
            power_sum = taken(sums2, source, 1)
            tilt_sum = gl.convert_layout(tilt_sum, gl.SliceLayout(1, TILE))
            scale = gl.rsqrt(power_sum / D + output_eps)
            back = scale * scale * scale * (gl.sum(p * along_sum, axis=0) + p1 * along_sum1) / D
            along_sum = scale * along_sum - back * tilt_sum
            along_sum1 = scale * along_sum1 - back * tilt_sum1
        mean = gl.sum(p * along_sum, axis=0) + p1 * along_sum1
        ds = p * (along_sum - mean)
        ds1 = p1 * (along_sum1 - mean)
        turn = ds * r
        turn1 = ds1 * r1
        pull_in = (turn * turned_sum * r * r / D)[:, None]
        pull_in1 = turn1 * turned_sum1 * r1 * r1 / D
        share = p[:, None]
        turned = turn[:, None]
        dn_next = ()
        dw_next = ()
        for c in gl.static_range(PIECES):
            line = c * _CHUNK + columns
            if KEPT:
                if EARLY:
                    before = held
                    if c + 1 < PIECES:
                        held = _kept(cells, source, kept, c + 1)
                else:
                    before = _kept(cells, source, kept, c)
            n = directed[c].load(LINE)
            g = widened(d[c], shift, mask)
            x = widened(v[c], shift, mask)
            y = widened(u[c], shift, mask)
            if NORM:
                w = widened(o[c], shift, mask)
                more = g * (w * scale).to(kind).to(gl.float32)
                if SHARED:
                    dw[c].store(dw[c].load(LINE) + more)
                else:
                    dw_next = dw_next + (dw[c] + more,)  # noqa: RUF005
                g = scale * (g * gl.load(output_weight + line).to(gl.float32)) - back * w
            more = gl.sum(x * turned, axis=0) + y * turn1
            if SHARED:
                dn[c].store(dn[c].load(LINE) + more)
            else:
                dn_next = dn_next + (dn[c] + more,)  # noqa: RUF005
            if BANK:
                dx = share * g[None, :] + turned * n[None, :] - pull_in * x
                if KEPT:
                    dx = dx + before.to(gl.float32)
                gl.store(cells + c * _CHUNK, dx.to(grads[0].dtype.element_ty), mask=(source < rows)[:, None], eviction_policy="evict_first")
            dx1 = p1 * g + turn1 * n - pull_in1 * y
            if ADD:
                dx1 = dx1 + gl.load(dmoved + at * dmoved_stride + line, eviction_policy="evict_first").to(gl.float32)
            gl.store(dprefix + at * D + line, dx1.to(kind), eviction_policy="evict_first")
        if not SHARED:
            dn = dn_next
            dw = dw_next
    async_copy.wait_group(0)
    for c in gl.static_range(PIECES):
        place = first * D + c * _CHUNK + columns
        if SHARED:
            gl.store(dn_rows + place, dn[c].load(LINE))
            if NORM:
                gl.store(dw_rows + place, dw[c].load(LINE))
        else:
            gl.store(dn_rows + place, dn[c])
            if NORM:
                gl.store(dw_rows + place, dw[c])


def backward(
    sources: torch.Tensor | Sequence[torch.Tensor], gradients: torch.Tensor | Sequence[torch.Tensor] | None, kept: int, prefix: torch.Tensor, do: torch.Tensor,
    dmoved: torch.Tensor | None, query: torch.Tensor, norm_weight: torch.Tensor, eps: float, output_weight: torch.Tensor | None, output_eps: float,
    launch: Launch | None = None,
) -> Sums:
    """As `triton_backward.backward`, for what `staged.takes`; `do` of the prefix's dtype."""
    tokens, width = prefix.shape
    count = sources.shape[1] if isinstance(sources, torch.Tensor) else len(sources)
    norm = output_weight is not None
    r, pinned = launch_of(BACKWARD, count, norm)
    launch = launch or pinned
    programs = max(1, min(tokens, launch.programs))
    sums = sums_for(prefix, query, norm_weight, output_weight, programs)
    if not tokens:
        return sums.nothing()
    read, do = apart(prefix), apart(do)
    rows = Rows(apart(sources) if isinstance(sources, torch.Tensor) else [apart(s) for s in sources], r, read)
    into = rows if gradients is None else Rows(gradients, r, prefix)
    # L2 is asked for pieces that begin at, and are of, multiples of sixteen bytes.
    ahead = (kept == 0 or (into.row == width and into.even)) and (dmoved is None or is_even(dmoved))
    _unmix_staged[(programs,)](
        rows.tensors, rows.strides, into.tensors, into.strides, read, read.stride(0), sums.dprefix, do, do.stride(0), dmoved,
        0 if dmoved is None else dmoved.stride(0), query, norm_weight, output_weight, sums.dn_rows, sums.dw_rows, tokens, count, kept, eps, output_eps, *OPAQUE,
        R=r, D=width, ROW=rows.row, GRAD_ROW=into.row, BANK=gradients is not None and count > 0, KEPT=kept > 0, ADD=dmoved is not None, NORM=norm,
        SHARED=launch.sums_shared, AHEAD=ahead, EARLY=launch.early, num_warps=WARPS, maxnreg=launch.registers, enable_fp_fusion=True,
    )
    return add_up(sums, query, norm_weight)
