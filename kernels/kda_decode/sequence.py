# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined,assignment"
"""Sequences of any length by the step that decodes one token: the bits of decoding them token by token, from one launch.

A program keeps the state of one sequence's head in registers from its first token to its last. `_prepare`, `_prepare_queries` and `_recur_read` are those of
`kda_decode`, in the same layouts and without contraction, so prefill, a learner's forward and decode compute the same bits; where a sequence lies, what is
beside it and in which pieces it comes leave no trace. WINDOW tokens are prepared at once, and the next ones are on their way meanwhile.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from driftline.kernels.kda_decode.triton import (
    _DIM,
    _LOG2_E,
    _PART,
    _PARTS,
    _STATE,
    _TOKEN,
    _ask_rows,
    _dense,
    _places,
    _prepare,
    _prepare_queries,
    _recur_read,
    _room,
    _store_state,
    _wait,
)

__all__ = ["WINDOW", "WINDOWS", "kda_sequence"]

WINDOW = 8
"""Tokens that are prepared at once. No bit depends on it."""

WINDOWS = (WINDOW, 4, 16)
"""What the benchmark's sweep times."""


@gluon.jit
def _ask_window(raw, q, k, v, z, first, qkv_begin, qkv_step, z_begin, z_step, head, count, WINDOW: gl.constexpr):
    """Begin to bring WINDOW tokens from `first` on into shared memory, those of them that are there. raw: k, z, v, q."""
    t = first + gl.arange(0, WINDOW, gl.SliceLayout(1, _TOKEN))
    _ask_rows(raw[0], k, qkv_begin, qkv_step, head, t, t < count)
    _ask_rows(raw[1], z, z_begin, z_step, head, t, t < count)
    _ask_rows(raw[2], v, qkv_begin, qkv_step, head, t, t < count)
    _ask_rows(raw[3], q, qkv_begin, qkv_step, head, t, t < count)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["tokens", "heads", "qkv_row", "qkv_step", "z_row", "z_step", "beta_row", "beta_step"])
def _sequence(q, k, v, z, beta, a_log, dt_bias, bounds, initial, final, out, tokens, heads, qkv_row, qkv_step, z_row, z_step, beta_row, beta_step, lower,
              VARLEN: gl.constexpr, HAS_INITIAL: gl.constexpr, WINDOW: gl.constexpr):
    """One program a sequence and head. Rows and steps of q, k, v and z are strides in heads; with VARLEN sequence n has the tokens bounds[n] to bounds[n + 1] of
    one row, else row n has `tokens`."""
    sequence = gl.program_id(0) // heads
    head = gl.program_id(0) % heads
    begin = sequence.to(gl.int64) * 0
    row = sequence.to(gl.int64)
    count = tokens
    if VARLEN:
        begin = gl.load(bounds + sequence).to(gl.int64)
        row = begin * 0
        count = (gl.load(bounds + sequence + 1).to(gl.int64) - begin).to(gl.int32)
    qkv_begin = row * qkv_row + begin * qkv_step
    z_begin = row * z_row + begin * z_step
    betas = beta + row * beta_row + begin * beta_step + head
    raw = (_room(k, WINDOW), _room(z, WINDOW), _room(v, WINDOW), _room(q, WINDOW))
    _ask_window(raw, q, k, v, z, 0, qkv_begin, qkv_step, z_begin, z_step, head, count, WINDOW)
    n = gl.arange(0, _DIM, gl.SliceLayout(0, _TOKEN))
    t = gl.arange(0, WINDOW, gl.SliceLayout(1, _TOKEN))
    speed = gl.exp2(_LOG2_E * gl.load(a_log + head))
    bias = gl.load(dt_bias + head * _DIM + n)
    places = _places(final, sequence.to(gl.int64), head, heads)
    zero = gl.zeros([_PART, _DIM], gl.float32, _STATE)
    state = (zero,)
    for _ in gl.static_range(1, _PARTS):
        state = state + (zero,)  # noqa: RUF005
    if HAS_INITIAL:
        start = _places(initial, sequence.to(gl.int64), head, heads)
        state = (gl.load(start),)
        for p in gl.static_range(1, _PARTS):
            state = state + (gl.load(start + p * (_PART * _DIM)),)  # noqa: RUF005
    column = out + ((row * tokens + begin) * heads + head) * _DIM + gl.arange(0, _DIM, gl.SliceLayout(0, _STATE))
    for first in range(0, count, WINDOW):
        here = gl.minimum(count - first, WINDOW)
        new_beta = gl.load(betas + (first + t) * beta_step, mask=t < here, other=0.0)
        # The window has come, and no warp reads the tiles of the one before any more.
        async_copy.wait_group(0)
        _wait()
        decays, keys, again, values = _prepare(raw[0].load(_TOKEN), raw[1].load(_TOKEN), raw[2].load(_TOKEN), new_beta, speed, bias, lower, WINDOW, 1)
        queries = _prepare_queries(raw[3].load(_TOKEN), WINDOW)
        # The tiles are there for every warp, and what they are made of is read.
        _wait()
        _ask_window(raw, q, k, v, z, first + WINDOW, qkv_begin, qkv_step, z_begin, z_step, head, count, WINDOW)
        for i in range(here):
            state, o = _recur_read(state, decays.index(i), keys.index(i), again.index(i), values.index(i), queries.index(i))
            gl.store(column + (first + i) * heads * _DIM, o.to(out.dtype.element_ty))
    async_copy.wait_group(0)
    _store_state(places, state)


def kda_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    lower_bound: float, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, window: int = WINDOW,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B, T, H, 128] in v's dtype and the final state fp32 [N, H, 128, 128], which is a tensor of its own. Arguments as the operator's (`kernels.kda.kda`), for
    heads of 128 channels; bounds that are int32 or int64 on the device, of which nothing comes to the host."""
    batch, steps, heads, dim = q.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device) if cu_seqlens is not None else torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final = torch.empty(sequences, heads, dim, v.shape[-1], dtype=torch.float32, device=v.device)
    if not sequences * heads:
        return out, final
    q, k, v = _dense(q, k, v)
    (z,) = _dense(z)
    beta = beta if beta.stride(-1) == 1 else beta.contiguous()
    initial = None if initial_state is None else initial_state.to(torch.float32).contiguous()
    _sequence[(sequences * heads,)](
        q, k, v, z, beta, a_log.float().contiguous(), dt_bias.float().contiguous(), a_log if cu_seqlens is None else cu_seqlens.contiguous(),
        final if initial is None else initial, final, out, steps, heads, q.stride(0) // dim, q.stride(1) // dim, z.stride(0) // dim, z.stride(1) // dim,
        beta.stride(0), beta.stride(1), float(lower_bound), VARLEN=cu_seqlens is not None, HAS_INITIAL=initial is not None, WINDOW=window, num_warps=4,
        enable_fp_fusion=False,
    )
    return out, final
