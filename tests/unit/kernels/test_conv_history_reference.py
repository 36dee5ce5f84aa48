"""The convolution while decoding, and the norm and gate behind KDA, by their references. (On a CPU an exponential's last bit depends on where in a
tensor it lies: outputs are compared within one; the kernels' bits are compared elsewhere.)"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.gated_norm import gated_norm
from driftline.kernels.short_conv import short_conv, short_conv_decode, short_conv_replay

torch.set_num_threads(1)

CHANNELS, SLOTS, CAPACITY = 5, 4, 4


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(rounds=st.lists(st.tuples(st.integers(1, CAPACITY), st.integers(0, CAPACITY)), min_size=1, max_size=6))
def test_any_history_of_drafts_is_one_prefill_of_what_was_accepted(rounds: list[tuple[int, int]]) -> None:
    weight, tail = noise(CHANNELS, 4), noise(1, 3, CHANNELS, seed=1)
    history, slots, accepted = torch.full((SLOTS, 3 + CAPACITY, CHANNELS), torch.nan), torch.tensor([2], dtype=torch.int32), 0
    history[2, :3] = tail
    real = torch.zeros(1, 0, CHANNELS)
    for i, (tokens, count) in enumerate(rounds):
        x = noise(1, tokens, CHANNELS, seed=2 + i)
        out = short_conv_replay(x, weight, history, slots, torch.tensor([accepted], dtype=torch.int32))
        whole, _ = short_conv(torch.cat([real, x], 1), weight, tail)
        torch.testing.assert_close(out, whole[:, real.shape[1] :], rtol=1e-6, atol=1e-7)
        accepted = min(count, tokens)
        real = torch.cat([real, x[:, :accepted]], 1)


def test_decode_is_prefill_one_input_at_a_time() -> None:
    x, weight, tail = noise(2, 6, CHANNELS), noise(CHANNELS, 4, seed=1), noise(2, 3, CHANNELS, seed=2)
    tails, slots = torch.zeros(SLOTS, 3, CHANNELS), torch.tensor([3, 0], dtype=torch.int32)
    tails[slots.long()] = tail
    want, end = short_conv(x, weight, tail)
    outs = [short_conv_decode(x[:, t], weight, tails, slots) for t in range(6)]
    torch.testing.assert_close(torch.stack(outs, 1), want, rtol=1e-6, atol=1e-7)
    assert torch.equal(tails[slots.long()], end)


def test_padding_rows_touch_nothing() -> None:
    history, padding = torch.ones(SLOTS, 3, CHANNELS), torch.tensor([-1], dtype=torch.int32)
    assert not short_conv_decode(noise(1, CHANNELS), noise(CHANNELS, 4), history, padding).any()
    assert bool((history == 1).all())


def test_a_history_or_count_that_does_not_fit_is_named() -> None:
    x, weight, slots = noise(1, 2, CHANNELS), noise(CHANNELS, 4), torch.zeros(1, dtype=torch.int32)
    counts = slots.clone()
    with pytest.raises(ValueError, match="2 inputs a row; the history has room for 1 to 1"):
        short_conv_replay(x, weight, torch.zeros(SLOTS, 4, CHANNELS), slots, counts)
    with pytest.raises(ValueError, match=r"the history is torch\.bfloat16"):
        short_conv_replay(x, weight, torch.zeros(SLOTS, 7, CHANNELS).bfloat16(), slots, counts)
    with pytest.raises(ValueError, match=r"accepted is torch\.int64"):
        short_conv_replay(x, weight, torch.zeros(SLOTS, 7, CHANNELS), slots, counts.long())
    with pytest.raises(ValueError, match="tails hold 4 inputs"):
        short_conv_decode(x[:, 0], weight, torch.zeros(SLOTS, 4, CHANNELS), slots)
    with pytest.raises(ValueError, match=r"slots is torch\.int64"):
        short_conv_decode(x[:, 0], weight, torch.zeros(SLOTS, 3, CHANNELS), slots.long())


def test_a_tail_or_length_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"tail \(2, 2, 5\)"):
        short_conv(noise(2, 6, CHANNELS), noise(CHANNELS, 4), noise(2, 2, CHANNELS))
    with pytest.raises(ValueError, match=r"lengths is \(3,\)"):
        short_conv(noise(2, 6, CHANNELS), noise(CHANNELS, 4), noise(2, 3, CHANNELS), torch.tensor([1, 2, 3]))


def test_the_gated_norm_rounds_once() -> None:
    """As the release's fused norm does; its other norms round before the weight."""
    o, weight, gate = noise(7, 96), 1 + 0.2 * noise(96, seed=1), noise(7, 96, seed=2).bfloat16()
    out = gated_norm(o, weight, gate, 1e-5)
    unit = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(out, (unit * weight * torch.sigmoid(gate.float())).bfloat16())
    stepwise = unit.bfloat16() * weight.bfloat16() * torch.sigmoid(gate.float()).bfloat16()
    assert (out != stepwise).float().mean() > 0.1


def test_a_gate_of_another_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"gate \(7, 95\)"):
        gated_norm(noise(7, 96), noise(96), noise(7, 95), 1e-5)
