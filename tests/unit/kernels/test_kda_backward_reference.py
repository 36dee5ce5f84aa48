"""KDA's backward in torch against autograd through the recurrence, and what its arguments must be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kda_backward_cases import BOUND, Case, Kind, case, errors, gradients

from driftline.kernels.kda.backward import kda_backward

torch.set_num_threads(1)


def run(one: Case, bound: float = BOUND) -> tuple[torch.Tensor, ...]:
    return kda_backward(one.q, one.k, one.v, one.z, one.beta, one.a_log, one.dt_bias, bound, one.initial, one.bounds, one.do, one.dfinal)


@pytest.mark.parametrize("kind", list(Kind))
def test_the_chunk_formulas_are_the_recurrences_gradient(kind: Kind) -> None:
    one = case(2, 21, 2, kind, dtype=torch.float64, width=16)
    assert max(errors(run(one), gradients(one)).values()) < 1e-6


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(0, 35), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_sequences_of_any_length(lengths: list[int], seed: int) -> None:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    one = case(1, bounds[-1], 1, bounds=tuple(bounds), seed=seed, dtype=torch.float64, width=8)
    found, wanted = run(one), gradients(one)
    assert all(torch.allclose(a.double(), b, atol=1e-6) for a, b in zip(found, wanted, strict=True))


def test_gradients_come_back_in_the_inputs_types() -> None:
    one = case(1, 5, 2, width=16)
    assert [x.dtype for x in run(one)] == [torch.bfloat16] * 5 + [torch.float32] * 3


def test_arguments_that_do_not_fit_are_named() -> None:
    one = case(1, 5, 2, width=16)
    for change, said in (
        ({"k": one.k[:, :4]}, "k has shape"), ({"beta": one.beta[..., :1]}, "beta has shape"), ({"a_log": one.a_log[:1]}, "a_log has shape"),
        ({"dt_bias": one.dt_bias[:3]}, "dt_bias has shape"), ({"do": one.do[..., :8]}, "do has shape"),
        ({"initial": one.initial[:, :1]}, "initial_state has shape"), ({"bounds": torch.tensor([0, 3, 5])}, "initial_state has shape"),
        ({"bounds": torch.tensor([0.0, 5.0])}, "cu_seqlens needs"),
    ):
        with pytest.raises(ValueError, match=said):
            run(one._replace(**change))
    with pytest.raises(ValueError, match="lower_bound is -6"):
        run(one, -6.0)
