"""The XOR of spans with their base, by the reference: the bits, the counts, and what is refused."""

from __future__ import annotations

import pytest
import torch
from delta_cases import WIDTHS, noise, nudged

from driftline.kernels import policy_delta
from driftline.kernels.policy_delta.spans import LONGEST_SPAN, Rounding, checked

torch.set_num_threads(1)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_difference_is_left_in_place_counted_by_block_and_taken_back_by_the_same_call(width: int) -> None:
    base = noise(3000, WIDTHS[width])
    new = nudged(base, 0.3)
    wanted = (base.view(torch.uint8) ^ new.view(torch.uint8)).view(-1, width)
    result = new.clone()
    counts = policy_delta.xor_blocks(base, result, block=1024)
    assert torch.equal(result.view(torch.uint8), wanted.view(-1))
    assert counts.tolist() == [int(part.any(1).sum()) for part in wanted.split(1024)]
    policy_delta.xor_blocks(base, result, block=1024)
    assert torch.equal(result.view(torch.uint8), new.view(torch.uint8))


def test_a_zero_of_another_sign_is_a_change_and_an_equal_nan_is_none() -> None:
    base = torch.tensor([0x0000, 0x7FC1, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    new = torch.tensor([-0x8000, 0x7FC1, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    assert policy_delta.xor_blocks(base, new, block=256).tolist() == [1]
    assert new.view(torch.int16).tolist() == [-0x8000, 0, 0]


def test_the_blocks_of_several_spans_lie_end_to_end() -> None:
    base = [torch.zeros(300), torch.zeros(256), torch.zeros(1)]
    new = [torch.ones(300), torch.zeros(256), torch.ones(1)]
    assert policy_delta.Xor(base, new, block=256).run().tolist() == [256, 44, 0, 1]
    assert policy_delta.Xor([], [], block=256).run().numel() == 0


@pytest.mark.parametrize("block", [0, -256, 128, 300, 131_072])
def test_a_block_that_cannot_be_counted_is_refused(block: int) -> None:
    with pytest.raises(ValueError, match=f"block is {block} elements; it must be a power of two"):
        policy_delta.xor_blocks(torch.zeros(4), torch.zeros(4), block=block)
    with pytest.raises(ValueError, match="power of two"):
        policy_delta.Xor([torch.zeros(4)], [torch.zeros(4)], block=block)


def test_spans_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="elements"):
        policy_delta.xor_blocks(torch.zeros(4), torch.zeros(5))
    with pytest.raises(ValueError, match="does not take"):
        policy_delta.xor_blocks(torch.zeros(4), torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="contiguous"):
        policy_delta.xor_blocks(torch.zeros(4), torch.zeros(8)[::2])


def test_a_span_longer_than_positions_can_count_is_taken_and_refused_where_positions_are_listed() -> None:
    long = torch.empty(LONGEST_SPAN + 1, dtype=torch.uint8)
    checked([long], [long], Rounding.NONE, longest=None)
    with pytest.raises(ValueError, match=f"from 1 to {LONGEST_SPAN}"):
        checked([long], [long], Rounding.NONE)
    with pytest.raises(ValueError, match="spans of 0 and 0 elements; both need as many, from 1 on"):
        policy_delta.xor_blocks(torch.zeros(0), torch.zeros(0))
