# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""KDA across chunks, as Triton kernels: the state's walk over a sequence's chunks, and the composition of segments.

One program carries BV columns of one head's state over its chunks, in order, and writes the outputs on the way:

    R = beta (v - k_grow S);  V' = inverse R;  O = q_grow S + a_qk V';  S <- decay S + k_tail^T V'

Everything is held transposed, S^T [BV, K] in fp32 registers: then S, R and V' are each the left operand of the next product straight from
registers, and only tiles that were loaded ahead go through shared memory. beta multiplies R, not the inverse: the inverse's diagonal of ones is
exact in bfloat16 so, and a rounded beta would be the same error for every token of a repeated key.

A segment is a run of chunks. Its transfer (M, S~), with S_out = M S_in + S~, is the same walk from the zero state, and without v from the identity.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["compose_segments", "walk_chunks"]


@triton.jit(do_not_specialize=["first_chunk", "last_chunk", "sequences", "steps", "heads"])
def walk_chunks(v, k_grow, q_grow, k_tail, inverse, a_qk, decay, betas, cu_seqlens, offsets, segment_table, segment_offsets, initial, final, transfer,
                entries, o, first_chunk, last_chunk, sequences, steps, heads, v_batch, v_step, SEGMENT: tl.constexpr, SUMMARY: tl.constexpr,
                HAS_INITIAL: tl.constexpr, VARLEN: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                STAGES: tl.constexpr):
    """SEGMENT 0: a program a sequence, over its chunks in [first_chunk, last_chunk); a state that began earlier is in `final`. SEGMENT n: a program a
    segment of n chunks; it starts from `entries`. SUMMARY: write the transfer [segments, H, K, V + K] of a segment with another after it, and no
    outputs. Workspace tiles are numbered from first_chunk, and the chunks of a batch without cu_seqlens interleave: chunk i of row b is i * B + b."""
    COLUMNS: tl.constexpr = (V + K) // BV if SUMMARY else V // BV
    rv = tl.program_id(0) % COLUMNS * BV + tl.arange(0, BV)
    h = tl.program_id(1)
    n = tl.program_id(0) // COLUMNS
    lo = 0
    segment = n.to(tl.int64)
    if SEGMENT > 0:
        if VARLEN:
            n = tl.load(segment_table + segment * 4)
            if n < 0:
                return
            lo = tl.load(segment_table + segment * 4 + 3) * SEGMENT
        else:
            n = (segment % sequences).to(tl.int32)
            lo = (segment // sequences).to(tl.int32) * SEGMENT
    if VARLEN:
        start = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - start).to(tl.int32)
        base = tl.load(offsets + n)
        step = 1
        row = start * 0
    else:
        start = tl.zeros([], tl.int64)
        length = steps
        base = n
        step = sequences
        row = n.to(tl.int64)
    chunks = (length + C - 1) // C
    hi = chunks
    if SEGMENT > 0:
        hi = tl.minimum(lo + SEGMENT, chunks)
        if SUMMARY:  # noqa: SIM102 - decided when the kernel is compiled, the inner one when it runs
            if hi == chunks:
                return
    else:
        lo = tl.maximum((first_chunk - base + step - 1) // step, 0)
        hi = tl.minimum((last_chunk - base + step - 1) // step, chunks)
        if lo >= hi:
            if (chunks > 0) | (first_chunk > 0):
                return
            lo = 0
            hi = 0
    rk = tl.arange(0, K)
    rt = tl.arange(0, C)
    home = (n.to(tl.int64) * heads + h) * (K * V) + rk[None, :] * V + rv[:, None]
    if SUMMARY:
        s = tl.where(rv[:, None] == rk[None, :] + V, 1.0, 0.0)
    elif SEGMENT > 0:
        if lo == 0:
            s = tl.load(initial + home) if HAS_INITIAL else tl.zeros([BV, K], tl.float32)
        else:
            s = tl.load(entries + (segment * heads + h) * (K * V) + rk[None, :] * V + rv[:, None])
    else:
        if lo == 0:
            s = tl.load(initial + home) if HAS_INITIAL else tl.zeros([BV, K], tl.float32)
        else:
            s = tl.load(final + home)
    wide = rk[:, None] + rt[None, :] * K
    tall = rt[:, None] * K + rk[None, :]
    square = rt[:, None] + rt[None, :] * C
    v_base = v + row * v_batch + h * V + rt[None, :] * v_step + rv[:, None]
    o_base = o + (row * steps * heads + h) * V + rt[None, :] * (heads * V) + rv[:, None]
    for i in tl.range(lo, hi, num_stages=STAGES):
        tile = (base + i * step - first_chunk).to(tl.int64) * heads + h
        kg = tl.load(k_grow + tile * (C * K) + wide)
        kt = tl.load(k_tail + tile * (C * K) + tall)
        ti = tl.load(inverse + tile * (C * C) + square)
        dk = tl.load(decay + tile * K + rk)
        bt = tl.load(betas + tile * C + rt)
        t0 = start + i * C
        live = (rt < length - i * C)[None, :]
        if SUMMARY:
            values = tl.load(v_base + t0 * v_step, mask=live & (rv < V)[:, None], other=0.0)
        else:
            values = tl.load(v_base + t0 * v_step, mask=live, other=0.0)
        sb = s.to(tl.bfloat16)
        u = tl.dot(sb, kg)
        rest = ((values.to(tl.float32) - u) * bt[None, :]).to(tl.bfloat16)
        new = tl.dot(rest, ti).to(tl.bfloat16)
        if not SUMMARY:
            qg = tl.load(q_grow + tile * (C * K) + wide)
            aq = tl.load(a_qk + tile * (C * C) + square)
            out = tl.dot(new, aq, acc=tl.dot(sb, qg))
            tl.store(o_base + t0 * (heads * V), out.to(o.dtype.element_ty), mask=live)
        s = tl.dot(new, kt, acc=s * dk[None, :])
    if SUMMARY:
        tl.store(transfer + (segment * heads + h) * (K * (V + K)) + rk[None, :] * (V + K) + rv[:, None], s)
    elif SEGMENT > 0:
        if hi == chunks:
            tl.store(final + home, s)
    else:
        tl.store(final + home, s)


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
