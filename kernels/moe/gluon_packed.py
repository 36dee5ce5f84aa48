# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,var-annotated"
"""The expert products of a learner's batch on MXFP4 weights, in Gluon: decoding and the matrix unit work at the same time.

The same tiles, sums and bits as `triton_forward`, out^T = W x^T with K in the same order, for experts with many rows. What is different is who waits for what:

* packed weights go from memory into the registers of the threads that decode them, one stretch of 128 of K ahead;
* 32 columns are decoded while the matrix unit multiplies the 32 before: it is waited for only when its weights' registers are needed again;
* the rows of x lie one after another (`triton_rows.gather`), so a tile of them is one copy by descriptor, some stretches ahead;
* results go from the accumulators to memory with no stop in shared memory: which feature is which row of the matrix unit is chosen so that what a thread
  has of a token are neighbours there.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from driftline.kernels.moe.activations import Activations
from driftline.kernels.moe.grouped import Grouping, Product
from driftline.kernels.moe.plan import Plan
from driftline.kernels.moe.triton_rows import mxfp8 as _mxfp8
from driftline.kernels.mxfp4.triton import TO_BFLOAT16_0, TO_BFLOAT16_1, TO_BFLOAT16_2, TO_BFLOAT16_3
from driftline.kernels.mxfp4.weights import Mxfp4Weight
from driftline.kernels.situ_glu.triton import situ as _situ

__all__ = ["down", "up"]

_wait_for_all = getattr(gl, "barrier", None) or gl.thread_barrier
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

_X = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_BAR = gl.constexpr(mbarrier.MBarrierLayout())
_WIDTHS = (32, 64, 128)
"""Rows of x that one copy may bring."""


@gluon.constexpr_function
def _number(rows):
    return 0 if rows == 32 else (1 if rows == 64 else 2)


@gluon.constexpr_function
def _words_layout(warps):
    """[16 warps, 4, 4] words of 128 of K: row, quarter, word; a thread has rows 8 apart and one quarter of each, 16 bytes: what it needs as an operand."""
    rows = []
    while 16 << len(rows) < 16 * warps:
        rows.append([16 << len(rows), 0, 0])
    return gl.DistributedLinearLayout(reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0]], lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
                                      warp_bases=rows, block_bases=[], shape=[16 * warps, 4, 4])


@gluon.constexpr_function
def _sums_layout(warps, width):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, width, 16])


@gluon.jit
def _feature(row, ORDERED: gl.constexpr):
    """Which of the tile's features a row of the matrix unit is. Rows 8 apart, which one thread has, are stored side by side, and so are 8 lanes' pairs; ORDERED:
    where the columns of 128 are those of `triton_rows.ordered`."""
    lane, half, warp = row % 8, row // 8 % 2, row // 16
    if ORDERED:
        return 32 * (lane % 4) + 8 * (2 * (warp % 2) + lane // 4) + 4 * half + warp // 2
    return 16 * warp + 2 * lane + half


@gluon.jit
def _ask(words, scales, at, at_scale, kb):
    return gl.load(words + kb * 16 + at), gl.load(scales + kb + at_scale)


@gluon.jit
def _factor(scale, quarter):
    """2^(scale - 1) in both halves of a word, of each row and quarter; as `mxfp4.triton.bfloat16_words`."""
    byte = (scale[:, None] >> (8 * quarter)[None, :]) & 0xFF
    return (gl.minimum(byte, 129) + 126) * 0x00800080


@gluon.jit
def _decoded(words, factor, PAIR: gl.constexpr, WARPS: gl.constexpr, N: gl.constexpr):
    """bfloat16 [BM, 32], columns 32 PAIR.. of the 128, as the matrix unit's first operand: nothing moves between threads."""
    words, factor = gl.broadcast(words, factor[:, :, None])
    if PAIR == 0:
        low, high = gl.inline_asm_elementwise(TO_BFLOAT16_0, "=h,=h,r,r", [words, factor], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1)
    elif PAIR == 1:
        low, high = gl.inline_asm_elementwise(TO_BFLOAT16_1, "=h,=h,r,r", [words, factor], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1)
    elif PAIR == 2:
        low, high = gl.inline_asm_elementwise(TO_BFLOAT16_2, "=h,=h,r,r", [words, factor], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1)
    else:
        low, high = gl.inline_asm_elementwise(TO_BFLOAT16_3, "=h,=h,r,r", [words, factor], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1)
    both = gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1, 3)), (words.shape[0], 32))
    return gl.convert_layout(both, gl.DotOperandLayout(0, _sums_layout(WARPS, N), 2), assert_trivial=True)


@gluon.jit
def _fetch(x, tile, bar, row, kb, slot, N0: gl.constexpr, N1: gl.constexpr, there):
    """128 columns of N0 and of N1 rows."""
    mbarrier.expect(bar.index(slot), (N0 + N1) * 256, pred=there)
    _copy(x[_number(N0)], [row, kb * 128], bar.index(slot), tile[0].index(slot), pred=there)
    if N1 > 0:
        _copy(x[_number(N1)], [row + N0, kb * 128], bar.index(slot), tile[1].index(slot), pred=there)


@gluon.jit
def _products(x, row, wa, sa, wb, sb, K: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
              ORDERED: gl.constexpr):
    """(a0, a1, b0, b1) fp32 [BM, N0] and [BM, N1]: two matrices' BM = 16 WARPS rows times rows row.. of x; without N1, a1 and b1 are a0 and b0."""
    BM: gl.constexpr = 16 * WARPS
    W: gl.constexpr = _words_layout(WARPS)
    L0: gl.constexpr = _sums_layout(WARPS, N0)
    KB: gl.constexpr = K // 128
    tile0 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N0, 128], _X)
    tile1 = tile0
    if N1 > 0:
        tile1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N1, 128], _X)
    tile = (tile0, tile1)
    bar = gl.allocate_shared_memory(gl.int64, [STAGES, 1], _BAR)
    for s in gl.static_range(STAGES):
        mbarrier.init(bar.index(s), count=1)
    fence_async_shared()
    _wait_for_all()
    for s in gl.static_range(min(STAGES - 1, KB)):
        _fetch(x, tile, bar, row, s, s, N0, N1, True)
    quarter = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, W)))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, W)))
    at_scale = _feature(gl.arange(0, BM, gl.SliceLayout(1, gl.SliceLayout(2, W))), ORDERED) * KB
    at = (at_scale * 16)[:, None, None] + (quarter * 4)[None, :, None] + word[None, None, :]
    next_a, next_scale_a = _ask(wa, sa, at, at_scale, 0)
    next_b, next_scale_b = _ask(wb, sb, at, at_scale, 0)
    a0 = gl.zeros((BM, N0), gl.float32, L0)
    b0 = warpgroup_mma_init(gl.zeros((BM, N0), gl.float32, L0))
    if N1 > 0:
        L1: gl.constexpr = _sums_layout(WARPS, N1)
        a1 = gl.zeros((BM, N1), gl.float32, L1)
        b1 = warpgroup_mma_init(gl.zeros((BM, N1), gl.float32, L1))
    slot = 0
    phase = 0
    for kb in range(KB):
        mbarrier.wait(bar.index(slot), phase)
        words_a, words_b = next_a, next_b
        factor_a, factor_b = _factor(next_scale_a, quarter), _factor(next_scale_b, quarter)
        following = gl.minimum(kb + 1, KB - 1)
        next_a, next_scale_a = _ask(wa, sa, at, at_scale, following)
        next_b, next_scale_b = _ask(wb, sb, at, at_scale, following)
        for i in gl.static_range(4):
            part = _decoded(words_a, factor_a, i, WARPS, N0)
            a0 = warpgroup_mma(part, tile0.index(slot).slice(i * 32, 32, dim=1).permute((1, 0)), a0, is_async=True)
            if N1 > 0:
                part1 = gl.convert_layout(part, gl.DotOperandLayout(0, L1, 2), assert_trivial=True)
                a1 = warpgroup_mma(part1, tile1.index(slot).slice(i * 32, 32, dim=1).permute((1, 0)), a1, is_async=True)
                b0, b1 = warpgroup_mma_wait(2, [b0, b1])
            else:
                b0 = warpgroup_mma_wait(1, [b0])
            if i == 0:
                # every warp has waited for the products of the stretch before: its slot is free
                _wait_for_all()
                free = slot + STAGES - 1
                _fetch(x, tile, bar, row, kb + STAGES - 1, gl.where(free >= STAGES, free - STAGES, free), N0, N1, kb + STAGES - 1 < KB)
            part = _decoded(words_b, factor_b, i, WARPS, N0)
            b0 = warpgroup_mma(part, tile0.index(slot).slice(i * 32, 32, dim=1).permute((1, 0)), b0, is_async=True)
            if N1 > 0:
                part1 = gl.convert_layout(part, gl.DotOperandLayout(0, L1, 2), assert_trivial=True)
                b1 = warpgroup_mma(part1, tile1.index(slot).slice(i * 32, 32, dim=1).permute((1, 0)), b1, is_async=True)
                a0, a1 = warpgroup_mma_wait(2, [a0, a1])
            else:
                a0 = warpgroup_mma_wait(1, [a0])
        slot += 1
        phase = gl.where(slot == STAGES, phase ^ 1, phase)
        slot = gl.where(slot == STAGES, 0, slot)
    if N1 > 0:
        b0, b1 = warpgroup_mma_wait(0, [b0, b1])
    else:
        b0 = warpgroup_mma_wait(0, [b0])
        a1, b1 = a0, b0
    return a0, a1, b0, b1


@gluon.jit
def _put(value, out, feature0, start, count, F: gl.constexpr):
    """fp32 [BM, N], rows as `_feature` has them, to rows start.. of `out`, words of two bfloat16: as many as there are of the N."""
    BM: gl.constexpr = value.shape[0]
    N: gl.constexpr = value.shape[1]
    low, high = gl.split(gl.permute(gl.reshape(value, (BM // 16, 2, 8, N)), (0, 2, 3, 1)))
    words = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    words = gl.reshape(words, (BM // 2, N))
    L: gl.constexpr = words.type.layout
    column = feature0 // 2 + gl.arange(0, BM // 2, gl.SliceLayout(1, L))
    row = gl.arange(0, N, gl.SliceLayout(0, L))
    gl.store(out + (((start + row) * (F // 2))[None, :] + column[:, None]), words, mask=(row < count)[None, :])


@gluon.jit
def _rounded(value):
    """fp32 [128, N], rows as `_feature` has them ORDERED, to MXFP8 in groups of 32 features."""
    N: gl.constexpr = value.shape[1]
    groups = gl.reshape(gl.permute(gl.reshape(value, (32, 4, N)), (1, 0, 2)), (4, 32, N))
    return gl.reshape(gl.permute(_mxfp8(groups), (1, 0, 2)), (128, N))


@gluon.jit
def _up_tile(x, w1, s1, w3, s3, h, expert, feature0, start, count, beta, linear_beta, over_beta, over_linear_beta, K: gl.constexpr, F: gl.constexpr,
             N0: gl.constexpr, N1: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr, ROUNDED: gl.constexpr):
    first = expert.to(gl.int64) * F + feature0
    g0, g1, u0, u1 = _products(x, start, w1 + first * (K // 8), s1 + first * (K // 128), w3 + first * (K // 8), s3 + first * (K // 128), K, N0, N1, WARPS,
                               STAGES, True)
    if N1 > 0:
        value = _situ(g1, u1, beta, linear_beta, over_beta, over_linear_beta)
        _put(_rounded(value) if ROUNDED else value, h, feature0, start + N0, count - N0, F)
    value = _situ(g0, u0, beta, linear_beta, over_beta, over_linear_beta)
    _put(_rounded(value) if ROUNDED else value, h, feature0, start, count, F)


@gluon.jit
def _up(x32, x64, x128, w1, s1, w3, s3, starts, tile_expert, tile_start, h, beta, linear_beta, over_beta, over_linear_beta, K: gl.constexpr,
        F: gl.constexpr, BLOCK: gl.constexpr, WIDTHS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr, ROUNDED: gl.constexpr):
    BM: gl.constexpr = 16 * WARPS
    number = gl.program_id(0) // (F // BM)
    feature0 = gl.program_id(0) % (F // BM) * BM
    expert = gl.load(tile_expert + number)
    if expert >= 0:
        start = gl.load(tile_start + number)
        count = gl.minimum(gl.load(starts + expert + 1) - start, BLOCK)
        for i in gl.static_range(1, len(WIDTHS)):
            if (count > WIDTHS[i - 1][0] + WIDTHS[i - 1][1]) & (count <= WIDTHS[i][0] + WIDTHS[i][1]):
                _up_tile((x32, x64, x128), w1, s1, w3, s3, h, expert, feature0, start, count, beta, linear_beta, over_beta, over_linear_beta, K, F,
                         WIDTHS[i][0], WIDTHS[i][1], WARPS, STAGES, ROUNDED)


@gluon.jit
def _down_tile(h, w2, s2, y, expert, feature0, start, count, K: gl.constexpr, F: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr,
               WARPS: gl.constexpr, STAGES: gl.constexpr):
    BM: gl.constexpr = 16 * WARPS
    first = expert.to(gl.int64) * F + feature0
    w2 += first * (K // 8)
    s2 += first * (K // 128)
    a0, a1, b0, b1 = _products(h, start, w2, s2, w2 + BM * (K // 8), s2 + BM * (K // 128), K, N0, N1, WARPS, STAGES, False)
    if N1 > 0:
        _put(a1, y, feature0, start + N0, count - N0, F)
        _put(b1, y, feature0 + BM, start + N0, count - N0, F)
    _put(a0, y, feature0, start, count, F)
    _put(b0, y, feature0 + BM, start, count, F)


@gluon.jit
def _down(h32, h64, h128, w2, s2, starts, tile_expert, tile_start, y, K: gl.constexpr, F: gl.constexpr, BLOCK: gl.constexpr, WIDTHS: gl.constexpr,
          WARPS: gl.constexpr, STAGES: gl.constexpr):
    BM: gl.constexpr = 32 * WARPS
    number = gl.program_id(0) // (F // BM)
    feature0 = gl.program_id(0) % (F // BM) * BM
    expert = gl.load(tile_expert + number)
    if expert >= 0:
        start = gl.load(tile_start + number)
        count = gl.minimum(gl.load(starts + expert + 1) - start, BLOCK)
        for i in gl.static_range(1, len(WIDTHS)):
            if (count > WIDTHS[i - 1][0] + WIDTHS[i - 1][1]) & (count <= WIDTHS[i][0] + WIDTHS[i][1]):
                _down_tile((h32, h64, h128), w2, s2, y, expert, feature0, start, count, K, F, WIDTHS[i][0], WIDTHS[i][1], WARPS, STAGES)


def _rows_of(tensor: torch.Tensor) -> tuple[TensorDescriptor, ...]:
    return tuple(TensorDescriptor.from_tensor(tensor, [rows, 128], _X.value) for rows in _WIDTHS)


def _words(weight: Mxfp4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.packed.view(torch.int32), weight.scale.view(torch.int32)


def up(x: torch.Tensor, w1: Mxfp4Weight, w3: Mxfp4Weight, plan: Plan, h: torch.Tensor, *, beta: float, linear_beta: float, grouping: Grouping,
       product: Product, rounding: Activations) -> None:
    """h bfloat16 [N k, I]: SiTU-GLU of both first products; x [N k, Z] as `triton_rows.gather` gives it, rows of both in the plan's order."""
    _, features, width = w1.shape
    _up[(plan.tile_expert.numel() * (features // product.features),)](
        *_rows_of(x), *_words(w1), *_words(w3), plan.starts, plan.tile_expert, plan.tile_start, h.view(torch.int32), beta, linear_beta, 1.0 / beta,
        1.0 / linear_beta, K=width, F=features, BLOCK=grouping.block, WIDTHS=((0, 0), *grouping.widths), WARPS=product.warps, STAGES=product.stages,
        ROUNDED=rounding is Activations.FP8_32, num_warps=product.warps, enable_fp_fusion=True)


def down(h: torch.Tensor, w2: Mxfp4Weight, plan: Plan, y: torch.Tensor, *, grouping: Grouping, product: Product) -> None:
    """y bfloat16 [N k, Z]: the second product, rows in the plan's order."""
    _, features, width = w2.shape
    _down[(plan.tile_expert.numel() * (features // product.features),)](
        *_rows_of(h), *_words(w2), plan.starts, plan.tile_expert, plan.tile_start, y.view(torch.int32), K=width, F=features, BLOCK=grouping.block,
        WIDTHS=((0, 0), *grouping.widths), WARPS=product.warps, STAGES=product.stages, num_warps=product.warps, enable_fp_fusion=True)
