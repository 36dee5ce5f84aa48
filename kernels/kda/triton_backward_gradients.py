# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""The gradients of one chunk, from the state at its start and the state's gradient at its end, down to the raw inputs.

With q' = scale q e^G, k' = k e^G, k- = k e^-G, k^ = k e^(G_64 - G), and everything on the right of one chunk:

    dX = T^T (Aqk^T do + k^ dS)      dv = beta dX      dbeta_logit = (1 - beta) <dX, V'>
    D = tril(do V'^T)                E = -tril(dv V'^T, -1)
    dq' = do S^T + D k-              dk' = -dv S^T + E k-          dk- = D^T q' + E^T k'          dk^ = V' dS^T
    dG = q' dq' + k' dk' - k- dk- - k^ dk^, its last row more by e^(G_64) <dS, S> + sum k^ dk^;   dg: its sums from the row on

then through the gate (dz, and the sums for dt_bias and A_log) and the norms. <dX, r> of the recurrence's residual r is <dX, V'> / beta, so dbeta
needs no division and dA none of the triangular inverse's: V' = T X makes it -dX V'^T.

What one phase hands to the next lies in tiles that are dead by then: D and E, both ways round, where w, qbar and ktail were; the gradients of the
unit queries and keys, in fp32, where the states were.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftline.kernels.kda.triton_backward_decay import (
    SHIFT,
    add_dot,
    as_stored,
    columns,
    decays,
    dot,
    gates,
    later_rows,
    length,
    narrow,
    place,
    rows,
    sigmoid,
)

__all__ = ["fold", "gradients"]


@triton.jit
def gradients(q, k, z, beta, a_log, dt_bias, do, owner, first, bounds, v_in, w_io, qbar_io, ktail_io, t_in, p_in, decay_in, states_io, dstates_io, dq_out,
              dk_out, dv_out, dz_out, dbeta_out, dbias_out, da_out, steps, chunks_each, heads, head0, group, lower_bound, VARLEN: tl.constexpr,
              CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, BV: tl.constexpr):
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
    N: tl.constexpr = CHUNK // BLOCK
    row = tl.arange(0, CHUNK)
    i = row[:, None]
    j = row[None, :]
    lanes = tl.arange(0, WIDTH)
    square = tile * CHUNK * CHUNK + i * CHUNK + j
    wide = tile * CHUNK * WIDTH + i * WIDTH + lanes[None, :]
    out = (begin * heads + head) * WIDTH + i.to(tl.int64) * heads * WIDTH
    there = i < valid
    strength = sigmoid(tl.load(beta + (begin + row) * heads + head, mask=row < valid, other=0.0).to(tl.float32))
    strength = tl.where(row < valid, strength, 0.0)

    share = tl.zeros([CHUNK], tl.float32)
    for part in range(0, WIDTH, BV):
        value = part + tl.arange(0, BV)
        dinner = dot(tl.trans(tl.load(p_in + square)), rows(do, begin, valid, head, heads, part, BV, CHUNK, WIDTH))
        dinner = add_dot(tl.load(ktail_io + wide), tl.load(dstates_io + tile * WIDTH * WIDTH + lanes[:, None] * WIDTH + value[None, :]), dinner)
        dx = dot(tl.trans(tl.load(t_in + square)), narrow(dinner))
        share += tl.sum(dx * tl.load(v_in + tile * CHUNK * WIDTH + i * WIDTH + value[None, :]).to(tl.float32), axis=1)
        tl.store(dv_out + out + value[None, :], as_stored(dx * strength[:, None], dv_out), mask=there)
    tl.store(dbeta_out + (begin + row) * heads + head, as_stored(share * (1.0 - strength), dbeta_out), mask=row < valid)
    tl.debug_barrier()

    inner = tl.load(v_in + wide)
    output = rows(do, begin, valid, head, heads, 0, WIDTH, CHUNK, WIDTH)
    dvalue = rows(dv_out, begin, valid, head, heads, 0, WIDTH, CHUNK, WIDTH)
    half = tile * CHUNK * WIDTH + i * CHUNK + j
    lower = i >= j
    tl.store(w_io + half, narrow(tl.where(lower, dot(output, tl.trans(inner)), 0.0)))
    tl.store(w_io + CHUNK * CHUNK + half, narrow(tl.where(i > j, -dot(dvalue, tl.trans(inner)), 0.0)))
    tl.store(qbar_io + half, narrow(tl.where(i <= j, dot(inner, tl.trans(output)), 0.0)))
    tl.store(qbar_io + CHUNK * CHUNK + half, narrow(tl.where(i < j, -dot(inner, tl.trans(dvalue)), 0.0)))
    tl.debug_barrier()

    speed = tl.exp(tl.load(a_log + head).to(tl.float32))
    k_scale = length(k, begin, valid, head, heads, CHUNK, WIDTH)
    q_scale = length(q, begin, valid, head, heads, CHUNK, WIDTH)
    q_along = tl.zeros([CHUNK], tl.float32)
    k_along = tl.zeros([CHUNK], tl.float32)
    da = tl.zeros([CHUNK], tl.float32)
    for channel in range(0, WIDTH, WIDE):
        lane = channel + tl.arange(0, WIDE)
        raw = gates(z, dt_bias, speed, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH)
        open_ = sigmoid(raw)
        local, total, before, after = decays(tl.where(there, lower_bound * 1.4426950408889634 * open_, 0.0), WIDE, CHUNK, BLOCK)
        keys = rows(k, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH).to(tl.float32) * k_scale[:, None]
        queries = rows(q, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH).to(tl.float32) * (q_scale * WIDTH ** -0.5)[:, None]
        rise = tl.exp2(local + SHIFT)
        tail = tl.exp2(total[:, None, :] - local - SHIFT)
        back = tl.exp2(-local - SHIFT)
        keys = tl.reshape(keys, [N, BLOCK, WIDE])
        queries = tl.reshape(queries, [N, BLOCK, WIDE])

        region = tile * WIDTH * WIDTH + lane[:, None] * WIDTH + lanes[None, :]
        state = tl.load(states_io + region)
        dstate = tl.load(dstates_io + region)
        last = tl.load(decay_in + tile * WIDTH + lane) * tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
        start = tl.reshape(tl.broadcast_to(tl.exp2(before - SHIFT)[:, None, :], [N, BLOCK, WIDE]), [CHUNK, WIDE])
        end = tl.reshape(tl.broadcast_to(tl.exp2(after + SHIFT)[:, None, :], [N, BLOCK, WIDE]), [CHUNK, WIDE])
        dq = dot(rows(do, begin, valid, head, heads, 0, WIDTH, CHUNK, WIDTH), tl.trans(state)) * start
        dk = dot(rows(dv_out, begin, valid, head, heads, 0, WIDTH, CHUNK, WIDTH), tl.trans(state)) * -start
        near = tl.zeros([CHUNK, WIDE], tl.float32)
        far = dot(tl.load(v_in + wide), tl.trans(dstate)) * end
        tail_keys = keys * tail
        back_keys = keys * back
        k_rise = keys * rise
        q_rise = queries * rise
        q_row = narrow(tl.reshape(q_rise, [CHUNK, WIDE]))
        k_row = narrow(tl.reshape(k_rise, [CHUNK, WIDE]))
        tail_row = narrow(tl.reshape(tail_keys, [CHUNK, WIDE]))
        back_row = narrow(tl.reshape(back_keys, [CHUNK, WIDE]))
        last += tl.sum(far * tail_row.to(tl.float32), axis=0)
        d_rows = tl.load(w_io + half)
        e_rows = tl.load(w_io + CHUNK * CHUNK + half)
        for block in tl.static_range(N):
            column = columns(tail_keys, back_keys, total, before, block, WIDE, CHUNK, BLOCK)
            mine = i // BLOCK == block
            dq = add_dot(tl.where(mine, d_rows, 0.0), column, dq)
            dk = add_dot(tl.where(mine, e_rows, 0.0), column, dk)
        d_columns = tl.load(qbar_io + half)
        e_columns = tl.load(qbar_io + CHUNK * CHUNK + half)
        same = i // BLOCK == j // BLOCK
        near = add_dot(tl.where(same, d_columns, 0.0), q_row, near)
        near = add_dot(tl.where(same, e_columns, 0.0), k_row, near)
        for block in tl.static_range(N - 1):
            mine = i // BLOCK == block
            far = add_dot(tl.where(mine, d_columns, 0.0), later_rows(q_rise, total, before, block, WIDE, CHUNK, BLOCK), far)
            far = add_dot(tl.where(mine, e_columns, 0.0), later_rows(k_rise, total, before, block, WIDE, CHUNK, BLOCK), far)
        keys = tl.reshape(keys, [CHUNK, WIDE])
        product = q_row.to(tl.float32) * dq
        q_along += tl.sum(product, axis=1)
        product += k_row.to(tl.float32) * dk - tail_row.to(tl.float32) * far - back_row.to(tl.float32) * near
        dgate = tl.cumsum(product, axis=0, reverse=True) + last[None, :]
        rise = tl.reshape(rise, [CHUNK, WIDE])
        dq = dq * rise
        dk = dk * rise + far * tl.reshape(tail, [CHUNK, WIDE]) + near * tl.reshape(back, [CHUNK, WIDE])
        k_along += tl.sum(keys * dk, axis=1)
        draw = tl.where(there, dgate * lower_bound * open_ * (1.0 - open_), 0.0)
        da += tl.sum(draw * raw, axis=1)
        tl.store(dz_out + out + lane[None, :], as_stored(draw * speed, dz_out), mask=there)
        tl.store(dbias_out + tile * WIDTH + lane, tl.sum(draw, axis=0) * speed)
        tl.debug_barrier()
        place32 = tile * (WIDTH * WIDTH // 2) + (channel // WIDE) * CHUNK * WIDE + i * WIDE + tl.arange(0, WIDE)[None, :]
        tl.store(states_io.to(tl.pointer_type(tl.float32)) + place32, dq)
        tl.store(dstates_io.to(tl.pointer_type(tl.float32)) + place32, dk)
    tl.store(da_out + tile, tl.sum(da, axis=0))
    tl.debug_barrier()

    for channel in range(0, WIDTH, WIDE):
        lane = channel + tl.arange(0, WIDE)
        place32 = tile * (WIDTH * WIDTH // 2) + (channel // WIDE) * CHUNK * WIDE + i * WIDE + tl.arange(0, WIDE)[None, :]
        dq = tl.load(states_io.to(tl.pointer_type(tl.float32)) + place32) * (WIDTH ** -0.5)
        dk = tl.load(dstates_io.to(tl.pointer_type(tl.float32)) + place32)
        queries = rows(q, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH).to(tl.float32) * q_scale[:, None]
        keys = rows(k, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH).to(tl.float32) * k_scale[:, None]
        tl.store(dq_out + out + lane[None, :], as_stored(q_scale[:, None] * (dq - queries * q_along[:, None]), dq_out), mask=there)
        tl.store(dk_out + out + lane[None, :], as_stored(k_scale[:, None] * (dk - keys * k_along[:, None]), dk_out), mask=there)


@triton.jit
def fold(parts, out, chunks, group, head0, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """Sum over the chunks, in a fixed order, of [chunks, group, WIDE] into out [heads, WIDE] from head0 on. One head a program."""
    slot = tl.program_id(0)
    lane = tl.arange(0, WIDE)
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, WIDE], tl.float32)
    for begin in range(0, chunks, ROWS):
        chunk = begin + row
        at = (chunk.to(tl.int64) * group + slot)[:, None] * WIDE + lane[None, :]
        total += tl.load(parts + at, mask=(chunk < chunks)[:, None], other=0.0)
    tl.store(out + (head0 + slot) * WIDE + lane, tl.sum(total, axis=0))
