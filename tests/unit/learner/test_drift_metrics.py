"""Distances between learner and rollout: exact values, and the traps of measuring them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from driftline.messages.errors import DriftlineError
from driftline.services.learner.drift_metrics import drift, drift_by_lag, lags

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "rl_golden.json").read_text())
F1 = GOLDEN["fixtures"]["F1"]
OLD, ROLL, MASK = np.array(F1["old"]), np.array(F1["roll"]), np.array(F1["mask"]).astype(bool)


def of_all(learner: Any, behaviour: Any) -> Any:
    learner, behaviour = np.asarray(learner), np.asarray(behaviour)
    return drift(learner, behaviour, np.ones(learner.shape, dtype=bool))


def test_token_averages_agree_with_the_references() -> None:
    found = drift(OLD, ROLL, MASK)
    verl = GOLDEN["E18.verl_offpolicy(old,rollout)"]
    assert found.tokens == 6
    assert found.k3 == pytest.approx(GOLDEN["E18.k3 token-avg"], abs=1e-8)  # not .2607, the mean of sequence means
    assert found.k3 == pytest.approx(verl["k3_kl"], abs=1e-8)
    assert found.k1 == pytest.approx(verl["kl"], abs=1e-8)
    assert found.ess == pytest.approx(GOLDEN["E18.ESS/B"], abs=1e-8)
    assert found.max_abs == pytest.approx(1.5)
    assert found.extreme == pytest.approx(1 / 6)


def test_one_token_agrees_with_the_references() -> None:
    found = of_all([math.log(0.25)], [math.log(0.5)])  # sampled with .5, the learner says .25
    assert found.k1 == pytest.approx(GOLDEN["E10.k1 p=.5 ref=.25"]["verl"], abs=1e-8)
    assert found.k3 == pytest.approx(GOLDEN["E10.k3 p=.5 ref=.25"]["verl"], abs=1e-8)


@pytest.mark.parametrize(("key", "p", "q", "kl"), [
    ("E10.exact", [0.5, 0.3, 0.2], [0.25, 0.25, 0.5], "KL(P||Q)"),
    ("E10.close", [0.5, 0.3, 0.2], [0.505, 0.297, 0.198], "KL"),
])
def test_both_estimators_are_unbiased_for_the_policy_that_sampled(key: str, p: list[float], q: list[float], kl: str) -> None:
    outcomes = [of_all([math.log(b)], [math.log(a)]) for a, b in zip(p, q, strict=True)]
    k1 = sum(a * o.k1 for a, o in zip(p, outcomes, strict=True))
    k3 = sum(a * o.k3 for a, o in zip(p, outcomes, strict=True))
    assert k1 == pytest.approx(GOLDEN[key][kl], rel=1e-6)
    assert k3 == pytest.approx(GOLDEN[key][kl], rel=1e-6)
    if key == "E10.exact":
        assert [o.k3 for o in outcomes] == pytest.approx(GOLDEN[key]["per_outcome_k3"], abs=1e-8)
        variance = sum(a * (o.k3 - k3) ** 2 for a, o in zip(p, outcomes, strict=True))
        assert variance == pytest.approx(GOLDEN[key]["Var_k3"], abs=1e-8)


def test_the_direction_is_the_policy_that_sampled() -> None:
    assert of_all([-15.0], [-5.0]).k3 == pytest.approx(9.0000454, abs=1e-7)
    assert of_all([-5.0], [-15.0]).k3 == pytest.approx(22015.47, abs=0.01)


@pytest.mark.parametrize("d", [1e-3, 1e-4, 1e-5])
def test_small_distances_are_not_lost_to_rounding(d: float) -> None:
    # exp(d) - 1 - d in float32 reads 1.4e-8 for 5e-11.
    exact = GOLDEN[f"E10.cancel k3 fp32 d={d}"]["exact"]
    assert of_all([-1.0 + d], [-1.0]).k3 == pytest.approx(exact, rel=1e-6)


@given(hnp.arrays(np.float32, 20, elements=st.floats(-50, 0, width=32)), st.floats(-3e-4, 3e-4))
def test_k3_is_never_negative(behaviour: Any, shift: float) -> None:
    assert of_all(behaviour + np.float32(shift), behaviour).k3 >= 0.0


def test_equality_is_of_bits() -> None:
    found = of_all(np.array([0.0, -1.0, -1.0], np.float32), np.array([-0.0, -1.0, np.nextafter(np.float32(-1), np.float32(0))], np.float32))
    assert found.bitwise_equal == pytest.approx(1 / 3)
    assert of_all(np.float32([-1, -2]), np.float32([-1, -2])).bitwise_equal == 1.0


def test_identical_policies_are_at_distance_zero() -> None:
    found = of_all(np.float32([-1.5, -0.25, -3]), np.float32([-1.5, -0.25, -3]))
    assert (found.k1, found.k3, found.k3_stderr, found.max_abs, found.extreme) == (0, 0, 0, 0, 0)
    assert found.ess == found.bitwise_equal == 1.0
    assert found.pearson == pytest.approx(1.0)


@pytest.mark.parametrize("junk", [math.inf, -math.inf, math.nan, 1e4])
def test_masked_positions_are_not_read(junk: float) -> None:
    learner, behaviour = np.where(MASK, OLD, junk), np.where(MASK, ROLL, junk)
    assert drift(learner, behaviour, MASK) == drift(OLD, ROLL, MASK)


def test_a_missing_log_probability_is_counted_and_left_out() -> None:
    found = of_all([-1.0, -2.0, -3.0], [math.nan, -2.0, -math.inf])
    assert (found.tokens, found.non_finite, found.k3) == (1, 2, 0.0)


def test_an_enormous_distance_stays_finite() -> None:
    found = of_all([-1.0, -1.0, -5000.0], [-120.0, -5000.0, -1.0])
    assert all(math.isfinite(v) for v in (found.k1, found.k3, found.k3_stderr, found.max_abs, found.ess, found.pearson))


def test_no_tokens_is_all_zero() -> None:
    found = drift(OLD, ROLL, np.zeros_like(MASK))
    assert (found.tokens, found.k3, found.ess, found.bitwise_equal) == (0, 0.0, 0.0, 0.0)


def test_one_position_of_shift_is_visible() -> None:
    rollout = -np.random.default_rng(0).exponential(1.0, 1000)
    assert of_all(rollout, rollout).pearson == pytest.approx(1.0)
    shifted = of_all(np.roll(rollout, 1), rollout)
    assert abs(shifted.pearson) < 0.2
    assert shifted.k3 > 0.3


def test_lag_zero_is_numerics_and_the_rest_staleness() -> None:
    learner, behaviour = np.float32([-1, -1, -1, -9]), np.float32([-1, -1, -2, 0])
    mask, versions = np.array([True, True, True, False]), np.array([7, 7, 5, -1], np.int32)
    report = drift_by_lag(learner, behaviour, mask, versions, head=7)
    assert sorted(report.by_lag) == [0, 2]
    assert report.numerics is not None
    assert (report.numerics.tokens, report.numerics.k3, report.numerics.bitwise_equal) == (2, 0.0, 1.0)
    assert report.by_lag[2].k1 == -1.0
    assert report.all.tokens == 3


def test_lags_by_oldest_token_and_per_token() -> None:
    versions = np.array([-1, 7, 7, 8, 8, 9, -1, 10], np.int32)
    found = lags(versions >= 0, versions, np.array([0, 0, 0, 0, 0, 0, 1, 1]), head=10)
    assert dict(found.oldest) == {3: 1, 0: 1}  # by the oldest token: 3, not 1 by the final one or 2.2 on average
    assert dict(found.token) == {3: 2, 2: 2, 1: 1, 0: 1}
    assert found.oldest_max == 3
    assert found.token_mean == pytest.approx(11 / 6)
    assert lags(np.zeros(2, bool), np.int32([-1, -1]), np.array([0, 0]), head=3).oldest_max == 0


def test_a_version_from_the_future_or_the_prompt_is_refused() -> None:
    one, mask = np.float32([-1]), np.array([True])
    for version in (6, -1):
        with pytest.raises(DriftlineError, match=r"0\.\.5"):
            drift_by_lag(one, one, mask, np.int32([version]), head=5)


def test_conversions_and_half_precision_are_refused() -> None:
    with pytest.raises(DriftlineError, match="float32"):
        of_all(np.float32([-1]), np.float64([-1]))
    with pytest.raises(DriftlineError, match="float32"):
        of_all(np.float16([-1]), np.float16([-1]))
    with pytest.raises(DriftlineError, match="shapes"):
        of_all(np.float32([-1, -1]), np.float32([-1]))
