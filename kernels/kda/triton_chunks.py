# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""KDA inside a chunk, as Triton kernels: everything of a chunk that does not need the state, one program a (chunk of 64, head).

From raw q, k, z and beta of 64 tokens a program makes, with G the inclusive sum of log2-decays from the chunk's start,

    q_grow = scale q^ 2^G      k_grow = k^ 2^G      k_tail = k^ 2^(G_64 - G)      decay = 2^(G_64)      beta = sigmoid(logit)
    a_qk[i, j] = scale sum_k q^_i k^_j 2^(G_i - G_j)  (i >= j)        inverse = (I + tril(beta_i sum_k k^_i k^_j 2^(G_i - G_j), -1))^-1

(q^, k^ normalised). v is not read: the state's pass applies the inverse to beta (v - k_grow S).

Range. 64 tokens may span 64 * 5 nats, more than fp32 has, so G_i - G_j is never split at the chunk's start. A row block of 16 has its own start a as
anchor: 2^(G_i - a) <= 1 for its rows, and 2^(a - G_j) for keys, which is <= 1 for earlier blocks and at most e^80 inside the block. No anchor is later
than the row it serves, so nothing that a row gets depends on what follows it.

Inverse. Its 8 x 8 diagonal blocks by substitution in fp32 (never Neumann doubling, which loses everything on repeated keys), then three merges of
blocks, [[A, 0], [-C B A, C]], whose products take fp16 operands: every entry is a product of contractions, so at most 1 in magnitude, and fp16
keeps 2^-12 of it, less than what the final bfloat16 loses.

Layout. Tiles are loaded with their rows permuted so that, with 4 warps, a warp holds one block of 16 rows and a thread 8 consecutive ones: sums
along tokens are then additions in registers, and what is constant a block costs one eighth.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["chunk_table", "gate_log2", "inverse_norm", "prepare_chunks"]

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["sequences", "rows"])
def chunk_table(cu_seqlens, table, offsets, sequences, rows, C: tl.constexpr, BLOCK: tl.constexpr):
    """Where the pieces of C tokens lie, for sequences of any length: table [rows, 4] int32 (sequence, first token, tokens, index in the sequence),
    -1 beyond the last, and offsets [sequences + 1] int32, each sequence's first piece. One program a sequence and one for what is beyond."""
    n = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    base = tl.zeros([BLOCK], tl.int32)
    for first in range(0, n, BLOCK):
        at = first + lane
        start = tl.load(cu_seqlens + at, mask=at < n, other=0).to(tl.int32)
        stop = tl.load(cu_seqlens + at + 1, mask=at < n, other=0).to(tl.int32)
        base += (stop - start + C - 1) // C
    piece = tl.sum(base, 0)
    tl.store(offsets + n, piece)
    if n < sequences:
        start = tl.load(cu_seqlens + n).to(tl.int32)
        length = tl.load(cu_seqlens + n + 1).to(tl.int32) - start
        for first in range(0, (length + C - 1) // C, BLOCK):
            index = first + lane
            live = index * C < length
            to = table + (piece + index) * 4
            tl.store(to, n + index * 0, mask=live)
            tl.store(to + 1, start + index * C, mask=live)
            tl.store(to + 2, tl.minimum(length - index * C, C), mask=live)
            tl.store(to + 3, index, mask=live)
    else:
        for first in range(piece, rows, BLOCK):
            at = first + lane
            tl.store(table + at * 4, lane * 0 - 1, mask=at < rows)


@triton.jit
def inverse_norm(x):
    """1 / sqrt(sum x^2 + 1e-6) over the last axis of [rows, K]: K3's epsilon, inside the root."""
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def gate_log2(z, dt, a_log, LOWER: tl.constexpr):
    """log2 of the decay, LOWER log2(e) sigmoid(exp(a_log) (z + dt)), in fp32; 0 where z is -inf. A root in place of the division: fewer
    instructions, and the error of a square of two roundings."""
    rate = tl.exp(a_log) * -_LOG2E
    root = tl.rsqrt(1.0 + tl.exp2(z * rate + dt * rate))
    return (root * (LOWER * _LOG2E)) * root


@triton.jit
def _tile(x, C: tl.constexpr, K: tl.constexpr):
    """[8, 4, 2, K], as rows are held, to [C, K] in the tokens' order, in bfloat16."""
    return tl.reshape(tl.permute(x, (1, 2, 0, 3)), [C, K]).to(tl.bfloat16)


@triton.jit
def _of_block(x, block, NUMBER: tl.constexpr):
    return tl.sum(tl.where(block == NUMBER, x, 0.0), 0)[None, :]


@triton.jit
def _scores(rows, same, one, two, three, block, column):
    """Products of a row block's rows with the keys anchored at its start: `same` for its own block, `one`, `two`, `three` for blocks 1, 2, 3."""
    a = tl.dot(rows, tl.trans(three))
    a = tl.where(block == 2, tl.dot(rows, tl.trans(two)), a)
    a = tl.where(block == 1, tl.dot(rows, tl.trans(one)), a)
    return tl.where(block == column, tl.dot(rows, tl.trans(same)), a)


@triton.jit
def _half_dot(a, b):
    return tl.dot(a.to(tl.float16), b.to(tl.float16))


@triton.jit
def _merge(t, a, block, column, WIDTH: tl.constexpr):
    """Inverses of diagonal blocks of WIDTH to those of twice it."""
    one = block // WIDTH
    other = column // WIDTH
    return t - _half_dot(t, _half_dot(tl.where((one == other + 1) & (other % 2 == 0), a, 0.0), t))


@triton.jit
def _inverse(a, i, j, C: tl.constexpr):
    """(I + a)^-1 for a strictly lower triangular a [64, 64] in fp32, i and j its indices."""
    diagonal = tl.arange(0, 8)[:, None, None, None] == tl.arange(0, 8)[None, None, :, None]
    d = tl.sum(tl.where(diagonal, tl.reshape(a, [8, 8, 8, 8]), 0.0), 2)
    row = tl.arange(0, 8)[None, :, None]
    col = tl.arange(0, 8)[None, None, :]
    t = tl.where(row == col, 1.0, 0.0) + d * 0.0
    for n in tl.static_range(7):
        weights = tl.sum(tl.where(col == n, d, 0.0), 2)
        known = tl.sum(tl.where(row == n, t, 0.0), 1)
        t -= weights[:, :, None] * known[:, None, :]
    t = tl.reshape(tl.where(diagonal, tl.broadcast_to(t[:, :, None, :], [8, 8, 8, 8]), 0.0), [C, C])
    t = _merge(t, a, i, j, 8)
    t = _merge(t, a, i, j, 16)
    return _merge(t, a, i, j, 32)


@triton.jit(do_not_specialize=["first_chunk", "sequences", "steps", "heads", "beta_batch", "beta_step"])
def prepare_chunks(q, k, z, beta, a_log, dt_bias, table, k_grow, q_grow, k_tail, inverse, a_qk, decay, betas, first_chunk, sequences, steps, heads,
                   q_batch, q_step, k_batch, k_step, z_batch, z_step, beta_batch, beta_step, SCALE: tl.constexpr, LOWER: tl.constexpr,
                   VARLEN: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    tile = tl.program_id(0)
    h = tile % heads
    chunk = tile // heads + first_chunk
    if VARLEN:
        batch = tl.load(table + chunk.to(tl.int64) * 4)
        if batch < 0:
            return
        batch = batch.to(tl.int64) * 0
        t0 = tl.load(table + chunk.to(tl.int64) * 4 + 1).to(tl.int64)
        left = tl.load(table + chunk.to(tl.int64) * 4 + 2)
    else:
        batch = (chunk % sequences).to(tl.int64)
        t0 = (chunk // sequences).to(tl.int64) * C
        left = tl.minimum(steps - t0, C).to(tl.int32)
    p = tl.arange(0, C)
    r = (16 * ((p // 2) % 4) + 8 * (p % 2) + p // 8)[:, None]
    c = tl.arange(0, K)
    live = r < left
    at = h * K + c[None, :]
    zf = tl.load(z + batch * z_batch + t0 * z_step + at + r * z_step, mask=live, other=-float("inf")).to(tl.float32)
    kf = tl.load(k + batch * k_batch + t0 * k_step + at + r * k_step, mask=live, other=0.0).to(tl.float32)
    qf = tl.load(q + batch * q_batch + t0 * q_step + at + r * q_step, mask=live, other=0.0).to(tl.float32)
    g = tl.reshape(gate_log2(zf, tl.load(dt_bias + h * K + c)[None, :], tl.load(a_log + h), LOWER), [8, 4, 2, K])

    half = tl.arange(0, 2)[None, :, None]
    eight = tl.sum(g, 0)
    before_half = tl.where(half == 0, 0.0, tl.sum(tl.where(half == 0, eight, 0.0), 1)[:, None, :])
    inside = tl.cumsum(g, 0) + before_half[None, :, :, :]
    block4 = tl.arange(0, 4)[:, None]
    total = tl.sum(eight, 1)
    g0 = _of_block(total, block4, 0)
    g1 = _of_block(total, block4, 1)
    g2 = _of_block(total, block4, 2)
    g3 = _of_block(total, block4, 3)
    before = tl.where(block4 == 0, 0.0, tl.where(block4 == 1, g0, tl.where(block4 == 2, g0 + g1, g0 + g1 + g2)))
    after = tl.where(block4 == 3, 0.0, tl.where(block4 == 2, g3, tl.where(block4 == 1, g3 + g2, g3 + g2 + g1)))
    start = tl.exp2(before)[None, :, None, :]

    rk = inverse_norm(kf)[:, None]
    rq = inverse_norm(qf)[:, None]
    wide = tile.to(tl.int64) * (C * K) + r * K + c[None, :]
    grow = tl.exp2(inside)
    qg = tl.reshape(qf * rq, [8, 4, 2, K]) * grow
    q_rows = _tile(qg, C, K)
    tl.store(q_grow + wide, tl.reshape(qg * (start * SCALE), [C, K]).to(tl.bfloat16))
    k4 = tl.reshape(kf * rk, [8, 4, 2, K])
    kg = k4 * grow
    k_rows = _tile(kg, C, K)
    tl.store(k_grow + wide, tl.reshape(kg * start, [C, K]).to(tl.bfloat16))
    keys = k4 * tl.exp2(-inside)
    same = _tile(keys, C, K)
    keys = keys * tl.exp2(total)[None, :, None, :]
    tl.store(k_tail + wide, tl.reshape(keys * tl.exp2(after)[None, :, None, :], [C, K]).to(tl.bfloat16))
    tl.store(decay + tile.to(tl.int64) * K + c, tl.exp2(tl.sum(total, 0)))
    to_two = tl.where(block4 == 0, tl.exp2(g1), tl.where(block4 == 1, 1.0, 0.0))
    to_three = tl.where(block4 == 0, tl.exp2(g1 + g2), tl.where(block4 == 1, tl.exp2(g2), tl.where(block4 == 2, 1.0, 0.0)))
    one = _tile(keys, C, K)
    two = _tile(keys * to_two[None, :, None, :], C, K)
    three = _tile(keys * to_three[None, :, None, :], C, K)

    i = p[:, None]
    j = p[None, :]
    block = i // 16
    column = j // 16
    square = tile.to(tl.int64) * (C * C) + i * C + j
    a = _scores(q_rows, same, one, two, three, block, column)
    tl.store(a_qk + square, tl.where(i >= j, a * SCALE, 0.0).to(tl.bfloat16))
    logit = tl.load(beta + batch * beta_batch + (t0 + p) * beta_step + h, mask=p < left, other=-float("inf")).to(tl.float32)
    b = tl.sigmoid(logit)
    tl.store(betas + tile.to(tl.int64) * C + p, b)
    a = _scores(k_rows, same, one, two, three, block, column)
    a = tl.where(i > j, a * b[:, None], 0.0)
    solved = _inverse(a, i, j, C)
    tl.store(inverse + square, solved.to(tl.bfloat16))
