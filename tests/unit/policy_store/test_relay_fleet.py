"""A fleet of engines that follow versions through the relay, over real HTTP: what leaves the origin, and what everyone ends up with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from policy_cases import Policy, copy_of
from relay_cases import CountingBlobs, engine, until

from driftline.messages.memory import MemoryBroker, MemoryBus
from driftline.messages.subjects import topology
from driftline.policy_store import PolicyReader, PolicyWriter, State, state_digest
from driftline.policy_store.relay_tree import depth, order

MIB = 1024 * 1024
ENGINES = 32


class Follower:
    """An engine without a model: its weights are the version it last moved to."""

    def __init__(self, bus: MemoryBus, run: str, name: str, origin: CountingBlobs, fanout: int) -> None:
        self.name, self.relay = name, engine(bus, run, name, origin, fanout=fanout)
        self.reader = PolicyReader(bus, self.relay.blobs, run)
        self.state: State = {}
        self.version = -1
        self._serving: asyncio.Task[None] | None = None
        self._up, self._stop = asyncio.Event(), asyncio.Event()

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._serve())
        await self._up.wait()

    async def _serve(self) -> None:
        async with self.relay.serving():
            self._up.set()
            await self._stop.wait()

    async def stop(self) -> None:
        assert self._serving is not None
        self._stop.set()
        await self._serving

    async def die(self) -> None:
        """No good-bye: connections break off in the middle, and nobody listens there any more, while its last beats still count."""
        runner = self.relay.server._runner
        assert runner is not None
        assert runner.server is not None
        for connection in runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()  # type: ignore[attr-defined]
        await self.relay.server.stop()

    async def move(self, version: int) -> str:
        if self.version < 0:
            self.state = await self.reader.materialise(version)
        else:
            self.state = await self.reader.advance(self.state, self.version, version, fallback=False)
        self.version = version
        return state_digest(self.state)


class Fleet:
    def __init__(self, run: str, origin: CountingBlobs, bus: MemoryBus, writer: PolicyWriter, fanout: int, stack: AsyncExitStack) -> None:
        self.origin, self.followers = origin, list[Follower]()
        self.policy = Policy(elements=60_000)
        self.version = -1
        self._run, self._bus, self._writer, self._fanout, self._stack = run, bus, writer, fanout, stack

    async def add(self, count: int) -> None:
        """Engines that all know each other and those before them."""
        for _ in range(count):
            follower = Follower(self._bus, self._run, f"host-{len(self.followers)}", self.origin, self._fanout)
            self.followers.append(follower)
            await follower.start()
            self._stack.push_async_callback(follower.stop)
        await self.know_each_other(self.followers)

    async def publish(self) -> tuple[int, int]:
        """The next version, and the bytes of the packs that a follower needs for it."""
        self.version += 1
        state = self.policy.step(0.05) if self.version else copy_of(self.policy.state)
        manifest = await self._writer.publish(state, version=self.version, learner_step=self.version, consumed=())
        encoding = manifest.delta or manifest.full
        assert encoding is not None
        return self.version, encoding.nbytes

    async def know_each_other(self, followers: Iterable[Follower]) -> None:
        those = list(followers)
        await until(lambda: all(len(f.relay.peers.live()) == len(those) - 1 for f in those), "they do not all know each other")


@asynccontextmanager
async def fleet(run: str, count: int = ENGINES, fanout: int = 4) -> AsyncIterator[Fleet]:
    origin, broker = CountingBlobs(), MemoryBroker()
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(MemoryBus(broker))
        await bus.declare(topology(run, queue_bytes=16 * MIB, blob_bytes=64 * MIB))
        writer = PolicyWriter(bus, origin, run, 10)
        await writer.resume()
        made = Fleet(run, origin, bus, writer, fanout, stack)
        await made.add(count)
        yield made


@pytest.mark.parametrize("fanout", [1, 4, 32])
async def test_each_version_leaves_the_origin_once_for_all_engines(fresh_run: str, fanout: int) -> None:
    async with fleet(fresh_run, fanout=fanout) as made:
        for _ in range(3):
            version, needed = await made.publish()
            before = made.origin.read_bytes
            digests = await asyncio.gather(*(follower.move(version) for follower in made.followers))
            assert set(digests) == {state_digest(made.policy.state)}
            assert needed <= made.origin.read_bytes - before <= 2 * needed
        served = [follower.relay.server.counts.served_bytes for follower in made.followers]
        received = [follower.relay.upstream.counts.bytes for follower in made.followers]
        assert sum(served) == sum(received)
        assert made.origin.read_bytes + sum(received) == sum(f.reader.counts.bytes_read for f in made.followers)
        assert not any(follower.relay.upstream.counts.refusals for follower in made.followers)


async def test_engines_killed_in_the_middle_of_a_version_cost_the_others_little(fresh_run: str) -> None:
    async with fleet(fresh_run) as made:
        version, _ = await made.publish()
        await asyncio.gather(*(follower.move(version) for follower in made.followers))
        version, needed = await made.publish()
        before = made.origin.read_bytes
        made.origin.open.clear()
        moves = [asyncio.create_task(follower.move(version)) for follower in made.followers]
        packs = [pack.digest for pack in (await made.followers[0].reader.manifest(version)).packs]
        await until(lambda: all(made.origin.reads[digest] for digest in packs), "the roots did not ask the origin")
        root = order(packs[0], [follower.name for follower in made.followers])[0]
        dead = [f for f in made.followers if f.name == root] + [f for f in made.followers if f.name != root][:7]
        for follower in dead:
            moves[made.followers.index(follower)].cancel()
            await follower.die()
        made.origin.open.set()
        alive = [follower for follower in made.followers if follower not in dead]
        digests = await asyncio.gather(*(moves[made.followers.index(follower)] for follower in alive))
        assert set(digests) == {state_digest(made.policy.state)}
        assert made.origin.read_bytes - before <= len(alive) // 3 * needed
        version, needed = await made.publish()
        before = made.origin.read_bytes
        assert len(set(await asyncio.gather(*(follower.move(version) for follower in alive)))) == 1
        assert made.origin.read_bytes - before <= len(alive) // 3 * needed


async def test_engines_that_come_and_go_end_with_the_same_weights(fresh_run: str) -> None:
    async with fleet(fresh_run, count=12) as made:
        for leaving in range(3):
            version, _ = await made.publish()
            moves = [asyncio.create_task(follower.move(version)) for follower in made.followers[leaving:]]
            await made.followers[leaving].stop()
            assert set(await asyncio.gather(*moves)) == {state_digest(made.policy.state)}
        await made.know_each_other(made.followers[3:])


async def test_an_engine_that_comes_late_reads_from_the_others(fresh_run: str) -> None:
    async with fleet(fresh_run, count=8) as made:
        needed = 0
        for _ in range(3):
            version, more = await made.publish()
            needed += more
            await asyncio.gather(*(follower.move(version) for follower in made.followers))
        before = made.origin.read_bytes
        await made.add(1)
        late = made.followers[-1]
        assert await late.move(version) == state_digest(made.policy.state)
        # What it is the root of it reads from the origin, by the tree; in none of the other packs is the origin asked.
        assert made.origin.read_bytes - before == late.relay.upstream.counts.origin_bytes
        assert late.relay.upstream.counts.bytes == needed - late.relay.upstream.counts.origin_bytes


async def test_a_fleet_outlives_its_origin(fresh_run: str) -> None:
    async with fleet(fresh_run, count=6) as made:
        version, _ = await made.publish()
        *rest, last = made.followers
        await asyncio.gather(*(follower.move(version) for follower in rest))
        made.origin.down = True
        assert await last.move(version) == state_digest(made.policy.state)


def test_the_deepest_engine_of_this_fleet_is_three_hops_from_the_origin() -> None:
    assert max(depth(position, 4) for position in range(ENGINES)) == 3
