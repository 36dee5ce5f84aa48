"""A reader so slow that its version is collected while it reads: it is told so, and whoever asked goes on with the head."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from policy_cases import Policy, copy_of, publish_chain, same

from driftline.messages.errors import IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.policy_store import BlobRef, MemoryBlobs, PolicyReader, PolicyWriter
from driftline.policy_store.collect import collect, plan, survey
from driftline.policy_store.reader import VersionCollected
from driftline.services.rollout.updates import Updates


class Slow(MemoryBlobs):
    """Does something else before it gives the first pack."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], Awaitable[None]] | None = None

    async def get(self, ref: BlobRef) -> bytes:
        if self.meanwhile is not None:
            work, self.meanwhile = self.meanwhile, None
            await work()
        return await super().get(ref)


class Run:
    def __init__(self, bus: MemoryBus, run: str) -> None:
        self.bus, self.run, self.blobs, self.policy = bus, run, Slow(), Policy(elements=2_000)
        self.writer: PolicyWriter | None = None

    async def publish(self, count: int) -> None:
        if self.writer is None:
            self.writer, _ = await publish_chain(self.bus, self.blobs, self.run, self.policy, count, full_every=2)
            return
        for version in range(self.writer.version + 1, self.writer.version + 1 + count):
            await self.writer.publish(self.policy.step(), version=version, learner_step=version)

    async def publish_and_collect(self) -> None:
        """Four more versions, and all but the last one go."""
        await self.publish(4)
        reader = PolicyReader(self.bus, self.blobs, self.run)
        head = await reader.head()
        assert head is not None
        await collect(self.bus, self.blobs, self.run, plan(await survey(self.bus, reader), head.link, 1).delete)


@pytest.fixture
async def run(quick_bus: MemoryBus, fresh_run: str) -> Run:
    run = Run(quick_bus, fresh_run)
    await run.publish(3)
    return run


async def test_a_version_collected_while_it_is_read_is_named_so(run: Run) -> None:
    reader = PolicyReader(run.bus, run.blobs, run.run)
    run.blobs.meanwhile = run.publish_and_collect
    with pytest.raises(VersionCollected, match="collected") as caught:
        await reader.materialise(2)
    assert isinstance(caught.value, IntegrityError)
    assert caught.value.value == 2


async def test_an_engine_that_starts_goes_on_with_the_head(run: Run) -> None:
    updates = Updates(PolicyReader(run.bus, run.blobs, run.run), outage_s=5.0, newer=lambda: None)
    run.blobs.meanwhile = run.publish_and_collect
    await updates.first()
    assert updates.version == 6
    assert same(updates.state, run.policy.state)


async def test_an_engine_that_follows_goes_on_with_the_head(run: Run) -> None:
    updates = Updates(PolicyReader(run.bus, run.blobs, run.run), outage_s=5.0, newer=lambda: None)
    await updates.first()
    await run.publish(1)
    await updates.look()
    await run.publish_and_collect()  # the version it is about to move to is gone before it begins
    await updates.move()
    assert updates.version == 7
    assert same(updates.state, run.policy.state)


async def test_a_follower_far_behind_whose_steps_were_collected_starts_from_a_full(run: Run) -> None:
    reader = PolicyReader(run.bus, run.blobs, run.run)
    state = await reader.materialise(1)
    await run.publish_and_collect()
    assert same(await reader.advance(copy_of(state), 1, 6), run.policy.state)
    with pytest.raises(VersionCollected, match="no steps lead below"):
        await reader.advance(copy_of(state), 1, 6, fallback=False)
