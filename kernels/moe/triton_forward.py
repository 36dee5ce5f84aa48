# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""The two expert products as Triton kernels: weights are the matrix unit's first operand, read once a tile of tokens and decoded on their way to it.

out^T = W x^T: the rows of a tile are features and its columns tokens, so one decoded weight serves every token of the tile, and goes from registers into the
matrix unit with no stop in shared memory. A tile has BLOCK tokens or, at an expert's end, the least width of its kind that holds what is left; widths above
128 are two products with the same weights. The two matrices of the first product share the tokens and end in SiTU-GLU, rounded as the second product reads it.

A row's bits do not depend on where it lies, nor on the width of its tile: K is summed by the matrix unit in one order, 128 at a time, for every width and
for every number of features a tile has; FP8 sums go to fp32 after each 128. No atomics; the sum over a token's experts is taken in the order of its slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from driftline.kernels.moe.activations import Activations
from driftline.kernels.moe.grouped import Form, Grouping, Product
from driftline.kernels.moe.plan import Plan
from driftline.kernels.moe.triton_rows import (
    FP8,
    MXFP4,
    ROUND_32,
    ROUND_128,
    ROUNDINGS,
    factors,
    mxfp8,
    narrowed,
    ordered,
)
from driftline.kernels.mxfp4.triton import INTERPRETED, bfloat16_chunk, bfloat16_words, fp8_tile, memory_rows
from driftline.kernels.mxfp4.weights import ExpertWeight, Fp8Weight, Mxfp4Weight
from driftline.kernels.situ_glu.triton import situ

__all__ = ["down", "up"]

@triton.jit
def _tile(w, s, at, at_scale, kb, FORM: tl.constexpr, WARPS: tl.constexpr):
    """Stretch kb of 128 of K, not from MXFP4 to bfloat16: the tile [BM, 128] and, where sums are scaled, its rows' factors [BM]. Offsets stay 32 bits wide
    everywhere, for registers are short."""
    if FORM == MXFP4:
        tile, factor = fp8_tile(tl.load(w + (at + kb * 64)), tl.load(s + (at_scale + kb)), WARPS)
    else:
        tile = tl.load(w + (at + kb * 128))
        if FORM == FP8:
            factor = tl.load(s + (at_scale + kb))
        else:
            factor = kb
    return tile, factor


@triton.jit
def _add(total, tile, x):
    """total [BM, N] plus tile [BM, K'] times x [K', N]."""
    if INTERPRETED:
        tile = tile.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(tile, x, total)


@triton.jit
def _add_scaled(total, tile, x, factor, x_factor):
    """The same over 128 of K in E4M3, whose sum is scaled by its row's and its column's factor before it joins the total in fp32."""
    if INTERPRETED:
        tile = tile.to(tl.float32)
        x = x.to(tl.float32)
    return total + tl.dot(tile, x) * (factor[:, None] * x_factor[None, :])


@triton.jit
def _matrix(w, s, expert, K: tl.constexpr, F: tl.constexpr, UNITS: tl.constexpr):
    """An expert's weights and their scales. UNITS: what 128 of K are in memory: 16 words, 64 bytes or 128 numbers."""
    row = expert.to(tl.int64) * F
    return w + row * (K // 128 * UNITS), s + row * (K // 128)


@triton.jit
def _place(feature0, BM: tl.constexpr, FORM: tl.constexpr, ROUNDING: tl.constexpr):
    """Where the columns of `_ordered` lie in a row of the second product's input."""
    c = tl.arange(0, BM)
    if FORM == MXFP4 and ROUNDING != ROUND_128 and BM < 128:
        Q: tl.constexpr = BM // 32
        q0 = (feature0 % 128) // 32
        return feature0 // 128 * 128 + c // (8 * Q) * 32 + (c // (2 * Q)) % 4 * 8 + q0 * 2 + c % (2 * Q)
    return feature0 + c


@triton.jit
def _finish(g, u, h, hs, feature0, start, count, rows, beta, linear_beta, over_beta, over_linear_beta, F: tl.constexpr, FORM: tl.constexpr,
            ROUNDING: tl.constexpr, WARPS: tl.constexpr):
    """SiTU-GLU of g, u [BM, N] and its rounding, to rows start.. of h."""
    BM: tl.constexpr = g.shape[0]
    N: tl.constexpr = g.shape[1]
    value = situ(g, u, beta, linear_beta, over_beta, over_linear_beta)
    if FORM == MXFP4:
        value = memory_rows(value, WARPS)
    row = tl.arange(0, N)
    if ROUNDING == ROUND_32:
        value = tl.reshape(mxfp8(tl.reshape(value, (BM // 32, 32, N))), (BM, N))
    elif ROUNDING == ROUND_128:
        times, factor = factors(tl.max(tl.abs(value), axis=0))
        value = value * times[None, :]
        tl.store(hs + feature0 // 128 * rows + start + row, factor, mask=row < count)
    out = ordered(tl.trans(narrowed(value, h.dtype.element_ty)), FORM, ROUNDING)
    at = (start + row)[:, None] * F + _place(feature0, BM, FORM, ROUNDING)[None, :]
    tl.store(h + at, out, mask=(row < count)[:, None])


@triton.jit
def _up_tile(x, xs, w1, s1, w3, s3, pairs, h, hs, expert, feature0, start, count, tokens, rows, beta, linear_beta, over_beta, over_linear_beta,
             TOP_K: tl.constexpr, K: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, UNITS: tl.constexpr,
             FORM: tl.constexpr, ROUNDING: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, STEPS: tl.constexpr):
    w1, s1 = _matrix(w1, s1, expert, K, F, UNITS)
    w3, s3 = _matrix(w3, s3, expert, K, F, UNITS)
    at_scale = (feature0 + tl.arange(0, BM)) * (K // 128)
    at = at_scale[:, None] * UNITS + tl.arange(0, UNITS)[None, :]
    k = tl.arange(0, 32 if FORM == MXFP4 and ROUNDING != ROUND_128 else 128)
    t0 = tl.arange(0, N0)
    row0 = tl.load(pairs + start + t0, mask=t0 < count, other=0) // TOP_K
    at0 = row0[None, :] * K + k[:, None]
    there0 = (t0 < count)[None, :]
    g0 = tl.zeros((BM, N0), tl.float32)
    u0 = tl.zeros((BM, N0), tl.float32)
    if N1 > 0:
        t1 = N0 + tl.arange(0, N1)
        row1 = tl.load(pairs + start + t1, mask=t1 < count, other=0) // TOP_K
        at1 = row1[None, :] * K + k[:, None]
        there1 = (t1 < count)[None, :]
        g1 = tl.zeros((BM, N1), tl.float32)
        u1 = tl.zeros((BM, N1), tl.float32)
    for pair in tl.range(0, K // (128 * STEPS), num_stages=STAGES):
        for step in tl.static_range(STEPS):
            kb = pair if STEPS == 1 else pair * STEPS + step
            if FORM == MXFP4 and ROUNDING != ROUND_128:
                words1, factor1 = bfloat16_words(tl.load(w1 + (at + kb * 16)), tl.load(s1 + (at_scale + kb)), WARPS)
                words3, factor3 = bfloat16_words(tl.load(w3 + (at + kb * 16)), tl.load(s3 + (at_scale + kb)), WARPS)
                for i in tl.static_range(4):
                    x0 = tl.load(x + (at0 + (kb * 128 + i * 32)), mask=there0, other=0.0)
                    chunk1 = bfloat16_chunk(words1, factor1, i)
                    g0 = _add(g0, chunk1, x0)
                    if N1 > 0:
                        x1 = tl.load(x + (at1 + (kb * 128 + i * 32)), mask=there1, other=0.0)
                        g1 = _add(g1, chunk1, x1)
                    chunk3 = bfloat16_chunk(words3, factor3, i)
                    u0 = _add(u0, chunk3, x0)
                    if N1 > 0:
                        u1 = _add(u1, chunk3, x1)
            else:
                x0 = tl.load(x + (at0 + kb * 128), mask=there0, other=0.0)
                if N1 > 0:
                    x1 = tl.load(x + (at1 + kb * 128), mask=there1, other=0.0)
                tile, factor = _tile(w1, s1, at, at_scale, kb, FORM, WARPS)
                if ROUNDING == ROUND_128:
                    f0 = tl.load(xs + (row0 + kb * tokens))
                    g0 = _add_scaled(g0, tile, x0, factor, f0)
                    if N1 > 0:
                        f1 = tl.load(xs + (row1 + kb * tokens))
                        g1 = _add_scaled(g1, tile, x1, factor, f1)
                else:
                    g0 = _add(g0, tile, x0)
                    if N1 > 0:
                        g1 = _add(g1, tile, x1)
                tile, factor = _tile(w3, s3, at, at_scale, kb, FORM, WARPS)
                if ROUNDING == ROUND_128:
                    u0 = _add_scaled(u0, tile, x0, factor, f0)
                    if N1 > 0:
                        u1 = _add_scaled(u1, tile, x1, factor, f1)
                else:
                    u0 = _add(u0, tile, x0)
                    if N1 > 0:
                        u1 = _add(u1, tile, x1)
    if N1 > 0:
        _finish(g1, u1, h, hs, feature0, start + N0, count - N0, rows, beta, linear_beta, over_beta, over_linear_beta, F, FORM, ROUNDING, WARPS)
    _finish(g0, u0, h, hs, feature0, start, count, rows, beta, linear_beta, over_beta, over_linear_beta, F, FORM, ROUNDING, WARPS)


@triton.jit(do_not_specialize=["tokens", "rows"])
def _up(x, xs, w1, s1, w3, s3, pairs, starts, tile_expert, tile_start, h, hs, tokens, rows, beta, linear_beta, over_beta, over_linear_beta,
        TOP_K: tl.constexpr, K: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, WIDTHS: tl.constexpr, UNITS: tl.constexpr,
        FORM: tl.constexpr, ROUNDING: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, STEPS: tl.constexpr):
    tile = tl.program_id(0) // (F // BM)
    feature0 = tl.program_id(0) % (F // BM) * BM
    expert = tl.load(tile_expert + tile)
    if expert >= 0:
        start = tl.load(tile_start + tile)
        count = tl.minimum(tl.load(starts + expert + 1) - start, BLOCK)
        for i in tl.static_range(1, len(WIDTHS)):
            if (count > WIDTHS[i - 1][0] + WIDTHS[i - 1][1]) & (count <= WIDTHS[i][0] + WIDTHS[i][1]):
                _up_tile(x, xs, w1, s1, w3, s3, pairs, h, hs, expert, feature0, start, count, tokens, rows, beta, linear_beta, over_beta,
                         over_linear_beta, TOP_K, K, F, BM, WIDTHS[i][0], WIDTHS[i][1], UNITS, FORM, ROUNDING, WARPS, STAGES, STEPS)


@triton.jit
def _write(total, y, feature0, start, count, F: tl.constexpr, FORM: tl.constexpr, WARPS: tl.constexpr):
    BM: tl.constexpr = total.shape[0]
    N: tl.constexpr = total.shape[1]
    if FORM == MXFP4:
        total = memory_rows(total, WARPS)
    row = tl.arange(0, N)
    at = (start + row)[:, None] * F + (feature0 + tl.arange(0, BM))[None, :]
    tl.store(y + at, tl.trans(narrowed(total, y.dtype.element_ty)), mask=(row < count)[:, None])


@triton.jit
def _down_tile(h, hs, w2, s2, y, expert, feature0, start, count, rows, K: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, N0: tl.constexpr,
               N1: tl.constexpr, UNITS: tl.constexpr, FORM: tl.constexpr, ROUNDING: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
               STEPS: tl.constexpr):
    w2, s2 = _matrix(w2, s2, expert, K, F, UNITS)
    at_scale = (feature0 + tl.arange(0, BM)) * (K // 128)
    at = at_scale[:, None] * UNITS + tl.arange(0, UNITS)[None, :]
    k = tl.arange(0, 32 if FORM == MXFP4 and ROUNDING != ROUND_128 else 128)
    row0 = tl.minimum(start + tl.arange(0, N0), rows - 1)
    at0 = row0[None, :] * K + k[:, None]
    there0 = (tl.arange(0, N0) < count)[None, :]
    y0 = tl.zeros((BM, N0), tl.float32)
    if N1 > 0:
        row1 = tl.minimum(start + N0 + tl.arange(0, N1), rows - 1)
        at1 = row1[None, :] * K + k[:, None]
        there1 = (N0 + tl.arange(0, N1) < count)[None, :]
        y1 = tl.zeros((BM, N1), tl.float32)
    for pair in tl.range(0, K // (128 * STEPS), num_stages=STAGES):
        for step in tl.static_range(STEPS):
            kb = pair if STEPS == 1 else pair * STEPS + step
            if FORM == MXFP4 and ROUNDING != ROUND_128:
                words, factor = bfloat16_words(tl.load(w2 + (at + kb * 16)), tl.load(s2 + (at_scale + kb)), WARPS)
                for i in tl.static_range(4):
                    chunk = bfloat16_chunk(words, factor, i)
                    y0 = _add(y0, chunk, tl.load(h + (at0 + (kb * 128 + i * 32)), mask=there0, other=0.0))
                    if N1 > 0:
                        y1 = _add(y1, chunk, tl.load(h + (at1 + (kb * 128 + i * 32)), mask=there1, other=0.0))
            else:
                tile, factor = _tile(w2, s2, at, at_scale, kb, FORM, WARPS)
                x0 = tl.load(h + (at0 + kb * 128), mask=there0, other=0.0)
                if ROUNDING == ROUND_128:
                    y0 = _add_scaled(y0, tile, x0, factor, tl.load(hs + (row0 + kb * rows)))
                else:
                    y0 = _add(y0, tile, x0)
                if N1 > 0:
                    x1 = tl.load(h + (at1 + kb * 128), mask=there1, other=0.0)
                    if ROUNDING == ROUND_128:
                        y1 = _add_scaled(y1, tile, x1, factor, tl.load(hs + (row1 + kb * rows)))
                    else:
                        y1 = _add(y1, tile, x1)
    _write(y0, y, feature0, start, count, F, FORM, WARPS)
    if N1 > 0:
        _write(y1, y, feature0, start + N0, count - N0, F, FORM, WARPS)


@triton.jit(do_not_specialize=["rows"])
def _down(h, hs, w2, s2, starts, tile_expert, tile_start, y, rows, K: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
          WIDTHS: tl.constexpr, UNITS: tl.constexpr, FORM: tl.constexpr, ROUNDING: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
          STEPS: tl.constexpr):
    tile = tl.program_id(0) // (F // BM)
    feature0 = tl.program_id(0) % (F // BM) * BM
    expert = tl.load(tile_expert + tile)
    if expert >= 0:
        start = tl.load(tile_start + tile)
        count = tl.minimum(tl.load(starts + expert + 1) - start, BLOCK)
        for i in tl.static_range(1, len(WIDTHS)):
            if (count > WIDTHS[i - 1][0] + WIDTHS[i - 1][1]) & (count <= WIDTHS[i][0] + WIDTHS[i][1]):
                _down_tile(h, hs, w2, s2, y, expert, feature0, start, count, rows, K, F, BM, WIDTHS[i][0], WIDTHS[i][1], UNITS, FORM, ROUNDING, WARPS,
                           STAGES, STEPS)


def _operands(weight: ExpertWeight, rounding: Activations) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and their scales as the kernels read them: words, or bytes where E4M3 is made of them; scales four to a word."""
    if isinstance(weight, Mxfp4Weight):
        return (weight.packed if rounding is Activations.FP8_128 else weight.packed.view(torch.int32)), weight.scale.view(torch.int32)
    if isinstance(weight, Fp8Weight):
        return weight.values, weight.scale
    return weight, weight


def _launch(weight: torch.Tensor, features: int, width: int, grouping: Grouping, product: Product, form: Form, rounding: Activations) -> dict[str, Any]:
    """What both products' launches are told by shapes and by the table."""
    return {"K": width, "F": features, "BM": product.features, "BLOCK": grouping.block, "WIDTHS": ((0, 0), *grouping.widths),
            "UNITS": weight.shape[-1] // (width // 128), "FORM": form.value, "ROUNDING": ROUNDINGS[rounding], "WARPS": product.warps,
            "STAGES": product.stages, "STEPS": product.steps if width // 128 % product.steps == 0 else 1, "num_warps": product.warps,
            "enable_fp_fusion": True}


def up(x: torch.Tensor, xs: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, plan: Plan, h: torch.Tensor, hs: torch.Tensor, *, top_k: int, beta: float,
       linear_beta: float, grouping: Grouping, product: Product, form: Form, rounding: Activations) -> None:
    """h [N k, I], hs [I / 128, N k]: SiTU-GLU of both first products, rows in the plan's order."""
    _, features, width = w1.shape
    a1, s1 = _operands(w1, rounding)
    a3, s3 = _operands(w3, rounding)
    _up[(plan.tile_expert.numel() * (features // product.features),)](
        x, xs, a1, s1, a3, s3, plan.pairs, plan.starts, plan.tile_expert, plan.tile_start, h, hs, x.shape[0], h.shape[0], beta, linear_beta, 1.0 / beta,
        1.0 / linear_beta, TOP_K=top_k, **_launch(a1, features, width, grouping, product, form, rounding))


def down(h: torch.Tensor, hs: torch.Tensor, w2: ExpertWeight, plan: Plan, y: torch.Tensor, *, grouping: Grouping, product: Product, form: Form,
         rounding: Activations) -> None:
    """y [N k, Z]: the second product, rows in the plan's order."""
    _, features, width = w2.shape
    a2, s2 = _operands(w2, rounding)
    _down[(plan.tile_expert.numel() * (features // product.features),)](
        h, hs, a2, s2, plan.starts, plan.tile_expert, plan.tile_start, y, h.shape[0], **_launch(a2, features, width, grouping, product, form, rounding))
