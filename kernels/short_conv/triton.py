# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""The short convolution of width 4 as Triton kernels: prefill, its backward, and decode on a pool of histories.

Every kernel walks down a strip of channels with the last three inputs in registers, so each input is read once, and every output is the same sum in
the same order: prefill in pieces, decode and replay give the bits of one prefill. The products and sums are rounded one by one, as the reference
rounds them. The weight's gradient is summed in fp32 by blocks of time, and the blocks in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["CONFIGURATION", "WIDTH", "Configuration", "backward", "decode", "forward", "replay"]

WIDTH = 4


@dataclass(frozen=True)
class Configuration:
    """`channels`: of a program; `steps`: of a program, after three that it reads for their sake."""

    channels: int
    steps: int
    warps: int


CONFIGURATION = Configuration(channels=256, steps=64, warps=2)
"""The pinned one, for every shape: four channels, so 8 bytes, a thread and access. On an NVIDIA H200 the forward and the window were fastest so, before four
steps were loaded together."""

_STRICT = {"enable_fp_fusion": False}


LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sigmoid(x):
    """To 2^-21, in five instructions: with a division it is thirteen."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def _silu(x):
    return x * _sigmoid(x)


@triton.jit
def _weights(weight, c, mask):
    at = weight + c * 4
    return (tl.load(at, mask=mask, other=0.0).to(tl.float32), tl.load(at + 1, mask=mask, other=0.0).to(tl.float32),
            tl.load(at + 2, mask=mask, other=0.0).to(tl.float32), tl.load(at + 3, mask=mask, other=0.0).to(tl.float32))


@triton.jit
def _mixed(x0, x1, x2, x3, w0, w1, w2, w3):
    out = x0 * w0
    out = out + x1 * w1
    out = out + x2 * w2
    return out + x3 * w3


@triton.jit
def _before(x, tail, row, t, steps, channels, c, mask):
    """The input at time t, which may be one of the three before the first."""
    if t >= 0:
        value = tl.load(x + (row * steps + t) * channels + c, mask=mask, other=0.0)
    else:
        value = tl.load(tail + (row * 3 + (t + 3)) * channels + c, mask=mask, other=0.0).to(x.dtype.element_ty)
    return value.to(tl.float32)


@triton.jit
def _until(mask, t, end):
    return mask & (t + tl.zeros_like(mask.to(tl.int32)) < end)


@triton.jit
def _four(x, at, t, end, channels, mask):
    """Of four steps from t on, loaded before any is used: zero from `end` on."""
    return (tl.load(x + at, mask=_until(mask, t, end), other=0.0).to(tl.float32),
            tl.load(x + at + channels, mask=_until(mask, t + 1, end), other=0.0).to(tl.float32),
            tl.load(x + at + 2 * channels, mask=_until(mask, t + 2, end), other=0.0).to(tl.float32),
            tl.load(x + at + 3 * channels, mask=_until(mask, t + 3, end), other=0.0).to(tl.float32))


@triton.jit
def _put(out, at, value, mask):
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sloped(grad, raw):
    """The gradient before SiLU, from the one behind it."""
    gate = _sigmoid(raw)
    return grad * (gate * (1.0 + raw * (1.0 - gate)))


@triton.jit
def _spread(g0, g1, g2, g3, w0, w1, w2, w3):
    return tl.fma(w3, g0, tl.fma(w2, g1, tl.fma(w1, g2, w0 * g3)))


@triton.jit(do_not_specialize=["steps"])
def _forward(x, weight, tail, lengths, out, new_tail, steps, channels, RAGGED: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < channels
    start = tl.program_id(1) * STEPS
    row = tl.program_id(2).to(tl.int64)
    w0, w1, w2, w3 = _weights(weight, c, mask)
    x0 = _before(x, tail, row, start - 3, steps, channels, c, mask)
    x1 = _before(x, tail, row, start - 2, steps, channels, c, mask)
    x2 = _before(x, tail, row, start - 1, steps, channels, c, mask)
    end = tl.minimum(start + STEPS, steps)
    for t in range(start, end, 4):
        at = (row * steps + t) * channels + c
        x3, x4, x5, x6 = _four(x, at, t, end, channels, mask)
        _put(out, at, _silu(_mixed(x0, x1, x2, x3, w0, w1, w2, w3)), mask)
        _put(out, at + channels, _silu(_mixed(x1, x2, x3, x4, w0, w1, w2, w3)), _until(mask, t + 1, end))
        _put(out, at + 2 * channels, _silu(_mixed(x2, x3, x4, x5, w0, w1, w2, w3)), _until(mask, t + 2, end))
        _put(out, at + 3 * channels, _silu(_mixed(x3, x4, x5, x6, w0, w1, w2, w3)), _until(mask, t + 3, end))
        x0, x1, x2 = x4, x5, x6
    if start == 0:
        end = steps
        if RAGGED:
            end = tl.load(lengths + row).to(tl.int32)
        for j in range(3):
            value = _before(x, tail, row, end - 3 + j, steps, channels, c, mask)
            tl.store(new_tail + (row * 3 + j) * channels + c, value.to(new_tail.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["steps"])
def _backward(x, weight, tail, grad, grad_x, grad_tail, grad_weight, steps, channels, blocks, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """grad_weight [rows * blocks, 4, channels] fp32: of each block of time. The input at time s is in the outputs from s to s + 3, so what goes to it is
    known three steps on; the first block also gives the tail's."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < channels
    start = tl.program_id(1) * STEPS
    row = tl.program_id(2).to(tl.int64)
    w0, w1, w2, w3 = _weights(weight, c, mask)
    x0 = _before(x, tail, row, start - 3, steps, channels, c, mask)
    x1 = _before(x, tail, row, start - 2, steps, channels, c, mask)
    x2 = _before(x, tail, row, start - 1, steps, channels, c, mask)
    g0 = tl.zeros((BLOCK,), tl.float32)
    g1, g2 = tl.where(mask, 0.0, 1.0), tl.where(mask, 0.0, 2.0)
    s0, s1, s2, s3 = g0, g0, g0, g0
    end = tl.minimum(start + STEPS, steps)
    for t in range(start, end + 3, 4):
        at = (row * steps + t) * channels + c
        x3, x4, x5, x6 = _four(x, at, t, steps, channels, mask)
        g3, g4, g5, g6 = _four(grad, at, t, steps, channels, mask)
        g3 = _sloped(g3, _mixed(x0, x1, x2, x3, w0, w1, w2, w3))
        g4 = _sloped(g4, _mixed(x1, x2, x3, x4, w0, w1, w2, w3))
        g5 = _sloped(g5, _mixed(x2, x3, x4, x5, w0, w1, w2, w3))
        g6 = _sloped(g6, _mixed(x3, x4, x5, x6, w0, w1, w2, w3))
        first, second, third = _spread(g0, g1, g2, g3, w0, w1, w2, w3), _spread(g1, g2, g3, g4, w0, w1, w2, w3), _spread(g2, g3, g4, g5, w0, w1, w2, w3)
        if t > start:
            _put(grad_x, at - 3 * channels, first, mask)
            _put(grad_x, at - 2 * channels, second, _until(mask, t - 2, end))
            _put(grad_x, at - channels, third, _until(mask, t - 1, end))
        elif t == 0:
            held = row * 3 * channels + c
            _put(grad_tail, held, first, mask)
            _put(grad_tail, held + channels, second, mask)
            _put(grad_tail, held + 2 * channels, third, mask)
        _put(grad_x, at, _spread(g3, g4, g5, g6, w0, w1, w2, w3), _until(mask, t, end))
        h3, h4 = tl.where(_until(mask, t, end), g3, 0.0), tl.where(_until(mask, t + 1, end), g4, 0.0)
        h5, h6 = tl.where(_until(mask, t + 2, end), g5, 0.0), tl.where(_until(mask, t + 3, end), g6, 0.0)
        s0 = tl.fma(h6, x3, tl.fma(h5, x2, tl.fma(h4, x1, tl.fma(h3, x0, s0))))
        s1 = tl.fma(h6, x4, tl.fma(h5, x3, tl.fma(h4, x2, tl.fma(h3, x1, s1))))
        s2 = tl.fma(h6, x5, tl.fma(h5, x4, tl.fma(h4, x3, tl.fma(h3, x2, s2))))
        s3 = tl.fma(h6, x6, tl.fma(h5, x5, tl.fma(h4, x4, tl.fma(h3, x3, s3))))
        x0, x1, x2, g0, g1, g2 = x4, x5, x6, g4, g5, g6
    part = (row * blocks + tl.program_id(1)) * 4 * channels + c
    tl.store(grad_weight + part, s0, mask=mask)
    tl.store(grad_weight + part + channels, s1, mask=mask)
    tl.store(grad_weight + part + 2 * channels, s2, mask=mask)
    tl.store(grad_weight + part + 3 * channels, s3, mask=mask)


@triton.jit(do_not_specialize=["steps", "capacity"])
def _decode(x, weight, history, slots, accepted, out, steps, channels, capacity, REPLAY: tl.constexpr, BLOCK: tl.constexpr):
    """A channel's history is read and written by the one thread that has the channel."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < channels
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        w0, w1, w2, w3 = _weights(weight, c, mask)
        held = history + slot * (3 + capacity) * channels + c
        first = held
        if REPLAY:
            first = held + tl.minimum(tl.maximum(tl.load(accepted + row), 0), capacity) * channels
        h0 = tl.load(first, mask=mask, other=0.0)
        h1 = tl.load(first + channels, mask=mask, other=0.0)
        h2 = tl.load(first + 2 * channels, mask=mask, other=0.0)
        if REPLAY:
            tl.store(held, h0, mask=mask)
            tl.store(held + channels, h1, mask=mask)
            tl.store(held + 2 * channels, h2, mask=mask)
        x0, x1, x2 = h0.to(tl.float32), h1.to(tl.float32), h2.to(tl.float32)
        for t in range(steps):
            at = (row * steps + t) * channels + c
            new = tl.load(x + at, mask=mask, other=0.0)
            x3 = new.to(tl.float32)
            tl.store(out + at, _silu(_mixed(x0, x1, x2, x3, w0, w1, w2, w3)).to(out.dtype.element_ty), mask=mask)
            if REPLAY:
                tl.store(held + (3 + t) * channels, new, mask=mask)
            x0, x1, x2 = x1, x2, x3
        if not REPLAY:
            tl.store(held, x0.to(history.dtype.element_ty), mask=mask)
            tl.store(held + channels, x1.to(history.dtype.element_ty), mask=mask)
            tl.store(held + 2 * channels, x2.to(history.dtype.element_ty), mask=mask)
    else:
        for t in range(steps):
            tl.store(out + (row * steps + t) * channels + c, tl.zeros((BLOCK,), tl.float32).to(out.dtype.element_ty), mask=mask)


def forward(
    x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor, lengths: torch.Tensor | None, configuration: Configuration = CONFIGURATION
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.short_conv` for a width of 4."""
    x, weight, tail = x.contiguous(), weight.contiguous(), tail.contiguous()
    rows, steps, channels = x.shape
    out, new_tail = torch.empty_like(x), torch.empty(rows, WIDTH - 1, channels, dtype=x.dtype, device=x.device)
    if not steps:
        return out, tail.to(x.dtype, copy=True)
    grid = (triton.cdiv(channels, configuration.channels), triton.cdiv(steps, configuration.steps), rows)
    _forward[grid](x, weight, tail, x if lengths is None else lengths, out, new_tail, steps, channels, RAGGED=lengths is not None, BLOCK=configuration.channels,
                   STEPS=configuration.steps, num_warps=configuration.warps, **_STRICT)
    return out, new_tail


def backward(
    x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor, grad: torch.Tensor, configuration: Configuration = CONFIGURATION
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the outputs' gradient [B, T, C], T >= 1: those of x, weight and tail, in their dtypes. The outputs are computed again from x."""
    x, weight, tail, grad = x.contiguous(), weight.contiguous(), tail.contiguous(), grad.contiguous()
    rows, steps, channels = x.shape
    blocks = triton.cdiv(steps, configuration.steps)
    grad_x, grad_tail = torch.empty_like(x), torch.empty_like(tail)
    parts = torch.empty(rows * blocks, WIDTH, channels, dtype=torch.float32, device=x.device)
    _backward[(triton.cdiv(channels, configuration.channels), blocks, rows)](
        x, weight, tail, grad, grad_x, grad_tail, parts, steps, channels, blocks, BLOCK=configuration.channels, STEPS=configuration.steps,
        num_warps=configuration.warps, **_STRICT,
    )
    return grad_x, parts.sum(0).T.to(weight.dtype), grad_tail


def decode(x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, slots: torch.Tensor, configuration: Configuration = CONFIGURATION) -> torch.Tensor:
    """As `history.short_conv_decode`'s reference, for a width of 4."""
    return _decoded(x, weight, tails, slots, slots, configuration, replays=False)


def replay(
    x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, configuration: Configuration = CONFIGURATION
) -> torch.Tensor:
    """As `history.short_conv_replay`'s reference, for a width of 4."""
    return _decoded(x, weight, history, slots, accepted, configuration, replays=True)


def _decoded(
    x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, configuration: Configuration, *, replays: bool
) -> torch.Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    rows, steps, channels = x.shape
    out = torch.empty_like(x)
    if rows:
        _decode[(triton.cdiv(channels, configuration.channels), rows)](
            x, weight, history, slots, accepted, out, steps, channels, history.shape[1] - (WIDTH - 1), REPLAY=replays, BLOCK=configuration.channels,
            num_warps=configuration.warps, **_STRICT,
        )
    return out
