# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Rows on their way into and out of the expert products, as Triton kernels: rounded, in the weights' order; and summed over slots.

The roundings are those of `activations`, bit for bit, and the second product's input is rounded by the same functions. A row depends on that row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from driftline.kernels.moe.activations import Activations
from driftline.kernels.moe.grouped import Form
from driftline.kernels.moe.plan import Plan
from driftline.kernels.mxfp4.triton import INTERPRETED

__all__ = ["ROUNDINGS", "combine", "factors", "gather", "mxfp8", "narrowed", "ordered", "prepare"]

BFLOAT16, MXFP4, FP8 = (tl.constexpr(form.value) for form in Form)
SAME, ROUND_32, ROUND_128 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ROUNDINGS = {Activations.SAME: 0, Activations.FP8_32: 1, Activations.FP8_128: 2}
_PREPARE_ROWS, _PREPARE_WARPS = 16, 4
_COMBINE_COLUMNS, _COMBINE_WARPS = 512, 2


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """fp32 to bfloat16 or E4M3, to nearest, ties to even: the device's own conversion, and by arithmetic in the interpreter, whose conversions differ."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        if dtype == tl.bfloat16:
            x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        else:
            power = tl.maximum((bits >> 23) & 0xFF, 121)
            up = ((257 - power) << 23).to(tl.float32, bitcast=True)
            down = ((power - 3) << 23).to(tl.float32, bitcast=True)
            x = tl.minimum(tl.maximum(((x * up + 12582912.0) - 12582912.0) * down, -448.0), 448.0)
    return x.to(dtype)


@triton.jit
def ordered(tile, FORM: tl.constexpr, ROUNDING: tl.constexpr):
    """[N, C] whose columns are features in order, to the order in which the weights of the next product come out of their words."""
    N: tl.constexpr = tile.shape[0]
    C: tl.constexpr = tile.shape[1]
    if FORM == MXFP4:
        if ROUNDING == ROUND_128:
            return tl.reshape(tl.permute(tl.reshape(tile, (N, C // 128, 4, 4, 2, 4)), (0, 1, 4, 3, 2, 5)), (N, C))
        Q: tl.constexpr = min(C, 128) // 32
        return tl.reshape(tl.permute(tl.reshape(tile, (N, C // (32 * Q), Q, 4, 2, 4)), (0, 1, 5, 3, 2, 4)), (N, C))
    return tile


@triton.jit
def mxfp8(groups):
    """[G, 32, N] fp32, rounded to E4M3 times a power of two a group, as `activations.round_to_mxfp8`."""
    bits = tl.max(tl.abs(groups), axis=1).to(tl.int32, bitcast=True)
    power = tl.maximum((bits >> 23) + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32) - 8, 27)
    up = (power << 23).to(tl.float32, bitcast=True)
    down = ((254 - power) << 23).to(tl.float32, bitcast=True)
    return narrowed(groups * down[:, None, :], tl.float8e4nv).to(tl.float32) * up[:, None, :]


@triton.jit
def factors(largest):
    """(what values are multiplied by, what they are stored with) for E4M3 with an fp32 scale, as `activations.quantise`."""
    largest = tl.maximum(largest, 1e-30)
    return tl.div_rn(tl.full(largest.shape, 448.0, tl.float32), largest), tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))


@triton.jit(do_not_specialize=["tokens"])
def _prepare(z, out, scale, tokens, K: tl.constexpr, FORM: tl.constexpr, ROUNDING: tl.constexpr, ROWS: tl.constexpr):
    """ROWS tokens, 128 columns: rounded, and in the order of the weights."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None] * K + tl.program_id(1) * 128 + tl.arange(0, 128)[None, :]
    inside = row < tokens
    value = tl.load(z + at, mask=inside[:, None], other=0).to(tl.float32)
    if ROUNDING == ROUND_32:
        value = tl.trans(tl.reshape(mxfp8(tl.reshape(tl.trans(value), (4, 32, ROWS))), (128, ROWS)))
    elif ROUNDING == ROUND_128:
        times, factor = factors(tl.max(tl.abs(value), axis=1))
        value = value * times[:, None]
        tl.store(scale + tl.program_id(1) * tokens + row, factor, mask=inside)
    tl.store(out + at, ordered(narrowed(value, out.dtype.element_ty), FORM, ROUNDING), mask=inside[:, None])


@triton.jit(do_not_specialize=["rows"])
def _gather(z, pairs, out, rows, TOP_K: tl.constexpr, K: tl.constexpr, FORM: tl.constexpr, ROUNDING: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """ROWS rows in the plan's order, BLOCKS times 128 columns: the tokens of their pairs, rounded, and in the order of the weights."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token = (tl.load(pairs + row, mask=inside, other=0) // TOP_K).to(tl.int64)
    column = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, 128)
    for i in tl.static_range(BLOCKS):
        value = tl.load(z + (token[:, None] * K + (column + i * 128)[None, :]), mask=inside[:, None], other=0).to(tl.float32)
        if ROUNDING == ROUND_32:
            value = tl.trans(tl.reshape(mxfp8(tl.reshape(tl.trans(value), (4, 32, ROWS))), (128, ROWS)))
        at = row.to(tl.int64)[:, None] * K + (column + i * 128)[None, :]
        tl.store(out + at, ordered(narrowed(value, out.dtype.element_ty), FORM, ROUNDING), mask=inside[:, None])


@triton.jit
def _combine(y, rows, starts, gates, out, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, Z: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < Z
    held = tl.load(starts + EXPERTS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(rows + token * TOP_K + slot)
        gate = tl.load(gates + token * TOP_K + slot).to(tl.float32)
        value = tl.load(y + row.to(tl.int64) * Z + column, mask=column < tl.where(row < held, Z, 0), other=0).to(tl.float32)
        total += tl.where(row < held, gate, 0.0) * value
    tl.store(out + token * Z + column, narrowed(total, out.dtype.element_ty), mask=inside)



def prepare(z: torch.Tensor, form: Form, rounding: Activations) -> tuple[torch.Tensor, torch.Tensor]:
    """z [N, Z] as the first product reads it, and its scales [Z / 128, N] (or nothing of use)."""
    if form is not Form.MXFP4 and rounding is Activations.SAME:
        return z, z
    tokens, width = z.shape
    fp8 = rounding is Activations.FP8_128
    out = torch.empty(tokens, width, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16, device=z.device)
    scale = torch.empty(width // 128, tokens, dtype=torch.float32, device=z.device) if fp8 else out
    _prepare[(triton.cdiv(tokens, _PREPARE_ROWS), width // 128)](z, out, scale, tokens, K=width, FORM=form.value, ROUNDING=ROUNDINGS[rounding],
                                                                 ROWS=_PREPARE_ROWS, num_warps=_PREPARE_WARPS, enable_fp_fusion=False)
    return out, scale



def gather(z: torch.Tensor, plan: Plan, out: torch.Tensor, *, top_k: int, form: Form, rounding: Activations) -> None:
    """out [N k, Z]: each row's token as `prepare` gives it, rows in the plan's order; not FP8_128."""
    rows, width = out.shape
    blocks = next(b for b in (4, 3, 2, 1) if width % (128 * b) == 0)
    _gather[(triton.cdiv(rows, _PREPARE_ROWS), width // (128 * blocks))](
        z, plan.pairs, out, rows, TOP_K=top_k, K=width, FORM=form.value, ROUNDING=ROUNDINGS[rounding], ROWS=_PREPARE_ROWS, BLOCKS=blocks,
        num_warps=_PREPARE_WARPS, enable_fp_fusion=False)


def combine(y: torch.Tensor, plan: Plan, gates: torch.Tensor, out: torch.Tensor) -> None:
    """out [N, Z]: over a token's slots in order, gate times its expert's row, in fp32. A slot without an expert adds nothing."""
    tokens, top_k = gates.shape
    width = out.shape[1]
    _combine[(tokens, triton.cdiv(width, _COMBINE_COLUMNS))](y, plan.rows, plan.starts, gates, out, EXPERTS=plan.starts.numel() - 1, TOP_K=top_k, Z=width,
                                                             COLUMNS=_COMBINE_COLUMNS, num_warps=_COMBINE_WARPS, enable_fp_fusion=True)
