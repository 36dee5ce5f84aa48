"""What an engine has in hand: the deliveries of each group, and of each member whether it is missing, being sampled, finished or stored.

Guarantees: a delivery is settled when every member it asks for is stored, or when its group is given up and nothing of it waits to be stored;
never before. Two deliveries of one group, a first and a retry, share the sampling and are settled each for itself. A group without a
delivery of ours (all leases lost, or all settled early) is an orphan: nobody waits for its work here. Pure state, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from driftline.messages.bus import Delivery
from driftline.messages.types import Group

__all__ = ["Hand"]


@dataclass(frozen=True)
class _Asked:
    """One delivery of a group and the members it asks for."""

    delivery: Delivery
    wanted: frozenset[int]


@dataclass
class _Held:
    """One group in hand. A member is in at most one of `sampling`, `finished` (out of the engine, not yet stored) and `stored`."""

    group: Group
    asked: dict[int, _Asked] = field(default_factory=dict)
    sampling: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)
    given_up: bool = False

    @property
    def missing(self) -> tuple[int, ...]:
        """Asked for and not begun."""
        if self.given_up:
            return ()
        wanted = frozenset[int]().union(*(asked.wanted for asked in self.asked.values()))
        return tuple(sorted(wanted - self.sampling - self.finished - self.stored))

    def settled(self, asked: _Asked) -> bool:
        return asked.wanted <= self.stored or (self.given_up and not self.finished)


class Hand:
    """Groups by name, in order of arrival."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    @property
    def deliveries(self) -> list[Delivery]:
        return [asked.delivery for held in self._held.values() for asked in held.asked.values()]

    @property
    def unfinished(self) -> int:
        """Members that the engine has or is to get."""
        return sum(len(held.sampling) + len(held.missing) for held in self._held.values())

    @property
    def unstored(self) -> int:
        """`unfinished`, and those that wait for the broker."""
        return self.unfinished + sum(len(held.finished) for held in self._held.values())

    def add(self, delivery: Delivery, group: Group) -> Delivery | None:
        """Take a delivery in. Returns the one it replaces: the same message, delivered again because its lease had lapsed."""
        held = self._held.setdefault(group.group, _Held(group))
        before = held.asked.get(group.attempt)
        held.asked[group.attempt] = _Asked(delivery, frozenset(group.to_sample))
        return None if before is None else before.delivery

    def group(self, name: str) -> Group:
        return self._held[name].group

    def ready(self) -> list[str]:
        """The groups with a member to begin."""
        return [name for name, held in self._held.items() if held.missing]

    def begin(self, name: str) -> tuple[int, ...]:
        """The missing members, which are now being sampled."""
        held = self._held[name]
        members = held.missing
        held.sampling.update(members)
        return members

    def finish(self, name: str, member: int) -> None:
        """A member left the engine and is to be stored."""
        if (held := self._held.get(name)) is not None:
            held.sampling.discard(member)
            held.finished.add(member)

    def give_up(self, name: str) -> None:
        """No member is begun any more; the group's deliveries are settled when what has finished is stored."""
        held = self._held[name]
        held.given_up = True
        held.sampling.clear()

    def store(self, name: str, member: int) -> None:
        """A member is stored, by this hand or by an earlier one that lost the group."""
        if (held := self._held.get(name)) is not None:
            held.finished.discard(member)
            held.stored.add(member)

    def settle(self, name: str) -> list[Delivery]:
        """The deliveries that are done with, to be acknowledged; they are no longer in hand."""
        held = self._held.get(name)
        if held is None:
            return []
        done = [attempt for attempt, asked in held.asked.items() if held.settled(asked)]
        deliveries = [held.asked.pop(attempt).delivery for attempt in done]
        if not held.asked and not held.sampling:
            del self._held[name]
        return deliveries

    def lose(self, lost: Iterable[Delivery]) -> None:
        """These deliveries are no longer ours: they come again, here or elsewhere."""
        gone = {id(delivery) for delivery in lost}
        for held in self._held.values():
            held.asked = {attempt: asked for attempt, asked in held.asked.items() if id(asked.delivery) not in gone}

    def disown(self, name: str) -> list[Delivery]:
        """Make a group an orphan; returns its deliveries."""
        held = self._held.get(name)
        if held is None:
            return []
        deliveries = [asked.delivery for asked in held.asked.values()]
        held.asked = {}
        return deliveries

    def orphans(self) -> list[str]:
        return [name for name, held in self._held.items() if not held.asked]

    def recall(self, name: str | None = None) -> list[str]:
        """The engine forgot this group, or all: what was being sampled is missing again. Returns the groups concerned."""
        concerned = [n for n, held in self._held.items() if held.sampling and name in (None, n)]
        for n in concerned:
            self._held[n].sampling.clear()
        return concerned

    def drop(self, name: str) -> list[Delivery]:
        """Forget a group; returns its deliveries."""
        held = self._held.pop(name, None)
        return [] if held is None else [asked.delivery for asked in held.asked.values()]
