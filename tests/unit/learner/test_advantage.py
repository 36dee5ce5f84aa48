"""Advantages: agreement with the public estimators, and rewards that must not become a gradient."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from driftline.services.learner.advantage import Estimator, group_advantages, is_zero_variance

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "rl_golden.json").read_text())
GROUPS = {"E7.[1,0,0,1]": [1.0, 0, 0, 1], "E7.[1,0,0,0]": [1.0, 0, 0, 0], "E7.[1,1,1,1]": [1.0, 1, 1, 1]}

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=16)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("column", "estimator", "eps"), [
    ("prime_grpo", Estimator.MEAN, 0.0),
    ("verl_drgrpo", Estimator.MEAN, 0.0),
    ("verl_grpo", Estimator.STD, 1e-6),
    ("skyrl_grpo", Estimator.STD, 1e-6),
    ("trl_group", Estimator.STD, 1e-4),
    ("verl_rloo", Estimator.RLOO, 0.0),
    ("skyrl_rloo", Estimator.RLOO, 0.0),
    ("maxrl", Estimator.MAXRL, 0.0),
])
def test_agrees_with(group: str, column: str, estimator: Estimator, eps: float) -> None:
    expected = GOLDEN[group][column]
    assert list(group_advantages(GROUPS[group], estimator, eps=eps).advantages) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("estimator", list(Estimator))
@pytest.mark.parametrize("reward", [0.7, 0.1, 0.3, 0.9, 0.35, 0.95, 1 / 3, -2.5, 0.0])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 10, 30])
def test_equal_rewards_have_advantage_exactly_zero(estimator: Estimator, reward: float, count: int) -> None:
    # float32 with a computed deviation: 0.056 (eps 1e-6) or 0.81 (guard 1e-8) for eight 0.7s.
    found = group_advantages([reward] * count, estimator)
    assert found.advantages == (0.0,) * count
    assert found.zero_variance


@pytest.mark.parametrize("estimator", list(Estimator))
def test_a_group_of_one_has_advantage_zero_and_not_its_reward(estimator: Estimator) -> None:
    assert group_advantages([0.7], estimator).advantages == (0.0,)
    assert group_advantages([0.7, None], estimator).advantages == (0.0, 0.0)


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("estimator", list(Estimator))
def test_a_missing_reward_drops_its_member_and_nothing_else(missing: float | None, estimator: Estimator) -> None:
    found = group_advantages([1.0, missing, 0.0, 0.0], estimator)
    without = group_advantages([1.0, 0.0, 0.0], estimator)
    assert found.kept == (True, False, True, True)
    assert found.dropped == 1
    assert found.mean == without.mean
    assert found.advantages == (without.advantages[0], 0.0, *without.advantages[1:])


def test_no_reward_at_all_is_a_group_without_a_mean() -> None:
    found = group_advantages([None, math.nan])
    assert (found.mean, found.dropped, found.zero_variance) == (None, 2, True)
    assert is_zero_variance([])


def test_the_peers_of_a_lone_winner_have_no_deviation_and_nobody_divides_by_it() -> None:
    # Leave-one-out with a leave-one-out deviation: 1e6.
    assert group_advantages([1.0, 0, 0, 0], Estimator.RLOO).advantages[0] == pytest.approx(1.0)


def test_maxrl_of_a_group_that_never_succeeds_is_zero() -> None:
    assert group_advantages([-1.0, -2.0], Estimator.MAXRL).advantages == (0.0, 0.0)


@given(REWARDS, st.sampled_from(Estimator), st.randoms(use_true_random=False))
def test_members_may_come_in_any_order(rewards: list[float], estimator: Estimator, random: Any) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    here = group_advantages(rewards, estimator).advantages
    there = group_advantages([rewards[i] for i in order], estimator).advantages
    assert there == tuple(here[i] for i in order)


@given(REWARDS, st.sampled_from([Estimator.MEAN, Estimator.STD, Estimator.RLOO]))
def test_advantages_sum_to_zero(rewards: list[float], estimator: Estimator) -> None:
    found = group_advantages(rewards, estimator)
    scale = max(1.0, *(abs(a) for a in found.advantages))
    assert math.fsum(found.advantages) == pytest.approx(0.0, abs=1e-9 * scale)


@given(REWARDS)
def test_zero_variance_is_max_equals_min(rewards: list[float]) -> None:
    assert is_zero_variance(rewards) == (len(rewards) < 2 or max(rewards) == min(rewards))
    assert group_advantages(rewards).zero_variance == is_zero_variance(rewards)
