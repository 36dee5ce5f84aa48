"""Readers of every kind beside a writer and a store that collects all it may: each gets a version exactly, or is told that it is gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable

from policy_cases import Policy, same

from driftline.messages.bus import Bus
from driftline.policy_store import JetStreamBlobs, PolicyReader, PolicyWriter, State
from driftline.policy_store.pins import held, pins
from driftline.policy_store.reader import VersionCollected
from driftline.services.policy_store.service import PolicyStoreService

VERSIONS = 36


class Quiet:
    async def report(self, values: object, *, step: int = -1) -> None: ...


async def kept(reading: Awaitable[State]) -> State:
    try:
        return await reading
    except VersionCollected as error:
        raise AssertionError("a version went from under its lease") from error


async def test_whoever_reads_while_versions_come_and_go_gets_one_exactly_or_is_told(bus: Bus, fresh_run: str) -> None:
    blobs, policy, states = JetStreamBlobs(bus, fresh_run), Policy(elements=2_000), list[State]()
    writer = PolicyWriter(bus, blobs, fresh_run, 5)
    await writer.resume()
    service = PolicyStoreService(bus, blobs, fresh_run, keep_versions=2, keep_start=False, reporter=Quiet())
    ended = asyncio.Event()
    exact = {"follower": 0, "joiner": 0, "leaser": 0}
    told = 0

    async def publish() -> None:
        for version in range(VERSIONS):
            states.append(policy.step())
            await writer.publish(states[version], version=version, learner_step=version)
            if version % 6 == 5:  # now and then the store and the readers catch up
                await service_at(version)
        await service_at(VERSIONS - 1)
        ended.set()

    async def service_at(version: int) -> None:
        async with asyncio.timeout(30), service._verified:
            await service._verified.wait_for(lambda: service.verified_version >= version)

    async def follow(seed: int) -> None:
        """Falls behind by a few versions at a time."""
        nonlocal told
        reader, at, state = PolicyReader(bus, blobs, fresh_run), -1, State()
        rng = random.Random(seed)
        while at < VERSIONS - 1:
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            head = await reader.head()
            if head is None or head.version <= at:
                continue
            try:
                if at < 0:
                    state = await reader.materialise(head.version)
                else:
                    state = await reader.advance(state, at, head.version)
            except VersionCollected:
                told, at, state = told + 1, -1, State()
                continue
            at = head.version
            assert same(state, states[at])
            exact["follower"] += 1

    async def join(seed: int, owner: str) -> None:
        """Reads old versions, with a lease or without."""
        nonlocal told
        rng, kind = random.Random(seed), "leaser" if owner else "joiner"
        while not ended.is_set() or exact[kind] < 3:
            reader = PolicyReader(bus, blobs, fresh_run)
            head = await reader.head()
            if head is None:
                await asyncio.sleep(0)
                continue
            version = max(0, head.version - rng.randrange(5))
            try:
                if not owner:
                    found = await reader.materialise(version)
                else:
                    async with held(bus, reader, version, owner) as manifest:
                        for _ in range(rng.randrange(20)):
                            await asyncio.sleep(0)  # it takes its time: the lease is what keeps the version
                        found = await kept(reader.materialise_manifest(manifest))
            except VersionCollected:
                told += 1
                continue
            assert same(found, states[version])
            exact[kind] += 1

    async with asyncio.timeout(120):
        serving = asyncio.create_task(service.run())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish())
            for seed in range(2):
                tasks.create_task(follow(seed))
                tasks.create_task(join(10 + seed, ""))
                tasks.create_task(join(20 + seed, f"leaser-{seed}"))
        serving.cancel()
        await asyncio.wait([serving])
    assert serving.cancelled(), "the service met nothing that it should not have"
    assert exact["follower"] >= 2
    assert await pins(bus, fresh_run) == ()
    assert service.collected_versions > VERSIONS // 2
