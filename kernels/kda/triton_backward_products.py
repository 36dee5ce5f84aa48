# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""What the scans need of a chunk beside what the forward prepares of it: the products with the triangular inverse T.

    w = T (beta k e^G)        u = T (beta v)        qbar = scale q e^G - Aqk w

so that the scans are `V' = u - w S; S <- e^(G_64) S + ktail^T V'` and `dS <- e^(G_64) dS + qbar^T do - w^T (ktail dS)`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftline.kernels.kda.triton_backward_decay import dot, narrow, place, rows

__all__ = ["products"]


@triton.jit(do_not_specialize=["steps", "chunks_each", "head0", "group"])
def products(v, inverse, scores, betas, owner, first, bounds, w_io, qbar_io, u_out, steps, chunks_each, heads, head0, group, VARLEN: tl.constexpr,
             CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """One chunk of one head a program. inverse, scores bf16 [chunks, group, 64, 64]: T and Aqk; betas fp32 [chunks, group, 64]. w, qbar, in place
    of k e^G and scale q e^G, and u: bf16 [chunks, group, 64, 128], zero rows where no token is."""
    chunk = tl.program_id(0)
    slot = tl.program_id(1)
    begin, valid = place(chunk, steps, chunks_each, owner, first, bounds, VARLEN, CHUNK)
    if valid <= 0:
        return
    tile = chunk.to(tl.int64) * group + slot
    row = tl.arange(0, CHUNK)
    square = tile * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :]
    wide = tile * CHUNK * WIDTH + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    strength = tl.load(betas + tile * CHUNK + row)[:, None]
    keys = narrow(tl.load(w_io + wide).to(tl.float32) * strength)
    held = narrow(rows(v, begin, valid, head0 + slot, heads, 0, WIDTH, CHUNK, WIDTH).to(tl.float32) * strength)
    w = narrow(dot(tl.load(inverse + square), keys))
    tl.store(u_out + wide, narrow(dot(tl.load(inverse + square), held)))
    qbar = tl.load(qbar_io + wide).to(tl.float32) - dot(tl.load(scores + square), w)
    tl.debug_barrier()
    tl.store(w_io + wide, w)
    tl.store(qbar_io + wide, narrow(qbar))
