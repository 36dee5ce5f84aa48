"""The rule of waiting against trying every schedule."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from driftline.services.learner.feasibility import held_back_by, shortfall

HEAD = 10
LASTS = st.lists(st.integers(HEAD - 2, HEAD + 4), max_size=7).map(lambda lasts: tuple(sorted(lasts)))
PER_STEP = st.integers(1, 3)


@cache
def fewest_lost(lasts: tuple[int, ...], head: int, per_step: int) -> int:
    """By trying every choice of up to `per_step` groups at every head."""
    alive = tuple(last for last in lasts if last >= head)
    lost = len(lasts) - len(alive)
    if not alive:
        return lost
    options = []
    for chosen in combinations(range(len(alive)), min(per_step, len(alive))):
        rest = tuple(last for i, last in enumerate(alive) if i not in chosen)
        options.append(fewest_lost(rest, head + 1, per_step))
    return lost + min(options)


@given(LASTS, PER_STEP)
@settings(max_examples=300, deadline=None)
def test_the_shortfall_is_what_the_best_schedule_loses(lasts: tuple[int, ...], per_step: int) -> None:
    assert shortfall(lasts, HEAD, per_step) == fewest_lost(lasts, HEAD, per_step)


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, int], int]:
    """Open groups with their last heads: the complete ones that may be trained, and the others."""
    ready = draw(st.lists(st.integers(HEAD, HEAD + 4), max_size=5))
    waiting = draw(st.lists(st.integers(HEAD - 2, HEAD + 4), max_size=4))
    return {f"r{i}": last for i, last in enumerate(ready)}, {f"w{i}": last for i, last in enumerate(waiting)}, draw(PER_STEP)


def oldest(ready: dict[str, int], per_step: int) -> list[str]:
    return sorted(ready, key=lambda name: (ready[name], name))[:per_step]


@given(situations())
@settings(max_examples=300, deadline=None)
def test_a_batch_is_held_back_exactly_when_it_would_lose_a_group_that_need_not_be_lost(
    situation: tuple[dict[str, int], dict[str, int], int]
) -> None:
    ready, waiting, per_step = situation
    if len(ready) < per_step:
        return
    everyone = ready | waiting

    def after(batch: tuple[str, ...] | list[str]) -> int:
        return fewest_lost(tuple(sorted(last for name, last in everyone.items() if name not in batch)), HEAD + 1, per_step)

    batch = oldest(ready, per_step)
    now = fewest_lost(tuple(sorted(everyone.values())), HEAD, per_step)
    blockers = held_back_by(everyone, batch, HEAD, per_step)
    assert bool(blockers) == (after(batch) > now)
    assert set(blockers) <= waiting.keys()
    if blockers:  # no other batch of complete groups would do
        assert min(after(other) for other in combinations(ready, per_step)) > now


@given(situations())
@settings(max_examples=300, deadline=None)
def test_waiting_ends_when_the_groups_it_names_are_complete_or_gone(situation: tuple[dict[str, int], dict[str, int], int]) -> None:
    ready, waiting, per_step = situation
    if len(ready) < per_step:
        return
    for ended in (False, True):
        complete, incomplete = dict(ready), dict(waiting)
        while blockers := held_back_by(complete | incomplete, oldest(complete, per_step), HEAD, per_step):
            for name in blockers:
                last = incomplete.pop(name)  # a KeyError here: it waits for a complete group
                assert last >= HEAD  # nothing waits for what is lost
                if not ended:
                    complete[name] = last


@pytest.mark.parametrize(("lasts", "batch", "held"), [
    ({"slow": 0, "a": 0}, {"a"}, ()),  # one of the two is lost anyway: the complete one goes
    ({"slow": 0, "a": 1}, {"a"}, ("slow",)),
    ({"lost": -1, "slow": 0, "a": 1}, {"a"}, ("slow",)),
    ({"lost": -1, "a": 1}, {"a"}, ()),  # nothing waits for what cannot be saved
    ({"x": 1, "y": 1, "a": 2}, {"a"}, ("x", "y")),  # both are due at the next head, which trains one
    ({"x": 1, "y": 2, "a": 2}, {"a"}, ()),
    ({}, set(), ()),
])
def test_a_step_of_one_group_from_head_zero(lasts: dict[str, int], batch: set[str], held: tuple[str, ...]) -> None:
    assert held_back_by(lasts, batch, 0, 1) == held
