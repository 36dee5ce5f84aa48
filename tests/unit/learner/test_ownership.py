"""One learner at a time: a second is refused with the first one's name, a dead one is replaced, a late one can do no harm."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from learner_cases import CONFIG, RUN, SUBJECTS, failure, feed, learner, ledger
from loop_cases import admit, base_state, beside, groups_of, head_at, outcomes, running

from driftline.messages.errors import BrokerUnavailable, HeadConflict
from driftline.messages.memory import MemoryBus
from driftline.messages.nats_bus import NatsBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import LearnerOwner, Outcome, OutcomeEvent, Taken
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.writer import PolicyWriter
from driftline.services.learner.ledger import LedgerPen
from driftline.services.learner.ownership import Ownership, process_identity
from driftline.services.runtime import run_topology

LEASE_S = 1.0


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(CONFIG))
    return memory_bus


def owner(bus: MemoryBus | NatsBus, *, host: str = "", pid: int = 0, boot: str | None = None, lease_s: float = LEASE_S) -> Ownership:
    """A learner as it would claim the run from another process or machine."""
    claim = Ownership(bus, RUN, lease_s=lease_s)
    claim._host, claim._pid = host or claim._host, pid or claim._pid
    claim._boot = claim._boot if boot is None else boot
    return claim


async def claimed(bus: MemoryBus) -> LearnerOwner:
    stored = await bus.last(SUBJECTS.stream("CONTROL"), SUBJECTS.learner)
    assert stored is not None
    assert isinstance(stored.message, LearnerOwner)
    return stored.message


async def test_epochs_grow_and_a_released_run_is_taken_at_once(bus: MemoryBus) -> None:
    for epoch in (1, 2):
        one = owner(bus, host=f"host{epoch}")
        assert await one.claim() == epoch
        assert not (await claimed(bus)).released
        await one.release()
        assert (await claimed(bus)).released


async def test_a_second_learner_is_refused_with_the_name_of_the_first(bus: MemoryBus) -> None:
    first = owner(bus, host="box-a", pid=41)
    await first.claim()
    keeping = asyncio.create_task(first.keep())
    with pytest.raises(HeadConflict, match=r"process 41 on box-a .*start one learner"):
        await owner(bus, host="box-b").claim()
    assert not keeping.done()
    keeping.cancel()


async def test_a_silent_owner_of_another_machine_is_replaced_after_its_lease(bus: MemoryBus) -> None:
    first = owner(bus, host="box-a", pid=41)
    await first.claim()
    assert await owner(bus, host="box-b").claim() == 2
    with pytest.raises(HeadConflict, match="on box-b"):
        await first.keep()


async def test_an_owner_that_releases_while_it_is_watched_is_replaced_at_once(bus: MemoryBus) -> None:
    first = owner(bus, host="box-a", lease_s=600)
    await first.claim()
    second = asyncio.create_task(owner(bus, host="box-b", lease_s=20).claim())
    await asyncio.sleep(0.05)
    await first.release()
    async with asyncio.timeout(15):
        assert await second == 2


def killed_process() -> tuple[subprocess.Popen[bytes], str]:
    """A process that is dead and not reaped, with the identity it had."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = process_identity(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process, identity


async def test_a_dead_process_of_this_machine_is_replaced_without_waiting(bus: MemoryBus) -> None:
    process, identity = await asyncio.to_thread(killed_process)
    assert identity
    assert process_identity(process.pid) == ""  # a zombie does not work any more
    await owner(bus, pid=process.pid, boot=identity, lease_s=600).claim()
    async with asyncio.timeout(30):
        assert await owner(bus, lease_s=600).claim() == 2
    await asyncio.to_thread(process.wait)


async def test_a_process_number_used_again_is_not_the_owner(bus: MemoryBus) -> None:
    boot, space, _ = process_identity(os.getpid()).split("/", 2)
    await owner(bus, pid=os.getppid(), boot=f"{boot}/{space}/1", lease_s=600).claim()
    async with asyncio.timeout(30):
        assert await owner(bus, lease_s=600).claim() == 2


async def test_a_process_of_another_container_is_not_judged_by_its_number(bus: MemoryBus) -> None:
    boot, _, started = process_identity(os.getpid()).split("/", 2)
    await owner(bus, pid=2**22, boot=f"{boot}/pid:[1]/{started}").claim()
    second = asyncio.create_task(owner(bus, lease_s=600).claim())
    await asyncio.sleep(0.1)
    assert not second.done()
    second.cancel()


async def test_renewing_rides_out_an_outage_whose_last_answer_was_lost(bus: MemoryBus) -> None:
    class Deaf(MemoryBus):
        """Stores, and never hears that it did."""

        deaf = False

        async def publish(self, subject: str, *args: object, **more: object) -> object:  # type: ignore[override]
            ack = await super().publish(subject, *args, **more)  # type: ignore[arg-type]
            if self.deaf:
                raise BrokerUnavailable("no answer", field="subject", value=subject)
            return ack

    deaf = Deaf(bus.broker)
    one = owner(deaf, host="box-a", lease_s=0.3)
    await one.claim()
    keeping = asyncio.create_task(one.keep())
    deaf.deaf = True
    await asyncio.sleep(0.35)
    deaf.deaf = False
    beat = (await claimed(bus)).beat
    while (await claimed(bus)).beat < beat + 2:
        assert not keeping.done()
        await asyncio.sleep(0.02)
    keeping.cancel()


async def test_over_a_real_broker(nats_bus: NatsBus, fresh_run: str) -> None:
    from driftline.messages.subjects import topology

    await nats_bus.declare(topology(fresh_run))
    first, second = (Ownership(nats_bus, fresh_run, lease_s=1.0) for _ in range(2))
    first._host, second._host = "box-a", "box-b"
    assert await first.claim() == 1
    assert await second.claim() == 2
    with pytest.raises(HeadConflict, match="on box-b"):
        await first.keep()
    await first.release()
    stored = await nats_bus.last(Subjects(fresh_run).stream("CONTROL"), Subjects(fresh_run).learner)
    assert stored is not None
    assert isinstance(stored.message, LearnerOwner)
    assert (stored.message.epoch, stored.message.released) == (2, False)


async def test_a_learner_that_was_replaced_stops_and_its_successor_finishes_the_work(bus: MemoryBus, tmp_path: Path) -> None:
    """L1: two learners on one run never train one group twice."""
    blobs = MemoryBlobs()
    config = CONFIG.model_copy(update={"learner": CONFIG.learner.model_copy(update={"lease_s": 1.0})})
    old, new = learner(bus, blobs, tmp_path, config), learner(bus, blobs, tmp_path, config)
    old._owner._host = "box-a"
    async with running(old) as first:
        await beside(first, head_at(bus, blobs, RUN, 0))
        successor = Ownership(bus, RUN, lease_s=1.0)
        stored = await bus.last(SUBJECTS.stream("CONTROL"), SUBJECTS.learner)
        assert stored is not None
        successor.epoch = 2  # what a successor writes after a lease of silence
        await successor._publish(0, stored.seq)
        await successor.release()
        error = await failure(first)
        assert isinstance(error, HeadConflict)
        assert "taken over" in str(error)
    async with running(new) as second:
        await feed(bus, 0, config)
        await beside(second, head_at(bus, blobs, RUN, 1))
        events = await beside(second, outcomes(bus, RUN, 2))
    assert [(e.outcome, e.version) for e in events] == [(Outcome.TRAINED, 1)] * 2


async def test_a_learner_that_wakes_up_late_cannot_move_the_head(bus: MemoryBus) -> None:
    """L20 (docs/field_failures.md)."""
    blobs = MemoryBlobs()
    late, successor = PolicyWriter(bus, blobs, RUN), PolicyWriter(bus, blobs, RUN)
    await late.resume(fence="1")
    await late.publish(base_state(), version=0, learner_step=0)
    await late.resume(fence="1")
    head = await successor.resume(fence="2")
    assert head is not None
    assert head.version == 0
    with pytest.raises(HeadConflict):
        await late.publish(base_state(), version=1, learner_step=1)
    assert (await successor.publish(base_state(), version=1, learner_step=1)).version == 1


async def test_a_learner_that_wakes_up_late_cannot_end_a_group_that_is_being_trained_on(bus: MemoryBus) -> None:
    """L20 (docs/field_failures.md)."""
    group = groups_of(CONFIG, [0])[0]
    await admit(bus, [group])
    late, successor = (LedgerPen(bus, RUN, full_wait_s=5.0) for _ in range(2))
    late.epoch, successor.epoch = 1, 2
    assert await successor.take([group.group], 1) == []
    expired = OutcomeEvent(run=RUN, group=group.group, outcome=Outcome.EXPIRED, reason="too late")
    with pytest.raises(HeadConflict, match="later learner"):
        await late.end(expired)
    trained = OutcomeEvent(run=RUN, group=group.group, outcome=Outcome.TRAINED, version=1)
    assert await successor.end(trained) == trained
    assert await ledger(bus, OutcomeEvent) == [trained]


async def test_a_group_that_a_dead_learner_had_taken_is_free_for_the_next(bus: MemoryBus) -> None:
    first, second = groups_of(CONFIG, [0, 1])
    await admit(bus, [first, second])
    dead, successor = (LedgerPen(bus, RUN, full_wait_s=5.0) for _ in range(2))
    dead.epoch, successor.epoch = 1, 2
    await dead.take([first.group, second.group], 1)
    ended = OutcomeEvent(run=RUN, group=second.group, outcome=Outcome.STALE, reason="on purpose")
    await dead.end(ended)
    assert await successor.take([first.group, second.group], 2) == [ended]
    assert [t.epoch for t in await ledger(bus, Taken)] == [1, 1, 2]
    other = OutcomeEvent(run=RUN, group=second.group, outcome=Outcome.EXPIRED)
    assert await successor.end(other) == ended  # the first outcome is the truth
