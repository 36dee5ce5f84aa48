"""KDA's backward kernels in Triton's interpreter against autograd through the recurrence in fp64. Run by test_kernels_interpreted.py."""

from __future__ import annotations

import pytest
import torch
from kda_backward_cases import BOUND, Case, Kind, case, errors, gradients, prepared, rounding_floor

from driftline.kernels.kda import triton_backward
from driftline.kernels.kda.triton_backward import WORKSPACE_BYTES, Gradients, backward
from driftline.kernels.kda.triton_backward_gradients import fold

torch.set_num_threads(1)

# Of flash-linear-attention's own tests: 0.008 of q, k, v and the initial state, 0.02 of the gate and beta. One head's A_log is one number, a sum of
# terms of both signs.
LIMITS = {"dq": 0.005, "dk": 0.005, "dv": 0.005, "dz": 0.008, "dbeta": 0.02, "da_log": 0.06, "ddt_bias": 0.008, "dinitial_state": 0.005}
REPEATED = {"dq": 0.01, "dk": 0.008, "dv": 0.015, "dz": 0.015, "dbeta": 0.02, "da_log": 0.06, "ddt_bias": 0.03, "dinitial_state": 0.008}


@pytest.fixture(autouse=True)
def _prepared_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter knows no Gluon; compiled_kda_backward_runs.py runs the forward's preparation with the rest."""
    monkeypatch.setattr(triton_backward, "prepare", prepared)


def run(one: Case, limit: int = WORKSPACE_BYTES) -> Gradients:
    return backward(one.q, one.k, one.v, one.z, one.beta, one.a_log, one.dt_bias, BOUND, one.initial, one.bounds, one.do, one.dfinal, limit=limit)


@pytest.mark.parametrize("kind", [Kind.SLOW, Kind.FAST, Kind.SAME, Kind.NEAR])
def test_gradients_are_the_recurrences_whatever_gates_and_keys(kind: Kind) -> None:
    one = case(1, 64, 1, kind)
    found = errors(run(one), gradients(one))
    limits = REPEATED if kind in (Kind.SAME, Kind.NEAR) else LIMITS
    assert {name: error for name, error in found.items() if error > limits[name]} == {}


@pytest.mark.parametrize(("kind", "heads", "seed"), [(Kind.SAME, 1, 0), (Kind.NEAR, 2, 1)])
def test_with_one_key_a_querys_gradient_is_near_what_bfloat16_operands_allow(kind: Kind, heads: int, seed: int) -> None:
    one = case(1, 200, heads, kind, seed=seed)
    floor = rounding_floor(one)
    assert 0.5 * floor < errors(run(one), gradients(one))["dq"] < 1.75 * floor, floor


def test_sequences_of_any_length_have_their_own_chunks_and_states() -> None:
    """70 tokens, none, one, and a whole chunk."""
    one = case(1, 135, 1, bounds=(0, 70, 70, 71, 135))
    found = run(one)
    assert {name: error for name, error in errors(found, gradients(one)).items() if error > LIMITS[name]} == {}
    assert torch.equal(found.initial_state[1], one.dfinal[1])


def test_a_sequence_does_not_feel_its_neighbours() -> None:
    one = case(1, 40, 1, bounds=(0, 24, 40))
    other = one._replace(k=one.k.clone(), do=one.do.clone())
    other.k[:, 24:] += 1.0
    other.do[:, 24:] *= 3.0
    first, second = run(one), run(other)
    assert all(torch.equal(a[:, :24], b[:, :24]) for a, b in zip(first[:5], second[:5], strict=True))
    assert torch.equal(first.initial_state[0], second.initial_state[0])
    assert not torch.equal(first.k[:, 24:], second.k[:, 24:])


def test_heads_that_take_turns_in_the_workspace_come_out_the_same_bits() -> None:
    one = case(1, 17, 2)
    assert triton_backward.heads_at_once(2, 2, 1) == 1
    assert all(torch.equal(a, b) for a, b in zip(run(one), run(one, limit=1), strict=True))


def test_without_states_the_initial_one_is_zero_and_its_gradient_still_there() -> None:
    one = case(1, 16, 1)
    zero = one._replace(initial=torch.zeros_like(one.initial), dfinal=torch.zeros_like(one.dfinal))
    found = backward(one.q, one.k, one.v, one.z, one.beta, one.a_log, one.dt_bias, BOUND, None, None, one.do, None)
    assert all(torch.equal(a, b) for a, b in zip(found, run(zero), strict=True))


def test_fp32_gradients_come_back_for_fp32_gates() -> None:
    one = case(1, 16, 1)
    found = run(one._replace(z=one.z.float(), beta=one.beta.float()))
    wanted = run(one)
    assert found.z.dtype is torch.float32
    assert torch.equal(found.z.bfloat16(), wanted.z)
    assert torch.equal(found.beta.bfloat16(), wanted.beta)


def test_a_wrong_sum_over_gates_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds above can fail: the sums that the gate's gradient takes, shifted by one token."""
    right = triton_backward.sums(torch.device("cpu"))
    wrong = right._replace(shares=torch.stack([right.shares[0].triu(1), right.shares[1]]))
    monkeypatch.setattr(triton_backward, "sums", lambda device: wrong)
    one = case(1, 16, 1)
    found = errors(run(one), gradients(one))
    assert found["dz"] > LIMITS["dz"]
    assert found["dv"] <= LIMITS["dv"]


def test_shares_of_chunks_are_summed_head_by_head() -> None:
    parts = torch.randn(37, 3, 128)
    out = torch.full((5, 128), float("nan"))
    fold[(3,)](parts, out, 37, 3, 1, WIDE=128, LINES=16)
    assert torch.allclose(out[1:4], parts.sum(0), atol=1e-5)
    assert bool(out[[0, 4]].isnan().all())
