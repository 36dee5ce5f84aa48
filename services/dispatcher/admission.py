"""Admission: how many groups may enter the loop, decided from the ledger alone.

Guarantees: the state is a fold over the ledger's events, so a dispatcher that starts anywhere, any number of times, arrives
at the same answer; there is no counter to restore and none to drift. A group is counted while it is admitted and has no
outcome, whatever that outcome is. An event seen twice changes nothing.

Admitting is safe on an old view: groups are numbered without gaps and the ledger refuses a number twice, so whoever gets
number k has seen every admission before it, and outcomes not yet seen only make the capacity smaller than it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from driftline.messages.types import Admitted, Group, OutcomeEvent

__all__ = ["AdmissionState", "LedgerEvent", "capacity", "fold", "group_id"]

LedgerEvent = Admitted | OutcomeEvent

_NONE: Mapping[str, Group] = MappingProxyType({})


@dataclass(frozen=True)
class AdmissionState:
    """`cursor` is the index of the next group; `open` holds the groups that are admitted and have not ended."""

    cursor: int = 0
    admitted: int = 0
    open: Mapping[str, Group] = field(default_factory=lambda: _NONE)

    @property
    def ended(self) -> int:
        return self.admitted - len(self.open)


def group_id(index: int) -> str:
    return f"g{index:08d}"


def fold(state: AdmissionState, events: Iterable[LedgerEvent]) -> AdmissionState:
    """The state after `events`, in ledger order."""
    cursor, admitted, groups = state.cursor, state.admitted, dict(state.open)
    for event in events:
        match event:
            case Admitted(group=group) if group.index >= cursor:
                cursor, admitted = group.index + 1, admitted + 1
                groups[group.group] = group
            case OutcomeEvent(group=name):
                groups.pop(name, None)
    return AdmissionState(cursor, admitted, MappingProxyType(groups))


def capacity(state: AdmissionState, max_lag: int, groups_per_step: int) -> int:
    """How many more groups may be admitted now; negative after the bound was lowered between two starts.

    With (max_lag + 1) * groups_per_step groups in the loop, the newest is trained at most max_lag versions after the one it
    was admitted under. With max_lag = 0 exactly one batch is in the loop, so a synchronous run still moves.
    """
    return (max_lag + 1) * groups_per_step - len(state.open)
