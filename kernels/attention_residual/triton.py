# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,assignment,var-annotated"
"""The attention residual as Triton kernels for any width and dtype (`staged.py` has those for K3's): a program holds all sources of one token, so each is
read from memory once; no two programs share a sum.

A token's row is its own: what is computed for it, and in which order, does not depend on how many tokens there are, which program takes it or what the
others hold. Sources are a tile [R, THREADS, VECTOR] for each stretch of THREADS x VECTOR columns, R a power of two, and one more row, the moving prefix; D =
7168 is seven stretches of 1,024 without a padded lane. Sums run over a thread's columns, then over the threads, then over the sources in their order.

The tile stays as bfloat16 between the passes over it: each later pass widens it anew by a shift whose width the compiler is not told, because it would
otherwise keep every widened value from the first pass and need twice the registers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from driftline.kernels.attention_residual.rows import Rows

__all__ = ["BACKWARD", "FORWARD", "Launch", "forward", "launch_of", "options"]

MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched for a tile of R sources. `programs`: at most so many, each taking every programs-th token; `registers`: the most a thread
    may take (None: the compiler's choice)."""

    warps: int
    vector: int
    programs: int
    registers: int | None = None


Table = dict[tuple[int, bool], Launch]

_ONE, _TWO = Launch(8, 4, MULTIPROCESSORS), Launch(8, 4, 2 * MULTIPROCESSORS, 128)
FORWARD: Table = {(1, False): _TWO, (2, False): _TWO, (4, False): _TWO, (8, False): _ONE, (1, True): _TWO, (2, True): _TWO, (4, True): _TWO, (8, True): _ONE}
BACKWARD: Table = {(1, False): _TWO, (2, False): _TWO, (4, False): _TWO, (8, False): _ONE, (1, True): _TWO, (2, True): _TWO, (4, True): _ONE, (8, True): _ONE}
"""The pinned configurations, by R and whether an output norm is fused: chosen by the shape of the call alone."""

OPAQUE_SHIFT = 16

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter narrows to bfloat16 by cutting off, where the device rounds to nearest, ties to even; there it is done in integers."""


def launch_of(table: Table, bank_rows: int, norm: bool) -> tuple[int, Launch]:
    """(R, its launch): the smallest R of the table that holds so many sources beside the prefix."""
    r = min(r for r, fused in table if fused == norm and r >= bank_rows)
    return r, table[r, norm]


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def widened(x, shift, SIGNED: tl.constexpr):
    """x in fp32, exactly. `shift` is 16: an argument of the kernel, so that this is another computation for the compiler than the first pass's conversion; and
    passes that extend the sign and passes that do not have nothing in common either."""
    if x.dtype == tl.bfloat16:
        if SIGNED:
            return (x.to(tl.int16, bitcast=True).to(tl.int32) << shift).to(tl.float32, bitcast=True)
        else:
            return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << shift).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrowed(x, DTYPE: tl.constexpr):
    """x rounded to DTYPE, to nearest."""
    if x.dtype == DTYPE:
        return x
    elif INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def columns(THREADS: tl.constexpr, VECTOR: tl.constexpr):
    return tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def row_piece(row, lane, c: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, POLICY: tl.constexpr):
    """Stretch c of one row [D] at a pointer: [THREADS, VECTOR]."""
    if (c + 1) * CHUNK <= D:
        return tl.load(row + c * CHUNK + lane, eviction_policy=POLICY)
    else:
        return tl.load(row + c * CHUNK + lane, mask=c * CHUNK + lane < D, other=0.0, eviction_policy=POLICY)


@triton.jit
def put_piece(row, value, lane, c: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr):
    if (c + 1) * CHUNK <= D:
        tl.store(row + c * CHUNK + lane, narrowed(value, row.dtype.element_ty))
    else:
        tl.store(row + c * CHUNK + lane, narrowed(value, row.dtype.element_ty), mask=c * CHUNK + lane < D)


@triton.jit
def sources_at(values, strides, token, lane, R: tl.constexpr, ROW: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers [R, THREADS, VECTOR] to the first stretch of a token's R sources: rows ROW elements apart, or (ROW 0) each at a pointer of its own."""
    source = tl.arange(0, R)
    if ROW > 0:
        # The false run of two along the threads decides a tie, so that the layout walks columns first and a thread holds every source.
        return values[0] + token * strides[0] + tl.max_contiguous(source[:, None, None] * ROW + lane[None, :, :], [1, 2, VECTOR])
    else:
        at = values[0] + (token * strides[0] + source * 0)
        for i in tl.static_range(1, R):
            at = tl.where(source == i, values[i] + token * strides[i], at)
        cells = tl.max_contiguous(at[:, None, None] + lane[None, :, :], [1, 2, VECTOR])
        if ALIGNED:
            cells = tl.multiple_of(cells, [1, 1, VECTOR * (values[0].dtype.element_ty.primitive_bitwidth // 8)])
        return cells


@triton.jit
def tile_piece(cells, there, lane, c: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, POLICY: tl.constexpr):
    """Stretch c of the sources; where a source is not there, zeros."""
    if (c + 1) * CHUNK <= D:
        return tl.load(cells + c * CHUNK, mask=there, other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(cells + c * CHUNK, mask=there & (c * CHUNK + lane < D)[None, :, :], other=0.0, eviction_policy=POLICY)


@triton.jit
def put_tile(cells, value, there, lane, c: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr):
    if (c + 1) * CHUNK <= D:
        tl.store(cells + c * CHUNK, narrowed(value, cells.dtype.scalar.element_ty), mask=there)
    else:
        tl.store(cells + c * CHUNK, narrowed(value, cells.dtype.scalar.element_ty), mask=there & (c * CHUNK + lane < D)[None, :, :])


@triton.jit
def direction(query, norm, lane, c: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr):
    """norm * query in fp32, [THREADS, VECTOR]. Read again in each pass: it is in the cache, and registers are what is scarce."""
    q = row_piece(query, lane, c, D, CHUNK, "evict_last").to(tl.float32)
    return q * row_piece(norm, lane, c, D, CHUNK, "evict_last").to(tl.float32)


@triton.jit
def softmax(score, score1, source, rows):
    """p [R] of the bank's sources and p of the prefix; 0 for a source that is not there. Nothing is divided twice: a zero query gives 1 / L rounded once."""
    masked = tl.where(source < rows, score, float("-inf"))
    top = tl.maximum(tl.max(masked, axis=0), score1)
    e = tl.exp(masked - top)
    e1 = tl.exp(score1 - top)
    total = tl.sum(e, axis=0) + e1
    return tl.div_rn(e, total + tl.zeros_like(e)), tl.div_rn(e1, total)


# One token is no case of its own: its bits are to be those it has among others.
@triton.jit(do_not_specialize=["tokens", "rows"])
def _mix(values, strides, prefix, prefix_stride, delta, delta_stride, moved, query, norm, output_weight, out, tokens, rows, eps, output_eps, shift,
         R: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, VECTOR: tl.constexpr, THREADS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
         ALIGNED: tl.constexpr):
    CHUNK: tl.constexpr = VECTOR * THREADS
    PIECES: tl.constexpr = (D + CHUNK - 1) // CHUNK
    lane = columns(THREADS, VECTOR)
    source = tl.arange(0, R)
    there = (source < rows)[:, None, None]
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = tl.cast(token, tl.int64)
        cells = sources_at(values, strides, at, lane, R, ROW, VECTOR, ALIGNED)
        v = ()
        u = ()
        w = ()
        for c in tl.static_range(PIECES):
            v += (tile_piece(cells, there, lane, c, D, CHUNK, "evict_first"),)
            u += (row_piece(prefix + at * prefix_stride, lane, c, D, CHUNK, "evict_first"),)
            if ADD:
                w += (row_piece(delta + at * delta_stride, lane, c, D, CHUNK, "evict_first"),)
        if ADD:
            sums = ()
            for c in tl.static_range(PIECES):
                total = narrowed(u[c].to(tl.float32) + w[c].to(tl.float32), u[c].dtype)
                put_piece(moved + at * D, total, lane, c, D, CHUNK)
                sums += (total,)
            u = sums
        square = tl.zeros([R, THREADS], tl.float32)
        dot = tl.zeros([R, THREADS], tl.float32)
        square1 = tl.zeros([THREADS], tl.float32)
        dot1 = tl.zeros([THREADS], tl.float32)
        for c in tl.static_range(PIECES):
            n = direction(query, norm, lane, c, D, CHUNK)
            x = v[c].to(tl.float32)
            y = u[c].to(tl.float32)
            square += tl.sum(x * x, axis=2)
            dot += tl.sum(x * n[None, :, :], axis=2)
            square1 += tl.sum(y * y, axis=1)
            dot1 += tl.sum(y * n, axis=1)
        square_sum, dot_sum = tl.reduce((square, dot), 1, _add2)
        square_sum1, dot_sum1 = tl.reduce((square1, dot1), 0, _add2)
        p, p1 = softmax(dot_sum * tl.rsqrt(square_sum / D + eps), dot_sum1 * tl.rsqrt(square_sum1 / D + eps), source, rows)
        mixed = ()
        power = tl.zeros([THREADS], tl.float32)
        for c in tl.static_range(PIECES):
            o = tl.sum(widened(v[c], shift, True) * p[:, None, None], axis=0) + widened(u[c], shift, True) * p1
            if NORM:
                rounded = narrowed(o, out.dtype.element_ty)
                power += tl.sum(rounded.to(tl.float32) * rounded.to(tl.float32), axis=1)
                mixed += (rounded,)
            else:
                put_piece(out + at * D, o, lane, c, D, CHUNK)
        if NORM:
            scale = tl.rsqrt(tl.sum(power, axis=0) / D + output_eps)
            for c in tl.static_range(PIECES):
                h = narrowed(widened(mixed[c], shift, True) * scale, out.dtype.element_ty)
                weight = narrowed(row_piece(output_weight, lane, c, D, CHUNK, "evict_last"), out.dtype.element_ty)
                put_piece(out + at * D, h.to(tl.float32) * weight.to(tl.float32), lane, c, D, CHUNK)


def forward(
    sources: torch.Tensor | Sequence[torch.Tensor], prefix: torch.Tensor, delta: torch.Tensor | None, query: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    output_weight: torch.Tensor | None, output_eps: float, launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mixed [N, D], moved [N, D]): as `reference.aggregate`, one launch. sources [N, rows, D] or up to eight tensors [N, D]; columns contiguous.
    moved is the prefix itself without a delta. `launch` stands in for the pinned configuration."""
    tokens, width = prefix.shape
    count = sources.shape[1] if isinstance(sources, torch.Tensor) else len(sources)
    r, pinned = launch_of(FORWARD, count, output_weight is not None)
    launch = launch or pinned
    rows = Rows(sources, r, prefix)
    out = torch.empty(tokens, width, dtype=prefix.dtype, device=prefix.device)
    moved = prefix if delta is None else torch.empty_like(out)
    if tokens:
        _mix[(min(tokens, launch.programs),)](
            rows.tensors, rows.strides, prefix, prefix.stride(0), delta, 0 if delta is None else delta.stride(0), moved, query, norm_weight, output_weight, out,
            tokens, count, eps, output_eps, OPAQUE_SHIFT, R=r, D=width, ROW=rows.row, VECTOR=launch.vector, THREADS=32 * launch.warps, ADD=delta is not None,
            NORM=output_weight is not None, ALIGNED=rows.even, **options(launch),
        )
    return out, moved


def options(launch: Launch) -> dict[str, Any]:
    """What the compiler is told. Contraction is said, because its default differs between versions and the bits depend on it."""
    told: dict[str, Any] = {"num_warps": launch.warps, "num_stages": 1, "enable_fp_fusion": True}
    return told if launch.registers is None else told | {"maxnreg": launch.registers}
