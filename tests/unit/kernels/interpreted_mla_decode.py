"""The decode kernels, as Triton's interpreter runs them on the CPU, against the reference in fp64. In float16: the interpreter
multiplies matrices of bfloat16 as the integers that hold them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_cases import Paged
from mla_cases import paged as paged_of

from driftline.kernels.mla_decode import reference, triton
from driftline.kernels.mla_decode.shapes import SCALE, checked

torch.set_num_threads(1)
paged = partial(paged_of, dtype=torch.float16)
SMALL = triton.Configuration(part=64, tile=32, warps=4, stages=2)


def ours(case: Paged, latent: int, configuration: triton.Configuration = SMALL, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    sizes = checked(*case, latent, None)
    return triton.decode(*case, sizes, SCALE, out_dtype, configuration)


def error(case: Paged, found: torch.Tensor, latent: int) -> float:
    exact = reference.mla_decode(case.q.double(), case.pages.double(), case.table, case.lengths, latent=latent, out_dtype=torch.float64)
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("window", [1, 3])
def test_parts_of_any_number_and_pages_of_any_size_give_what_fp64_gives(page: int, window: int) -> None:
    case = paged([1 + window, 64, 150], heads=6, window=window, latent=64, shared=16, page=page)
    found = ours(case, 64)
    assert error(case, found, 64) < 5e-4
    assert torch.equal(ours(case, 64, out_dtype=torch.float16), found.half())


def test_the_widths_of_k3_and_more_heads_than_a_program_takes() -> None:
    case = paged([70], heads=66, spare=0)
    assert error(case, ours(case, 512, triton.DEFAULT), 512) < 5e-4


def test_what_no_sequence_holds_is_never_read_and_a_sequence_of_no_rows_gives_zeros() -> None:
    case = paged([0, 40], heads=3, latent=32, shared=16, page=16)
    found = ours(case, 32)
    assert bool(found.isfinite().all())
    assert not bool(found[0].any())
    assert bool(found[1].all())


@settings(max_examples=4, deadline=None)
@given(lengths=st.lists(st.integers(4, 150), min_size=2, max_size=3), seed=st.integers(0, 99))
def test_a_sequence_alone_and_without_the_rest_of_its_window_gives_the_bits_it_gives_with_them(lengths: list[int], seed: int) -> None:
    """The first query of a window of four, as if the later rows were not there yet. It keeps its place in the tile: numpy's product, which stands in for the
    matrix unit's, gives a row other bits in another place. Places are checked on the device."""
    case = paged(lengths, heads=5, window=4, latent=16, shared=16, page=32, seed=seed)
    together = ours(case, 16)
    for i, length in enumerate(lengths):
        shorter = torch.tensor([length - 3], dtype=torch.int32)
        alone = ours(Paged(case.q[i : i + 1, :1].contiguous(), case.pages, case.table[i : i + 1], shorter), 16)
        assert torch.equal(alone[0, 0], together[i, 0])


def test_another_part_gives_other_bits_so_that_the_check_above_can_fail() -> None:
    case = paged([150], heads=5, latent=16, shared=16, page=32)
    assert not torch.equal(ours(case, 16), ours(case, 16, SMALL._replace(part=128)))


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    case = paged([100], heads=4, latent=16, shared=16, page=32)
    case = case._replace(q=case.q * 200)
    found = ours(case, 16)
    assert bool(found.isfinite().all())
    assert error(case, found, 16) < 5e-4
