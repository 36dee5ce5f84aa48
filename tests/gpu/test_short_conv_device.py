"""The compiled convolution and gated norm on a CUDA device at K3's widths: near fp64 both ways, and the same bits in pieces, decoding and replaying."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.gated_norm import gated_norm
from driftline.kernels.gated_norm import reference as norm_reference
from driftline.kernels.rmsnorm.reference import rmsnorm
from driftline.kernels.short_conv import reference, short_conv, short_conv_decode, short_conv_replay

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
CHANNELS = 36_864
EPS = 1e-5


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The values of a leading index are those of any other leading shape."""
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def weights(channels: int = CHANNELS) -> torch.Tensor:
    return 0.5 * noise(channels, 4, seed=9, dtype=torch.float32)


def poison(elements: int) -> None:
    """The memory that the next result is put in is full of NaN."""
    block = torch.full((elements,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    del block


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("steps", [1, 3, 64, 65, 200])
def test_the_convolution_is_near_fp64(steps: int) -> None:
    x, weight, tail = noise(2, steps, CHANNELS), weights(), noise(2, 3, CHANNELS, seed=1)
    poison(x.numel())
    out, end = short_conv(x, weight, tail)
    wanted, _ = reference.short_conv(x.double(), weight.double(), tail.double())
    assert error(out, wanted) < 3e-3
    assert torch.equal(end, torch.cat([tail, x], 1)[:, steps:])
    wide, _ = short_conv(x.float(), weight, tail.float())
    assert error(wide, wanted) < 1e-6


@pytest.mark.parametrize("ragged", [False, True])
def test_the_convolutions_gradients_are_near_fp64(ragged: bool) -> None:
    steps, channels = 130, 4_608
    ours = [noise(2, steps, channels).requires_grad_(), weights(channels).requires_grad_(), noise(2, 3, channels, seed=1).requires_grad_()]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    lengths = torch.tensor([steps, 65], device=DEVICE) if ragged else None
    grad, grad_tail = noise(2, steps, channels, seed=2), noise(2, 3, channels, seed=3)
    poison(2 * steps * channels)
    torch.autograd.backward(short_conv(ours[0], ours[1], ours[2], lengths), (grad, grad_tail))
    torch.autograd.backward(reference.short_conv(theirs[0], theirs[1], theirs[2], lengths), (grad.double(), grad_tail.double()))
    for a, b, bound in zip(ours, theirs, (4e-3, 2e-5, 4e-3), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.dtype == a.dtype
        assert error(a.grad, b.grad) < bound


def test_pieces_decode_and_replay_give_the_bits_of_one_prefill() -> None:
    rows, steps = 3, 150
    x, weight, tail = noise(rows, steps, CHANNELS), weights(), noise(rows, 3, CHANNELS, seed=1)
    whole, end = short_conv(x, weight, tail)
    slots = torch.tensor([4, 0, 2], dtype=torch.int32, device=DEVICE)
    outs, carried = [], tail
    for piece in x.tensor_split((1, 64, 127), 1):
        out, carried = short_conv(piece, weight, carried)
        outs.append(out)
    assert torch.equal(torch.cat(outs, 1), whole)
    assert torch.equal(carried, end)
    tails = torch.full((5, 3, CHANNELS), torch.nan, dtype=x.dtype, device=DEVICE)
    tails[slots.long()] = tail
    decoded = [short_conv_decode(x[:, t].contiguous(), weight, tails, slots) for t in range(9)]
    assert torch.equal(torch.stack(decoded, 1), whole[:, :9])
    history = torch.full((5, 8, CHANNELS), torch.nan, dtype=x.dtype, device=DEVICE)
    history[slots.long(), :3] = tail
    accepted, at = torch.zeros(rows, dtype=torch.int32, device=DEVICE), 0
    for count in (2, 5, 1, 0, 3):
        draft = x[:, at : at + 5].clone()
        draft[:, count:] += 1
        out = short_conv_replay(draft, weight, history, slots, accepted)
        assert torch.equal(out[:, :count], whole[:, at : at + count])
        assert not torch.equal(out[:, count:], whole[:, at + count : at + 5]) or count == 5
        accepted.fill_(count)
        at += count


def test_a_convolved_row_is_the_row_alone_and_no_repeat_differs() -> None:
    x, weight, tail = noise(64, 4, CHANNELS), weights(), noise(64, 3, CHANNELS, seed=1)
    whole, _ = short_conv(x, weight, tail)
    for rows in (1, 2, 7):
        assert torch.equal(short_conv(x[:rows], weight, tail[:rows])[0], whole[:rows])
    inputs = [noise(1, 200, 4_608).requires_grad_(), weights(4_608).requires_grad_(), noise(1, 3, 4_608, seed=1).requires_grad_()]
    grad, wrong, first = noise(1, 200, 4_608, seed=5), torch.zeros((), dtype=torch.bool, device=DEVICE), None
    for _ in range(1000):
        out, _ = short_conv(inputs[0], inputs[1], inputs[2])
        found = (out.detach(), *torch.autograd.grad(out, inputs, grad))
        first = first or found
        for a, b in zip(found, first, strict=True):
            wrong |= (a != b).any()
    assert not wrong


def test_a_later_input_changes_no_earlier_output() -> None:
    x, weight, tail = noise(1, 130, CHANNELS), weights(), noise(1, 3, CHANNELS, seed=1)
    first, _ = short_conv(x, weight, tail)
    changed = x.clone()
    changed[:, 63:] += 1
    second, _ = short_conv(changed, weight, tail)
    assert torch.equal(first[:, :63], second[:, :63])
    assert not torch.equal(first[:, 63], second[:, 63])


def test_a_sequence_of_more_than_two_billion_elements_is_convolved_to_its_end() -> None:
    steps = 2**31 // CHANNELS + 70
    x = torch.empty(1, steps, CHANNELS, dtype=torch.bfloat16, device=DEVICE)
    for start in range(0, steps, 8192):
        x[:, start : start + 8192].copy_(noise(1, min(8192, steps - start), CHANNELS, seed=start))
    weight, tail = weights(), noise(1, 3, CHANNELS, seed=1)
    out, end = short_conv(x, weight, tail)
    last, _ = short_conv(x[:, -100:].contiguous(), weight, x[:, -103:-100].contiguous())
    assert torch.equal(out[:, -100:], last)
    assert torch.equal(end, x[:, -3:])


@pytest.mark.parametrize("rows", [1, 31, 5000])
def test_the_gated_norm_rounds_once_as_torch_does_in_fp32(rows: int) -> None:
    """Torch's own kernels sum and exponentiate otherwise, so a value beside a rounding's edge may fall on its other side: a few in ten thousand."""
    o, weight, gate = noise(rows, 96, 128, dtype=torch.float32), 1 + 0.2 * noise(128, seed=1, dtype=torch.float32), 2 * noise(rows, 96, 128, seed=2)
    poison(o.numel())
    out = gated_norm(o, weight, gate, EPS)
    wanted = norm_reference.gated_norm(o, weight, gate, EPS)
    assert out.dtype == torch.bfloat16
    assert (out != wanted).float().mean() < 2e-3
    torch.testing.assert_close(out, wanted, rtol=2**-6, atol=1e-6)
    stepwise = rmsnorm(o.bfloat16(), weight, EPS) * torch.sigmoid(gate.float()).bfloat16()
    assert (stepwise != wanted).float().mean() > 0.1
    for part in (1, 7):
        assert torch.equal(gated_norm(o[-part:], weight, gate[-part:], EPS), out[-part:])


def test_the_gated_norms_gradients_are_near_fp64_and_no_repeat_differs() -> None:
    weight = 1 + 0.2 * noise(128, seed=1, dtype=torch.float32)
    ours = [noise(700, 96, 128).requires_grad_(), weight.requires_grad_(), noise(700, 96, 128, seed=2).requires_grad_()]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    grad = noise(700, 96, 128, seed=3)
    torch.autograd.backward(norm_reference.gated_norm(theirs[0], theirs[1], theirs[2], EPS), grad.double())
    wrong, first = torch.zeros((), dtype=torch.bool, device=DEVICE), None
    for _ in range(200):
        found = torch.autograd.grad(gated_norm(ours[0], ours[1], ours[2], EPS), ours, grad)
        first = first or found
        for a, b in zip(found, first, strict=True):
            wrong |= (a != b).any()
    assert not wrong
    assert first is not None
    for a, b in zip(first, theirs, strict=True):
        assert b.grad is not None
        assert error(a, b.grad) < 5e-3
