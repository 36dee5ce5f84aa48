"""The writer: one of two wins, a crash leaves one whole version, and what is unknown is read again before anything is written."""

from __future__ import annotations

import asyncio

import pytest
from policy_cases import Policy, copy_of, publish_chain, same

from driftline.messages.bus import Bus, PubAck
from driftline.messages.errors import (
    BrokerUnavailable,
    ConfigError,
    HeadConflict,
    IntegrityError,
)
from driftline.messages.memory import MemoryBus
from driftline.messages.types import Message
from driftline.policy_store import (
    BlobRef,
    BlobStore,
    Manifest,
    MemoryBlobs,
    PolicyReader,
    PolicyWriter,
)


async def test_two_writers_race_and_one_loses_without_a_trace(
    bus: Bus, blobs: BlobStore, fresh_run: str
) -> None:
    first, second = Policy(1, 4_000), Policy(2, 4_000)
    writers = [PolicyWriter(bus, blobs, fresh_run, 3) for _ in range(2)]
    for writer in writers:
        await writer.resume()
    results = await asyncio.gather(
        *(writer.publish(policy.state, version=0, learner_step=0)
          for writer, policy in zip(writers, (first, second), strict=True)),
        return_exceptions=True,
    )
    lost = [result for result in results if isinstance(result, HeadConflict)]
    won = [result for result in results if isinstance(result, Manifest)]
    assert len(lost) == len(won) == 1
    winner = results.index(won[0])
    policy = (first, second)[winner]
    assert same(await PolicyReader(bus, blobs, fresh_run).materialise(0), policy.state)
    with pytest.raises(HeadConflict, match="resume"):
        await writers[1 - winner].publish(second.state, version=1, learner_step=1)
    await writers[winner].publish(policy.step(), version=1, learner_step=1)
    assert same(await PolicyReader(bus, blobs, fresh_run).materialise(1), policy.state)


async def test_a_version_that_does_not_follow_the_head_is_refused(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, small_policy: Policy
) -> None:
    writer, _ = await publish_chain(quick_bus, quick_blobs, fresh_run, small_policy, 2)
    for version in (0, 1, 3):
        with pytest.raises(HeadConflict, match="next version is 2"):
            await writer.publish(small_policy.state, version=version, learner_step=0)
    await writer.publish(small_policy.step(), version=2, learner_step=2)


async def test_a_writer_that_has_not_resumed_may_not_publish(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, small_policy: Policy
) -> None:
    with pytest.raises(HeadConflict, match=r"resume\(\)"):
        await PolicyWriter(quick_bus, quick_blobs, fresh_run).publish(small_policy.state, version=0, learner_step=0)


def test_a_chain_without_fulls_is_refused(quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str) -> None:
    with pytest.raises(ConfigError):
        PolicyWriter(quick_bus, quick_blobs, fresh_run, 0)


class Crash(Exception):
    pass


class Crashing:
    """Fails at the n-th durable step: `before` it happens, or after it happened but before anyone hears."""

    def __init__(self, bus: MemoryBus, blobs: MemoryBlobs, at: int, before: bool, error: type[Exception] = Crash) -> None:
        self.bus, self.blobs, self.at, self.before, self.error = bus, blobs, at, before, error
        self.steps: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.bus, name)

    async def publish(self, subject: str, message: Message, *, id: str, expect_last: int | None = None) -> PubAck:
        fails = self._step(type(message).__name__)
        ack = await self.bus.publish(subject, message, id=id, expect_last=expect_last)
        if fails:
            raise self.error("after")
        return ack

    async def put(self, data: bytes) -> BlobRef:
        fails = self._step("blob")
        ref = await self.blobs.put(data)
        if fails:
            raise self.error("after")
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        return await self.blobs.get(ref)

    def _step(self, what: str) -> bool:
        self.steps.append(what)
        if len(self.steps) != self.at:
            return False
        if self.before:
            raise self.error("before")
        return True


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(("at", "what"), [(1, "blob"), (2, "blob"), (3, "Manifest"), (4, "PolicyHead")])
async def test_a_crash_between_any_two_steps_leaves_one_whole_version_and_a_writer_that_goes_on(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, small_policy: Policy, at: int, what: str, before: bool
) -> None:
    """L6, H6 (docs/field_failures.md)."""
    await publish_chain(quick_bus, quick_blobs, fresh_run, small_policy, 3, full_every=3)
    old = copy_of(small_policy.state)
    faulty = Crashing(quick_bus, quick_blobs, 0, before)
    writer = PolicyWriter(faulty, faulty, fresh_run, 3)  # type: ignore[arg-type]
    await writer.resume()
    faulty.at = at
    lost = small_policy.step()  # version 3 carries a delta and a full: two blobs
    with pytest.raises(Crash):
        await writer.publish(lost, version=3, learner_step=3)
    assert faulty.steps[-1] == what

    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    head = await reader.head()
    assert head is not None
    moved = what == "PolicyHead" and not before
    assert head.version == (3 if moved else 2)
    assert same(await reader.materialise(head.version), lost if moved else old)

    successor = PolicyWriter(quick_bus, quick_blobs, fresh_run, 3)
    resumed = await successor.resume()
    assert resumed == head
    other = small_policy.step()  # the successor's step need not be the lost one
    await successor.publish(other, version=head.version + 1, learner_step=9)
    assert same(await PolicyReader(quick_bus, quick_blobs, fresh_run).materialise(head.version + 1), other)


@pytest.mark.parametrize("before", [True, False], ids=["lost", "stored"])
async def test_no_answer_for_the_head_stops_the_writer_until_it_resumes(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, small_policy: Policy, before: bool
) -> None:
    faulty = Crashing(quick_bus, quick_blobs, 0, before, BrokerUnavailable)
    writer = PolicyWriter(faulty, faulty, fresh_run, 100)  # type: ignore[arg-type]
    await writer.resume()
    await writer.publish(small_policy.state, version=0, learner_step=0)
    faulty.at = len(faulty.steps) + 3
    with pytest.raises(BrokerUnavailable):
        await writer.publish(small_policy.step(), version=1, learner_step=1)
    with pytest.raises(HeadConflict, match=r"resume\(\)"):
        await writer.publish(small_policy.step(), version=2, learner_step=2)
    head = await writer.resume()
    assert head is not None
    assert head.version == (0 if before else 1)
    await writer.publish(small_policy.step(), version=head.version + 1, learner_step=2)
    assert same(await PolicyReader(quick_bus, quick_blobs, fresh_run).materialise(head.version + 1), small_policy.state)


async def test_a_refused_blob_leaves_the_writer_ready_to_try_again(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, small_policy: Policy
) -> None:
    """W1 (docs/field_failures.md)."""
    faulty = Crashing(quick_bus, quick_blobs, 0, True, BrokerUnavailable)
    writer = PolicyWriter(faulty, faulty, fresh_run, 100)  # type: ignore[arg-type]
    await writer.resume()
    await writer.publish(small_policy.state, version=0, learner_step=0)
    state = small_policy.step()
    faulty.at = len(faulty.steps) + 1
    with pytest.raises(BrokerUnavailable):
        await writer.publish(state, version=1, learner_step=1)
    await writer.publish(state, version=1, learner_step=1)
    assert same(await PolicyReader(quick_bus, quick_blobs, fresh_run).materialise(1), state)


async def test_the_published_state_is_the_callers_again_and_the_base_is_not_it(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, small_policy: Policy
) -> None:
    writer = PolicyWriter(quick_bus, quick_blobs, fresh_run, 100)
    await writer.resume()
    state = copy_of(small_policy.state)
    for version in range(4):
        await writer.publish(state, version=version, learner_step=version)
        assert same(await PolicyReader(quick_bus, quick_blobs, fresh_run).materialise(version), state)
        assert same(await writer.base(), state)
        state["norm"].data[version] ^= 0xFF  # trained in place


async def test_a_damaged_base_in_the_writer_is_found_before_it_is_published(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, small_policy: Policy
) -> None:
    writer, _ = await publish_chain(quick_bus, quick_blobs, fresh_run, small_policy, 2, full_every=10)
    writer._base["frozen"].data[0] ^= 1
    with pytest.raises(IntegrityError, match="not what it published"):
        await writer.publish(small_policy.step(), version=2, learner_step=2)
    await writer.resume()
    await writer.publish(small_policy.step(), version=2, learner_step=2)


