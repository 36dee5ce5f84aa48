"""The divergence watch: how far the learner is from what the rollout recorded, at every step, why, and when that is too far.

Guarantees: a batch is judged before it is trained on, so the batch that halts a run changes nothing; one bad batch does neither raise nor halt unless `in_a_row`
is 1; a reading of fewer than `min_tokens` tokens is not judged at all, and neither continues nor breaks a row; a distance that is not a number is over every
limit. The rules are pure: a state, a reading, the next state and what is to be said.

**Where the distance comes from.** d = learner - rollout at a trained token, and k3 = mean(expm1(d) - d) in float64 is an estimate of KL(rollout || learner). Write
d = n + s: n as if the learner had the weights that sampled the token (arithmetic, kernels, expert choices), s what the weights have moved since. For a token of
lag 0, s = 0, so its d is numerics, measured on every such token. For the others the probe recomputes members under the very version that sampled them. With T_l and N_l
the mean k3 of the total and of the numerics at lag l, and w_l the share of trained tokens of that lag,

    numerics = sum over l of w_l N_l,      staleness = sum over l of w_l (T_l - N_l) = total - numerics.

N_0 = T_0. Where the probe has no token of a lag, its mean over all lags stands in; where it has none at all, there is no split, only a total. The two parts add up
by definition; that the rest is the weights' doing is exact as far as exp(n) and exp(s) are uncorrelated, E exp(d) = E exp(n) E exp(s), and each of them near 1. It
may come out a little below zero: both parts are means over samples, and `staleness_stderr` says how well it is known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from driftline.messages.errors import ConfigError
from driftline.messages.types import Divergence, DivergenceLevel, DivergenceSignal
from driftline.models.flips import Flips
from driftline.services.learner.drift_metrics import Drift, DriftReport
from driftline.services.learner_config import WatchConfig

__all__ = ["Gate", "Limits", "Reading", "Split", "StepDrift", "Verdict", "Watch", "WatchRules", "WatchState", "halted_because", "judge", "readings", "rules_of", "split", "watch_values"]


@dataclass(frozen=True)
class StepDrift:
    """How far apart the two sides are on some tokens, all and by lag; `flips` where a router's own choices were counted."""

    drift: DriftReport
    flips: Flips | None = None


@dataclass(frozen=True)
class Limits:
    """Over `alarm` somebody is told, over `halt` the run ends; None: never. Inclusive: a value equal to a limit is not over it."""

    alarm: float | None = None
    halt: float | None = None


_DEFAULT: Mapping[DivergenceSignal, Limits] = MappingProxyType({
    # Between the 1.5e-3 that is published for mixtures of experts without router replay and what a wrong weight costs.
    DivergenceSignal.NUMERICS: Limits(alarm=2e-3),
})


@dataclass(frozen=True)
class WatchRules:
    """`limits` of each signal that is watched; `in_a_row` judged steps over a limit before it acts, and below the alarm's before that is over; `min_tokens` a
    reading must stand on. `count_flips`: have the routers' own choices compared with the replayed ones. Raises ConfigError for limits that could not act as meant."""

    limits: Mapping[DivergenceSignal, Limits] = field(default_factory=lambda: _DEFAULT)
    min_tokens: int = 128
    in_a_row: int = 3
    count_flips: bool = False

    def __post_init__(self) -> None:
        for name, number in (("min_tokens", self.min_tokens), ("in_a_row", self.in_a_row)):
            if number < 1:
                raise ConfigError("judges nothing" if name == "min_tokens" else "acts on nothing", field=f"watch.{name}", value=number, remedy="give at least 1")
        for signal, limits in self.limits.items():
            for kind, limit in (("alarm", limits.alarm), ("halt", limits.halt)):
                if limit is not None and not (math.isfinite(limit) and limit > 0):
                    raise ConfigError("a limit is a positive number", field=f"watch.{signal.value}_{kind}", value=limit, remedy="leave it out to turn it off")
            if limits.alarm is not None and limits.halt is not None and limits.halt < limits.alarm:
                raise ConfigError(f"the run would end before the alarm at {limits.alarm:g}", field=f"watch.{signal.value}_halt", value=limits.halt,
                                  remedy="give a halt level of at least the alarm's")


def rules_of(config: WatchConfig) -> WatchRules:
    """The rules that a run file's `[watch]` describes; 0 there is None here."""
    limits = {
        signal: Limits(getattr(config, f"{signal.value}_alarm") or None, getattr(config, f"{signal.value}_halt") or None) for signal in DivergenceSignal
    }
    return WatchRules({signal: limit for signal, limit in limits.items() if limit != Limits()}, config.min_tokens, config.in_a_row, config.count_flips)


class Reading(NamedTuple):
    """What is judged: a value, and how many tokens (of flips: token and layer pairs) it is the mean of."""

    value: float
    tokens: int


class Split(NamedTuple):
    """Token-averaged k3 in nats: `total = numerics + staleness`. None where nothing says how much of the total is numerics."""

    total: float
    numerics: float | None
    staleness: float | None
    numerics_tokens: int
    numerics_stderr: float
    staleness_stderr: float


def split(step: DriftReport, same_weights: DriftReport | None) -> Split:
    """The total of `step`, in two parts. `same_weights`: what the probe found, by the lag of the version that sampled."""
    shown = {lag: part for lag, part in step.by_lag.items() if part.tokens}
    sources = {lag: part if lag == 0 else _at_lag(same_weights, lag) for lag, part in shown.items()}
    total, trained = step.all.k3, sum(part.tokens for part in shown.values())
    numerics = variance = 0.0
    for lag, source in sources.items():
        if source is None:
            return Split(total, None, None, 0, 0.0, 0.0)
        share = shown[lag].tokens / trained
        numerics += share * source.k3
        variance += (share * source.k3_stderr) ** 2
    error = math.sqrt(variance)
    stood_on = shown[0].tokens if 0 in shown else 0
    if same_weights is not None:
        stands_in = any(source is same_weights.all for source in sources.values())
        stood_on += sum(part.tokens for lag, part in same_weights.by_lag.items() if (stands_in or lag in shown) and not (lag == 0 and 0 in shown))
    if shown.keys() <= {0}:
        return Split(total, numerics, 0.0, stood_on, error, 0.0)
    return Split(total, numerics, total - numerics, stood_on, error, math.hypot(step.all.k3_stderr, error))


def _at_lag(found: DriftReport | None, lag: int) -> Drift | None:
    if found is None:
        return None
    exact = found.by_lag.get(lag)
    if exact is not None and exact.tokens:
        return exact
    return found.all if found.all.tokens else None


def readings(step: StepDrift, same_weights: StepDrift | None) -> dict[DivergenceSignal, Reading]:
    """What a step has to show for each signal; a signal it says nothing about is missing. Tokens without a finite log-probability make the total not a number."""
    parts = split(step.drift, None if same_weights is None else same_weights.drift)
    everything = step.drift.all
    unread = everything.non_finite > 0
    found = {
        DivergenceSignal.TOTAL: Reading(math.nan if unread else everything.k3, everything.tokens + everything.non_finite),
        DivergenceSignal.EXTREME: Reading(math.nan if unread else everything.extreme, everything.tokens + everything.non_finite),
    }
    if parts.numerics is not None:
        bad = same_weights is not None and same_weights.drift.all.non_finite > 0
        found[DivergenceSignal.NUMERICS] = Reading(math.nan if bad else parts.numerics, parts.numerics_tokens)
    if parts.staleness is not None:
        found[DivergenceSignal.STALENESS] = Reading(parts.staleness, min(everything.tokens, parts.numerics_tokens))
    if step.flips is not None and step.flips.rows:
        found[DivergenceSignal.FLIPS] = Reading(step.flips.share, step.flips.rows)
    return found


@dataclass(frozen=True)
class _Row:
    """How many judged steps in a row one signal has been over its alarm, over its halt level, and below its alarm; whether its alarm is raised."""

    alarm: int = 0
    halt: int = 0
    calm: int = 0
    raised: bool = False


@dataclass(frozen=True)
class WatchState:
    rows: Mapping[DivergenceSignal, _Row] = field(default_factory=dict)

    @property
    def raised(self) -> tuple[DivergenceSignal, ...]:
        """The signals whose alarm is raised."""
        return tuple(signal for signal, row in self.rows.items() if row.raised)


@dataclass(frozen=True)
class Verdict:
    """The state after a step, what became known at it, and the first limit that ends the run, if one does."""

    state: WatchState
    events: tuple[Divergence, ...] = ()
    halt: Divergence | None = None


def judge(rules: WatchRules, state: WatchState, found: Mapping[DivergenceSignal, Reading], *, run: str, version: int, at: float) -> Verdict:
    """Judge the step that is to make `version`, before it is taken."""
    rows, events = dict(state.rows), list[Divergence]()
    for signal, limits in rules.limits.items():
        reading = found.get(signal)
        if reading is None or reading.tokens < rules.min_tokens:
            continue
        row = _next(state.rows.get(signal, _Row()), reading.value, limits)

        def say(level: DivergenceLevel, limit: float | None, steps: int, *, signal: DivergenceSignal = signal, reading: Reading = reading) -> None:
            events.append(Divergence(run=run, version=version, signal=signal, level=level, value=reading.value, limit=limit or 0.0, tokens=reading.tokens,
                                     steps=steps, at=at))

        if row.alarm >= rules.in_a_row and not row.raised:
            row = replace(row, raised=True)
            say(DivergenceLevel.ALARM, limits.alarm, row.alarm)
        elif row.raised and row.calm >= rules.in_a_row:
            row = replace(row, raised=False)
            say(DivergenceLevel.CLEARED, limits.alarm, row.calm)
        if row.halt >= rules.in_a_row:
            say(DivergenceLevel.HALT, limits.halt, row.halt)
        rows[signal] = row
    halts = [event for event in events if event.level is DivergenceLevel.HALT]
    return Verdict(WatchState(rows), tuple(events), halts[0] if halts else None)


def _next(row: _Row, value: float, limits: Limits) -> _Row:
    over_alarm, over_halt = _over(value, limits.alarm), _over(value, limits.halt)
    return replace(row, alarm=row.alarm + 1 if over_alarm else 0, halt=row.halt + 1 if over_halt else 0, calm=0 if over_alarm else row.calm + 1)


def _over(value: float, limit: float | None) -> bool:
    return limit is not None and not value <= limit


def watch_values(step: StepDrift, same_weights: StepDrift | None, state: WatchState) -> dict[str, float]:
    """A step's numbers under the names that metrics use; what was not measured is missing. `alarms`: how many signals' alarms are raised."""
    parts = split(step.drift, None if same_weights is None else same_weights.drift)
    values = {"alarms": float(len(state.raised)), "k3_stderr": step.drift.all.k3_stderr, "extreme": step.drift.all.extreme}
    if parts.numerics is not None and parts.staleness is not None:
        values |= {"k3_numerics": parts.numerics, "k3_numerics_stderr": parts.numerics_stderr, "tokens_numerics": float(parts.numerics_tokens),
                   "k3_staleness": parts.staleness, "k3_staleness_stderr": parts.staleness_stderr}
    if same_weights is not None:
        values["extreme_numerics"] = same_weights.drift.all.extreme
    for suffix, flips in (("", step.flips), ("_numerics", None if same_weights is None else same_weights.flips)):
        if flips is not None and flips.rows:
            values |= {f"flips{suffix}": flips.share, f"flips_ordered{suffix}": flips.ordered_share, f"flip_rows{suffix}": float(flips.rows)}
    return values


def halted_because(event: Divergence) -> str:
    """The reason of a run that the watch ended, for people."""
    what = {DivergenceSignal.FLIPS: "share of flipped routes", DivergenceSignal.EXTREME: "share of extreme tokens"}.get(event.signal, f"k3 of {event.signal.value}")
    return (f"divergence: {what} {event.value:.3g} over {event.limit:.3g} (watch.{event.signal.value}_halt) in {event.steps} steps in a row; "
            f"the batch for version {event.version} was not trained on")


class Watch:
    """The watch of one learner's life: the state between its steps. What a row had reached is forgotten with the process."""

    def __init__(self, run: str, rules: WatchRules) -> None:
        self._run, self._rules = run, rules
        self.state = WatchState()

    def gate(self, version: int, same_weights: StepDrift | None) -> Gate:
        """For the step that is to make `version`; `same_weights` is what the probe found on its batch."""
        return Gate(self, version, same_weights)

    def judge(self, step: StepDrift, same_weights: StepDrift | None, version: int) -> Verdict:
        verdict = judge(self._rules, self.state, readings(step, same_weights), run=self._run, version=version, at=time.time())
        self.state = verdict.state
        return verdict


class Gate:
    """Whether one step may be taken; called with its distances between its last backward pass and the optimizer, perhaps in another thread."""

    def __init__(self, watch: Watch, version: int, same_weights: StepDrift | None) -> None:
        self._watch, self._version, self._same_weights = watch, version, same_weights
        self.verdict = Verdict(watch.state)

    def __call__(self, step: StepDrift) -> bool:
        self.verdict = self._watch.judge(step, self._same_weights, self._version)
        return self.verdict.halt is None
