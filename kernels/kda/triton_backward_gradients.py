# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""The gradients of one chunk's queries, keys and gates, from the states around it and the triangles D and E of `values`, down to the raw inputs.

With q' = scale q e^G, k' = k e^G, k- = k e^-G, k^ = k e^(G_64 - G), and everything on the right of one chunk:

    dq' = do S^T + D k-     dk' = -dv S^T + E k-     dk- = D^T q' + E^T k'     dk^ = V' dS^T
    dG = q' dq' + k' dk' - k- dk- - k^ dk^, its last row more by e^(G_64) <dS, S> + sum k^ dk^;   dg: its sums from the row on

then through the gate (dz, and the sums for dt_bias and A_log) and the norms. Nothing goes through the triangular inverse: V' = T X makes its gradient
-dX V'^T, which is in E. The gradients of the unit queries and keys wait where qbar and ktail were; most of a query's may lie along the query and is taken away
by the norm, so what bfloat16 leaves of it waits too, where T and Aqk were.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftline.kernels.kda.triton_backward_decay import (
    AFTER,
    DOWN,
    LOG2E,
    LOWER,
    RISE,
    SINCE,
    START,
    TAIL,
    UNTIL,
    UP,
    UPPER,
    add_dot,
    as_stored,
    dot,
    gates,
    length,
    matrix,
    narrow,
    place,
    rows,
    sigmoid,
    split,
    summed,
    widen,
)

__all__ = ["fold", "gradients"]


@triton.jit(do_not_specialize=["steps", "chunks_each", "head0", "group", "zero"])
def gradients(q, k, z, a_log, dt_bias, do, matrices, shares, owner, first, bounds, v_in, triangles, queries_io, keys_io, left_io, right_io, decay_in, states_in, dstates_in, dq_out,
              dk_out, dv, dz_out, dbias_out, da_out, steps, chunks_each, heads, head0, group, zero, lower_bound, VARLEN: tl.constexpr,
              CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """One chunk of one head a program. dq.. dz as the inputs lie; dbias fp32 [chunks, group, 128] and da fp32 [chunks, group]: this chunk's share."""
    chunk = tl.program_id(0)
    slot = tl.program_id(1)
    head = head0 + slot
    begin, valid = place(chunk, steps, chunks_each, owner, first, bounds, VARLEN, CHUNK)
    tile = chunk.to(tl.int64) * group + slot
    if valid <= 0:
        tl.store(da_out + tile, 0.0)
        tl.store(dbias_out + tile * WIDTH + tl.arange(0, WIDTH), tl.zeros([WIDTH], tl.float32))
        return
    row = tl.arange(0, CHUNK)
    i = row[:, None]
    j = row[None, :]
    lanes = tl.arange(0, WIDTH)
    square = i * CHUNK + j
    wide = i * WIDTH + lanes[None, :]
    v_in += tile * CHUNK * WIDTH
    triangles += tile * CHUNK * WIDTH
    queries_io += tile * CHUNK * WIDTH
    keys_io += tile * CHUNK * WIDTH
    left_io += tile * CHUNK * CHUNK
    right_io += tile * CHUNK * CHUNK
    states_in += tile * WIDTH * WIDTH
    dstates_in += tile * WIDTH * WIDTH
    out = i * (heads * WIDTH)
    dq_out += (begin * heads + head) * WIDTH
    dk_out += (begin * heads + head) * WIDTH
    dz_out += (begin * heads + head) * WIDTH
    there = i < valid

    SECOND: tl.constexpr = CHUNK * CHUNK
    bi = i // BLOCK
    bj = j // BLOCK
    same = bi == bj
    left = (bi == bj + 1) & (bj % 2 == 0)
    corner = (bi >= 2) & (bj < 2)
    speed = tl.exp(tl.load(a_log + head).to(tl.float32))
    k_scale = length(k, begin, valid, head, heads, CHUNK, WIDTH)
    q_scale = length(q, begin, valid, head, heads, CHUNK, WIDTH)
    q_along = tl.zeros([CHUNK], tl.float32)
    k_along = tl.zeros([CHUNK], tl.float32)
    da = tl.zeros([CHUNK], tl.float32)
    for channel in range(0, WIDTH, WIDE):
        lane = channel + tl.arange(0, WIDE)
        still = channel * zero
        region = lanes[:, None] * WIDTH + lane[None, :]
        state = tl.load(states_in + region)
        last = tl.load(decay_in + tile * WIDTH + lane) * tl.sum(state.to(tl.float32) * tl.load(dstates_in + region).to(tl.float32), axis=0)
        opened = sigmoid(gates(z, dt_bias, speed, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH))
        gate = tl.where(there, lower_bound * LOG2E * opened, 0.0).to(tl.float16)
        keys = rows(k, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH).to(tl.float32) * (k_scale * DOWN)[:, None]
        queries = rows(q, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH).to(tl.float32) * (q_scale * (WIDTH ** -0.5 * DOWN))[:, None]

        start = tl.exp2(summed(matrices + still, START, gate, CHUNK)) * DOWN
        dq = dot(rows(do, begin, valid, head, heads, still, WIDTH, CHUNK, WIDTH), state) * start
        dk = dot(rows(dv, begin, valid, head, heads, still, WIDTH, CHUNK, WIDTH), state) * -start
        local = summed(matrices + still, RISE, gate, CHUNK)
        factor = tl.exp2(-local)
        keys_row = narrow(keys * factor)
        d = tl.load(triangles + still + square, mask=same, other=0.0)
        e = tl.load(triangles + still + (SECOND + square), mask=same, other=0.0)
        dq = add_dot(d, keys_row, dq)
        dk = add_dot(e, keys_row, dk)
        rise = tl.exp2(local) * (UP * UP)
        q_row = narrow(queries * rise)
        k_row = narrow(keys * rise)
        more = add_dot(tl.trans(e), k_row, dot(tl.trans(d), q_row))
        product = -widen(keys_row) * more
        dkey = factor * more

        factor = tl.exp2(summed(matrices + still, TAIL, gate, CHUNK))
        keys_row = narrow(keys * factor)
        d = tl.load(triangles + still + square, mask=left, other=0.0)
        e = tl.load(triangles + still + (SECOND + square), mask=left, other=0.0)
        dq = add_dot(d, keys_row, dq)
        product += widen(q_row) * dq
        q_along += tl.sum(widen(q_row) * dq, axis=1)
        dq = dq * rise
        dk = add_dot(e, keys_row, dk)
        product += widen(k_row) * dk
        dkey += dk * rise
        more = add_dot(tl.trans(e), k_row, dot(tl.trans(d), q_row))
        product -= widen(keys_row) * more
        ending = dot(tl.load(v_in + still + wide), tl.load(dstates_in + still + region)) * (tl.exp2(summed(matrices + still, AFTER, gate, CHUNK)) * UP)
        dkey += factor * (more + ending)
        until_high, until_low = split(widen(keys_row) * ending)

        factor = factor * tl.exp2(summed(matrices + still, UPPER, gate, CHUNK))
        keys_row = narrow(keys * factor)
        rise = rise * tl.exp2(summed(matrices + still, LOWER, gate, CHUNK))
        d = tl.load(triangles + still + square, mask=corner, other=0.0)
        e = tl.load(triangles + still + (SECOND + square), mask=corner, other=0.0)
        more = dot(d, keys_row)
        q_row = narrow(queries * rise)
        product += widen(q_row) * more
        q_along += tl.sum(widen(q_row) * more, axis=1)
        dq += rise * more
        dq = dq * (WIDTH ** -0.5 * DOWN)
        high = narrow(dq)
        tl.store(queries_io + (i * WIDTH + lane[None, :]), high)
        low = narrow(dq - widen(high))
        half = i * CHUNK + lane[None, :]
        tl.store(left_io + half, low, mask=(lane < CHUNK)[None, :] & (i >= 0))
        tl.store(right_io + half - CHUNK, low, mask=(lane >= CHUNK)[None, :] & (i >= 0))
        more = dot(e, keys_row)
        k_row = narrow(keys * rise)
        product += widen(k_row) * more
        dkey += rise * more
        more = add_dot(tl.trans(e), k_row, dot(tl.trans(d), q_row))
        product -= widen(keys_row) * more
        dkey += factor * more
        tl.store(keys_io + (i * WIDTH + lane[None, :]), narrow(dkey * DOWN))
        k_along += tl.sum(keys * dkey, axis=1)

        since_high, since_low = split(product)
        # loaded together, so that no right operand of 64-byte rows begins where a left one of 128-byte rows does: CUDA 12.8's assembler confuses the two
        since, until = matrix(shares + still, SINCE, CHUNK), matrix(shares + still, UNTIL, CHUNK)
        dgate = add_dot(since, since_high, add_dot(since, since_low, add_dot(until, until_high, dot(until, until_low)))) + last[None, :]
        raw = gates(z, dt_bias, speed, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH)
        opened = sigmoid(raw)
        draw = tl.where(there, dgate * lower_bound * opened * (1.0 - opened), 0.0)
        da += tl.sum(draw * raw, axis=1)
        tl.store(dz_out + channel + (out + tl.arange(0, WIDE)[None, :]), as_stored(draw * speed, dz_out), mask=there)
        tl.store(dbias_out + tile * WIDTH + lane, tl.sum(draw, axis=0) * speed)
    tl.store(da_out + tile, tl.sum(da, axis=0))
    tl.debug_barrier()

    for channel in range(0, WIDTH, WIDE):
        lane = channel + tl.arange(0, WIDE)
        half = i * CHUNK + lane[None, :]
        dq = tl.load(queries_io + (i * WIDTH + lane[None, :])).to(tl.float32)
        dq += tl.load(left_io + half, mask=(lane < CHUNK)[None, :] & (i >= 0), other=0.0).to(tl.float32)
        dq += tl.load(right_io + half - CHUNK, mask=(lane >= CHUNK)[None, :] & (i >= 0), other=0.0).to(tl.float32)
        dk = tl.load(keys_io + (i * WIDTH + lane[None, :])).to(tl.float32)
        queries = rows(q, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH).to(tl.float32) * q_scale[:, None]
        keys = rows(k, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH).to(tl.float32) * k_scale[:, None]
        tl.store(dq_out + (out + lane[None, :]), as_stored(q_scale[:, None] * (dq - queries * q_along[:, None]), dq_out), mask=there)
        tl.store(dk_out + (out + lane[None, :]), as_stored(k_scale[:, None] * (dk - keys * k_along[:, None]), dk_out), mask=there)


@triton.jit(do_not_specialize=["chunks", "group", "head0"])
def fold(parts, out, chunks, group, head0, WIDE: tl.constexpr, LINES: tl.constexpr):
    """Sum over the chunks, in a fixed order, of [chunks, group, WIDE] into out [heads, WIDE] from head0 on. One head a program."""
    slot = tl.program_id(0)
    lane = tl.arange(0, WIDE)
    row = tl.arange(0, LINES)
    total = tl.zeros([LINES, WIDE], tl.float32)
    for begin in range(0, chunks, LINES):
        chunk = begin + row
        at = (chunk.to(tl.int64) * group + slot)[:, None] * WIDE + lane[None, :]
        total += tl.load(parts + at, mask=(chunk < chunks)[:, None], other=0.0)
    tl.store(out + (head0 + slot) * WIDE + lane, tl.sum(total, axis=0))
