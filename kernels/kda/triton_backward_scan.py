# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""The serial part, both ways in one launch: the state at each chunk's start, and the gradient of the state at each chunk's end.

Forward, `V' = u - w S; S <- decay S + ktail^T V'`; in reverse, `dS <- decay dS + qbar^T do - w^T (ktail dS)`. Neither needs what the other finds, so
half of the programs run each; a program owns one head of one sequence and BV of the 128 value channels, and keeps its slice in fp32. Every left
operand of a product is read from memory and every right one is in shared memory, so that no matrix instruction reads its operands from registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftline.kernels.kda.triton_backward_decay import add_dot, dot, narrow

__all__ = ["scan"]


@triton.jit(do_not_specialize=["steps", "chunks_each", "head0", "group"])
def scan(w_in, u_io, qbar_in, ktail_in, decay_in, do, initial, dfinal, states_out, dstates_out, dinitial_out, first, bounds, steps, chunks_each, heads,
         head0, group, VARLEN: tl.constexpr, INITIAL: tl.constexpr, DFINAL: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, BV: tl.constexpr,
         STAGES: tl.constexpr):
    """Grid (2 x 128 / BV, group, sequences). u becomes V'. states, dstates bf16 [chunks, group, 128, 128], transposed: at the start and at the end of the chunk.
    initial, dfinal, dinitial fp32 [sequences, heads, 128, 128]."""
    PARTS: tl.constexpr = WIDTH // BV
    part = tl.program_id(0) % PARTS
    slot = tl.program_id(1)
    sequence = tl.program_id(2)
    if VARLEN:
        begin = tl.load(bounds + sequence).to(tl.int64)
        length = (tl.load(bounds + sequence + 1).to(tl.int64) - begin).to(tl.int32)
        chunk0 = tl.load(first + sequence).to(tl.int32)
    else:
        begin = sequence.to(tl.int64) * steps
        length = steps
        chunk0 = sequence * chunks_each
    count = (length + CHUNK - 1) // CHUNK
    row = tl.arange(0, CHUNK)[:, None]
    key = tl.arange(0, WIDTH)
    value = part * BV + tl.arange(0, BV)
    wide = row * WIDTH + key[None, :]
    slice_ = row * WIDTH + value[None, :]
    turned = value[:, None] * WIDTH + key[None, :]
    whole = (sequence.to(tl.int64) * heads + head0 + slot) * WIDTH * WIDTH + (key[:, None] * WIDTH + value[None, :])
    if tl.program_id(0) < PARTS:
        if INITIAL:
            state = tl.load(initial + whole).to(tl.float32)
        else:
            state = tl.zeros([WIDTH, BV], tl.float32)
        for n in tl.range(0, count, num_stages=STAGES):
            tile = (chunk0 + n).to(tl.int64) * group + slot
            narrowed = narrow(state)
            tl.store(states_out + tile * WIDTH * WIDTH + turned, tl.trans(narrowed))
            at = tile * CHUNK * WIDTH
            inner = tl.load(u_io + at + slice_).to(tl.float32) - dot(tl.load(w_in + at + wide), narrowed)
            inner = narrow(inner)
            state = state * tl.load(decay_in + tile * WIDTH + key)[:, None]
            state = add_dot(tl.trans(tl.load(ktail_in + at + wide)), inner, state)
            tl.store(u_io + at + slice_, inner)
    else:
        if DFINAL:
            grad = tl.load(dfinal + whole).to(tl.float32)
        else:
            grad = tl.zeros([WIDTH, BV], tl.float32)
        for n in tl.range(0, count, num_stages=STAGES):
            chunk = count - 1 - n
            tile = (chunk0 + chunk).to(tl.int64) * group + slot
            narrowed = narrow(grad)
            tl.store(dstates_out + tile * WIDTH * WIDTH + turned, tl.trans(narrowed))
            at = tile * CHUNK * WIDTH
            token = begin + chunk * CHUNK + row
            output = tl.load(do + (token * heads + head0 + slot) * WIDTH + value[None, :], mask=row < length - chunk * CHUNK, other=0.0)
            found = dot(tl.load(ktail_in + at + wide), narrowed)
            grad = grad * tl.load(decay_in + tile * WIDTH + key)[:, None]
            grad = add_dot(tl.trans(tl.load(qbar_in + at + wide)), output, grad)
            grad = add_dot(tl.trans(tl.load(w_in + at + wide)), narrow(-found), grad)
        tl.store(dinitial_out + whole, grad)
