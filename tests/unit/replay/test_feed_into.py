"""Feeding a recording to a live run: what changes of a member, how much is fed at once, and which runs are left alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loop_cases import admit, beside, finish, groups_of, tiny
from recording_cases import small_step, write_small

from driftline.messages.bus import Bus
from driftline.messages.codec import decode
from driftline.messages.errors import DriftlineError, HeadConflict
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import Admitted, Metrics, Outcome, OutcomeEvent, Trajectory
from driftline.services.replay import into
from driftline.services.replay.into import Fed, feed_into, renamed
from driftline.services.replay.reader import Recording
from driftline.services.runtime import run_topology

LIVE = tiny("live")
SUBJECTS = Subjects("live")


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(LIVE))
    return memory_bus


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording.open(write_small(tmp_path / "run.dlr"))  # three versions of two groups of two members


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(into, "ALIVE_S", 0.05)


async def stored(bus: MemoryBus, plane: str) -> list[object]:
    return [decode(raw.data) for raw in await bus.read(SUBJECTS.stream(plane), ">")]


async def end(bus: Bus, group: str, outcome: Outcome = Outcome.TRAINED) -> None:
    event = OutcomeEvent(run="live", group=group, outcome=outcome, version=1)
    await bus.publish(SUBJECTS.outcome(group), event, id=f"live/outcome/{group}")


async def end_all(bus: MemoryBus, count: int) -> None:
    """Play the learner: end what is admitted, as it comes."""
    seen = 0
    async for event in bus.follow(SUBJECTS.stream("LEDGER"), f"{SUBJECTS.root}.ledger.admitted.>"):
        assert isinstance(event.message, Admitted)
        await end(bus, event.message.group.group, Outcome.STALE if seen == 0 else Outcome.TRAINED)
        seen += 1
        if seen == count:
            return


def test_a_renamed_group_is_the_live_runs_and_keeps_its_tokens() -> None:
    entry = small_step(1).groups("recorded")[0]
    group, members = renamed(entry, "live", 7)
    assert (group.run, group.group, group.index, group.members, group.task) == ("live", "g00000007", 7, 2, entry.group.task)
    assert [t.id for t in members] == ["live/g00000007/0", "live/g00000007/1"]
    for t, was in zip(members, entry.members, strict=True):
        assert t.model_dump_json(include={"text", "prompt_tokens", "finish"}) == was.trajectory.model_dump_json(include={"text", "prompt_tokens", "finish"})
        assert (t.tokens is was.trajectory.tokens, t.logprobs is was.trajectory.logprobs, t.versions is was.trajectory.versions) == (True,) * 3


def test_members_that_were_not_recorded_are_not_waited_for() -> None:
    entry = small_step(1).groups("recorded")[0]
    group, (only,) = renamed(entry.model_copy(update={"members": entry.members[1:], "excluded": (0,)}), "live", 0)
    assert (group.members, only.members, only.member) == (1, 1, 0)


async def test_everything_is_fed_once_and_its_ending_counted(bus: MemoryBus, recording: Recording) -> None:
    learner = asyncio.create_task(end_all(bus, 6))
    fed = await beside(learner, feed_into(bus, recording, "live", in_flight=2, wait_s=30.0))
    await learner
    assert fed == Fed("live", 6, 12, "g00000000", "g00000005", {"stale": 1, "trained": 5}, 0)
    sent = [t for t in await stored(bus, "TRAJECTORIES") if isinstance(t, Trajectory)]
    assert [t.id for t in sent] == [f"live/g{group:08d}/{member}" for group in range(6) for member in range(2)]


async def test_no_more_than_asked_for_is_in_flight(bus: MemoryBus, recording: Recording) -> None:
    fed = await feed_into(bus, recording, "live", in_flight=3, wait_s=0.2)
    assert (fed.groups, fed.open, dict(fed.outcomes)) == (3, 3, {})
    assert len(await stored(bus, "LEDGER")) == 3


async def test_only_the_versions_asked_for_are_fed(bus: MemoryBus, recording: Recording) -> None:
    said: list[str] = []
    await feed_into(bus, recording, "live", first=2, last=2, in_flight=9, wait_s=0.2, say=said.append)
    assert said == ["version 2: fed 2 groups, 2 open"]
    recorded = [member for entry in small_step(2).groups("recorded") for member in entry.members]
    assert len(await stored(bus, "TRAJECTORIES")) == len(recorded) == 4


async def test_indices_continue_behind_the_live_cursor(bus: MemoryBus, recording: Recording) -> None:
    await admit(bus, groups_of(LIVE, range(3)))
    fed = await feed_into(bus, recording, "live", last=1, in_flight=9, wait_s=0.2)
    assert (fed.first, fed.last) == ("g00000003", "g00000004")


async def test_a_finished_run_is_refused(bus: MemoryBus, recording: Recording) -> None:
    await finish(bus, "live", 3)
    with pytest.raises(DriftlineError, match="the run is finished"):
        await feed_into(bus, recording, "live", in_flight=2)
    assert await stored(bus, "LEDGER") == []


async def report(bus: Bus, number: int) -> None:
    """A dispatcher's report."""
    await bus.publish(SUBJECTS.metrics("dispatcher"), Metrics(run="live", service="dispatcher", values={"n": number}), id=f"m{number}")


async def test_a_dispatcher_that_reports_is_a_reason_to_refuse(bus: MemoryBus, recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(into, "ALIVE_S", 30.0)
    feeding = asyncio.create_task(feed_into(bus, recording, "live", in_flight=2))

    async def reports() -> None:
        number = 0
        while not feeding.done():
            await report(bus, number)
            number += 1
            await asyncio.wait({feeding}, timeout=0.01)

    async with asyncio.timeout(30):
        await reports()
    with pytest.raises(HeadConflict, match="its dispatcher is running"):
        feeding.result()


async def test_a_dispatcher_that_reported_once_is_gone(bus: MemoryBus, recording: Recording) -> None:
    await report(bus, 1)
    fed = await feed_into(bus, recording, "live", in_flight=2, wait_s=0.2)
    assert fed.groups == 2


async def test_a_cursor_that_another_moves_stops_the_feeding(bus: MemoryBus, recording: Recording) -> None:
    feeding = asyncio.create_task(feed_into(bus, recording, "live", in_flight=2, wait_s=30.0))
    async for event in bus.follow(SUBJECTS.stream("LEDGER"), f"{SUBJECTS.root}.ledger.admitted.>"):
        if event.subject.endswith("g00000001"):
            break
    await admit(bus, groups_of(LIVE, [2]))
    async with asyncio.timeout(30):
        with pytest.raises(HeadConflict, match=r"someone else admits.*what was fed stays"):
            await feeding


async def test_forced_it_goes_around_what_another_admits(bus: MemoryBus, recording: Recording) -> None:
    feeding = asyncio.create_task(feed_into(bus, recording, "live", in_flight=2, force=True, wait_s=30.0))
    async for event in bus.follow(SUBJECTS.stream("LEDGER"), f"{SUBJECTS.root}.ledger.admitted.>"):
        if event.subject.endswith("g00000001"):
            break
    await admit(bus, groups_of(LIVE, [2]))
    learner = asyncio.create_task(end_all(bus, 7))
    fed = await beside(learner, feeding)
    assert (fed.groups, fed.last, fed.open) == (6, "g00000006", 0)


async def test_a_ledger_that_cannot_be_followed_is_an_error_and_not_a_wait(
    bus: MemoryBus, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(feeder: object) -> None:
        raise DriftlineError("cut off")

    monkeypatch.setattr(into._Feeder, "follow", broken)
    with pytest.raises(DriftlineError, match="cut off"):
        await feed_into(bus, recording, "live", in_flight=2, wait_s=3600.0)
