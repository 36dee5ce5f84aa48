"""The audit as a rule: a valid history has no finding, and whatever is taken from it or added to it is named."""

from __future__ import annotations

import pytest
from audit_cases import (
    RUN,
    Beside,
    Event,
    admitted,
    consumed,
    ended,
    histories,
    ids,
    judge,
    retried,
    trained,
)
from hypothesis import given
from hypothesis import strategies as st

from driftline.messages.types import (
    Admitted,
    Divergence,
    DivergenceLevel,
    DivergenceSignal,
    Outcome,
    OutcomeEvent,
    Taken,
)
from driftline.services.audit.fold import Accounts, Consumed
from driftline.services.audit.report import Bounds, FindingKind, Report
from driftline.services.audit.text import CLEAN, report_lines
from driftline.services.dispatcher.admission import group_id

TWO: list[Event] = [Consumed(0, []), admitted(0), admitted(1), consumed(1, 0), trained(0, 1), ended(1, Outcome.ZERO_VARIANCE, arrived=(0, 1))]
"""Two groups: one trained by version 1, one without variance."""
LIMITS = Bounds(max_lag=1, groups_per_step=1)

CASES: dict[FindingKind, tuple[list[Event], Beside, str]] = {
    FindingKind.INDEX_MISSING: ([admitted(0), ended(0), admitted(2), ended(2)], Beside(), "1"),
    FindingKind.INDEX_TWICE: ([admitted(0), ended(0), admitted(0, name="other"), OutcomeEvent(run=RUN, group="other", outcome=Outcome.STALE)],
                              Beside(), "other"),
    FindingKind.ADMITTED_TWICE: ([admitted(0), admitted(0), ended(0)], Beside(), group_id(0)),
    FindingKind.NEVER_ADMITTED: ([*TWO, ended(7)], Beside(), group_id(7)),
    FindingKind.ENDED_TWICE: ([*TWO, ended(1, Outcome.STALE)], Beside(), group_id(1)),
    FindingKind.UNFINISHED: ([*TWO, admitted(2)], Beside(), group_id(2)),
    FindingKind.OUTCOME_DIFFERS: ([*TWO, admitted(2), trained(2, 1)], Beside(), group_id(2)),
    FindingKind.CONSUMED_UNTRAINED: ([*TWO, admitted(2), consumed(2, 2), ended(2)], Beside(), ids(2)[0]),
    FindingKind.TRAINED_TWICE: ([*TWO, consumed(2, 0)], Beside(), ids(0)[0]),
    FindingKind.VERSION_GAP: ([*TWO, admitted(2), consumed(3, 2), trained(2, 3)], Beside(), "2"),
    FindingKind.TOO_STALE: ([*TWO, admitted(2), consumed(2, 2), trained(2, 2, lag=2)], Beside(), group_id(2)),
    FindingKind.OVER_ADMITTED: ([*TWO, admitted(2), admitted(3), admitted(4), ended(2), ended(3), ended(4)], Beside(), group_id(4)),
    FindingKind.ADMISSION_DIFFERS: ([*TWO, ended(2), admitted(2)], Beside(), group_id(2)),
    FindingKind.STRAY_DELIVERY: (TWO, Beside(queued=[("graded", "g9")]), "g9"),
    FindingKind.STRAY_LETTER: (TWO, Beside(letters=[(3, "graded", "g9")]), "g9"),
    FindingKind.UNREADABLE: (TWO, Beside(unreadable=["LEDGER 5"]), "LEDGER 5"),
}


def found(report: Report) -> list[tuple[FindingKind, str]]:
    return [(finding.kind, finding.id) for finding in report.findings]


@pytest.mark.parametrize("kind", FindingKind)
def test_every_finding_has_a_history_that_produces_it(kind: FindingKind) -> None:
    history, beside, id = CASES[kind]
    assert (kind, id) in found(judge(history, beside=beside, bounds=LIMITS))
    assert judge(TWO, bounds=LIMITS).findings == ()


def test_what_the_divergence_watch_said_is_counted_and_is_no_finding() -> None:
    def said(version: int, level: DivergenceLevel) -> Divergence:
        return Divergence(run=RUN, version=version, signal=DivergenceSignal.TOTAL, level=level, value=1.0, limit=0.5, tokens=200, steps=3)

    report = judge([*TWO, said(1, DivergenceLevel.ALARM), said(5, DivergenceLevel.CLEARED), said(9, DivergenceLevel.ALARM)], bounds=LIMITS)
    assert report.divergences == {"alarm total": 2, "cleared total": 1}
    assert report.findings == ()
    lines = list(report_lines(report))
    assert "divergence    alarm total 2, cleared total 1" in lines
    assert lines[-1] == CLEAN
    assert "divergence    none" in report_lines(judge(TWO, bounds=LIMITS))


def test_a_number_twice_and_a_number_missing_are_told_apart() -> None:
    assert {kind for kind, _ in found(judge(CASES[FindingKind.INDEX_TWICE][0]))} == {FindingKind.INDEX_TWICE}
    assert {kind for kind, _ in found(judge(CASES[FindingKind.INDEX_MISSING][0]))} == {FindingKind.INDEX_MISSING}


@pytest.mark.parametrize("event", [ended(7), retried(7), Taken(run=RUN, group=group_id(7), version=1, epoch=1)])
def test_whatever_is_said_of_a_group_that_was_not_admitted_is_named(event: Event) -> None:
    assert found(judge([*TWO, event])) == [(FindingKind.NEVER_ADMITTED, group_id(7))]


@pytest.mark.parametrize(
    ("history", "kind", "id"),
    [
        ([admitted(0), consumed(1, 0), trained(0, 1, (0,))], FindingKind.OUTCOME_DIFFERS, group_id(0)),
        ([admitted(0), consumed(1, 0), trained(0, 2)], FindingKind.OUTCOME_DIFFERS, group_id(0)),
        ([admitted(0), consumed(1, 0), trained(0, -1)], FindingKind.OUTCOME_DIFFERS, group_id(0)),
        ([admitted(0), Consumed(1, ids(0, (0, 1, 2))), trained(0, 1, (0, 1, 2))], FindingKind.OUTCOME_DIFFERS, group_id(0)),
        ([admitted(0), ended(0, Outcome.FAILED, trained=(1,))], FindingKind.OUTCOME_DIFFERS, group_id(0)),
        ([consumed(1, 0)], FindingKind.CONSUMED_UNTRAINED, ids(0)[0]),
        ([admitted(0), consumed(1, 0), consumed(2), trained(0, 2, ())], FindingKind.CONSUMED_UNTRAINED, ids(0)[1]),
        ([admitted(0), consumed(1, 0), trained(0, 1), Consumed(2, ["elsewhere/g1/0"])], FindingKind.CONSUMED_UNTRAINED, "elsewhere/g1/0"),
        ([admitted(0), consumed(1, 0), trained(0, 1), Consumed(2, ["r/g1/x"])], FindingKind.CONSUMED_UNTRAINED, "r/g1/x"),
    ],
)
def test_what_outcomes_and_versions_say_of_each_other_is_compared(history: list[Event], kind: FindingKind, id: str) -> None:
    assert (kind, id) in found(judge(history))


def test_a_group_may_be_open_while_the_run_goes_on_and_not_when_it_is_over() -> None:
    """H19 (a lost completion: the sample is waited for without end). While the run goes on the audit shows the group in flight; the end
    of the run makes it a finding with its name."""
    history: list[Event] = [*TWO, admitted(2, members=8)]
    live = judge(history, over=False)
    assert (live.findings, live.open, live.trajectories.in_flight) == ((), 1, 8)
    assert found(judge(history)) == [(FindingKind.UNFINISHED, group_id(2))]


def test_a_group_lost_in_a_step_says_which_version_was_being_trained() -> None:
    [finding] = judge([*TWO, admitted(2), Taken(run=RUN, group=group_id(2), version=2, epoch=1)]).findings
    assert finding.kind is FindingKind.UNFINISHED
    assert "being trained" in finding.sentence


def test_the_newest_version_may_be_ahead_of_its_outcomes_and_an_older_one_may_not() -> None:
    history: list[Event] = [*TWO, admitted(2), consumed(2, 2)]
    assert judge(history, over=False).findings == ()
    assert found(judge([*history, consumed(3)], over=False)) == [(FindingKind.CONSUMED_UNTRAINED, id) for id in ids(2)]


def test_what_was_sampled_ahead_and_dropped_by_a_resume_is_named() -> None:
    """L3 (oversampled buffer dropped on resume: ids 0..7 in batches of 4, 6 sampled, crash). Groups 4 and 5 were let in and forgotten."""
    first: list[Event] = [Consumed(0, []), *(admitted(index) for index in range(6)), consumed(1, 0, 1, 2, 3), *(trained(index, 1) for index in range(4))]
    whole = [*first, admitted(6), admitted(7), consumed(2, 4, 5, 6, 7), *(trained(index, 2) for index in range(4, 8))]
    forgotten = [*first, admitted(6), admitted(7), ended(6), ended(7)]
    assert judge(whole).findings == ()
    assert judge(whole).trajectories.trained == 16
    assert found(judge(forgotten)) == [(FindingKind.UNFINISHED, group_id(4)), (FindingKind.UNFINISHED, group_id(5))]


def test_prompts_skipped_by_a_resume_are_named_as_one_range() -> None:
    """L4 (675 of 736 prompts skipped on resume): with half the ids in flight a crash moves the cursor; every id must end exactly once."""
    history: list[Event] = [event for index in (*range(61), 736) for event in (admitted(index), ended(index))]
    assert found(judge(history)) == [(FindingKind.INDEX_MISSING, "61-735")]


def test_siblings_with_one_id_are_named_and_eight_with_their_own_are_not() -> None:
    """L16 (siblings of a prompt get identical ids): eight siblings are eight trajectories of one group."""
    eight = range(8)
    assert judge([admitted(0, 8), Consumed(1, ids(0, eight)), trained(0, 1, eight)]).trajectories.trained == 8
    same = judge([admitted(0, 8), Consumed(1, ids(0, [3] * 8)), trained(0, 1, [3] * 8)])
    assert {id for kind, id in found(same) if kind is FindingKind.TRAINED_TWICE} == {ids(0, [3])[0]}
    assert (FindingKind.OUTCOME_DIFFERS, group_id(0)) in found(same)


def test_fifty_discarded_rollouts_leave_nothing_in_flight() -> None:
    """H28 (in-flight counter not decremented for discarded rollouts): there is no counter; the dispatcher's fold and ours agree."""
    bounds = Bounds(max_lag=1, groups_per_step=25)
    history: list[Event] = [*(admitted(index) for index in range(50)), *(ended(index, Outcome.STALE, arrived=(0, 1)) for index in range(50))]
    report = judge(history, over=False, bounds=bounds)
    assert (report.findings, report.trajectories.in_flight, report.capacity, report.peak_open) == ((), 0, 50, 50)
    assert report.trajectories.untrained == {"stale": 100}


def test_a_burst_after_a_resume_is_named() -> None:
    """S2 (the accepted counter restarts at 0 while the version is restored: a burst). At version 100 the bound is the same as at 0."""
    bounds = Bounds(max_lag=1, groups_per_step=1)
    history: list[Event] = [Consumed(0, [])]
    for step in range(100):
        history += [admitted(step), consumed(step + 1, step), trained(step, step + 1)]
    steady = [*history, admitted(100), admitted(101)]
    report = judge(steady, over=False, bounds=bounds)
    assert (report.findings, report.capacity) == ((), 0)
    burst = [*steady, admitted(102), admitted(103)]
    assert found(judge(burst, over=False, bounds=bounds)) == [(FindingKind.OVER_ADMITTED, group_id(index)) for index in (102, 103)]


def test_every_trajectory_is_counted_once() -> None:
    history: list[Event] = [
        Consumed(0, []), admitted(0, 4), admitted(1, 4), admitted(2, 4), admitted(3, 4), Consumed(1, ids(0, (0, 2))),
        trained(0, 1, (0, 2), arrived=(0, 1, 2)), ended(1, Outcome.EXPIRED, arrived=(3,)), ended(2, Outcome.ZERO_VARIANCE, arrived=range(4)),
    ]
    counts = judge(history, over=False).trajectories
    assert (counts.total, counts.trained, counts.never_arrived, counts.in_flight) == (16, 2, 4, 4)
    assert counts.untrained == {"expired": 1, "left_out": 1, "zero_variance": 4}


def test_reasons_are_counted_without_their_numbers_and_are_bounded() -> None:
    history: list[Event] = [admitted(0), ended(0, reason="lag 2 exceeds 1"), admitted(1), ended(1, reason="lag 12 exceeds 1")]
    assert judge(history).reasons == {"stale": {"lag N exceeds N": 2}}
    many: list[Event] = [event for index in range(200) for event in (admitted(index), ended(index, reason="x" * index))]
    reasons = judge(many).reasons["stale"]
    assert (len(reasons), sum(reasons.values())) == (65, 200)


def test_deliveries_of_ended_groups_are_residue_and_no_finding() -> None:
    queued = [("graded", group_id(0)), ("graded", group_id(2)), ("groups", group_id(1))]
    report = judge([*TWO, admitted(2)], over=False, beside=Beside(queued=queued, letters=[(1, "graded", group_id(0)), (2, "ledger", None)]))
    assert report.findings == ()
    assert (report.queues["graded"].in_flight, report.queues["graded"].residue, report.queues["groups"].residue) == (1, 1, 1)
    assert report.dead_letters == {"graded": 1, "ledger": 1}


def test_a_queued_message_that_names_no_group_is_named_by_its_place() -> None:
    report = judge(TWO, beside=Beside(queued=[("groups", None)]))
    assert found(report) == [(FindingKind.UNREADABLE, "groups 0")]
    assert report.queues["groups"].stray == 1


def test_a_trained_group_whose_version_left_nothing_is_counted_as_unverified() -> None:
    report = judge([admitted(0), trained(0, 1), admitted(1), consumed(2, 1), trained(1, 2)])
    assert (report.findings, report.versions.unverified, report.versions.manifests) == ((), 1, 1)


def test_records_stand_in_for_collected_manifests() -> None:
    history: list[Event] = [admitted(0), Consumed(1, ids(0, (0,)), recorded=True), trained(0, 1), admitted(1), consumed(2, 1), trained(1, 2)]
    report = judge(history)
    assert found(report) == [(FindingKind.OUTCOME_DIFFERS, group_id(0))]
    assert (report.versions.records, report.versions.manifests) == (1, 1)


def test_pages_of_any_size_give_one_report() -> None:
    events = [event for event in [*TWO, ended(7), admitted(3)] if not isinstance(event, Consumed)]
    whole, paged = Accounts(RUN), Accounts(RUN)
    whole.ledger(events)
    for event in events:
        paged.ledger([event])
    assert whole.report(head=1, finished="done") == paged.report(head=1, finished="done")


def test_the_text_ends_with_one_line_when_nothing_is_wrong_and_names_what_is() -> None:
    assert list(report_lines(judge(TWO)))[-1] == CLEAN == "nothing missing, nothing doubled, nothing unfinished"
    lines = list(report_lines(judge([*TWO, admitted(2)])))
    assert lines[-1] == "1 findings"
    assert lines[-2].startswith(f"unfinished  {group_id(2)}: ")


def test_the_text_shows_no_control_characters_of_a_stranger() -> None:
    report = judge([admitted(0), ended(0, reason="\x1b[2Jgone")], beside=Beside(queued=[("graded", "g\x1b")]))
    assert "\x1b" not in "".join(report_lines(report))


LAG, STEP = 2, 2


@given(histories(max_lag=LAG, per_step=STEP))
def test_a_valid_history_has_no_finding_at_any_moment(history: list[Event]) -> None:
    bounds = Bounds(LAG, STEP)
    report = judge(history, bounds=bounds)
    assert report.findings == ()
    assert report.open == 0
    counts = report.trajectories
    assert counts.total == counts.trained + sum(counts.untrained.values()) + counts.never_arrived
    assert counts.trained == sum(len(event.trajectories) for event in history if isinstance(event, Consumed))
    for cut in range(len(history)):
        assert judge(history[:cut], over=False, bounds=bounds).findings == ()


def about(history: list[Event], position: int) -> tuple[set[str], str]:
    """The ids that a finding on this event may carry: the group's, its number's, and the beginning of its trajectories'."""
    event = history[position]
    name = event.group.group if isinstance(event, Admitted) else event.group  # type: ignore[union-attr]
    index = next(e.group.index for e in history if isinstance(e, Admitted) and e.group.group == name)
    return {name, str(index)}, f"{RUN}/{name}/"


@given(histories(max_lag=LAG, per_step=STEP).filter(lambda history: len(history) > 1), st.data())
def test_an_event_removed_or_doubled_is_named_and_nothing_else_is(history: list[Event], data: st.DataObject) -> None:
    positions = [i for i, event in enumerate(history) if isinstance(event, (Admitted, OutcomeEvent))]
    at = data.draw(st.sampled_from(positions))
    names, beginning = about(history, at)
    removed = history[:at] + history[at + 1 :]
    again = data.draw(st.integers(at + 1, len(history)))
    for changed in (removed, [*history[:again], history[at], *history[again:]]):
        findings = judge(changed).findings
        assert findings
        assert all(finding.id in names or finding.id.startswith(beginning) for finding in findings)


@given(histories(max_lag=LAG, per_step=STEP), st.data())
def test_a_trajectory_taken_from_or_added_to_a_version_is_named(history: list[Event], data: st.DataObject) -> None:
    versions = [i for i, event in enumerate(history) if isinstance(event, Consumed) and event.trajectories]
    if not versions:
        return
    at = data.draw(st.sampled_from(versions))
    version = history[at]
    assert isinstance(version, Consumed)
    id = data.draw(st.sampled_from(list(version.trajectories)))
    name = id.split("/")[1]
    fewer = version._replace(trajectories=[other for other in version.trajectories if other != id])
    assert found(judge([*history[:at], fewer, *history[at + 1 :]])) == [(FindingKind.OUTCOME_DIFFERS, name)]
    to = data.draw(st.sampled_from(versions))
    target = history[to]
    assert isinstance(target, Consumed)
    more = target._replace(trajectories=[*target.trajectories, id])
    assert (FindingKind.TRAINED_TWICE, id) in found(judge([*history[:to], more, *history[to + 1 :]]))
