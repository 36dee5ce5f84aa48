# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined,assignment"
"""KDA inside a chunk, in Gluon: everything of a chunk that does not need the state, one program a (chunk of 64, head).

From raw q, k, z and beta of 64 tokens a program makes, with G the inclusive sum of log2-decays from the chunk's start,

    q_grow = scale q^ 2^G      k_grow = k^ 2^G      k_tail = k^ 2^(G_64 - G)      decay = 2^(G_64)      beta = sigmoid(logit)
    a_qk[i, j] = scale sum_k q^_i k^_j 2^(G_i - G_j)  (i >= j)        inverse = (I + tril(beta_i sum_k k^_i k^_j 2^(G_i - G_j), -1))^-1

(q^, k^ normalised). v is not read: the state's pass applies the inverse to beta (v - k_grow S).

Range. 64 tokens may span 64 * 5 nats, more than fp32 has, so G_i - G_j is never split at the chunk's start. A row block of 16 has its own start a as
anchor: 2^(G_i - a) <= 1 for its rows, and 2^(a - G_j) for keys, which is <= 1 for earlier blocks and at most e^80 inside the block. No anchor is later
than the row it serves, so nothing that a row gets depends on what follows it.

Inverse. Its 16 x 16 diagonal blocks by substitution in fp32 (never Neumann doubling, which loses everything on repeated keys), then block columns from
the last to the first, X_wJ = -(sum_m X_wm A_mJ) T_J, whose products take fp16 operands: every entry is a product of contractions, so at most 1 in
magnitude, and fp16 keeps 11 bits of it.

Layout. A warp holds a block of 16 rows, so the products of the four blocks, each with keys anchored for it, and all of the inverse but what it takes from
other blocks are a warp's own: matrix instructions of a warp (mma.sync) and not of a group of four, and few barriers. A thread holds eight consecutive tokens
of 8 channels: sums along tokens are additions in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

__all__ = ["chunk_table", "prepare_chunks"]

_wait = getattr(gl, "barrier", None) or gl.thread_barrier
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

_LOG2E = gl.constexpr(1.4426950408889634)
_TOKENS = gl.constexpr(64)
_WIDTH = gl.constexpr(128)

_ROWS = gl.constexpr(gl.BlockedLayout([1, 1, 8, 8], [1, 2, 1, 16], [4, 1, 1, 1], [3, 2, 1, 0]))
"""[4 blocks, 2, 8 tokens, channels]."""
_GROUPS = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 2, 16], [4, 1, 1], [2, 1, 0]))
"""[4 blocks, 2, channels]: _ROWS without the tokens of a thread, as a layout of its own, for scans are of no other."""
_BLOCKS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, _ROWS)))
_FACTORS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_LINES = gl.constexpr(gl.BlockedLayout([1, 1], [16, 2], [4, 1], [1, 0]))
_OF_BLOCKS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
_OF_ROWS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
_SOLVED = gl.constexpr(gl.BlockedLayout([1, 1, 16], [1, 16, 2], [4, 1, 1], [2, 1, 0]))
"""[4 blocks, 16, 16], a thread a row of a block."""

_WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_CUBE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_TILES = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
_SQUARE = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
_SQUARES = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0]))


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


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _before(a, b, c, d):
    """Of (sum of what came before, the last): the scan of it is a sum that leaves out the element itself, and never saw it."""
    return a + b + c, d


@gluon.jit
def _wide(x):
    """bfloat16 to fp32, two at a time; fp32 as it is."""
    if x.dtype == gl.float32:
        return x
    return gl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=&r,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def _prefetch(at):
    """Ask for lines into L2, for a program that runs later."""
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _store_norms(norms, rows):
    """1 / sqrt(|row|^2 + 1e-6), K3's epsilon, of [4, 16, 128]: the diagonal of a product with itself, whose terms are exact and summed in fp32."""
    left = rows.load(gl.DotOperandLayout(0, _OF_BLOCKS, 2))
    right = gl.convert_layout(gl.permute(left, (0, 2, 1)), gl.DotOperandLayout(1, _OF_BLOCKS, 2), assert_trivial=True)
    squares = mma_v2(left, right, gl.zeros([4, 16, 16], gl.float32, _OF_BLOCKS))
    down = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, _OF_BLOCKS)))[None, :, None]
    across = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, _OF_BLOCKS)))[None, None, :]
    norms.store(gl.rsqrt(gl.sum(gl.where(down == across, squares, 0.0), 2) + 1e-6))


@gluon.jit
def _factor(factors, NUMBER: gl.constexpr):
    return factors.index(NUMBER).load(_BLOCKS)[:, None, None, :]


@gluon.jit
def _tile(x):
    """[4, 2, 8, channels], as rows are held, to [64, channels] in bfloat16."""
    return gl.reshape(x, [_TOKENS, _WIDTH]).to(gl.bfloat16)


@gluon.jit
def _element(x, index, NUMBER: gl.constexpr, axis: gl.constexpr):
    """The one of an axis that a thread holds whole: no instruction, for anything plus -0 is itself."""
    return gl.sum(gl.where(index == NUMBER, x, -0.0), axis)


@gluon.jit
def _half_dot(a, b, acc):
    left = gl.convert_layout(a.to(gl.float16), gl.DotOperandLayout(0, _OF_ROWS, 2))
    return mma_v2(left, b.load(gl.DotOperandLayout(1, _OF_ROWS, 2)), acc)


@gluon.jit
def _decays(z, rate, shift, LOWER: gl.constexpr):
    """Minus the inclusive sums, from each block's start, of log2-decays LOWER log2(e) sigmoid(exp(a_log) (z + dt)), and minus each block's whole; 0 where
    z is -inf. A root in place of the division: fewer instructions, and the error of a square of two roundings."""
    UNIT: gl.constexpr = -1.0 / (LOWER * _LOG2E)
    root = gl.rsqrt(gl.exp2(_wide(z) * rate + shift) * UNIT + UNIT)
    inside = gl.associative_scan(root * root, 2, _add)
    group = _element(inside, gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, _ROWS))))[None, None, :, None], 7, 2)
    alone = gl.convert_layout(group, _GROUPS, assert_trivial=True)
    before, _ = gl.associative_scan((alone * 0.0, alone), 1, _before)
    inside += gl.convert_layout(before, gl.SliceLayout(2, _ROWS), assert_trivial=True)[:, :, None, :]
    return inside, gl.sum(group, 1)


@gluon.jit
def _store_factors(factors, totals):
    """Of minus each block's log2-decay, per block and channel: 2 to what came before it, its own, what comes after it; and from a key's block end to the
    starts of blocks 1, 2 and 3 (back to its own start for that block's own keys). Returns the chunk's decay."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, _FACTORS)
    g0 = totals.index(0).load(COLUMN)[None, :] * -1.0
    g1 = totals.index(1).load(COLUMN)[None, :] * -1.0
    g2 = totals.index(2).load(COLUMN)[None, :] * -1.0
    g3 = totals.index(3).load(COLUMN)[None, :] * -1.0
    block = gl.arange(0, 4, gl.SliceLayout(1, _FACTORS))[:, None]
    own = gl.where(block == 0, g0, gl.where(block == 1, g1, gl.where(block == 2, g2, g3)))
    back = own * -1.0
    factors.index(0).store(gl.exp2(gl.where(block == 0, 0.0, gl.where(block == 1, g0, gl.where(block == 2, g0 + g1, g0 + g1 + g2)))))
    factors.index(1).store(gl.exp2(own))
    factors.index(2).store(gl.exp2(gl.where(block == 3, 0.0, gl.where(block == 2, g3, gl.where(block == 1, g3 + g2, g3 + g2 + g1)))))
    factors.index(3).store(gl.exp2(gl.where(block == 1, back, 0.0)))
    factors.index(4).store(gl.exp2(gl.where(block == 0, g1, gl.where(block == 2, back, 0.0))))
    factors.index(5).store(gl.exp2(gl.where(block == 0, g1 + g2, gl.where(block == 1, g2, gl.where(block == 3, back, 0.0)))))
    return gl.exp2(gl.sum(g0 + g1 + g2 + g3, 0))


@gluon.jit
def _substituted(a):
    """(I + a)^-1 for strictly lower triangular a [4, 16, 16] in fp32, rows from right to left: t[:, :n] -= t[:, n] a[n, :n]."""
    lines = gl.allocate_shared_memory(gl.float32, [16, 4, 16], _CUBE)
    lines.store(gl.permute(a, (1, 0, 2)))
    lines = _reinterpret(lines, gl.float32, [16, 4, 16], _PLAIN)
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, _SOLVED)))[None, :, None]
    col = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, _SOLVED)))[None, None, :]
    block = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, _SOLVED)))[:, None, None]
    t = gl.where(row == col, 1.0, 0.0) + block.to(gl.float32) * 0.0
    for m in gl.static_range(15):
        line = lines.index(15 - m).load(gl.SliceLayout(1, _SOLVED))
        known = _element(t, col, 15 - m, 2)
        t = gl.where(col < 15 - m, t - known[:, :, None] * line[:, None, :], t)
    return t


@gluon.jit
def _inverse(to, a):
    """Stores (I + a)^-1 for a strictly lower triangular a [4 row blocks, 16, 64] in fp32 to a square [64, 64] in bfloat16."""
    blocks = gl.reshape(a, [4, 16, 4, 16])
    HELD: gl.constexpr = blocks.type.layout
    down = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, HELD))))[:, None, None, None]
    across = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, HELD))))[None, None, :, None]
    below = gl.allocate_shared_memory(gl.float16, [16, 16, 16], _SQUARES)
    below.store(gl.reshape(gl.permute(blocks, (2, 0, 1, 3)).to(gl.float16), [16, 16, 16]))
    below = _reinterpret(below, gl.float16, [16, 16, 16], _SQUARE)
    diagonal = gl.sum(gl.where(down == across, blocks, -0.0), 2)
    solved = _substituted(diagonal)
    narrow = gl.allocate_shared_memory(gl.float16, [4, 16, 16], _SQUARES)
    narrow.store(solved.to(gl.float16))
    narrow = _reinterpret(narrow, gl.float16, [4, 16, 16], _SQUARE)
    exact = gl.allocate_shared_memory(gl.float32, [_TOKENS, 16], _PLAIN)
    exact.store(gl.reshape(solved, [_TOKENS, 16]))
    t = exact.load(_OF_ROWS)
    i = gl.arange(0, 64, gl.SliceLayout(1, _OF_ROWS))[:, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, _OF_ROWS))[None, :]
    none = gl.zeros([_TOKENS, 16], gl.float32, _OF_ROWS)
    x3 = gl.where(i // 16 == 3, t, 0.0)
    p = _half_dot(-x3, below.index(11), none)
    x2 = _half_dot(p, narrow.index(2), gl.where(i // 16 == 2, t, 0.0))
    p = _half_dot(-x3, below.index(7), _half_dot(-x2, below.index(6), none))
    x1 = _half_dot(p, narrow.index(1), gl.where(i // 16 == 1, t, 0.0))
    p = _half_dot(-x3, below.index(3), _half_dot(-x2, below.index(2), _half_dot(-x1, below.index(1), none)))
    x0 = _half_dot(p, narrow.index(0), gl.where(i // 16 == 0, t, 0.0))
    at = to + (i * _TOKENS + j)
    gl.store(at, x0.to(gl.bfloat16))
    gl.store(at + 16, x1.to(gl.bfloat16))
    gl.store(at + 32, x2.to(gl.bfloat16))
    gl.store(at + 48, x3.to(gl.bfloat16))


@gluon.jit(do_not_specialize=["first_chunk", "sequences", "steps", "heads", "ahead", "beta_batch", "beta_step"])
def prepare_chunks(q, k, z, beta, a_log, dt_bias, table, k_grow, q_grow, k_tail, inverse, a_qk, decay, betas, first_chunk, sequences, steps, heads, ahead,
                   q_batch, q_step, k_batch, k_step, z_batch, z_step, beta_batch, beta_step, SCALE: gl.constexpr, LOWER: gl.constexpr,
                   VARLEN: gl.constexpr, C: gl.constexpr, K: gl.constexpr):
    """Program (h, n) prepares head h of chunk first_chunk + n into tile n of the workspace, with 4 warps. `ahead`: how many tokens on is the chunk that is
    begun when this one ends; it is brought into L2."""
    h = gl.program_id(0)
    chunk = gl.program_id(1)
    tile = (chunk * heads + h).to(gl.int64)
    chunk += first_chunk
    if VARLEN:
        batch = gl.load(table + chunk.to(gl.int64) * 4)
        if batch < 0:
            return
        batch = batch.to(gl.int64) * 0
        t0 = gl.load(table + chunk.to(gl.int64) * 4 + 1).to(gl.int64)
        left = gl.load(table + chunk.to(gl.int64) * 4 + 2)
    else:
        if sequences == 1:
            batch = chunk.to(gl.int64) * 0
            t0 = chunk.to(gl.int64) * C
        else:
            batch = (chunk % sequences).to(gl.int64)
            t0 = (chunk // sequences).to(gl.int64) * C
        left = gl.minimum(steps - t0, C).to(gl.int32)
    block = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, _ROWS))))[:, None, None]
    group = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, _ROWS))))[None, :, None]
    token = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, _ROWS))))[None, None, :]
    r = (block * 16 + group * 8 + token)[:, :, :, None]
    c = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, _ROWS))))[None, None, None, :]
    live = (r < left) & (c >= 0)
    HELD: gl.constexpr = gl.reshape(live, [C, K]).type.layout
    zb = gl.load(z + batch * z_batch + t0 * z_step + (h * K + c + r * z_step), mask=live, other=-float("inf"))
    q_rows = gl.allocate_shared_memory(gl.bfloat16, [C, K], _TILE)
    k_rows = gl.allocate_shared_memory(gl.bfloat16, [C, K], _TILE)
    rt = gl.arange(0, C, gl.SliceLayout(1, _COPIED))[:, None]
    rc = gl.arange(0, K, gl.SliceLayout(0, _COPIED))[None, :]
    there = (rt < left) & (rc >= 0)
    _copy(q_rows, q + batch * q_batch + t0 * q_step + h * K + (rt * q_step + rc), mask=there)
    _copy(k_rows, k + batch * k_batch + t0 * k_step + h * K + (rt * k_step + rc), mask=there)
    async_copy.commit_group()
    later = gl.minimum(t0 + ahead + gl.arange(0, C, gl.SliceLayout(1, _LINES)), steps - 1)[:, None]
    line = h * K + gl.arange(0, 2, gl.SliceLayout(0, _LINES))[None, :] * (K // 2)
    _prefetch(z + batch * z_batch + (later * z_step + line))
    _prefetch(q + batch * q_batch + (later * q_step + line))
    _prefetch(k + batch * k_batch + (later * k_step + line))

    rate = gl.exp2(gl.load(a_log + h) * _LOG2E) * -_LOG2E
    bias = gl.load(dt_bias + h * K + gl.arange(0, K, gl.SliceLayout(0, _BLOCKS)))
    inside, total = _decays(zb, rate, gl.convert_layout((bias * rate)[None, None, None, :], _ROWS), LOWER)
    totals = gl.allocate_shared_memory(gl.float32, [4, K], _PLAIN)
    totals.store(total)
    async_copy.wait_group(0)
    _wait()
    q_blocks = _reinterpret(q_rows, gl.bfloat16, [4, 16, K], _TILES)
    k_blocks = _reinterpret(k_rows, gl.bfloat16, [4, 16, K], _TILES)
    q_norms = gl.allocate_shared_memory(gl.float32, [4, 16], _PLAIN)
    k_norms = gl.allocate_shared_memory(gl.float32, [4, 16], _PLAIN)
    _store_norms(q_norms, q_blocks)
    _store_norms(k_norms, k_blocks)
    factors = gl.allocate_shared_memory(gl.float32, [6, 4, K], _PLAIN)
    whole = _store_factors(factors, _reinterpret(totals, gl.float32, [4, K], _WORDS))
    gl.store(decay + tile * K + gl.arange(0, K, gl.SliceLayout(0, _FACTORS)), whole)
    rq = _reinterpret(q_norms, gl.float32, [4, 2, 8], _CUBE).load(gl.SliceLayout(3, _ROWS))[:, :, :, None]
    rk = _reinterpret(k_norms, gl.float32, [4, 2, 8], _CUBE).load(gl.SliceLayout(3, _ROWS))[:, :, :, None]
    qb = q_rows.load(HELD)
    kb = k_rows.load(HELD)
    keys = gl.allocate_shared_memory(gl.bfloat16, [4, C, K], _TILES)
    place = tile * (C * K)
    wide = r * K + c
    grow = gl.exp2(inside * -1.0)
    qg = gl.reshape(_wide(qb), [4, 2, 8, K]) * rq * grow
    q_rows.store(_tile(qg))
    gl.store(q_grow + place + wide, (qg * (_factor(factors, 0) * SCALE)).to(gl.bfloat16))
    kn = gl.reshape(_wide(kb), [4, 2, 8, K]) * rk
    kg = kn * grow
    k_rows.store(_tile(kg))
    gl.store(k_grow + place + wide, (kg * _factor(factors, 0)).to(gl.bfloat16))
    same = kn * gl.exp2(inside)
    one = same * _factor(factors, 1)
    gl.store(k_tail + place + wide, (one * _factor(factors, 2)).to(gl.bfloat16))
    even = gl.join(_tile(same), _tile(one * _factor(factors, 4)))
    odd = gl.join(_tile(one * _factor(factors, 3)), _tile(one * _factor(factors, 5)))
    keys.store(gl.reshape(gl.permute(gl.join(even, odd), (2, 3, 0, 1)), [4, C, K]))
    aq = gl.zeros([4, 16, C], gl.float32, _OF_BLOCKS)
    ak = gl.zeros([4, 16, C], gl.float32, _OF_BLOCKS)
    for first in gl.static_range(0, K, K // 2):
        right = keys.slice(first, K // 2, dim=2).permute((0, 2, 1)).load(gl.DotOperandLayout(1, _OF_BLOCKS, 2))
        aq = mma_v2(q_blocks.slice(first, K // 2, dim=2).load(gl.DotOperandLayout(0, _OF_BLOCKS, 2)), right, aq)
        ak = mma_v2(k_blocks.slice(first, K // 2, dim=2).load(gl.DotOperandLayout(0, _OF_BLOCKS, 2)), right, ak)

    p = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, _OF_BLOCKS)))[:, None] * 16
    p += gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, _OF_BLOCKS)))[None, :]
    logit = gl.load(beta + batch * beta_batch + (t0 + p) * beta_step + h, mask=p < left, other=-float("inf")).to(gl.float32)
    b = 1.0 / (1.0 + gl.exp2(logit * -_LOG2E))
    gl.store(betas + tile * C + p, b)
    i = p[:, :, None]
    j = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, _OF_BLOCKS)))[None, None, :]
    gl.store(a_qk + tile * (C * C) + (i * C + j), gl.where(i >= j, aq * SCALE, 0.0).to(gl.bfloat16))
    _inverse(inverse + tile * (C * C), gl.where(i > j, ak * b[:, :, None], 0.0))
