"""The divergence watch as rules: where a distance comes from, when it is said, when it ends a run."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline.messages.errors import ConfigError
from driftline.messages.types import Divergence, DivergenceLevel, DivergenceSignal
from driftline.models.flips import Flips
from driftline.services.config import Config
from driftline.services.learner.drift_metrics import Drift, DriftReport, drift_by_lag
from driftline.services.learner.watch import (
    Gate,
    Limits,
    Reading,
    StepDrift,
    Verdict,
    Watch,
    WatchRules,
    WatchState,
    halted_because,
    judge,
    readings,
    rules_of,
    split,
    watch_values,
)

TOTAL, NUMERICS = DivergenceSignal.TOTAL, DivergenceSignal.NUMERICS
BOTH = WatchRules({TOTAL: Limits(alarm=0.1, halt=1.0)}, min_tokens=10, in_a_row=2)


def part(tokens: int, k3: float, stderr: float = 0.0, non_finite: int = 0) -> Drift:
    return Drift(tokens, 0.0, k3, stderr, 0.0, 0.0, 0.0, 1.0, 1.0, non_finite)


def report(by_lag: dict[int, Drift]) -> DriftReport:
    tokens = sum(p.tokens for p in by_lag.values())
    k3 = sum(p.tokens * p.k3 for p in by_lag.values()) / tokens if tokens else 0.0
    return DriftReport(part(tokens, k3, non_finite=sum(p.non_finite for p in by_lag.values())), by_lag)


def run(rules: WatchRules, values: list[float | tuple[float, int]], signal: DivergenceSignal = TOTAL) -> list[Verdict]:
    """One judged step after another; a bare value stands on enough tokens."""
    state, verdicts = WatchState(), []
    for version, value in enumerate(values, 1):
        reading = Reading(*value) if isinstance(value, tuple) else Reading(value, rules.min_tokens)
        verdicts.append(judge(rules, state, {signal: reading}, run="r", version=version, at=0.0))
        state = verdicts[-1].state
    return verdicts


def said(verdicts: list[Verdict]) -> list[tuple[int, DivergenceLevel]]:
    return [(event.version, event.level) for verdict in verdicts for event in verdict.events]


def test_one_bad_batch_neither_raises_nor_halts() -> None:
    assert said(run(BOTH, [0.0, 5.0, 0.0, 5.0, 0.05])) == []


def test_an_alarm_is_said_once_and_its_end_after_as_many_calm_steps() -> None:
    verdicts = run(BOTH, [0.2, 0.2, 0.2, 0.0, 0.2, 0.0, 0.0, 0.0])
    assert said(verdicts) == [(2, DivergenceLevel.ALARM), (7, DivergenceLevel.CLEARED)]
    assert [len(v.state.raised) for v in verdicts] == [0, 1, 1, 1, 1, 1, 0, 0]


def test_a_distance_over_the_halt_level_ends_the_run_at_the_step_that_makes_the_row() -> None:
    verdicts = run(BOTH, [2.0, 2.0])
    assert [v.halt is not None for v in verdicts] == [False, True]
    halt = verdicts[1].halt
    assert halt is not None
    assert (halt.level, halt.version, halt.value, halt.limit, halt.steps) == (DivergenceLevel.HALT, 2, 2.0, 1.0, 2)
    assert [e.level for e in verdicts[1].events] == [DivergenceLevel.ALARM, DivergenceLevel.HALT]
    assert "k3 of total 2 over 1 (watch.total_halt) in 2 steps in a row" in halted_because(halt)
    assert "version 2 was not trained on" in halted_because(halt)


def test_a_value_at_a_limit_is_not_over_it() -> None:
    assert said(run(BOTH, [0.1, 0.1, 0.1])) == []
    assert said(run(BOTH, [math.nextafter(0.1, 1)] * 2)) == [(2, DivergenceLevel.ALARM)]


def test_a_batch_of_few_tokens_is_not_judged_and_breaks_no_row() -> None:
    few = (100.0, BOTH.min_tokens - 1)
    assert said(run(BOTH, [few] * 10)) == []
    assert said(run(BOTH, [0.2, few, few, 0.2])) == [(4, DivergenceLevel.ALARM)]
    calm = (0.0, BOTH.min_tokens - 1)
    assert said(run(BOTH, [0.2, calm, 0.2])) == [(3, DivergenceLevel.ALARM)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_distance_that_is_no_number_is_over_every_limit(value: float) -> None:
    assert said(run(BOTH, [value, value])) == [(2, DivergenceLevel.ALARM), (2, DivergenceLevel.HALT)]


def test_with_one_in_a_row_the_first_bad_batch_is_not_trained_on() -> None:
    rules = replace(BOTH, in_a_row=1)
    assert run(rules, [2.0])[0].halt is not None


def test_signals_are_judged_apart() -> None:
    rules = WatchRules({TOTAL: Limits(alarm=0.1), NUMERICS: Limits(halt=0.5)}, min_tokens=1, in_a_row=2)
    state = WatchState()
    for version in (1, 2):
        verdict = judge(rules, state, {TOTAL: Reading(0.0 if version == 1 else 1.0, 5), NUMERICS: Reading(1.0, 5)}, run="r", version=version, at=0.0)
        state = verdict.state
    assert [(e.signal, e.level) for e in verdict.events] == [(NUMERICS, DivergenceLevel.HALT)]


def test_a_signal_without_a_reading_keeps_its_row() -> None:
    state = judge(BOTH, WatchState(), {TOTAL: Reading(0.2, 10)}, run="r", version=1, at=0.0).state
    state = judge(BOTH, state, {}, run="r", version=2, at=0.0).state
    assert judge(BOTH, state, {TOTAL: Reading(0.2, 10)}, run="r", version=3, at=0.0).events[0].level is DivergenceLevel.ALARM


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 20)), max_size=40), st.integers(1, 4))
def test_alarms_and_ends_alternate_and_a_halt_needs_its_row(history: list[tuple[float, int]], in_a_row: int) -> None:
    rules = replace(BOTH, in_a_row=in_a_row)
    levels = [level for _, level in said(run(rules, list(history))) if level is not DivergenceLevel.HALT]
    assert levels == [DivergenceLevel.ALARM, DivergenceLevel.CLEARED] * (len(levels) // 2) + [DivergenceLevel.ALARM] * (len(levels) % 2)
    judged = [value for value, tokens in history if tokens >= rules.min_tokens]
    halts = [i for i in range(len(judged)) if i + 1 >= in_a_row and all(v > 1.0 for v in judged[i + 1 - in_a_row : i + 1])]
    assert sum(v.halt is not None for v in run(rules, list(history))) == len(halts)


def test_at_lag_zero_all_is_numerics() -> None:
    parts = split(report({0: part(100, 0.25, 0.01)}), None)
    assert (parts.total, parts.numerics, parts.staleness, parts.numerics_tokens) == (0.25, 0.25, 0.0, 100)
    assert (parts.numerics_stderr, parts.staleness_stderr) == (0.01, 0.0)


def test_the_two_parts_weigh_each_lag_by_its_tokens_and_add_up() -> None:
    step = report({0: part(50, 0.01), 2: part(150, 0.5)})
    probe = report({0: part(10, 9.0), 2: part(30, 0.03)})
    parts = split(step, probe)
    assert parts.numerics == pytest.approx(0.25 * 0.01 + 0.75 * 0.03)  # lag 0 from all of its tokens, not from the probe's
    assert parts.staleness == pytest.approx(0.75 * (0.5 - 0.03))
    assert parts.numerics is not None
    assert parts.staleness is not None
    assert parts.numerics + parts.staleness == pytest.approx(parts.total)
    assert parts.numerics_tokens == 50 + 30


def test_a_lag_the_probe_has_not_seen_takes_its_mean() -> None:
    parts = split(report({1: part(10, 0.5), 3: part(10, 0.7)}), report({1: part(8, 0.02)}))
    assert parts.numerics == pytest.approx(0.02)
    assert parts.numerics_tokens == 8
    other = split(report({3: part(10, 0.7)}), report({1: part(8, 0.02), 2: part(8, 0.04)}))
    assert other.numerics == pytest.approx(0.03)
    assert other.numerics_tokens == 16


def test_without_a_probe_stale_tokens_are_not_split() -> None:
    step = report({0: part(10, 0.1), 1: part(10, 0.3)})
    for probe in (None, report({})):
        assert split(step, probe)[1:3] == (None, None)
    found = readings(StepDrift(step), None)
    assert found.keys() == {TOTAL, DivergenceSignal.EXTREME}
    assert "k3_numerics" not in watch_values(StepDrift(step), None, WatchState())


def test_staleness_on_gaussian_parts_is_what_the_weights_moved() -> None:
    """d = n + s with independent normal parts, shifted as log-ratios are: the estimator gives back the KL of each."""
    rng = np.random.default_rng(0)
    tokens, sd_n, sd_s = 400_000, 0.02, 0.1
    n, s = (rng.normal(-sd * sd / 2, sd, tokens) for sd in (sd_n, sd_s))  # E exp = 1
    behave, mask, versions = np.zeros(tokens), np.ones(tokens, bool), np.full(tokens, 3)
    step = drift_by_lag(n + s, behave, mask, versions, 5)
    few = slice(0, 50_000)
    probe = drift_by_lag(rng.permutation(n)[few], behave[few], mask[few], versions[few], 5)
    parts = split(step, probe)
    assert parts.numerics == pytest.approx(sd_n**2 / 2, rel=0.05)
    assert parts.staleness == pytest.approx(sd_s**2 / 2, rel=0.05)
    assert 0 < parts.staleness_stderr < 0.05 * sd_s**2 / 2


def test_readings_of_tokens_that_are_no_numbers_are_none_either() -> None:
    found = readings(StepDrift(report({0: part(10, 0.1, non_finite=1)})), None)
    assert math.isnan(found[TOTAL].value)
    assert found[TOTAL].tokens == 11
    probe = StepDrift(report({1: part(10, 0.1, non_finite=2)}))
    assert math.isnan(readings(StepDrift(report({1: part(10, 0.1)})), probe)[NUMERICS].value)


def test_flips_are_read_where_they_were_counted() -> None:
    step = report({0: part(10, 0.1)})
    assert DivergenceSignal.FLIPS not in readings(StepDrift(step), None)
    assert DivergenceSignal.FLIPS not in readings(StepDrift(step, Flips()), None)
    assert readings(StepDrift(step, Flips(200, 10, 30)), None)[DivergenceSignal.FLIPS] == Reading(0.05, 200)
    values = watch_values(StepDrift(step, Flips(200, 10, 30)), StepDrift(step, Flips(100, 1, 2)), WatchState())
    assert (values["flips"], values["flips_ordered"], values["flip_rows"], values["flips_numerics"]) == (0.05, 0.15, 200.0, 0.01)


def test_flips_add_up() -> None:
    assert Flips(10, 1, 2) + Flips(5, 0, 3) == Flips(15, 1, 5)
    assert (Flips().share, Flips().ordered_share) == (0.0, 0.0)


def test_a_gate_judges_with_the_state_of_the_steps_before_it() -> None:
    watch = Watch("r", replace(BOTH, limits={TOTAL: Limits(halt=1.0)}))
    bad = StepDrift(report({0: part(10, 2.0)}))
    first = watch.gate(1, None)
    assert first(bad)
    second: Gate = watch.gate(2, None)
    assert not second(bad)
    assert second.verdict.halt is not None
    assert watch.gate(3, None).verdict.events == ()  # a step that was never judged says nothing


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        ({"limits": {TOTAL: Limits(alarm=0.0)}}, "watch.total_alarm"), ({"limits": {TOTAL: Limits(halt=math.nan)}}, "watch.total_halt"),
        ({"limits": {NUMERICS: Limits(alarm=0.2, halt=0.1)}}, "watch.numerics_halt"), ({"min_tokens": 0}, "watch.min_tokens"), ({"in_a_row": 0}, "watch.in_a_row"),
    ],
)
def test_rules_that_cannot_act_as_meant_are_refused(rules: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        WatchRules(**rules)  # type: ignore[arg-type]
    assert error.value.field == field


def test_a_run_files_levels_become_rules_and_zero_is_off() -> None:
    config = Config.model_validate({"watch": {"numerics_alarm": 0, "total_halt": 0.5, "in_a_row": 4, "min_tokens": 7}}).watch
    assert rules_of(config) == WatchRules({TOTAL: Limits(halt=0.5)}, min_tokens=7, in_a_row=4)
    assert rules_of(Config().watch) == WatchRules()


def test_the_event_survives_the_wire_with_any_number() -> None:
    from driftline.messages import decode, encode

    event = Divergence(run="r", version=1, signal=TOTAL, level=DivergenceLevel.ALARM, value=math.inf, limit=0.1, tokens=9, steps=1)
    assert decode(encode(event)) == event
