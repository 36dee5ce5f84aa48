"""Speculation turns itself off where a drafted step gives fewer tokens a second than a plain one, tries again, and counts what it drafted."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from driftline.messages.errors import ConfigError
from driftline.services.rollout.speculation import Acceptance, Drafts, NgramDrafter, Pays, Row, Speculator
from driftline.services.rollout_config import SpeculationRule


def _run(pays: Pays, steps: int, *, accepted: float, cost: float, rows: int = 8) -> list[bool]:
    """Steps of a world where a drafted step takes `cost` plain ones and `accepted` drafts a row stand. Returns which were drafted."""
    said = []
    for _ in range(steps):
        wants = pays.wants(rows)
        pays.stepped(rows, round(rows * (1 + accepted)) if wants else rows, cost if wants else 1.0, drafted=wants)
        said.append(wants)
    return said


def test_it_stays_on_where_it_pays_and_goes_off_where_it_does_not() -> None:
    good = _run(Pays(every=64, trial=2), 400, accepted=1.5, cost=1.3)
    bad = _run(Pays(every=64, trial=2), 400, accepted=0.25, cost=1.6)
    assert sum(good) > 370
    assert 3 <= sum(bad) < 30, "drafted in trials alone"


def test_it_notices_when_the_text_changes() -> None:
    pays = Pays(every=32, trial=2)
    _run(pays, 200, accepted=0.25, cost=1.6)
    assert not pays.on(8)
    _run(pays, 2000, accepted=2.5, cost=1.6)
    assert pays.on(8)
    _run(pays, 400, accepted=0.0, cost=1.6)
    assert not pays.on(8)


def test_one_slow_step_is_no_reason() -> None:
    pays = Pays()
    for i in range(8):
        pays.stepped(8, 20, 60.0 if i == 0 else 1.3, drafted=True)
        pays.stepped(8, 8, 1.0, drafted=False)
    assert pays.on(8)


def test_batches_of_other_sizes_are_judged_apart() -> None:
    pays = Pays()
    _run(pays, 50, accepted=0.25, cost=2.0, rows=256)
    _run(pays, 50, accepted=0.25, cost=1.0, rows=4)
    assert not pays.on(256)
    assert pays.on(4)


def test_without_times_it_stays_on() -> None:
    pays = Pays()
    for _ in range(100):
        wants = pays.wants(4)
        pays.stepped(4, 5, 0.0, drafted=wants)
    assert pays.on(4)


@pytest.mark.parametrize(("every", "trial"), [(4, 4), (10, 0)])
def test_trials_that_cannot_be_are_refused(every: int, trial: int) -> None:
    with pytest.raises(ConfigError, match="trial"):
        Pays(every=every, trial=trial)


def _row(room: int = 99, name: str = "a") -> Row:
    return Row(name, array("i", [1, 2, 3, 4, 5, 1, 2]), room)


def test_a_row_is_never_drafted_past_its_room() -> None:
    for room, expected in ((99, 3), (3, 2), (2, 1)):
        drafts = Speculator(NgramDrafter()).begin_step([_row(room)])
        assert drafts is not None
        assert drafts.counts.tolist() == [expected]
        assert drafts.tokens.shape == (1, 3), "one width, whatever was found"
    assert Speculator(NgramDrafter()).begin_step([_row(1)]) is None


def test_a_step_without_drafts_is_a_plain_step() -> None:
    speculator = Speculator(NgramDrafter())
    assert speculator.begin_step([Row("a", array("i", [1, 2, 3]), 9)]) is None
    assert speculator.begin_step([]) is None


def test_acceptance_counts_what_was_reached_and_what_stood() -> None:
    acceptance = Acceptance()
    acceptance.count(np.array([3, 3, 0, 2]), np.array([3, 1, 0, 0]))
    assert (acceptance.reached, acceptance.stood) == ([3, 2, 1], [2, 1, 1])
    assert acceptance.length == 2.0
    assert acceptance.drafted_length == pytest.approx(1 + 4 / 3)
    acceptance.reset()
    assert acceptance.length == 1.0


def test_counting_the_bonus_token_as_a_draft_is_refused() -> None:
    speculator = Speculator(NgramDrafter())
    rows = [_row(2)]
    drafts = speculator.begin_step(rows)
    with pytest.raises(ValueError, match="without the token behind them"):
        speculator.finish_step(rows, drafts, np.array([2]), 0.0)


def test_it_stops_drafting_when_its_steps_do_not_pay() -> None:
    speculator = Speculator(NgramDrafter(), pays=Pays(every=1000, trial=1))
    drafted = 0
    for _ in range(60):
        drafts = speculator.begin_step([_row()])
        drafted += drafts is not None
        speculator.finish_step([_row()], drafts, None if drafts is None else np.array([0]), 1.0 if drafts is None else 1.5)
    assert drafted <= 4


def test_asking_a_drafter_that_has_nothing_is_not_a_plain_step() -> None:
    """It took the drafter's time, so it must not make plain steps look dear."""
    speculator, asked = Speculator(NgramDrafter(), pays=Pays(every=1000, trial=1)), 0
    rows = [Row("a", array("i", [1, 2, 3]), 9)]
    for _ in range(60):
        assert speculator.begin_step(rows) is None
        asked += speculator._asked
        speculator.finish_step(rows, None, None, 1.5 if speculator._asked else 1.0)
    assert 3 <= asked <= 4


def test_dear_windows_are_not_hidden_by_steps_that_had_no_drafts() -> None:
    pays = Pays(every=1000, trial=1)
    for i in range(60):
        pays.stepped(8, 20 if i % 3 == 0 else 8, 4.5 if i % 3 == 0 else 1.1, drafted=True)
        pays.stepped(8, 8, 1.0, drafted=False)
    assert not pays.on(8), "1.5 tokens a step for 2.2 times its price"


def test_drafts_with_probabilities_are_widened_together() -> None:
    class Two(NgramDrafter):
        def propose(self, rows, limits, *, probs=False):  # type: ignore[no-untyped-def]
            assert probs
            return Drafts(np.array([[1, 2]]), np.array([2], dtype=np.int32), torch.full((1, 2, 5), 0.2))

    drafts = Speculator(Two(), length=4, rule=SpeculationRule.REJECTION).begin_step([_row()])
    assert drafts is not None
    assert drafts.probs is not None
    assert drafts.tokens.tolist() == [[1, 2, 2, 2]]
    assert drafts.probs.sum(2)[0].tolist() == pytest.approx([1, 1, 0, 0])


@pytest.mark.parametrize("length", [0, 16])
def test_lengths_that_no_window_holds_are_refused(length: int) -> None:
    with pytest.raises(ConfigError, match="draft_tokens"):
        Speculator(NgramDrafter(), length=length)
