"""What a person is shown follows from the messages alone, in any order and however often they arrive."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from driftline.messages.bus import Depth
from driftline.messages.types import (
    Admitted,
    Divergence,
    DivergenceLevel,
    DivergenceSignal,
    EvalResult,
    Group,
    Message,
    Metrics,
    Outcome,
    OutcomeEvent,
    RunFinished,
    Task,
)
from driftline.services.config import Config
from driftline.services.watch.picture import Picture
from driftline.services.watch.render import render, sparkline, step_line
from driftline.services.watch.report import report
from driftline.services.watch.screen import PlainScreen, screen_for
from driftline.services.watch.summary import KEYS, summarise


def step(version: int, **values: float) -> Metrics:
    return Metrics(run="r", service="learner", step=version, at=float(version), values={"version": version, **values},
                   series={"lag_histogram": [5.0, 3.0]})


def outcome(group: str, how: Outcome, lag: int = 0, reason: str = "") -> OutcomeEvent:
    return OutcomeEvent(run="r", group=group, outcome=how, lag=lag, reason=reason)


def admitted(index: int) -> Admitted:
    group = Group(run="r", group=f"g{index}", index=index, task=Task(id="t", source="s", family="f", prompt="p"), members=2)
    return Admitted(run="r", group=group, at=0.0)


def text(picture: Picture, width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render(picture, now=100.0, started_at=0.0))
    return out.getvalue()


MESSAGES: list[Message] = [
    admitted(0), admitted(1), admitted(2), outcome("g0", Outcome.TRAINED, lag=2),
    outcome("g1", Outcome.ZERO_VARIANCE, reason="all rewards 0"), step(1, reward_train=0.25, lag_max=1.0),
    EvalResult(run="r", version=0, tasks=8, samples=2, reward_sampled=0.125, reward_greedy=0.5),
    Metrics(run="r", service="rollout", instance="0", values={"tokens_sampled": 10.0, "tokens_per_s": 4.0}),
]


def seen(messages: list[Message]) -> Picture:
    picture = Picture("r", 10)
    for message in messages:
        picture.see(message)
    return picture


@given(st.permutations(MESSAGES), st.lists(st.sampled_from(MESSAGES), max_size=5))
def test_streams_interleave_and_repeat_without_changing_the_picture(order: list[Message], again: list[Message]) -> None:
    assert seen(order + again) == seen(MESSAGES)


def test_an_empty_picture_renders_and_summarises() -> None:
    picture = Picture("r")
    assert "none yet" in text(picture)
    summary = summarise(picture, Config(), 1.0)
    assert tuple(summary) == KEYS
    assert summary["heldout_first"] is None
    assert summary["versions"] == 0
    assert "No evaluation finished" in report(picture, Config(), summary, "Stopped.")


def test_the_view_renders_without_a_terminal() -> None:
    picture = seen([*MESSAGES, step(2, reward_train=0.5)])
    picture.depths["rollout"] = Depth(3, 1, 0)
    shown = text(picture)
    for words in ("0.250 → 0.500", "max seen 2", "rollout 3+1", "all rewards 0", "step 2/10", "4 from 1 engines"):
        assert words in shown, words


def test_the_view_fits_a_narrow_terminal() -> None:
    assert max(len(line) for line in text(seen(MESSAGES), 60).splitlines()) <= 60


def test_a_restarted_engine_does_not_take_its_tokens_back() -> None:
    def engine(tokens: float) -> Metrics:
        return Metrics(run="r", service="rollout", instance="0", values={"tokens_sampled": tokens})

    assert seen([engine(100), engine(250), engine(10), engine(30)]).tokens_sampled == 280


def test_the_largest_lag_is_of_what_was_trained_on_and_not_of_what_was_dropped() -> None:
    picture = seen([outcome("a", Outcome.STALE, lag=9), outcome("b", Outcome.TRAINED, lag=2)])
    assert picture.max_lag_seen == 2


def test_a_step_trained_again_after_a_restart_counts_once() -> None:
    picture = seen([step(1, tokens_trained=100.0), step(1, tokens_trained=100.0), step(2, tokens_trained=50.0)])
    assert summarise(picture, Config(), 1.0)["tokens_trained"] == 150


def test_figures_that_are_not_numbers_are_not_measured() -> None:
    summary = summarise(seen([step(1, k3_lag0=math.nan), step(2, k3_lag0=2e-8)]), Config(), 1.0)
    assert summary["k3_lag0_mean"] == 2e-8


def test_time_left_follows_the_newest_pace_and_ends_with_the_run() -> None:
    picture = seen([step(version) for version in range(1, 6)])
    assert picture.eta_s(5.0) == pytest.approx(5.0)
    picture.see(RunFinished(run="r", version=5, reason="time"))
    assert picture.eta_s(5.0) is None


def test_plain_lines_come_once_per_step_and_evaluation() -> None:
    out = io.StringIO()
    screen, picture = PlainScreen(Console(file=out, width=200, soft_wrap=True)), Picture("r", 3)
    for message in (*MESSAGES, *MESSAGES):
        picture.see(message)
        screen.see(message, picture)
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["step", "eval"]
    assert "0.1250 sampled, 0.5000 greedy" in lines[1]


def test_without_a_terminal_the_plain_screen_is_chosen() -> None:
    assert isinstance(screen_for(plain=False), PlainScreen)


@given(st.lists(st.floats(-1e6, 1e6), max_size=60))
def test_a_sparkline_is_never_wider_than_asked(values: list[float]) -> None:
    assert len(sparkline(values, 24)) == min(len(values), 24)


def divergence(version: int, level: DivergenceLevel, signal: DivergenceSignal = DivergenceSignal.NUMERICS) -> Divergence:
    return Divergence(run="r", version=version, signal=signal, level=level, value=0.5, limit=0.1, tokens=200, steps=3)


def test_alarms_are_shown_counted_and_end() -> None:
    alarm, cleared, halt = DivergenceLevel.ALARM, DivergenceLevel.CLEARED, DivergenceLevel.HALT
    calm = seen([step(1)])
    assert calm.alarmed == ()
    assert "no alarm, 0 alarms so far" in text(calm)
    assert "ALARM" not in step_line(calm.steps[1], calm)
    messages: list[Message] = [step(3, alarms=1.0, k3=0.25, k3_numerics=2e-3, k3_staleness=0.1, flips=0.01), divergence(3, alarm)]
    raised = seen([*messages, *messages])
    assert (raised.alarms, raised.alarmed) == (1, ("numerics",))
    assert "numerics, 1 alarms so far" in text(raised)
    assert "numerics 2.0e-03  staleness 1.0e-01" in text(raised)
    assert "k3 2.5e-01 ALARM" in step_line(raised.steps[3], raised)
    over = seen([*messages, divergence(7, cleared), divergence(9, alarm), divergence(9, halt, DivergenceSignal.TOTAL)])
    assert (over.alarms, over.alarmed) == (2, ("numerics", "total"))
    summary = summarise(over, Config(), 1.0)
    assert (summary["divergence_alarms"], summary["divergence_halt"]) == (2, "total")
    assert summary["k3_numerics_mean"] == 2e-3
    assert summary["k3_staleness_mean"] == 0.1
    assert seen([*messages, divergence(7, cleared)]).alarmed == ()
    assert summarise(calm, Config(), 1.0)["divergence_halt"] is None
