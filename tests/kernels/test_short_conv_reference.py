"""Short convolution: pieces equal the whole, rows of any length, and nothing sees what comes after it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from driftline.kernels.short_conv import short_conv

torch.set_num_threads(1)

CHANNELS, WIDTH = 5, 4


def case(steps: int, batch: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(steps)
    shapes = ((batch, steps, CHANNELS), (CHANNELS, WIDTH), (batch, WIDTH - 1, CHANNELS))
    x, weight, tail = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes)
    return x, weight, tail


def test_equals_a_grouped_convolution_with_the_tail_on_its_left() -> None:
    x, weight, tail = case(9)
    out, _ = short_conv(x, weight, tail)
    want = F.silu(F.conv1d(torch.cat([tail, x], 1).mT, weight[:, None], groups=CHANNELS).mT)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("cuts", [(1, 2, 3, 4), (2, 9), (5, 6)])
def test_pieces_equal_the_whole(cuts: tuple[int, ...]) -> None:
    x, weight, tail = case(11)
    want, want_tail = short_conv(x, weight, tail)
    outs, start = [], 0
    for stop in (*cuts, 11):
        out, tail = short_conv(x[:, start:stop], weight, tail)
        outs.append(out)
        start = stop
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=0, atol=1e-15)
    assert torch.equal(tail, want_tail)


def test_a_ragged_row_carries_the_tail_of_its_own_end() -> None:
    x, weight, tail = case(7, batch=8)
    lengths = torch.arange(8)
    out, got = short_conv(x, weight, tail, lengths)
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            assert torch.equal(got[row], tail[row])
            continue
        alone, alone_tail = short_conv(x[row : row + 1, :length], weight, tail[row : row + 1])
        torch.testing.assert_close(out[row, :length], alone[0], rtol=0, atol=1e-15)
        assert torch.equal(got[row], alone_tail[0])


def test_half_precision_inputs_meet_the_fp32_weights_wide_and_are_cast_once() -> None:
    x, weight, tail = case(40)
    out, new_tail = short_conv(x.bfloat16(), weight.float(), tail.bfloat16())
    want, _ = short_conv(x.bfloat16().float(), weight.float(), tail.bfloat16().float())
    assert torch.equal(out, want.bfloat16())
    assert new_tail.dtype == torch.bfloat16


def test_a_later_input_changes_no_earlier_output() -> None:
    x, weight, tail = case(8)
    before, _ = short_conv(x, weight, tail)
    x[:, 5] += 1
    after, _ = short_conv(x, weight, tail)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])
