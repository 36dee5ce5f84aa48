# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""What the two scans and the gradients need of a chunk and the state does not enter: the triangular inverse and its products.

    Akk = beta_i k_i.k_j e^(G_i - G_j), i > j        Aqk = scale q_i.k_j e^(G_i - G_j), i >= j        T = (I + Akk)^-1
    w = T (beta k e^G)        u = T (beta v)        qbar = scale q e^G - Aqk w        ktail = k e^(G_64 - G)

so that the scans are `V' = u - w S; S <- e^(G_64) S + ktail^T V'` and `dS <- e^(G_64) dS + qbar^T do - w^T (ktail dS)`.

T is exact algebra throughout, whatever the keys: substitution in fp32 inside each block of 16, then two merges of halves, `T - T A T` with A the
off-diagonal block, in bfloat16 split in two (three products, 2^-16). Every left operand of a product is read back from memory: no matrix instruction
takes its operands from registers, which the assemblers of CUDA 12.8 and 12.9 sometimes overwrite too early.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftline.kernels.kda.triton_backward_decay import (
    COLUMNS,
    DOWN,
    END,
    GROW,
    LOG2E,
    RISE,
    UP,
    add_dot,
    dot,
    gates,
    length,
    narrow,
    place,
    rows,
    sigmoid,
    split,
    summed,
)

__all__ = ["prepare"]


@triton.jit
def _product(left, high, low, square, CHUNK: tl.constexpr):
    """left @ (high + low) to 2^-16; left is read from memory, where it lies as two bfloat16 tiles."""
    left_high = tl.load(left + square)
    return add_dot(left_high, high, add_dot(left_high, low, dot(tl.load(left + (CHUNK * CHUNK + square)), high)))


@triton.jit
def _merge(inverse, block, scratch, square, CHUNK: tl.constexpr):
    """The inverse with one more off-diagonal block: inverse - inverse @ block @ inverse. scratch: room for four bfloat16 tiles."""
    high, low = split(inverse)
    tl.store(scratch + square, high)
    tl.store(scratch + (CHUNK * CHUNK + square), low)
    other, rest = split(block)
    tl.store(scratch + (2 * CHUNK * CHUNK + square), other)
    tl.store(scratch + (3 * CHUNK * CHUNK + square), rest)
    tl.debug_barrier()
    high, low = split(_product(scratch + 2 * CHUNK * CHUNK, high, low, square, CHUNK))
    inverse -= _product(scratch, high, low, square, CHUNK)
    tl.debug_barrier()
    return inverse


@triton.jit
def _invert_blocks(a, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """(I + a)^-1 of the diagonal blocks of 16 of a strictly lower [64, 64], by substitution in fp32; zero elsewhere."""
    N: tl.constexpr = CHUNK // BLOCK
    same = tl.arange(0, N)[:, None, None, None] == tl.arange(0, N)[None, None, :, None]
    mine = -tl.sum(tl.where(same, tl.reshape(a, [N, BLOCK, N, BLOCK]), 0.0), axis=2)
    turned = tl.trans(mine, 0, 2, 1)
    row = tl.arange(0, BLOCK)[None, :, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    inverse = mine
    for i in range(2, BLOCK):
        weight = tl.sum(tl.where(column == i, turned, 0.0), axis=2)
        found = tl.sum(tl.where(row == i, mine, 0.0) + weight[:, :, None] * inverse, axis=1)
        inverse = tl.where(row == i, found[:, None, :], inverse)
    inverse = inverse + tl.where(row == column, 1.0, 0.0)
    return tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [CHUNK, CHUNK])


@triton.jit(do_not_specialize=["steps", "chunks_each", "head0", "group", "zero"])
def prepare(q, k, v, z, beta, a_log, dt_bias, matrices, owner, first, bounds, w_out, u_out, qbar_out, ktail_out, t_out, p_out, decay_out, rows_out, steps, chunks_each, heads,
            head0, group, zero, lower_bound, VARLEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """One chunk of one head a program. Outputs bf16 [chunks, group, 64, 128] (t, p: [.., 64, 64]), decay fp32 [chunks, group, 128]; zero rows where no token is."""
    chunk = tl.program_id(0)
    head = head0 + tl.program_id(1)
    begin, valid = place(chunk, steps, chunks_each, owner, first, bounds, VARLEN, CHUNK)
    if valid <= 0:
        return
    row = tl.arange(0, CHUNK)
    i = row[:, None]
    j = row[None, :]
    tile = chunk.to(tl.int64) * group + tl.program_id(1)
    w_out += tile * CHUNK * WIDTH
    u_out += tile * CHUNK * WIDTH
    qbar_out += tile * CHUNK * WIDTH
    ktail_out += tile * CHUNK * WIDTH
    rows_out += tile * WIDTH * WIDTH
    t_out += tile * CHUNK * CHUNK
    p_out += tile * CHUNK * CHUNK
    decay_out += tile * WIDTH
    square = i * CHUNK + j
    speed = tl.exp(tl.load(a_log + head).to(tl.float32))
    k_scale = length(k, begin, valid, head, heads, CHUNK, WIDTH)
    q_scale = length(q, begin, valid, head, heads, CHUNK, WIDTH) * (WIDTH ** -0.5)
    strength = sigmoid(tl.load(beta + (begin + row) * heads + head, mask=row < valid, other=0.0).to(tl.float32))
    strength = tl.where(row < valid, strength, 0.0)

    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for channel in range(0, WIDTH, WIDE):
        still = channel * zero
        gate = lower_bound * LOG2E * sigmoid(gates(z, dt_bias, speed, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH))
        gate = tl.where(i < valid, gate, 0.0).to(tl.float16)
        keys = rows(k, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH).to(tl.float32) * k_scale[:, None]
        queries = rows(q, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH).to(tl.float32) * q_scale[:, None]
        lane = channel + tl.arange(0, WIDE)[None, :]
        at = i * WIDTH + lane
        grow = tl.exp2(summed(matrices + still, GROW, gate, CHUNK))
        tl.store(decay_out + (lane + i * 0), grow, mask=i == CHUNK - 1)
        tl.store(w_out + at, narrow(keys * grow * strength[:, None]))
        tl.store(qbar_out + at, narrow(queries * grow))
        tl.store(ktail_out + at, narrow(keys * tl.exp2(summed(matrices + still, END, gate, CHUNK))))
        rise = tl.exp2(summed(matrices + still, RISE, gate, CHUNK)) * UP
        stash = i * WIDE + tl.arange(0, WIDE)[None, :]
        tl.store(rows_out + stash, narrow(keys * rise))
        tl.store(rows_out + (CHUNK * WIDE + stash), narrow(queries * rise))
        tl.debug_barrier()
        keys = keys * DOWN
        for block in tl.static_range(CHUNK // BLOCK):
            column = tl.trans(narrow(keys * tl.exp2(summed(matrices + still, COLUMNS + block, gate, CHUNK))))
            mine = i // BLOCK == block
            pairs = add_dot(tl.load(rows_out + still + stash, mask=mine, other=0.0), column, pairs)
            scores = add_dot(tl.load(rows_out + still + (CHUNK * WIDE + stash), mask=mine, other=0.0), column, scores)
        tl.debug_barrier()
    pairs = tl.where(i > j, pairs * strength[:, None], 0.0)
    scores = narrow(tl.where(i >= j, scores, 0.0))
    tl.store(p_out + square, scores)

    neighbour = (i // BLOCK == j // BLOCK + 1) & (j // BLOCK % 2 == 0)
    far = (i >= CHUNK // 2) & (j < CHUNK // 2)
    inverse = _invert_blocks(tl.where(i // BLOCK == j // BLOCK, pairs, 0.0), CHUNK, BLOCK)
    inverse = _merge(inverse, tl.where(neighbour, pairs, 0.0), rows_out, square, CHUNK)
    inverse = _merge(inverse, tl.where(far, pairs, 0.0), rows_out, square, CHUNK)
    tl.store(t_out + square, narrow(inverse))
    tl.debug_barrier()

    for channel in range(0, WIDTH, WIDE):
        lane = channel + tl.arange(0, WIDE)
        at = i * WIDTH + lane[None, :]
        t = tl.load(t_out + square)
        w = narrow(dot(t, tl.load(w_out + at)))
        values = rows(v, begin, valid, head, heads, channel, WIDE, CHUNK, WIDTH).to(tl.float32) * strength[:, None]
        u = dot(t, narrow(values))
        qbar = tl.load(qbar_out + at).to(tl.float32) - dot(tl.load(p_out + square), w)
        tl.store(w_out + at, w)
        tl.store(u_out + at, narrow(u))
        tl.store(qbar_out + at, narrow(qbar))
