"""The schedule of faults is a pure function of its seed, and does what it promises."""

from __future__ import annotations

import pytest
from chaos_schedule import ENGINES, KINDS, LONG, SHORT, Act, Plane, kills_by_kind, schedule
from hypothesis import given
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**31 - 1)
STEPS = st.integers(4, 200)


@given(seed=SEEDS, steps=STEPS)
def test_the_same_seed_tells_the_same_story(seed: int, steps: int) -> None:
    assert schedule(seed, steps) == schedule(seed, steps)


@given(seed=SEEDS, steps=STEPS)
def test_every_kind_is_killed_often_enough_and_the_broker_stopped_and_killed(seed: int, steps: int) -> None:
    faults = schedule(seed, steps)
    assert all(count >= LONG.kills for count in kills_by_kind(faults).values())
    acts = [fault.act for fault in faults]
    assert (acts.count(Act.STOP_BROKER), acts.count(Act.KILL_BROKER)) == (1, 1)
    assert {fault.target for fault in faults if fault.act is Act.DUPLICATE} == set(Plane)
    assert {fault.target for fault in faults if fault.act in (Act.KILL, Act.KILL_STARTING)} == {*KINDS, *ENGINES} - {"rollout"}


@given(seed=SEEDS, steps=STEPS)
def test_every_fault_but_the_last_kill_leaves_a_step_to_recover_in(seed: int, steps: int) -> None:
    faults = schedule(seed, steps)
    assert [f.version for f in faults] == sorted(f.version for f in faults)
    assert all(1 <= f.version <= steps - 2 for f in faults[:-1])
    assert (faults[-1].version, faults[-1].act, faults[-1].target) == (steps, Act.KILL, "learner")


def test_seeds_differ() -> None:
    assert len({schedule(seed, 30) for seed in range(50)}) == 50


def test_the_short_story_has_one_of_each() -> None:
    faults = schedule(3, 8, SHORT)
    assert all(count >= 1 for count in kills_by_kind(faults).values())
    acts = [fault.act for fault in faults]
    assert (acts.count(Act.KILL_BROKER), acts.count(Act.STOP_BROKER), acts.count(Act.PAUSE)) == (1, 0, 1)


def test_a_run_too_short_for_a_story_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        schedule(1, 3)
