"""Pairing never starves a prompt, never lets one group pay for another's step alone where both could, and is worth what the simulator says."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.messages.errors import ConfigError
from driftline.services.rollout.pairing import Costs, Load, Pairing, Why, Workload, simulate

COSTS = Costs(decode_s=0.01, decode_row_s=0.0001, prefill_s=0.02, prefill_token_s=0.00005)
BUSY, READY, IDLE = Load(4, 0), Load(4, 100), Load(0, 0)

loads = st.builds(Load, st.integers(0, 3), st.sampled_from([0, 0, 64, 700]))


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 4), st.floats(0, 0.5), st.integers(1, 5))
def test_no_prompt_waits_longer_than_its_window_and_the_step_it_ran_out_in(data: st.DataObject, groups: int, window: float, longest: int) -> None:
    pairing = Pairing(groups, window, longest=longest)
    now = 0.0
    since: list[float | None] = [None] * groups
    for lasted in data.draw(st.lists(st.floats(0.001, 0.2), min_size=1, max_size=30)):
        found = data.draw(st.lists(loads, min_size=groups, max_size=groups))
        decision = pairing.step(now, found)
        ready = {g for g, load in enumerate(found) if load.tokens}
        since = [None if g not in ready else now if since[g] is None else since[g] for g in range(groups)]
        assert decision.groups in (frozenset(), frozenset(ready))  # all or nobody
        if not decision.groups:
            assert all(now - begun < window for begun in since if begun is not None)
            assert not ready or any(load.rows and not load.tokens for load in found)
        since = [now if g in decision.groups else begun for g, begun in enumerate(since)]
        now += lasted


def test_prompts_wait_for_the_others_and_go_together() -> None:
    pairing = Pairing(2, 1.0)
    assert pairing.step(0.0, [READY, BUSY]) == (frozenset(), Why.WAITING)
    assert pairing.step(0.5, [READY, READY]) == (frozenset({0, 1}), Why.TOGETHER)


def test_a_window_that_ran_out_lets_one_group_go_alone() -> None:
    pairing = Pairing(2, 1.0)
    pairing.step(0.0, [READY, BUSY])
    assert pairing.step(1.0, [READY, BUSY]) == (frozenset({0}), Why.WINDOW)


def test_an_idle_group_is_not_waited_for_and_nothing_waits_where_nobody_decodes() -> None:
    assert Pairing(2, 1.0).step(0.0, [READY, IDLE]).why is Why.TOGETHER
    assert Pairing(2, 1.0).step(0.0, [Load(0, 5), IDLE]).why is Why.NOTHING_DECODES


def test_a_long_prompt_goes_on_and_others_join_it_until_the_round_is_over() -> None:
    pairing = Pairing(2, 1.0, longest=3)
    pairing.step(0.0, [READY, BUSY])
    decisions = [pairing.step(1.0 + i / 100, [READY, READY if i == 1 else BUSY]) for i in range(5)]
    assert [d.why for d in decisions] == [Why.WINDOW, Why.TOGETHER, Why.ROUND, Why.ROUND, Why.WAITING]
    assert decisions[1].groups == {0, 1}


def test_no_window_is_no_pairing() -> None:
    assert Pairing(2, 0.0).step(0.0, [READY, BUSY]) == (frozenset({0}), Why.WINDOW)


@pytest.mark.parametrize(("groups", "window", "longest", "field"), [(0, 1.0, 1, "groups"), (1, -1.0, 1, "window"), (1, 1.0, 0, "longest")])
def test_sizes_that_mean_nothing_are_refused_by_name(groups: int, window: float, longest: int, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Pairing(groups, window, longest=longest)


def test_loads_of_another_number_of_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="2 groups"):
        Pairing(2, 1.0).step(0.0, [READY])


def test_every_token_is_sampled_whatever_the_window() -> None:
    load = Workload(trajectories=8, turns=3, sampled=5, prompt=300, prefill_tokens=256)
    outcomes = [simulate(Pairing(2, window), COSTS, load) for window in (0.0, 0.03, 10.0)]
    assert {outcome.tokens for outcome in outcomes} == {2 * 8 * 3 * 5}
    assert all(len(outcome.wait_s) == 2 * 8 * 3 for outcome in outcomes)


def test_pairing_makes_fewer_long_steps_and_its_waits_are_bounded() -> None:
    load = Workload(trajectories=32, turns=10, sampled=16, prompt=512, tool_s=1.0)
    apart, paired = (simulate(Pairing(2, window), COSTS, load) for window in (0.0, 0.05))
    assert paired.long_steps < apart.long_steps
    longest_step = COSTS.of(load.trajectories, load.prefill_tokens)
    assert paired.wait(1.0) <= 0.05 + 4 * longest_step  # its window, and the budget of the steps before it
    assert paired.tokens_per_s > apart.tokens_per_s


def test_the_simulator_is_a_function_of_its_seed() -> None:
    load = Workload(trajectories=4, turns=2)
    first, again, other = (simulate(Pairing(2, 0.02), COSTS, load, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_costs_are_what_was_measured() -> None:
    costs = Costs.fitted([(1, 0.011), (10, 0.02), (100, 0.11)], [(64, 0.164), (1000, 1.1)])
    assert costs == pytest.approx((0.01, 0.001, 0.1, 0.001))
    with pytest.raises(ValueError, match="prefill was measured at 1 sizes"):
        Costs.fitted([(1, 0.01), (2, 0.02)], [(64, 1.0)])
    with pytest.raises(ValueError, match="never ends"):
        simulate(Pairing(1, 0.0), Costs(0, 0, 0, 0), Workload())


def test_more_window_never_means_more_long_steps_by_much() -> None:
    load = Workload(trajectories=16, turns=5)
    steps = [simulate(Pairing(2, window), COSTS, load).long_steps for window in (0.0, 0.02, 0.1)]
    assert all(later <= 1.05 * earlier for earlier, later in pairwise(steps))
