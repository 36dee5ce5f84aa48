"""Histories for the audit: the events of a run in the order they happened, and the report on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from driftline.messages.types import (
    Admitted,
    Group,
    Message,
    Outcome,
    OutcomeEvent,
    Retried,
    Taken,
    Task,
)
from driftline.services.audit.fold import Accounts, Consumed
from driftline.services.audit.report import Bounds, Report
from driftline.services.dispatcher.admission import group_id

RUN = "r"
Event = Message | Consumed

UNTRAINED = [outcome for outcome in Outcome if outcome is not Outcome.TRAINED]


def group(index: int, members: int = 2, name: str = "") -> Group:
    task = Task(id=f"t{index}", source="test", family="spell", prompt="abc")
    return Group(run=RUN, group=name or group_id(index), index=index, task=task, members=members)


def admitted(index: int, members: int = 2, name: str = "") -> Admitted:
    return Admitted(run=RUN, group=group(index, members, name), at=0.0)


def retried(index: int, attempt: int = 1) -> Retried:
    return Retried(run=RUN, group=group(index).model_copy(update={"attempt": attempt, "wanted": (0,)}), at=0.0)


def ended(index: int, outcome: Outcome = Outcome.STALE, *, arrived: Sequence[int] = (), reason: str = "", trained: Sequence[int] = ()) -> OutcomeEvent:
    return OutcomeEvent(run=RUN, group=group_id(index), outcome=outcome, arrived=tuple(arrived), reason=reason, trained=tuple(trained))


def trained(index: int, version: int, members: Sequence[int] = (0, 1), *, lag: int = 0, arrived: Sequence[int] | None = None) -> OutcomeEvent:
    return OutcomeEvent(run=RUN, group=group_id(index), outcome=Outcome.TRAINED, version=version, lag=lag, trained=tuple(members),
                        arrived=tuple(members if arrived is None else arrived))


def ids(index: int, members: Iterable[int] = (0, 1)) -> list[str]:
    return [f"{RUN}/{group_id(index)}/{member}" for member in members]


def consumed(version: int, *indices: int) -> Consumed:
    """A version trained on both members of these groups."""
    return Consumed(version, [id for index in indices for id in ids(index)])


@dataclass
class Beside:
    """What lies in queues and dead letters, by group."""

    queued: Sequence[tuple[str, str | None]] = ()
    letters: Sequence[tuple[int, str, str | None]] = ()
    unreadable: Sequence[str] = field(default_factory=tuple)


def judge(
    history: Sequence[Event], *, over: bool = True, bounds: Bounds | None = None, head: int | None = None, beside: Beside | None = None
) -> Report:
    """The report on a history. `over`: the run is finished. The head is the newest version in it, unless it is given."""
    accounts = Accounts(RUN, bounds)
    versions = [event for event in history if isinstance(event, Consumed)]
    for version in versions:
        accounts.version(version)
    accounts.ledger(event for event in history if isinstance(event, Message))
    beside = beside or Beside()
    for number, (plane, name) in enumerate(beside.queued):
        accounts.queued(plane, name, f"{plane} {number}")
    for seq, kind, name in beside.letters:
        accounts.letter(seq, kind, name)
    for where in beside.unreadable:
        accounts.unreadable(where, "not a frame")
    newest = max((version.version for version in versions), default=-1) if head is None else head
    return accounts.report(head=newest, finished="done" if over else None)


@st.composite
def histories(draw: st.DrawFn, *, max_lag: int, per_step: int) -> list[Event]:
    """A valid run, in the order in which its services write: every group ends, the last ones by the end of the run."""
    events: list[Event] = [Consumed(0, [])]
    open_: dict[int, int] = {}
    attempts: dict[int, int] = {}
    cursor = version = 0
    for action in draw(st.lists(st.sampled_from(["admit", "admit", "end", "retry", "step"]), max_size=40)):
        match action:
            case "admit" if len(open_) < (max_lag + 1) * per_step:
                open_[cursor] = draw(st.integers(1, 4))
                events.append(admitted(cursor, open_[cursor]))
                cursor += 1
            case "end" if open_:
                index = draw(st.sampled_from(sorted(open_)))
                arrived = draw(st.sets(st.integers(0, open_.pop(index) - 1)))
                events.append(ended(index, draw(st.sampled_from(UNTRAINED)), arrived=sorted(arrived)))
            case "retry" if open_:
                index = draw(st.sampled_from(sorted(open_)))
                attempts[index] = attempts.get(index, 0) + 1
                events.append(retried(index, attempts[index]))
            case "step" if len(open_) >= per_step:
                batch = draw(st.permutations(sorted(open_)))[:per_step]
                version += 1
                used = {index: sorted(draw(st.sets(st.integers(0, open_[index] - 1), min_size=1))) for index in sorted(batch)}
                events += [Taken(run=RUN, group=group_id(index), version=version, epoch=1) for index in used]
                events.append(Consumed(version, [id for index, members in used.items() for id in ids(index, members)]))
                events += [trained(index, version, members, arrived=range(open_.pop(index))) for index, members in used.items()]
    return events + [ended(index, Outcome.CANCELLED) for index in sorted(open_)]
