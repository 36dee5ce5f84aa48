# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""The gradients of one chunk's values and betas, and the two triangles through which keys and queries meet values.

With V' what the chunk writes to the state, S and dS the state's gradient at its end, and everything on the right of one chunk:

    dX = T^T (Aqk^T do + k^ dS)      dv = beta dX      dbeta_logit = (1 - beta) <dX, V'>
    D = tril(do V'^T)                E = -tril(dv V'^T, -1)

<dX, r> of the recurrence's residual r is <dX, V'> / beta, so dbeta needs no division. D and E are left where w was, which is dead by then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftline.kernels.kda.triton_backward_decay import (
    add_dot,
    as_stored,
    dot,
    narrow,
    place,
    rows,
    sigmoid,
)

__all__ = ["values"]


@triton.jit(do_not_specialize=["steps", "chunks_each", "head0", "group"])
def values(beta, do, owner, first, bounds, v_in, triangles, ktail_in, t_in, p_in, dstates_in, dv_out, dbeta_out, steps, chunks_each, heads, head0,
           group, VARLEN: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, BV: tl.constexpr):
    """One chunk of one head a program. dv, dbeta as the inputs lie; triangles bf16 [chunks, group, 2, 64, 64]: D and E."""
    chunk = tl.program_id(0)
    slot = tl.program_id(1)
    head = head0 + slot
    begin, valid = place(chunk, steps, chunks_each, owner, first, bounds, VARLEN, CHUNK)
    if valid <= 0:
        return
    tile = chunk.to(tl.int64) * group + slot
    row = tl.arange(0, CHUNK)
    i = row[:, None]
    j = row[None, :]
    lanes = tl.arange(0, WIDTH)
    square = i * CHUNK + j
    wide = i * WIDTH + lanes[None, :]
    v_in += tile * CHUNK * WIDTH
    triangles += tile * CHUNK * WIDTH
    ktail_in += tile * CHUNK * WIDTH
    t_in += tile * CHUNK * CHUNK
    p_in += tile * CHUNK * CHUNK
    dstates_in += tile * WIDTH * WIDTH
    out = i * (heads * WIDTH)
    dv_at = dv_out + (begin * heads + head) * WIDTH
    there = i < valid
    strength = sigmoid(tl.load(beta + (begin + row) * heads + head, mask=row < valid, other=0.0).to(tl.float32))
    strength = tl.where(row < valid, strength, 0.0)

    share = tl.zeros([CHUNK], tl.float32)
    for part in range(0, WIDTH, BV):
        value = part + tl.arange(0, BV)
        dinner = dot(tl.trans(tl.load(p_in + square)), rows(do, begin, valid, head, heads, part, BV, CHUNK, WIDTH))
        dinner = add_dot(tl.load(ktail_in + wide), tl.trans(tl.load(dstates_in + (value[:, None] * WIDTH + lanes[None, :]))), dinner)
        dx = dot(tl.trans(tl.load(t_in + square)), narrow(dinner))
        share += tl.sum(dx * tl.load(v_in + (i * WIDTH + value[None, :])).to(tl.float32), axis=1)
        tl.store(dv_at + (out + value[None, :]), as_stored(dx * strength[:, None], dv_out), mask=there)
    tl.store(dbeta_out + (begin + row) * heads + head, as_stored(share * (1.0 - strength), dbeta_out), mask=row < valid)
    tl.debug_barrier()

    inner = tl.load(v_in + wide)
    output = rows(do, begin, valid, head, heads, 0, WIDTH, CHUNK, WIDTH)
    dvalue = rows(dv_out, begin, valid, head, heads, 0, WIDTH, CHUNK, WIDTH)
    SECOND: tl.constexpr = CHUNK * CHUNK
    tl.store(triangles + square, narrow(tl.where(i >= j, dot(output, tl.trans(inner)), 0.0)))
    tl.store(triangles + (SECOND + square), narrow(tl.where(i > j, -dot(dvalue, tl.trans(inner)), 0.0)))
