# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined,assignment"
"""The expert MLP's three grouped products of the backward in Gluon, for Hopper: what `triton_backward` computes, over rows copied into sorted order.

out^T = M^T x^T: a program owns 256 rows of out^T and up to 160 tokens of one expert, in widths of which it takes the least that holds them. The weights are
the matrix unit's first operand, MXFP4 from registers (`gluon_operands`) and bfloat16 from shared memory. The copy engine fills shared memory some steps
ahead, and products run while the weights of the next 32 of the sum are decoded: nothing waits for a product but the step that would overwrite its operands.

A row's sum is taken over the whole axis in order in one accumulator, whatever the width: its bits depend on that row and its expert's weights alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from driftline.kernels.moe.gluon_operands import across, along, fetch, reinterpret, rows_along, wait_for_all
from driftline.kernels.moe.plan import Plan
from driftline.kernels.mxfp4.weights import ExpertWeight, Mxfp4Weight
from driftline.kernels.situ_glu.triton import situ_partials

__all__ = ["BLOCK", "GATE_COLUMNS", "STAGES", "d_hidden", "d_input", "inner", "takes"]

BLOCK = 160
"""Most tokens of a tile, 128 and 32: the accumulators of eight warps then take 160 registers a thread. K3's experts get 146 rows of 8,192 tokens."""

GATE_COLUMNS = 128
"""Columns of h whose products with dh one program sums. Part of the contract: it decides bits of the gates' gradients."""


class Stages(NamedTuple):
    """Steps of 64 of the sum in shared memory, by the weights' form."""

    packed: int
    dense: int


STAGES = Stages(5, 4)

_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_LINES = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_HALF_LINES = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))


@gluon.jit
def _ask(step, stage, given, held, full, at, start, feature, STEPS: gl.constexpr, TWICE: gl.constexpr, ACROSS: gl.constexpr, PACKED: gl.constexpr, N1: gl.constexpr,
         BYTES: gl.constexpr):
    """Step `step` of the sum into a stage. given: descriptors of the rows in two widths, of weights and scales (or of both matrices); with TWICE again of
    the second sum's."""
    bar = full.index(stage)
    mbarrier.expect(bar, BYTES)
    k = step * 64
    first = True
    if TWICE:
        first = step < STEPS
        k = gl.where(first, k, k - STEPS * 64)
    for i in gl.static_range(2 if TWICE else 1):
        here = first
        if i == 1:
            here = step >= STEPS
        if ACROSS:
            # the engine refuses a column that is no multiple of 16 bytes, so scales of 512 columns are copied
            fetch(given[4 * i + 2], [at + k, feature // 4 if PACKED else feature], bar, held[2].index(stage), pred=here)
            if PACKED:
                fetch(given[4 * i + 3], [at + k, feature // 512 * 16], bar, held[3].index(stage), pred=here)
        else:
            col = k // 8 if PACKED else k
            fetch(given[2], [at + feature, col], bar, held[2].index(stage).slice(0, 128, 0))
            fetch(given[3], [at + feature, col], bar, held[2].index(stage).slice(128, 128, 0))
        fetch(given[4 * i], [start, k], bar, held[0].index(stage), pred=here)
        if N1 > 0:
            fetch(given[4 * i + 1], [start + given[0].block_shape[0], k], bar, held[1].index(stage), pred=here)


@gluon.jit
def _sum(given, scale_1, scale_3, at, start, feature, depth: gl.constexpr, TWICE: gl.constexpr, ACROSS: gl.constexpr, PACKED: gl.constexpr, HALF: gl.constexpr,
         N0: gl.constexpr, N1: gl.constexpr, STAGES: gl.constexpr):
    """fp32 [256, N0] and [256, N1] (the first again where N1 is 0): over the sum, ACROSS, the packed axis or along it. Along it rows 128.. are W3's. HALF: which half of 512
    columns these 256 are."""
    M0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N0, 16])
    M1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N1 if N1 > 0 else 32, 16])
    STEPS: gl.constexpr = depth // 64
    TOTAL: gl.constexpr = 2 * STEPS if TWICE else STEPS
    BYTES: gl.constexpr = 128 * (N0 + N1) + ((64 * (128 + 16) if ACROSS else 256 * 32) if PACKED else 256 * 128)
    x0_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N0, 64], given[0].layout)
    x1_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N1, 64], given[0].layout) if N1 > 0 else x0_s
    w_s = gl.allocate_shared_memory(given[2].dtype, [STAGES, 64, 64 if PACKED else 256] if ACROSS else [STAGES, 256, 8 if PACKED else 64], given[2].layout)
    s_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 64, 16], given[3].layout) if PACKED and ACROSS else w_s
    held = (x0_s, x1_s, w_s, s_s)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(STAGES - 1):
        _ask(i, i, given, held, full, at, start, feature, STEPS, TWICE, ACROSS, PACKED, N1, BYTES)
    y0 = gl.zeros((256, N0), gl.float32, M0)
    y1 = gl.zeros((256, N1), gl.float32, M1) if N1 > 0 else y0
    last = gl.zeros((256, 32), gl.bfloat16, gl.DotOperandLayout(0, M0, 2))
    if PACKED and not ACROSS:
        of_row = (at + feature + rows_along()) * STEPS
        next_1 = gl.load(scale_1 + of_row)
        next_3 = gl.load(scale_3 + of_row)
    stage = 0
    phase = 0
    for step in range(TOTAL):
        if PACKED and not ACROSS:
            scales_1 = next_1.to(gl.int32)
            scales_3 = next_3.to(gl.int32)
            following = of_row + gl.minimum(step + 1, TOTAL - 1)
            next_1 = gl.load(scale_1 + following)
            next_3 = gl.load(scale_3 + following)
        mbarrier.wait(full.index(stage), phase)
        x0 = x0_s.index(stage)
        x1 = x1_s.index(stage)
        w = w_s.index(stage)
        CHUNKS: gl.constexpr = 2 if PACKED else 1
        DEPTH: gl.constexpr = 64 // CHUNKS
        for c in gl.static_range(CHUNKS):
            if PACKED:
                if ACROSS:
                    now = across(w.slice(32 * c, 32, 0), reinterpret(s_s.index(stage), gl.uint8, [64, 16], _ROWS).slice(32 * c, 32, 0).slice(8 * HALF, 8, 1))
                else:
                    now_1 = along(w.slice(0, 128, 0).slice(4 * c, 4, 1), scales_1 >> (8 * c))
                    now_3 = along(w.slice(128, 128, 0).slice(4 * c, 4, 1), scales_3 >> (8 * c))
                    now = gl.reshape(gl.permute(gl.join(now_1, now_3), (2, 0, 1)), (256, 32))
                now = gl.convert_layout(now, gl.DotOperandLayout(0, M0, 2), assert_trivial=True)
                also = now
                if N1 > 0:
                    also = gl.convert_layout(now, gl.DotOperandLayout(0, M1, 2), assert_trivial=True)
            else:
                now = w.permute((1, 0)) if ACROSS else w
                also = now
            y0 = warpgroup_mma(now, x0.slice(DEPTH * c, DEPTH, 1).permute((1, 0)), y0, is_async=True)
            if N1 > 0:
                y1 = warpgroup_mma(also, x1.slice(DEPTH * c, DEPTH, 1).permute((1, 0)), y1, is_async=True)
                y0, y1, last = warpgroup_mma_wait(2, deps=[y0, y1, last])
            else:
                y0, last = warpgroup_mma_wait(1, deps=[y0, last])
            if PACKED:
                last = now
            if c == 0:
                # every warp's products of the step before are done, so its stage may be filled again
                wait_for_all()
                ahead = step + STAGES - 1
                if ahead < TOTAL:
                    _ask(ahead, (stage + STAGES - 1) % STAGES, given, held, full, at, start, feature, STEPS, TWICE, ACROSS, PACKED, N1, BYTES)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if N1 > 0:
        y0, y1, last = warpgroup_mma_wait(0, deps=[y0, y1, last])
    else:
        y0, last = warpgroup_mma_wait(0, deps=[y0, last])
        y1 = y0
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))
    return y0, y1


@gluon.jit
def _write(total, out, feature, start, count, width, PACKED: gl.constexpr, N: gl.constexpr):
    """total [256, N] to rows start.. of out, columns feature.."""
    value = total.to(gl.bfloat16)
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0]] + ([[32, 0]] if N > 32 else []) + ([[64, 0]] if N > 64 else []),
        [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]], [[0, 32], [0, 64], [0, 128]], [], [N, 256]) if PACKED else _LINES
    if PACKED:
        value = gl.reshape(gl.permute(gl.reshape(value, (2, 8, 2, 8, N)), (4, 1, 3, 0, 2)), (N, 256))
    else:
        value = gl.permute(value, (1, 0))
    value = gl.convert_layout(value, LAYOUT, assert_trivial=PACKED)
    row = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
    col = feature + gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))
    gl.store(out + (start + row).to(gl.int64)[:, None] * width + col[None, :], value, mask=(row < count)[:, None])


@gluon.jit
def _across_tile(given, out, at, start, count, feature, width, depth: gl.constexpr, TWICE: gl.constexpr, PACKED: gl.constexpr, HALF: gl.constexpr, N0: gl.constexpr,
                 N1: gl.constexpr, STAGES: gl.constexpr):
    y0, y1 = _sum(given, 0, 0, at, start, feature, depth, TWICE, True, PACKED, HALF, N0, N1, STAGES)
    if N1 > 0:
        _write(y1, out, feature, start + N0, count - N0, width, PACKED, N1)
    _write(y0, out, feature, start, count, width, PACKED, N0)


@gluon.jit
def _across(x128, x64, x32, w, s, x128_, x64_, x32_, w_, s_, out, tile_expert, tile_start, starts, block, width, depth: gl.constexpr, TWICE: gl.constexpr,
            PACKED: gl.constexpr, STAGES: gl.constexpr):
    """out bfloat16 [rows, width]: x @ M, M [depth, width] the expert's; with TWICE plus the same of the second five."""
    blocks = width // 256
    tile = gl.program_id(0) // blocks
    feature = gl.program_id(0) % blocks * 256
    expert = gl.load(tile_expert + tile)
    if expert >= 0:
        start = gl.load(tile_start + tile)
        count = gl.minimum(gl.load(starts + expert + 1) - start, block)
        at = expert * depth
        for half in gl.static_range(2 if PACKED else 1):
            if (feature // 256) % 2 == half or not PACKED:
                if count > 128:
                    _across_tile((x128, x32, w, s, x128_, x32_, w_, s_), out, at, start, count, feature, width, depth, TWICE, PACKED, half, 128, 32, STAGES)
                elif count > 64:
                    _across_tile((x128, x32, w, s, x128_, x32_, w_, s_), out, at, start, count, feature, width, depth, TWICE, PACKED, half, 128, 0, STAGES)
                elif count > 32:
                    _across_tile((x64, x32, w, s, x64_, x32_, w_, s_), out, at, start, count, feature, width, depth, TWICE, PACKED, half, 64, 0, STAGES)
                else:
                    _across_tile((x32, x32, w, s, x32_, x32_, w_, s_), out, at, start, count, feature, width, depth, TWICE, PACKED, half, 32, 0, STAGES)


@gluon.jit
def _finish(total, rest, feature, start, count, width, rows, beta, linear_beta, over_beta, over_linear_beta, KEEP: gl.constexpr, PACKED: gl.constexpr):
    """32 tokens: total [256, 32], g in its upper half and u in its lower. rest: gates, dh, du, gated, parts, pairs, as `_inner` takes them."""
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout([[0, 1], [1, 0], [8, 0], [16, 0]], [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32], [0, 64]], [],
                                                      [32, 128]) if PACKED else _HALF_LINES
    if PACKED:
        both = gl.reshape(gl.permute(gl.reshape(total, (2, 8, 2, 8, 32)), (4, 1, 3, 2, 0)), (32, 128, 2))
    else:
        both = gl.permute(gl.reshape(total, (2, 128, 32)), (2, 1, 0))
    g, u = gl.split(both)
    g = gl.convert_layout(g, LAYOUT, assert_trivial=PACKED)
    u = gl.convert_layout(u, LAYOUT, assert_trivial=PACKED)
    row = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    there = row < count
    col = feature + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    gate = gl.load(rest[0] + gl.load(rest[5] + start + row, mask=there, other=0), mask=there, other=0)[:, None]
    at = (start + row).to(gl.int64)[:, None] * width + col[None, :]
    grad = gl.load(rest[1] + at, mask=there[:, None], other=0).to(gl.float32)
    h, by_g, by_u = situ_partials(g, u, beta, linear_beta, over_beta, over_linear_beta)
    h = h.to(gl.bfloat16).to(gl.float32)
    gl.store(rest[4] + (feature // 128).to(gl.int64) * rows + start + row, gl.sum(h * grad, axis=1), mask=there)
    grad = grad * gate
    gl.store(rest[1] + at, (by_g * grad).to(gl.bfloat16), mask=there[:, None])
    gl.store(rest[2] + at, (by_u * grad).to(gl.bfloat16), mask=there[:, None])
    if KEEP:
        gl.store(rest[3] + at, (h * gate).to(gl.bfloat16), mask=there[:, None])


@gluon.jit
def _halves(total, N: gl.constexpr):
    return gl.split(gl.permute(gl.reshape(total, (256, 2, N // 2)), (0, 2, 1)))


@gluon.jit
def _finish_all(total, rest, feature, start, count, width, rows, beta, linear_beta, over_beta, over_linear_beta, KEEP: gl.constexpr, PACKED: gl.constexpr,
                N: gl.constexpr):
    """A few tokens after the others: all at once would not fit the registers."""
    if N == 32:
        _finish(total, rest, feature, start, count, width, rows, beta, linear_beta, over_beta, over_linear_beta, KEEP, PACKED)
    elif N == 64:
        some = _halves(total, 64)
        for i in gl.static_range(2):
            _finish(some[i], rest, feature, start + 32 * i, count - 32 * i, width, rows, beta, linear_beta, over_beta, over_linear_beta, KEEP, PACKED)
    else:
        half = _halves(total, 128)
        for j in gl.static_range(2):
            some = _halves(half[j], 64)
            for i in gl.static_range(2):
                _finish(some[i], rest, feature, start + (64 * j + 32 * i), count - (64 * j + 32 * i), width, rows, beta, linear_beta, over_beta, over_linear_beta,
                        KEEP, PACKED)


@gluon.jit
def _inner_tile(given, scale_1, scale_3, rest, at, start, count, feature, width, rows, beta, linear_beta, over_beta, over_linear_beta, depth: gl.constexpr,
                KEEP: gl.constexpr, PACKED: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, STAGES: gl.constexpr):
    y0, y1 = _sum(given, scale_1, scale_3, at, start, feature, depth, False, False, PACKED, 0, N0, N1, STAGES)
    if N1 > 0:
        _finish_all(y1, rest, feature, start + N0, count - N0, width, rows, beta, linear_beta, over_beta, over_linear_beta, KEEP, PACKED, N1)
    _finish_all(y0, rest, feature, start, count, width, rows, beta, linear_beta, over_beta, over_linear_beta, KEEP, PACKED, N0)


@gluon.jit(do_not_specialize=["rows"])
def _inner(x128, x64, x32, w1, w3, scale_1, scale_3, gates, dh, du, gated, parts, pairs, tile_expert, tile_start, starts, block, width, rows, beta, linear_beta, over_beta,
           over_linear_beta, depth: gl.constexpr, KEEP: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr):
    """In place of dh [rows, I]: dg. Also du; with KEEP gated, the gate times h; parts fp32 [I / 128, rows] of the gates' gradients."""
    blocks = width // 128
    tile = gl.program_id(0) // blocks
    feature = gl.program_id(0) % blocks * 128
    expert = gl.load(tile_expert + tile)
    rest = (gates, dh, du, gated, parts, pairs)
    if expert >= 0:
        start = gl.load(tile_start + tile)
        count = gl.minimum(gl.load(starts + expert + 1) - start, block)
        at = expert * width
        if count > 128:
            _inner_tile((x128, x32, w1, w3), scale_1, scale_3, rest, at, start, count, feature, width, rows, beta, linear_beta, over_beta, over_linear_beta, depth,
                        KEEP, PACKED, 128, 32, STAGES)
        elif count > 64:
            _inner_tile((x128, x32, w1, w3), scale_1, scale_3, rest, at, start, count, feature, width, rows, beta, linear_beta, over_beta, over_linear_beta, depth,
                        KEEP, PACKED, 128, 0, STAGES)
        elif count > 32:
            _inner_tile((x64, x32, w1, w3), scale_1, scale_3, rest, at, start, count, feature, width, rows, beta, linear_beta, over_beta, over_linear_beta, depth,
                        KEEP, PACKED, 64, 0, STAGES)
        else:
            _inner_tile((x32, x32, w1, w3), scale_1, scale_3, rest, at, start, count, feature, width, rows, beta, linear_beta, over_beta, over_linear_beta, depth,
                        KEEP, PACKED, 32, 0, STAGES)


def takes(weight: ExpertWeight) -> bool:
    """Whether these products take this matrix [E, N, K]: MXFP4 with N and K multiples of 512, or bfloat16 with multiples of 256."""
    if isinstance(weight, Mxfp4Weight):
        least = 512
    elif isinstance(weight, torch.Tensor) and weight.dtype is torch.bfloat16:
        least = 256
    else:
        return False
    return all(size % least == 0 for size in weight.shape[1:])


def _swizzled(tensor: torch.Tensor, box: list[int], swizzle: int = 128) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, box, gl.NVMMASharedLayout(swizzle, tensor.element_size() * 8, 2))


def _rows(rows: torch.Tensor) -> list[TensorDescriptor]:
    return [_swizzled(rows, [count, 64]) for count in (128, 64, 32)]


def _matrix_across(weight: ExpertWeight) -> list[TensorDescriptor]:
    """Boxes of 64 rows of the sum and 256 columns, and of their scales (of 512, for 16 bytes are the least that is copied)."""
    _, _, width = weight.shape
    if isinstance(weight, Mxfp4Weight):
        return [_swizzled(weight.packed.contiguous().view(torch.int16).view(-1, width // 4), [64, 64]),
                _swizzled(weight.scale.contiguous().view(-1, width // 32), [64, 16], 0)]
    assert isinstance(weight, torch.Tensor)
    return [_swizzled(weight.contiguous().view(-1, width), [64, 256])] * 2


def _matrix_along(weight: ExpertWeight) -> tuple[TensorDescriptor, torch.Tensor]:
    """Boxes of 128 rows and 64 columns of the sum, and the scales, two a word."""
    _, _, width = weight.shape
    if isinstance(weight, Mxfp4Weight):
        return _swizzled(weight.packed.contiguous().view(torch.int32).view(-1, width // 8), [128, 8], 32), weight.scale.contiguous().view(torch.int16)
    assert isinstance(weight, torch.Tensor)
    return _swizzled(weight.contiguous().view(-1, width), [128, 64]), weight


def _options(weight: ExpertWeight) -> dict[str, Any]:
    packed = isinstance(weight, Mxfp4Weight)
    return {"PACKED": packed, "STAGES": STAGES.packed if packed else STAGES.dense, "num_warps": 8, "enable_fp_fusion": True}


def d_hidden(dy: torch.Tensor, w2: ExpertWeight, table: Plan, out: torch.Tensor) -> None:
    """dy [N * k, Z] in sorted order, w2 [E, Z, I]; writes the rows that have an expert of out [N * k, I]. All bfloat16; the table's block is BLOCK."""
    _, outer, hidden = w2.shape
    given = (*_rows(dy), *_matrix_across(w2))
    _across[(table.tile_expert.numel() * (hidden // 256),)](*given, *given, out, table.tile_expert, table.tile_start, table.starts, table.block, hidden, depth=outer, TWICE=False,
                                                            **_options(w2))


def inner(z: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, gates: torch.Tensor, dh: torch.Tensor, du: torch.Tensor, gated: torch.Tensor | None, table: Plan,
          betas: tuple[float, float]) -> torch.Tensor:
    """z [N * k, Z] in sorted order, its columns as `sorted_rows` renames them for MXFP4; w1, w3 [E, I, Z], gates fp32 [N, k], dh, du and gated (or None)
    [N * k, I]. dh becomes dg. Returns the gates' parts for `d_gates`."""
    _, hidden, outer = w1.shape
    rows, (beta, linear_beta) = dh.shape[0], betas
    parts = torch.empty((hidden // GATE_COLUMNS, rows), dtype=torch.float32, device=z.device)
    (first, scale_1), (third, scale_3) = _matrix_along(w1), _matrix_along(w3)
    _inner[(table.tile_expert.numel() * (hidden // 128),)](
        *_rows(z), first, third, scale_1, scale_3, gates, dh, du, dh if gated is None else gated, parts, table.pairs, table.tile_expert, table.tile_start,
        table.starts, table.block, hidden, rows, beta, linear_beta, 1 / beta, 1 / linear_beta, depth=outer, KEEP=gated is not None, **_options(w1))
    return parts


def d_input(dg: torch.Tensor, du: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, table: Plan, out: torch.Tensor) -> None:
    """dg, du [N * k, I], w1, w3 [E, I, Z]; writes the rows that have an expert of out [N * k, Z]."""
    _, hidden, outer = w1.shape
    _across[(table.tile_expert.numel() * (outer // 256),)](*_rows(dg), *_matrix_across(w1), *_rows(du), *_matrix_across(w3), out, table.tile_expert, table.tile_start,
                                                           table.starts, table.block, outer, depth=hidden, TWICE=True, **_options(w1))
