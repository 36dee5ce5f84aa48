"""The decode kernels' own source, run on the CPU, against the reference in fp64. Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from gluon_on_cpu import launcher
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_cases import Paged, paged

from driftline.kernels.mla_decode import reference, triton
from driftline.kernels.mla_decode.shapes import SCALE, checked

torch.set_num_threads(1)

LATENT, PART = 64, 128
BOUND = 3e-3  # probabilities are rounded to bfloat16 before the second product
NAMES = {
    "_wait": lambda gl: gl.barrier, "_copy": lambda gl: gl.copies.copy, "async_copy": lambda gl: gl.copies, "fence_async_shared": lambda gl: gl.fence,
    "warpgroup_mma": lambda gl: gl.products.multiply, "warpgroup_mma_wait": lambda gl: gl.products.wait,
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_part", launcher(triton._part, triton, NAMES))


def ours(case: Paged, latent: int = LATENT, part: int = PART, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return triton.decode(*case, checked(*case, latent, None), SCALE, out_dtype, part)


def error(case: Paged, found: torch.Tensor, latent: int = LATENT) -> float:
    exact = reference.mla_decode(case.q.double(), case.pages.double(), case.table, case.lengths, latent=latent, out_dtype=torch.float64)
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("page", [1, 64, 128])
@pytest.mark.parametrize("window", [1, 3])
def test_parts_of_any_number_and_pages_of_any_size_give_what_fp64_gives(page: int, window: int) -> None:
    case = paged([1 + window, 64, 300], heads=6, window=window, latent=LATENT, page=page)
    assert error(case, ours(case)) < BOUND


def test_a_rounded_output_is_the_output_rounded() -> None:
    """To float16: the interpreter cuts off where it should round to bfloat16."""
    case = paged([70], heads=6, latent=LATENT)
    assert torch.equal(ours(case, out_dtype=torch.float16), ours(case).half())


def test_the_widths_of_k3_and_more_heads_than_a_program_takes() -> None:
    case = paged([70], heads=66, spare=0)
    assert error(case, ours(case, 512, triton.PART), 512) < BOUND


def test_what_no_sequence_holds_is_never_read_and_a_sequence_of_no_rows_gives_zeros() -> None:
    case = paged([0, 40], heads=3, latent=LATENT, page=16)
    found = ours(case)
    assert bool(found.isfinite().all())
    assert not bool(found[0].any())
    assert bool(found[1].all())


@settings(max_examples=3, deadline=None)
@given(lengths=st.lists(st.integers(4, 300), min_size=2, max_size=3), seed=st.integers(0, 99))
def test_a_sequence_alone_and_without_the_rest_of_its_window_gives_the_bits_it_gives_with_them(lengths: list[int], seed: int) -> None:
    """The first query of a window of four, as if the later rows were not there yet. It keeps its place in the tile: the CPU's product, which stands in for
    the matrix unit's, may give a row other bits in another place. Places are checked on the device."""
    case = paged(lengths, heads=5, window=4, latent=LATENT, page=32, seed=seed)
    together = ours(case)
    for i, length in enumerate(lengths):
        shorter = torch.tensor([length - 3], dtype=torch.int32)
        alone = ours(Paged(case.q[i : i + 1, :1].contiguous(), case.pages, case.table[i : i + 1], shorter))
        assert torch.equal(alone[0, 0], together[i, 0])


def test_another_part_gives_other_bits_so_that_the_check_above_can_fail() -> None:
    case = paged([300], heads=5, latent=LATENT, page=32)
    assert not torch.equal(ours(case), ours(case, part=256))


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    case = paged([100], heads=4, latent=LATENT, page=32)
    case = case._replace(q=case.q * 200)
    found = ours(case)
    assert bool(found.isfinite().all())
    assert error(case, found) < BOUND
