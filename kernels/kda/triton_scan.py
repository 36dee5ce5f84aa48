# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined,assignment"
"""KDA across chunks: the state's walk over a sequence's chunks, in Gluon, and the composition of segments, in Triton.

One program carries BV columns of one head's state over its chunks, in order, and writes the outputs on the way:

    R = beta (v - k_grow S);  V' = inverse R;  O = q_grow S + a_qk V';  S <- decay S + k_tail^T V'

Everything is held transposed, S^T [BV, K] in fp32 registers: then S, R and V' are each the left operand of the next product straight from
registers, and only tiles that were loaded ahead go through shared memory. beta multiplies R, not the inverse: the inverse's diagonal of ones is
exact in bfloat16 so, and a rounded beta would be the same error for every token of a repeated key.

While a chunk is computed, the next one's tiles are copied to the other half of shared memory, and the outputs of the one before go from registers through
shared memory to their place: neither is waited for.

A segment is a run of chunks. Its transfer (M, S~), with S_out = M S_in + S~, is the same walk from the zero state, and without v from the identity.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

__all__ = ["compose_segments", "walk_chunks"]

_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_wait = getattr(gl, "barrier", None) or gl.thread_barrier

_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def _rows(width, warps):
    """[64, width] in 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])


@gluon.jit
def _ask(stage, k_tiles, q_tiles, tails, inverses, scores, values, decays, scales, k_grow, q_grow, k_tail, inverse, a_qk, decay, betas, v, v_step, tile, left,
         HAS_V, SUMMARY: gl.constexpr, C: gl.constexpr, K: gl.constexpr, BV: gl.constexpr, WARPS: gl.constexpr):
    """Begin to copy a chunk: workspace tile `tile` and the `left` tokens of v."""
    WIDE: gl.constexpr = _rows(K, WARPS)
    SQUARE: gl.constexpr = _rows(C, WARPS)
    VALUES: gl.constexpr = _rows(BV, WARPS)
    wide = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None] * K + gl.arange(0, K, gl.SliceLayout(0, WIDE))[None, :]
    square = gl.arange(0, C, gl.SliceLayout(1, SQUARE))[:, None] * C + gl.arange(0, C, gl.SliceLayout(0, SQUARE))[None, :]
    token = gl.arange(0, C, gl.SliceLayout(1, VALUES))[:, None]
    column = gl.arange(0, BV, gl.SliceLayout(0, VALUES))[None, :]
    _copy(k_tiles.index(stage), k_grow + tile * (C * K) + wide)
    _copy(values.index(stage), v + (token * v_step + column), mask=(token < left) & (column >= 0) & HAS_V)
    _copy(scales.index(stage), betas + tile * C + gl.arange(0, C, gl.BlockedLayout([2], [32], [WARPS], [0])))
    _copy(inverses.index(stage), inverse + tile * (C * C) + square)
    _copy(decays.index(stage), decay + tile * K + gl.arange(0, K, gl.BlockedLayout([4], [32], [WARPS], [0])))
    _copy(tails.index(stage), k_tail + tile * (C * K) + wide)
    if not SUMMARY:
        _copy(q_tiles.index(stage), q_grow + tile * (C * K) + wide)
        _copy(scores.index(stage), a_qk + tile * (C * C) + square)
    async_copy.commit_group()


@gluon.jit
def _put(o, token_step, outs, left, C: gl.constexpr, BV: gl.constexpr, WARPS: gl.constexpr):
    ROWS: gl.constexpr = _rows(BV, WARPS)
    token = gl.arange(0, C, gl.SliceLayout(1, ROWS))[:, None]
    column = gl.arange(0, BV, gl.SliceLayout(0, ROWS))[None, :]
    gl.store(o + (token * token_step + column), outs.load(ROWS), mask=(token < left) & (column >= 0))


@gluon.jit(do_not_specialize=["first_chunk", "last_chunk", "sequences", "steps", "heads"])
def walk_chunks(v, k_grow, q_grow, k_tail, inverse, a_qk, decay, betas, cu_seqlens, offsets, segment_table, segment_offsets, initial, final, transfer,
                entries, o, first_chunk, last_chunk, sequences, steps, heads, v_batch, v_step, SEGMENT: gl.constexpr, SUMMARY: gl.constexpr,
                HAS_INITIAL: gl.constexpr, VARLEN: gl.constexpr, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
                WARPS: gl.constexpr):
    """SEGMENT 0: a program a sequence, over its chunks in [first_chunk, last_chunk); a state that began earlier is in `final`. SEGMENT n: a program a
    segment of n chunks; it starts from `entries`. SUMMARY: write the transfer [segments, H, K, V + K] of a segment with another after it, and no
    outputs. Workspace tiles are numbered from first_chunk, and the chunks of a batch without cu_seqlens interleave: chunk i of row b is i * B + b."""
    COLUMNS: gl.constexpr = (V + K) // BV if SUMMARY else V // BV
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    column = gl.program_id(0) % COLUMNS * BV
    h = gl.program_id(1)
    n = gl.program_id(0) // COLUMNS
    lo = 0
    segment = n.to(gl.int64)
    if SEGMENT > 0:
        if VARLEN:
            n = gl.load(segment_table + segment * 4)
            if n < 0:
                return
            lo = gl.load(segment_table + segment * 4 + 3) * SEGMENT
        else:
            n = (segment % sequences).to(gl.int32)
            lo = (segment // sequences).to(gl.int32) * SEGMENT
    if VARLEN:
        start = gl.load(cu_seqlens + n).to(gl.int64)
        length = (gl.load(cu_seqlens + n + 1).to(gl.int64) - start).to(gl.int32)
        base = gl.load(offsets + n)
        step = 1
        row = start * 0
    else:
        start = n.to(gl.int64) * 0
        length = steps
        base = n
        step = sequences
        row = n.to(gl.int64)
    chunks = (length + C - 1) // C
    hi = chunks
    if SEGMENT > 0:
        hi = gl.minimum(lo + SEGMENT, chunks)
        if SUMMARY:  # noqa: SIM102 - decided when the kernel is compiled, the inner one when it runs
            if hi == chunks:
                return
    else:
        lo = gl.maximum((first_chunk - base + step - 1) // step, 0)
        hi = gl.minimum((last_chunk - base + step - 1) // step, chunks)
        if lo >= hi:
            if (chunks > 0) | (first_chunk > 0):
                return
            lo = 0
            hi = 0
    rv = column + gl.arange(0, BV, gl.SliceLayout(1, STATE))[:, None]
    rk = gl.arange(0, K, gl.SliceLayout(0, STATE))[None, :]
    home = (n.to(gl.int64) * heads + h) * (K * V) + (rk * V + rv)
    if SUMMARY:
        s = gl.where(rv == rk + V, 1.0, 0.0)
    elif SEGMENT > 0:
        if lo == 0:
            s = gl.load(initial + home) if HAS_INITIAL else gl.zeros([BV, K], gl.float32, STATE)
        else:
            s = gl.load(entries + (segment * heads + h) * (K * V) + (rk * V + rv))
    else:
        if lo == 0:
            s = gl.load(initial + home) if HAS_INITIAL else gl.zeros([BV, K], gl.float32, STATE)
        else:
            s = gl.load(final + home)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], _TILE)
    tails = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], _TILE)
    inverses = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], _TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [2, C, BV], _TILE)
    decays = gl.allocate_shared_memory(gl.float32, [2, K], _WORDS)
    scales = gl.allocate_shared_memory(gl.float32, [2, C], _WORDS)
    if SUMMARY:
        q_tiles = k_tiles
        scores = inverses
    else:
        q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], _TILE)
        scores = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], _TILE)
        outs = gl.allocate_shared_memory(gl.bfloat16, [C, BV], _TILE)
    v += row * v_batch + h * V + column
    o += (row * steps * heads + h) * V + column
    token_step = heads * V
    if lo < hi:
        _ask(0, k_tiles, q_tiles, tails, inverses, scores, values, decays, scales, k_grow, q_grow, k_tail, inverse, a_qk, decay, betas,
             v + (start + lo * C) * v_step, v_step, (base + lo * step - first_chunk).to(gl.int64) * heads + h, length - lo * C, column < V, SUMMARY, C, K,
             BV, WARPS)
    none = gl.zeros([BV, C], gl.float32, PRODUCT)
    out = none
    for i in range(lo, hi):
        stage = (i - lo) % 2
        async_copy.wait_group(0)
        _wait()
        if i + 1 < hi:
            _ask(1 - stage, k_tiles, q_tiles, tails, inverses, scores, values, decays, scales, k_grow, q_grow, k_tail, inverse, a_qk, decay, betas,
                 v + (start + (i + 1) * C) * v_step, v_step, (base + (i + 1) * step - first_chunk).to(gl.int64) * heads + h, length - (i + 1) * C,
                 column < V, SUMMARY, C, K, BV, WARPS)
        narrow = gl.convert_layout(s.to(gl.bfloat16), LEFT)
        u = warpgroup_mma(narrow, k_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        if not SUMMARY:
            kept = warpgroup_mma(narrow, q_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            outs.permute((1, 0)).store(out.to(gl.bfloat16))
        wanted = values.index(stage).permute((1, 0)).load(PRODUCT).to(gl.float32)
        scale = scales.index(stage).load(gl.SliceLayout(0, PRODUCT))[None, :]
        s = s * decays.index(stage).load(gl.SliceLayout(0, STATE))[None, :]
        u = warpgroup_mma_wait(0 if SUMMARY else 1, deps=(u,))
        rest = gl.convert_layout(((wanted - u) * scale).to(gl.bfloat16), LEFT)
        new = warpgroup_mma(rest, inverses.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        if SUMMARY:
            new = warpgroup_mma_wait(0, deps=(new,))
        else:
            _wait()
            if i > lo:
                _put(o + (start + (i - 1) * C) * token_step, token_step, outs, length - (i - 1) * C, C, BV, WARPS)
            new, kept = warpgroup_mma_wait(0, deps=(new, kept))
        left = new.to(gl.bfloat16)
        s = warpgroup_mma(gl.convert_layout(left, gl.DotOperandLayout(0, STATE, 2)), tails.index(stage), s, is_async=True)
        if SUMMARY:
            s = warpgroup_mma_wait(0, deps=(s,))
        else:
            out = warpgroup_mma(gl.convert_layout(left, LEFT), scores.index(stage).permute((1, 0)), kept, is_async=True)
            s, out = warpgroup_mma_wait(0, deps=(s, out))
    if not SUMMARY:  # noqa: SIM102 - as above
        if lo < hi:
            outs.permute((1, 0)).store(out.to(gl.bfloat16))
            _wait()
            _put(o + (start + (hi - 1) * C) * token_step, token_step, outs, length - (hi - 1) * C, C, BV, WARPS)
    if SUMMARY:
        gl.store(transfer + (segment * heads + h) * (K * (V + K)) + (rk * (V + K) + rv), s)
    elif SEGMENT > 0:
        if hi == chunks:
            gl.store(final + home, s)
    else:
        gl.store(final + home, s)


@triton.jit(do_not_specialize=["sequences", "segments", "heads"])
def compose_segments(transfer, initial, entries, final, segment_offsets, sequences, segments, heads, HAS_INITIAL: tl.constexpr, VARLEN: tl.constexpr,
                     K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr):
    """The state that each segment starts from, S <- M S + S~ in order, in fp32 (three tf32 products a step). A sequence without tokens gets its final
    state here, for no segment of it exists."""
    rv = tl.program_id(0) % (V // BV) * BV + tl.arange(0, BV)
    h = tl.program_id(1)
    n = tl.program_id(0) // (V // BV)
    rk = tl.arange(0, K)
    state = rk[:, None] * V + rv[None, :]
    home = (n.to(tl.int64) * heads + h) * (K * V)
    if VARLEN:
        base = tl.load(segment_offsets + n)
        count = tl.load(segment_offsets + n + 1) - base
        step = 1
    else:
        base = n
        count = segments
        step = sequences
    s = tl.load(initial + home + state) if HAS_INITIAL else tl.zeros([K, BV], tl.float32)
    if count == 0:
        tl.store(final + home + state, s)
    for i in tl.range(0, count - 1, num_stages=STAGES):
        at = (base + i * step).to(tl.int64) * heads + h
        m = tl.load(transfer + at * (K * (V + K)) + rk[:, None] * (V + K) + V + rk[None, :])
        add = tl.load(transfer + at * (K * (V + K)) + rk[:, None] * (V + K) + rv[None, :])
        s = tl.dot(m, s, acc=add, input_precision="tf32x3")
        tl.store(entries + ((base + (i + 1) * step).to(tl.int64) * heads + h) * (K * V) + state, s)
