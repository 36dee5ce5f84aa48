"""Memory is bounded by bytes: decoding costs its frame, a pull its limit, and hundreds of batches leave nothing behind."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
from messages_samples import TASK, group, note, small_topology, trajectory

from driftline.messages import (
    Graded,
    Group,
    MemoryBus,
    NatsBus,
    NatsServer,
    Outcome,
    OutcomeEvent,
    Subjects,
    decode,
    encode,
)
from driftline.messages.bus import Bus
from driftline.messages.nats_pull import BATCH_BYTES
from driftline.services.learner.assembler import Assembler

GROWTH_BYTES_PER_BATCH = 1024
"""What 2 ended groups may leave: their ids, so that they do not come again. A batch itself is a hundred times that."""


def traced(work: Callable[[], object]) -> tuple[int, int]:
    """(held afterwards, peak) of `work`, in bytes."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = work()
        gc.collect()
        now, peak = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return now, peak


def test_a_decoded_trajectory_costs_its_bytes_and_not_boxed_numbers() -> None:
    """M1: a list of a million token ids is 36 MB in boxed integers, an array of them 4."""
    length = 200_000
    frame = encode(trajectory("r", length))
    raw = length * (4 + 1 + 4 + 4)
    held, peak = traced(lambda: decode(frame))
    assert held < raw * 1.05 + 20_000
    assert peak < raw * 1.5 + 20_000  # checking a column makes one more of it for a moment


def test_an_uncompressed_frame_is_not_copied() -> None:
    frame = encode(note("r", size=500_000))
    assert frame[3] == 0
    held, _ = traced(lambda: decode(frame))
    assert held < 20_000


async def test_a_pull_holds_no_more_than_its_bytes(nats_bus: NatsBus, fresh_run: str) -> None:
    """M1: a batch counts bytes, whatever number of messages was asked for."""
    made, root = small_topology(fresh_run, work_bytes=256 << 20), Subjects(fresh_run).root
    await nats_bus.declare(made)
    for i in range(60):
        await nats_bus.publish(f"{root}.work.a", note(fresh_run, size=120_000, seed=i), id=str(i))
    gc.collect()
    tracemalloc.start()
    deliveries = await nats_bus.pull(made.consumers[0], batch=60, timeout_s=10)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1 < len(deliveries) < 60
    assert peak < BATCH_BYTES * 1.25


class Batches:
    """Groups that are admitted, arrive and are trained on, two a batch, through a bus and the assembler."""

    def __init__(self, bus: Bus, run: str) -> None:
        self.bus, self.run, self.count = bus, run, 0
        self.topology = small_topology(run)
        self.assembler = Assembler(run=run, groups_per_step=2, max_lag=0)

    async def one(self) -> None:
        root, head = Subjects(self.run).root, self.count
        for index in (2 * head, 2 * head + 1):
            self.assembler.admit(Group(run=self.run, group=f"g{index}", index=index, task=TASK, members=2), 0.0)
            for member in range(2):
                sample = trajectory(self.run, 2000).model_copy(update={
                    "group": f"g{index}", "index": index, "member": member,
                    "versions": np.where(np.arange(2000) >= 2, head, -1).astype(np.int32),
                })  # fmt: skip
                await self.bus.publish(f"{root}.work.a", Graded(run=self.run, trajectory=sample, reward=member), id=f"{index}/{member}")
        held = []
        while len(held) < 4:
            held += await self.bus.pull(self.topology.consumers[0], batch=4, timeout_s=10)
        for delivery in held:
            assert isinstance(delivery.message, Graded)
            self.assembler.arrive(delivery.message)
        batch = self.assembler.next_batch(head)
        assert batch is not None
        self.assembler.commit(batch, head + 1, now=0.0)
        for name in batch.group_ids:
            self.assembler.ended(OutcomeEvent(run=self.run, group=name, outcome=Outcome.TRAINED, version=head + 1, members=2))
        for delivery in held:
            await delivery.ack()
        self.count += 1


async def growth(batches: Batches, first: int, last: int) -> float:
    """Traced bytes per batch that stay, between two counts of batches."""
    while batches.count < first:
        await batches.one()
    gc.collect()
    tracemalloc.start()
    try:
        await batches.one()  # what the tracing itself and the caches of one batch hold
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        while batches.count < last:
            await batches.one()
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / (last - first - 1)
    finally:
        tracemalloc.stop()


async def test_five_hundred_batches_leave_nothing_in_the_connection_or_the_assembler(tmp_path: Path) -> None:
    """M3: two gigabytes a step stayed in a fetch buffer elsewhere. Through a real broker."""
    async with NatsServer(tmp_path) as server, await NatsBus.connect(server.url, name="memory") as bus:
        batches = Batches(bus, "r")
        await bus.declare(batches.topology)
        assert await growth(batches, 20, 500) < GROWTH_BYTES_PER_BATCH
        assert batches.assembler.held_bytes == 0
        assert (bus._window._used_bytes, bus._window._used_count) == (0, 0)
        assert bus._connection._waiting == {}
        assert len(bus._connection._inboxes) <= 1  # the last pull's, kept for the next
        # The client keeps a subscription for each inbox it has not yet heard the end of; one for replies is ours.
        assert len(bus._connection.client._subs) <= 2


async def test_a_bus_in_memory_forgets_what_was_acknowledged() -> None:
    """M3, for the bus that unit tests and small runs use. It remembers ids for its duplicate window, as a broker does."""
    async with MemoryBus() as bus:
        batches = Batches(bus, "r")
        await bus.declare(batches.topology)
        assert await growth(batches, 20, 200) < 3 * GROWTH_BYTES_PER_BATCH


async def test_followers_that_come_and_go_leave_nothing(nats_bus: NatsBus, fresh_run: str) -> None:
    """M3 of `follow`: subscriptions, inboxes and tasks."""
    made, root = small_topology(fresh_run), Subjects(fresh_run).root
    await nats_bus.declare(made)
    await nats_bus.publish(f"{root}.log.a", group(fresh_run), id="a")
    before = len(nats_bus._connection.client._subs)
    for _ in range(50):
        messages = nats_bus.follow(made.stream("LOG"), f"{root}.log.>")
        assert (await anext(messages)).seq == 1
        await messages.aclose()  # type: ignore[attr-defined]
    assert len(nats_bus._connection.client._subs) == before
    assert nats_bus._connection._inboxes == set()
