"""The kernels of grouped queries' attention, as Triton's interpreter runs them on the CPU, against the reference in fp64. In float16: the interpreter
multiplies matrices of bfloat16 as the integers that hold them."""

from __future__ import annotations

import pytest
import torch
from gqa_cases import Case, Widths, error, packed, padded
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.gqa import autograd, reference, triton_backward, triton_forward
from driftline.kernels.gqa.layout import Layout, tiles_of

torch.set_num_threads(1)
FORWARD, FEW = triton_forward.Configuration(64, 4, 2), triton_forward.Configuration(32, 4, 2)
BACKWARD = triton_backward.Configuration(32, 32, 4, 2)
PART = 128

CASES = {
    "one token of several": padded(2, 1, 300, Widths(6, 2)),
    "a group of three, a width that is no power of two, values of another": padded(1, 70, 200, Widths(3, 1, 48, 16)),
    "every head its own keys": padded(2, 40, 40, Widths(2, 2, 16, 16)),
    "skipped columns": padded(2, 5, 300, share=0.5),
    "one token a row after skipped columns": padded(4, 1, 150, share=0.5),
    "packed": packed([33, 1, 0, 64], [33, 1, 0, 64], Widths(6, 2)),
    "packed with cached keys": packed([5, 40, 3], [50, 97, 300]),
    "packed with keys in any order": packed([5, 40, 3], [50, 97, 150], shuffled=True),
}


def forward(case: Case, configuration: triton_forward.Configuration = FORWARD, out_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return triton_forward.forward(*case[:3], case.layout, case.sizes, 0.2, out_dtype, configuration, PART)


def decode(case: Case, configuration: triton_forward.Configuration = FORWARD) -> torch.Tensor:
    return triton_forward.decode(*case[:3], case.layout, case.sizes, 0.2, torch.float32, configuration, PART)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_near_fp64(name: str) -> None:
    case = CASES[name]
    exact = case.double()
    wanted = reference.attention(*exact, case.layout, 0.2, torch.float64)
    out, lse = forward(case)
    assert error(out, wanted.detach()) < 6e-4
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).half().float()
    wanted.backward(grad.double())
    found = triton_backward.backward(*case[:3], case.layout, out, lse, grad, case.sizes, 0.2, BACKWARD, BACKWARD)
    for one, other in zip(found, exact, strict=True):
        assert other.grad is not None
        assert one.dtype == torch.float16
        assert error(one, other.grad) < 1.5e-3


@pytest.mark.parametrize("name", CASES)
def test_parts_apart_give_the_bits_of_one_program(name: str) -> None:
    assert torch.equal(decode(CASES[name]), forward(CASES[name])[0])


def test_other_parts_give_other_bits_so_that_the_check_above_can_fail() -> None:
    case = CASES["one token of several"]
    assert not torch.equal(triton_forward.forward(*case[:3], case.layout, case.sizes, 0.2, torch.float32, FORWARD, 64)[0], forward(case)[0])


def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient() -> None:
    case = padded(2, 3, 50, share=0.3)
    layout = Layout.padded(2, 3, 50, valid=torch.tensor([[False] * 49 + [True], [True] * 50]))
    case = case._replace(layout=layout)
    out, lse = forward(case)
    assert not bool(out[0, :2].any())
    assert bool(out[0, 2].all())
    assert bool(torch.isfinite(out).all())
    assert torch.equal(decode(case), out)
    dq, dk, dv = triton_backward.backward(*case[:3], layout, out, lse, torch.ones_like(out), case.sizes, 0.2, BACKWARD, BACKWARD)
    assert not bool(dq[0, :2].any())
    assert not bool(dk[0, :49].any() or dv[0, :49].any())
    assert all(bool(torch.isfinite(t).all()) for t in (dq, dk, dv))


def test_what_is_skipped_is_never_read() -> None:
    case = padded(2, 3, 200, share=0.4)
    assert case.layout.valid is not None
    poisoned = [t.masked_fill(~case.layout.valid[:, :, None, None], torch.nan) for t in (case.keys, case.values)]
    assert torch.equal(forward(Case(case.q, *poisoned, case.layout))[0], forward(case)[0])


def test_skipped_columns_and_the_rest_of_a_batch_change_no_bits() -> None:
    case = padded(3, 2, 300, share=0.4)
    assert case.layout.valid is not None
    whole = forward(case)[0]
    for i in range(3):
        keep = case.layout.valid[i]
        alone = Case(case.q[i : i + 1], case.keys[i : i + 1, keep].contiguous(), case.values[i : i + 1, keep].contiguous(), Layout.padded(1, 2, int(keep.sum())))
        assert torch.equal(forward(alone)[0][0], whole[i])


def test_a_sequence_in_a_pack_and_a_prefix_of_it_have_the_bits_of_the_sequence_alone() -> None:
    case = packed([40, 70], [40, 70])
    whole = forward(case)[0][0]

    def alone(a: int, b: int) -> torch.Tensor:
        return forward(Case(*(t[:, a:b].contiguous() for t in case[:3]), Layout.padded(1, b - a, b - a)))[0][0]

    assert torch.equal(alone(40, 110), whole[40:])
    assert torch.equal(alone(40, 90), whole[40:90])
    assert not torch.equal(alone(39, 110)[1:], whole[40:]), "another first key is seen"


def test_the_operator_is_differentiable_by_the_kernels() -> None:
    case = packed([17], [17], Widths(4, 2, 32, 16))
    ours = [t.clone().requires_grad_() for t in case[:3]]
    autograd.attention(*ours, case.layout, case.sizes, 0.2, torch.float32).square().sum().backward()
    exact = case.double()
    reference.attention(*exact, case.layout, 0.2, torch.float64).square().sum().backward()
    for one, other in zip(ours, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert error(one.grad, other.grad) < 2e-3


def test_without_gradients_few_queries_of_many_keys_take_the_parts() -> None:
    case = padded(1, 1, triton_forward.PART + 76, Widths(2, 1, 16, 16))
    assert triton_forward.decodes(case.layout, case.sizes)
    found = autograd.attention(*case[:3], case.layout, case.sizes, 0.2, torch.float32)
    assert error(found, reference.attention(*case.double(), case.layout, 0.2, torch.float64).detach()) < 6e-4
    assert not triton_forward.decodes(padded(1, 1, triton_forward.PART).layout, case.sizes)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=8), tile=st.sampled_from([32, 64, 128]), more=st.integers(0, 500))
def test_every_row_of_every_sequence_is_in_one_tile(lengths: list[int], tile: int, more: int) -> None:
    found = tiles_of(torch.tensor(lengths, dtype=torch.int32), sum(lengths) + more, tile).tolist()
    wanted = [[i, first] for i, n in enumerate(lengths) for first in range(0, n, tile)]
    assert [pair for pair in found if pair[0] >= 0] == wanted
    assert len(found) == (sum(lengths) + more) // tile + len(lengths)
