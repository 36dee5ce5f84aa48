"""Admission is a fold: whoever folds the ledger, from wherever and however often, never lets more in than the bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from driftline.messages.types import Admitted, Group, Outcome, OutcomeEvent, Task
from driftline.services.dispatcher.admission import AdmissionState, LedgerEvent, capacity, fold, group_id

TASK = Task(id="t", source="test", family="test", prompt="p")


def admitted(index: int) -> Admitted:
    group = Group(run="r", group=group_id(index), index=index, task=TASK, members=2)
    return Admitted(run="r", group=group, at=0.0)


def outcome(index: int, how: Outcome = Outcome.TRAINED) -> OutcomeEvent:
    return OutcomeEvent(run="r", group=group_id(index), outcome=how)


class Ledger:
    """A ledger that refuses a number twice, like the broker does."""

    def __init__(self) -> None:
        self.events: list[LedgerEvent] = []
        self.taken: set[int] = set()
        self.ended: set[int] = set()

    def admit(self, index: int) -> bool:
        if index in self.taken:
            return False
        self.taken.add(index)
        self.events.append(admitted(index))
        return True

    def end(self, index: int, how: Outcome) -> None:
        self.ended.add(index)
        self.events.append(outcome(index, how))

    @property
    def open(self) -> set[int]:
        return self.taken - self.ended


def test_an_empty_ledger_admits_one_batch_even_without_any_lag() -> None:
    """H35 (docs/field_failures.md)."""
    assert capacity(AdmissionState(), 0, 4) == 4


def test_every_kind_of_outcome_gives_the_place_back() -> None:
    """H4, H30 (docs/field_failures.md)."""
    state = fold(AdmissionState(), [admitted(index) for index in range(len(Outcome))])
    assert capacity(state, 0, len(Outcome)) == 0
    state = fold(state, [outcome(index, how) for index, how in enumerate(Outcome)])
    assert capacity(state, 0, len(Outcome)) == len(Outcome)
    assert (state.admitted, state.ended) == (len(Outcome), len(Outcome))


def test_three_batches_that_all_have_zero_variance_do_not_stop_admission() -> None:
    """H17 (docs/field_failures.md)."""
    state, batch = AdmissionState(), 8
    for start in range(0, 3 * batch, batch):
        state = fold(state, [admitted(index) for index in range(start, start + batch)])
        state = fold(state, [outcome(index, Outcome.ZERO_VARIANCE) for index in range(start, start + batch)])
    assert capacity(state, 0, batch) == batch
    assert state.cursor == 3 * batch


def test_fifty_dropped_groups_leave_nothing_in_flight() -> None:
    """H28, H4 (docs/field_failures.md)."""
    events: list[LedgerEvent] = []
    for index in range(50):
        events += [admitted(index), outcome(index, Outcome.STALE)]
    state = fold(AdmissionState(), events)
    assert not state.open
    assert capacity(state, 2, 16) == 48


def test_a_restart_at_a_high_version_admits_the_bound_and_not_a_burst() -> None:
    """S2, H27 (docs/field_failures.md)."""
    ledger = Ledger()
    for index in range(1600):
        ledger.admit(index)
        if index >= 48:
            ledger.end(index - 48, Outcome.TRAINED)
    resumed = fold(AdmissionState(), ledger.events)
    assert capacity(resumed, 2, 16) == 0
    assert len(resumed.open) == 48


def test_an_outcome_seen_twice_frees_one_place() -> None:
    """H28 (docs/field_failures.md)."""
    state = fold(AdmissionState(), [admitted(0), admitted(1), outcome(0), outcome(0)])
    assert capacity(state, 0, 2) == 1
    assert state.ended == 1


def test_an_outcome_for_a_group_never_admitted_frees_nothing() -> None:
    state = fold(AdmissionState(), [admitted(0), outcome(7)])
    assert capacity(state, 0, 2) == 1


def test_an_admission_seen_again_after_it_ended_does_not_reopen_it() -> None:
    state = fold(AdmissionState(), [admitted(0), outcome(0), admitted(0)])
    assert (state.cursor, state.admitted, len(state.open)) == (1, 1, 0)


def test_a_bound_lowered_between_two_starts_admits_nothing_until_the_excess_ended() -> None:
    state = fold(AdmissionState(), [admitted(index) for index in range(12)])
    assert capacity(state, 0, 4) == -8


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[LedgerEvent], int, int]:
    max_lag, per_step = draw(st.integers(0, 3)), draw(st.integers(1, 5))
    ledger = Ledger()
    for _ in range(draw(st.integers(0, 60))):
        state = fold(AdmissionState(), ledger.events)
        if capacity(state, max_lag, per_step) > 0 and (not ledger.open or draw(st.booleans())):
            ledger.admit(state.cursor)
        elif ledger.open:
            ledger.end(draw(st.sampled_from(sorted(ledger.open))), draw(st.sampled_from(Outcome)))
    return ledger.events, max_lag, per_step


@given(histories(), st.data())
def test_folding_in_any_pieces_gives_the_same_state(history: tuple[list[LedgerEvent], int, int], data: st.DataObject) -> None:
    events, _, _ = history
    cut = data.draw(st.integers(0, len(events)))
    assert fold(fold(AdmissionState(), events[:cut]), events[cut:]) == fold(AdmissionState(), events)


@given(histories(), st.data())
def test_events_delivered_again_from_any_point_change_nothing(
    history: tuple[list[LedgerEvent], int, int], data: st.DataObject
) -> None:
    events, _, _ = history
    cut = data.draw(st.integers(0, len(events)))
    state = fold(AdmissionState(), events)
    assert fold(state, events[cut:]) == state


@given(st.integers(0, 3), st.integers(1, 5), st.data())
def test_dispatchers_with_old_views_never_exceed_the_bound_and_never_stop_for_good(
    max_lag: int, per_step: int, data: st.DataObject
) -> None:
    """S18, S2, H29: Two dispatchers, each having read some prefix of the ledger, each crashing whenever it likes."""
    ledger, bound = Ledger(), (max_lag + 1) * per_step
    views = [0, 0]
    for _ in range(data.draw(st.integers(1, 80))):
        match data.draw(st.sampled_from(["read", "admit", "end", "crash"])):
            case "read":
                who = data.draw(st.integers(0, 1))
                views[who] = data.draw(st.integers(views[who], len(ledger.events)))
            case "admit":
                state = fold(AdmissionState(), ledger.events[: views[data.draw(st.integers(0, 1))]])
                if capacity(state, max_lag, per_step) > 0:
                    ledger.admit(state.cursor)
            case "end" if ledger.open:
                ledger.end(data.draw(st.sampled_from(sorted(ledger.open))), data.draw(st.sampled_from(Outcome)))
            case "crash":
                views[data.draw(st.integers(0, 1))] = 0
        assert len(ledger.open) <= bound
    assert ledger.taken == set(range(len(ledger.taken)))
    for index in sorted(ledger.open):
        ledger.end(index, Outcome.CANCELLED)
    assert capacity(fold(AdmissionState(), ledger.events), max_lag, per_step) == bound
