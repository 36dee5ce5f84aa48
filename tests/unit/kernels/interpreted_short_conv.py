"""The short convolution's kernels, as Triton's interpreter runs them on the CPU, against the reference and against each other. Run by
test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.short_conv import autograd, reference
from driftline.kernels.short_conv import triton as kernels

torch.set_num_threads(1)

SMALL = kernels.Configuration(channels=4, steps=4, warps=1)
CHANNELS = 5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for launch in (kernels.forward, kernels.backward, kernels.decode, kernels.replay):
        monkeypatch.setattr(launch, "__defaults__", (SMALL,))


def case(steps: int, rows: int = 2, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed + steps)
    x, tail = torch.randn(rows, steps, CHANNELS, generator=rng).to(dtype), torch.randn(rows, 3, CHANNELS, generator=rng).to(dtype)
    return x, torch.randn(CHANNELS, 4, generator=rng), tail


@pytest.mark.parametrize("steps", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prefill_is_the_reference(steps: int, dtype: torch.dtype) -> None:
    x, weight, tail = case(steps, dtype=dtype)
    out, new_tail = kernels.forward(x, weight, tail, None)
    want, want_tail = reference.short_conv(x, weight, tail)
    torch.testing.assert_close(out, want, rtol=1e-2 if dtype is torch.bfloat16 else 2e-6, atol=1e-6)
    assert torch.equal(new_tail, want_tail)


def test_ragged_rows_carry_the_tail_of_their_own_end() -> None:
    x, weight, tail = case(4, rows=5)
    lengths = torch.arange(5)
    _, new_tail = kernels.forward(x, weight, tail, lengths)
    assert torch.equal(new_tail, reference.short_conv(x, weight, tail, lengths)[1])


@settings(max_examples=4, deadline=None)
@given(cuts=st.lists(st.integers(1, 4), min_size=2, max_size=3), seed=st.integers(0, 99))
def test_prefill_in_pieces_and_decode_give_the_bits_of_one_prefill(cuts: list[int], seed: int) -> None:
    x, weight, tail = case(sum(cuts), seed=seed)
    whole, end = kernels.forward(x, weight, tail, None)
    outs: list[torch.Tensor] = []
    carried = tail
    for stop in torch.tensor(cuts).cumsum(0).tolist():
        piece = x[:, sum(out.shape[1] for out in outs) : stop]
        out, carried = kernels.forward(piece, weight, carried, None)
        outs.append(out)
    assert torch.equal(torch.cat(outs, 1), whole)
    pool = torch.zeros(4, 3, CHANNELS, dtype=x.dtype)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    pool[slots.long()] = tail
    steps = [kernels.decode(x[:, t : t + 1], weight, pool, slots) for t in range(x.shape[1])]
    assert torch.equal(torch.cat(steps, 1), whole)
    assert torch.equal(carried, end)
    assert torch.equal(pool[slots.long()], end)
    assert not pool[[0, 2]].any()


@settings(max_examples=3, deadline=None)
@given(counts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=2), seed=st.integers(0, 99))
def test_a_window_continues_behind_what_was_accepted_of_the_last(counts: list[tuple[int, int]], seed: int) -> None:
    """As decode of the accepted inputs alone, whatever was drafted besides."""
    _, weight, tail = case(1, seed=seed)
    history, tails = torch.full((4, 6, CHANNELS), torch.nan, dtype=torch.bfloat16), torch.full((4, 3, CHANNELS), torch.nan, dtype=torch.bfloat16)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    history[slots.long(), :3] = tail
    tails[slots.long()] = tail
    accepted = torch.zeros(2, dtype=torch.int32)
    for i, pair in enumerate(counts):
        x, _, _ = case(3, seed=seed + 7 * i + 1)
        out = kernels.replay(x, weight, history, slots, accepted)
        for row, count in enumerate(pair):
            one = slots[row : row + 1]
            ahead = tails
            for t in range(3):
                if t == count:
                    ahead = tails.clone()
                held = tails if t < count else ahead
                assert torch.equal(kernels.decode(x[row : row + 1, t : t + 1], weight, held, one)[0, 0], out[row, t])
        accepted = torch.tensor(pair, dtype=torch.int32)


def test_a_padding_row_touches_nothing_and_gives_zeros() -> None:
    x, weight, _ = case(2)
    history = torch.ones(2, 5, CHANNELS, dtype=torch.bfloat16)
    padding = torch.full((2,), -1, dtype=torch.int32)
    assert not kernels.replay(x, weight, history, padding, padding).any()
    assert not kernels.decode(x[:, :1], weight, history[:, :3].contiguous(), padding).any()
    assert bool((history == 1).all())


@pytest.mark.parametrize(("steps", "ragged"), [(1, True), (2, False), (4, True), (9, False)])
def test_the_backward_is_that_of_the_reference(steps: int, ragged: bool) -> None:
    x, weight, tail = (t.float() for t in case(steps, rows=3))
    lengths = torch.tensor([steps, 0, max(steps - 2, 0)]) if ragged else None
    ours = [t.clone().requires_grad_() for t in (x, weight, tail)]
    theirs = [t.double().requires_grad_() for t in (x, weight, tail)]
    for inputs, run in ((ours, autograd.short_conv), (theirs, reference.short_conv)):
        out, new_tail = run(inputs[0], inputs[1], inputs[2], lengths)
        rng = torch.Generator().manual_seed(9)
        loss = (out * torch.randn(out.shape, generator=rng)).sum() + (new_tail * torch.randn(new_tail.shape, generator=rng)).sum()
        torch.autograd.backward([loss])
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-5)


def test_a_later_input_changes_no_earlier_bit_of_outputs_or_of_their_gradients() -> None:
    x, weight, tail = case(9)
    grad = torch.randn(2, 9, CHANNELS, generator=torch.Generator().manual_seed(4)).bfloat16()
    grad[:, 5:] = 0
    first, moved = kernels.forward(x, weight, tail, None)[0], x.clone()
    moved[:, 6] += 1
    second = kernels.forward(moved, weight, tail, None)[0]
    assert torch.equal(first[:, :6], second[:, :6])
    assert not torch.equal(first[:, 6], second[:, 6])
    assert torch.equal(kernels.backward(x, weight, tail, grad)[0], kernels.backward(moved, weight, tail, grad)[0])
