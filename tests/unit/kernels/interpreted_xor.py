"""The XOR kernels, as Triton's interpreter runs them on the CPU, against the reference."""

from __future__ import annotations

import pytest
import torch
from delta_cases import WIDTHS, noise, nudged
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.policy_delta import reference, triton_xor

torch.set_num_threads(1)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("block", [256, 4096, 65_536])
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_a_span_of_any_length_becomes_its_difference_and_back(width: int, block: int, share: float) -> None:
    for elements in (1, 255, 4096, 70_001):
        base = noise(elements, WIDTHS[width], elements)
        new = nudged(base, share)
        ours, theirs = new.clone(), new.clone()
        counts = triton_xor.xor(base, ours, block=block)
        assert torch.equal(counts, reference.xor_blocks([base], [theirs], block=block))
        assert equal(ours, theirs)
        triton_xor.xor(base, ours, block=block)
        assert equal(ours, new), "twice is never"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("configuration", triton_xor.CONFIGURATIONS)
def test_many_spans_are_one_launch_and_no_block_runs_into_the_next_span(width: int, configuration: triton_xor.Configuration) -> None:
    sizes = [1, 255, 256, 33_000, 8192]
    base = [noise(size, WIDTHS[width], i) for i, size in enumerate(sizes)]
    new = [nudged(span, share) for span, share in zip(base, (1.0, 0.5, 1.0, 0.1, 0.0), strict=True)]
    ours, theirs = [span.clone() for span in new], [span.clone() for span in new]
    counts = triton_xor.Xor(base, ours, block=1024, configuration=configuration).run()
    assert torch.equal(counts, reference.xor_blocks(base, theirs, block=1024))
    assert counts.numel() == 1 + 1 + 1 + 33 + 8
    assert all(equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_every_element_of_the_largest_block_counts() -> None:
    """65,536 changes of one byte each: the halves of the packed count are as full as they get."""
    for width, dtype in WIDTHS.items():
        base = torch.zeros(65_536 * width, dtype=torch.uint8).view(dtype)
        new = torch.full((65_536 * width,), 0x80, dtype=torch.uint8).view(dtype)
        assert triton_xor.xor(base, new, block=65_536).tolist() == [65_536]


@settings(max_examples=20, deadline=None)
@given(start=st.integers(0, 20), other=st.integers(0, 20), elements=st.integers(1, 3000), width=st.sampled_from([1, 2, 4]))
def test_a_span_may_begin_anywhere(start: int, other: int, elements: int, width: int) -> None:
    base, new = noise(elements + 20, WIDTHS[width], 3)[start:][:elements], noise(elements + 20, WIDTHS[width], 4)[other:][:elements]
    theirs = new.clone()
    whole = new.clone()
    assert torch.equal(triton_xor.xor(base, new, block=512), reference.xor_blocks([base], [theirs], block=512))
    assert equal(new, theirs)
    assert not equal(whole, new) or not bool(base.view(torch.uint8).any())
