"""A recording fed to a live run: its trajectories, ungraded and under that run's name, as if its own engines had sampled them.

Guarantees: a fed group has an index and an id that the live run has not used, because the ledger's compare-and-set says so; at most
`in_flight` groups are fed and not ended; a run whose dispatcher admits too is left alone unless forced. Tokens, log-probabilities and
the versions they are stamped with stay as recorded: the live learner judges their age like any other's.

What the live services make of them is theirs: rewards are given anew, groups may end stale or without variance. The report says how
each ended, as far as it was seen before the wait was over.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from driftline.messages.bus import Bus
from driftline.messages.errors import DriftlineError, HeadConflict
from driftline.messages.recording import RecordedGroup
from driftline.messages.subjects import Subjects
from driftline.messages.types import Admitted, Group, Metrics, OutcomeEvent, RunFinished, Trajectory
from driftline.services.dispatcher.admission import AdmissionState, fold, group_id
from driftline.services.publishing import publish_patiently
from driftline.services.replay.reader import Recording

__all__ = ["Fed", "feed_into", "renamed"]

Say = Callable[[str], None]

FULL_WAIT_S = 120.0
ALIVE_S = 3.0  # a dispatcher reports every second


@dataclass(frozen=True)
class Fed:
    """`outcomes` counts how fed groups ended; `open` are those that had not when the wait was over."""

    run: str
    groups: int
    trajectories: int
    first: str
    last: str
    outcomes: Mapping[str, int]
    open: int

    def document(self) -> dict[str, Any]:
        return {"run": self.run, "groups": self.groups, "trajectories": self.trajectories, "first": self.first, "last": self.last,
                "outcomes": dict(self.outcomes), "open": self.open}

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items())) or "none ended"
        return (f"fed {self.groups} groups ({self.trajectories} trajectories) into {self.run}, {self.first} to {self.last}: {ends}"
                + (f", {self.open} still open" if self.open else ""))


def renamed(entry: RecordedGroup, run: str, index: int) -> tuple[Group, tuple[Trajectory, ...]]:
    """The group and its members under another run's name. Members that were left out are not recorded: the rest close ranks."""
    name = group_id(index)
    count = len(entry.members)
    group = entry.group.model_copy(update={"run": run, "group": name, "index": index, "members": count, "attempt": 0, "wanted": ()})
    members = tuple(
        graded.trajectory.model_copy(update={"run": run, "group": name, "index": index, "member": number, "members": count})
        for number, graded in enumerate(entry.members)
    )
    return group, members


async def feed_into(
    bus: Bus, recording: Recording, run: str, *, first: int | None = None, last: int | None = None, in_flight: int,
    force: bool = False, wait_s: float = 300.0, say: Say = lambda _: None,
) -> Fed:
    """Feed the batches of versions `first` to `last` to `run`; returns when all ended, or nothing ended for `wait_s`."""
    feeder = _Feeder(bus, run, in_flight, force, wait_s)
    following = asyncio.ensure_future(feeder.follow())
    feeding = asyncio.ensure_future(feeder.run(recording, first, last, say))
    try:
        await asyncio.wait({following, feeding}, return_when=asyncio.FIRST_COMPLETED)
        if not feeding.done():
            following.result()  # the ledger cannot be followed any more
        return await feeding
    finally:
        following.cancel()
        feeding.cancel()
        await asyncio.wait({following, feeding})


class _Feeder:
    def __init__(self, bus: Bus, run: str, in_flight: int, force: bool, wait_s: float) -> None:
        self._bus, self._run, self._in_flight, self._force, self._wait_s = bus, run, in_flight, force, wait_s
        self._subjects = Subjects(run)
        self._ledger = self._subjects.stream("LEDGER")
        self._state = AdmissionState()
        self._seen = 0
        self._changed = asyncio.Event()
        self._fed: list[str] = []
        self._open: set[str] = set()
        self._outcomes: Counter[str] = Counter()
        self._foreign = ""

    async def follow(self) -> None:
        async with aclosing(self._bus.follow(self._ledger, self._subjects.ledger)) as events:  # type: ignore[type-var]
            async for stored in events:
                match stored.message:
                    case Admitted(group=group) as event:
                        if self._fed and group.group not in self._fed:
                            self._foreign = group.group
                        self._state = fold(self._state, (event,))
                    case OutcomeEvent(group=name) as event:
                        self._state = fold(self._state, (event,))
                        if name in self._open:
                            self._open.discard(name)
                            self._outcomes[event.outcome.value] += 1
                self._seen = stored.seq
                self._changed.set()

    async def run(self, recording: Recording, first: int | None, last: int | None, say: Say) -> Fed:
        await self._ready()
        sent = 0
        for step in recording.steps(last):
            if first is not None and step.version < first:
                continue
            for entry in recording.groups(step):
                if not await self._room():
                    return self._report(sent)
                sent += await self._send(entry)
            say(f"version {step.version}: fed {len(self._fed)} groups, {len(self._open)} open")
        while self._open and await self._moved():
            pass
        return self._report(sent)

    async def _ready(self) -> None:
        """The ledger is read to its end, the run goes on, and no one else admits."""
        end = await self._bus.last(self._subjects.stream("CONTROL"), self._subjects.finished)
        if end is not None and isinstance(end.message, RunFinished):
            raise DriftlineError("the run is finished: nothing would take them", field="--into", value=self._run,
                                 remedy="feed them to a run that goes on")
        newest = await self._bus.last(self._ledger, self._subjects.ledger)
        async with asyncio.timeout(self._wait_s):
            while self._seen < (newest.seq if newest else 0):
                await self._change()
        if not self._force and await self._dispatcher_lives():
            raise HeadConflict("its dispatcher is running and admits groups too", field="--into", value=self._run,
                               remedy="stop the dispatcher, or mix both with --force")

    async def _dispatcher_lives(self) -> bool:
        """It reports every second; a report that comes while we listen is its own. Reports of the past prove nothing."""
        stream, subject = self._subjects.stream("METRICS"), self._subjects.metrics("dispatcher")
        newest = await self._bus.last(stream, subject)
        start = newest.seq + 1 if newest else 1
        async with aclosing(self._bus.follow(stream, subject, start=start)) as reports:  # type: ignore[type-var]
            try:
                async with asyncio.timeout(ALIVE_S):
                    async for stored in reports:
                        if isinstance(stored.message, Metrics):
                            return True
            except TimeoutError:
                return False
        return False

    async def _room(self) -> bool:
        """Wait until another group may be fed; False when nothing has ended for too long."""
        while len(self._open) >= self._in_flight:
            if not await self._moved():
                return False
        return True

    async def _moved(self) -> bool:
        """Whether one of ours ended within the wait."""
        before = len(self._open)
        try:
            async with asyncio.timeout(self._wait_s):
                while len(self._open) >= before:
                    self._refuse_foreign()
                    await self._change()
        except TimeoutError:
            return False
        return True

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _refuse_foreign(self) -> None:
        if self._foreign and not self._force:
            raise HeadConflict("someone else admits groups into the run", field="group", value=self._foreign,
                               remedy="stop the dispatcher, or mix both with --force; what was fed stays in the run")

    async def _send(self, entry: RecordedGroup) -> int:
        group, members = await self._admit(entry)
        for t in members:
            await publish_patiently(self._bus, self._subjects.trajectory(t.group), t, id=f"{self._run}/trajectory/{t.group}/{t.member}",
                                    wait_s=FULL_WAIT_S)
        return group.members

    async def _admit(self, entry: RecordedGroup) -> tuple[Group, tuple[Trajectory, ...]]:
        """Under the next free index. With another admitting too, its event is on the way when the ledger refuses ours."""
        while True:
            self._refuse_foreign()
            group, members = renamed(entry, self._run, self._state.cursor)
            event = Admitted(run=self._run, group=group, at=time.time())
            self._fed.append(group.group)
            try:
                ack = await publish_patiently(self._bus, self._subjects.admitted(group.group), event,
                                              id=f"{self._run}/admitted/{group.group}", wait_s=FULL_WAIT_S, expect_last=0)
                lost = ack.duplicate
            except HeadConflict:
                lost = True
            if not lost:
                self._open.add(group.group)
                self._state = fold(self._state, (event,))
                return group, members
            self._fed.remove(group.group)
            self._foreign = group.group
            async with asyncio.timeout(self._wait_s):
                while self._state.cursor <= group.index:
                    await self._change()

    def _report(self, trajectories: int) -> Fed:
        return Fed(self._run, len(self._fed), trajectories, self._fed[0] if self._fed else "", self._fed[-1] if self._fed else "",
                   dict(self._outcomes), len(self._open))
