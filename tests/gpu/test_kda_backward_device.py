"""KDA's backward on a CUDA device at K3's widths: against autograd through the recurrence in fp64, and bit for bit against itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "kernels"))
    from kda_backward_cases import BOUND, NAMES, Case, Kind, case, errors, gradients, rounding_floor

    from driftline.kernels.kda import kda, triton_backward
    from driftline.kernels.kda.backward import kda_backward
    from driftline.kernels.kda.triton_backward import Gradients, backward

LIMITS = {"dq": 0.008, "dk": 0.008, "dv": 0.008, "dz": 0.02, "dbeta": 0.02, "da_log": 0.06, "ddt_bias": 0.02, "dinitial_state": 0.008}
"""Of flash-linear-attention's own tests; A_log's gradient is one number a head, a sum of terms of both signs."""

REPEATED = {**LIMITS, "dv": 0.02, "dz": 0.025, "dbeta": 0.03, "ddt_bias": 0.04}
"""Where one key stands in every token, what is written is taken back again, and rounding weighs more: for a query's gradient, by how much is computed."""
ABOVE_FLOOR = 1.75


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Every tensor that is made without values holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def run(one: Case, limit: int | None = None) -> Gradients:
    return backward(one.q, one.k, one.v, one.z, one.beta, one.a_log, one.dt_bias, BOUND, one.initial, one.bounds, one.do, one.dfinal,
                    limit=triton_backward.WORKSPACE_BYTES if limit is None else limit)


def same(one: Gradients, other: Gradients) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["RANDOM", "SLOW", "FAST", "SAME", "NEAR"])
def test_gradients_are_the_recurrences_whatever_gates_and_keys(kind: str) -> None:
    one = case(2, 500, 4, Kind[kind], device="cuda")
    found = errors(run(one), gradients(one))
    limits = {**REPEATED, "dq": ABOVE_FLOOR * rounding_floor(one)} if kind in ("SAME", "NEAR") else LIMITS
    print(kind, {name: round(error, 5) for name, error in found.items()}, round(limits["dq"], 5))
    assert {name: error for name, error in found.items() if not error <= limits[name]} == {}


def test_packed_sequences_of_any_length_have_their_own_states() -> None:
    one = case(1, 1000, 3, bounds=(0, 0, 1, 65, 65, 600, 1000), device="cuda")
    found = run(one)
    assert {name: error for name, error in errors(found, gradients(one)).items() if not error <= LIMITS[name]} == {}
    assert torch.equal(found.initial_state[0], one.dfinal[0])


def test_a_wrong_sum_over_gates_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_backward.sums(torch.device("cuda"))
    wrong = right._replace(shares=torch.stack([right.shares[0].triu(1), right.shares[1]]))
    one = case(1, 200, 2, device="cuda")
    wanted = gradients(one)
    assert errors(run(one), wanted)["dz"] <= LIMITS["dz"]
    monkeypatch.setattr(triton_backward, "sums", lambda device: wrong)
    assert errors(run(one), wanted)["dz"] > LIMITS["dz"]


def test_autograd_through_the_operator_is_this_backward() -> None:
    one = case(1, 300, 2, device="cuda")
    leaves = [x.detach().requires_grad_() for x in (one.q, one.k, one.v, one.z, one.beta, one.a_log, one.dt_bias, one.initial)]
    out, state = kda(*leaves[:7], initial_state=leaves[7])
    found = torch.autograd.grad([out, state], leaves, [one.do, one.dfinal])
    wanted = kda_backward(one.q, one.k, one.v, one.z, one.beta, one.a_log, one.dt_bias, BOUND, one.initial, None, one.do, one.dfinal)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, wanted, strict=True)), NAMES


def test_a_thousand_runs_give_one_result() -> None:
    one = case(1, 1024, 12, device="cuda")
    first = run(one)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for a, b in zip(run(one), first, strict=True):
            differing += (a != b).sum()
    assert differing.item() == 0
    other = run(one._replace(do=one.do * 2))
    assert not same(other, first), "what is compared does differ where inputs do"


@pytest.mark.parametrize("batch", [2, 7, 64, 512])
def test_a_sequence_does_not_feel_how_many_there_are(batch: int) -> None:
    """The last of B sequences alone gives the same bits, packed or in rows."""
    one = case(batch, 100, 2, device="cuda")
    alone = Case(*(x[-1:].contiguous() if i in (0, 1, 2, 3, 4, 7, 8, 9) else x for i, x in enumerate(one)))  # type: ignore[arg-type]
    many, single = run(one), run(alone)
    for name in ("q", "k", "v", "z", "beta", "initial_state"):
        assert torch.equal(getattr(many, name)[-1:], getattr(single, name)), name
    bounds = torch.arange(batch + 1, device="cuda") * 100
    rows = (x.flatten(0, 1)[None] if i in (0, 1, 2, 3, 4, 8) else x for i, x in enumerate(one[:10]))
    packed = run(Case(*rows, bounds))  # type: ignore[arg-type]
    for name in ("q", "k", "v", "z", "beta"):
        assert torch.equal(getattr(packed, name)[0, -100:], getattr(single, name)[0]), name


def test_heads_that_take_turns_in_the_workspace_come_out_the_same_bits() -> None:
    one = case(1, 700, 5, device="cuda")
    assert same(run(one), run(one, limit=1))
    need = triton_backward.workspace_bytes(11, 1)
    assert same(run(one), run(one, limit=2 * need))


def test_a_changed_neighbour_leaves_a_sequence_alone() -> None:
    one = case(1, 900, 4, bounds=(0, 500, 900), device="cuda")
    other = one._replace(k=one.k.clone())
    other.k[:, 500:] += 1.0
    first, second = run(one), run(other)
    for name in ("q", "k", "v", "z", "beta"):
        assert torch.equal(getattr(first, name)[:, :500], getattr(second, name)[:, :500]), name
        assert not torch.equal(getattr(first, name)[:, 500:], getattr(second, name)[:, 500:]), name


def test_nothing_of_the_inputs_layers_width_overflows_thirty_two_bits() -> None:
    """180,000 tokens of 96 heads are more than 2^31 elements: the last sequence of the row is as it is alone."""
    steps, heads, tail = 180_000, 96, 130
    one = case(1, tail, heads, device="cuda")

    def placed(x: torch.Tensor) -> torch.Tensor:
        long = torch.zeros(1, steps, *x.shape[2:], dtype=x.dtype, device="cuda")
        long[:, -tail:] = x
        return long

    bounds = torch.tensor([0, 64, steps - tail, steps], device="cuda")
    initial, dfinal = (torch.cat([torch.zeros_like(x), torch.zeros_like(x), x]) for x in (one.initial, one.dfinal))
    long = Case(*(placed(x) for x in one[:5]), one.a_log, one.dt_bias, initial, placed(one.do), dfinal, bounds)
    found, wanted = run(long), run(one)
    for name in ("q", "k", "v", "z", "beta"):
        assert torch.equal(getattr(found, name)[:, -tail:], getattr(wanted, name)), name
