"""What NatsBus does when the broker restarts, hangs, refuses, fills up or is not there. Each test has a server of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import nats
import pytest
from messages_samples import group, note, small_topology

from driftline.messages import (
    BrokerDenied,
    BrokerFull,
    BrokerUnavailable,
    ConfigError,
    Credentials,
    Delivery,
    LeaseLost,
    NatsBus,
    NatsServer,
    PayloadTooLarge,
    Subjects,
    Topology,
    dead_letters,
    get_blob,
    put_blob,
    topology,
)
from driftline.messages.nats_bus import HEADROOM


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[NatsBus]:
    async with await NatsBus.connect(server.url, name="fault") as bus:
        yield bus


async def declared(bus: NatsBus, run: str, **options: float) -> tuple[Topology, str]:
    made = small_topology(run, **options)  # type: ignore[arg-type]
    await bus.declare(made)
    return made, Subjects(run).root


async def restart(server: NatsServer, *, kill: bool = False) -> None:
    await (server.kill() if kill else server.stop())
    await server.start()


class Follower:
    """Follows in a task, so that a test can wait for a count."""

    def __init__(self, bus: NatsBus, stream: str, subject: str) -> None:
        self.seqs: list[int] = []
        self._grown = asyncio.Condition()
        self._task = asyncio.create_task(self._run(bus, stream, subject))

    async def _run(self, bus: NatsBus, stream: str, subject: str) -> None:
        async with aclosing(bus.follow(stream, subject)) as messages:  # type: ignore[type-var]
            async for stored in messages:
                async with self._grown:
                    self.seqs.append(stored.seq)
                    self._grown.notify_all()

    async def reaches(self, count: int) -> None:
        async with asyncio.timeout(20), self._grown:
            await self._grown.wait_for(lambda: len(self.seqs) >= count)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.mark.parametrize("kill", [False, True])
async def test_messages_survive_a_restart_and_everything_goes_on(server: NatsServer, bus: NatsBus, kill: bool) -> None:
    made, root = await declared(bus, "r")
    follower = Follower(bus, made.stream("LOG"), f"{root}.log.>")
    for i in range(20):
        await bus.publish(f"{root}.work.a", group("r", f"g{i}"), id=f"w{i}")
        await bus.publish(f"{root}.log.a", note("r", str(i)), id=f"l{i}")
    await follower.reaches(20)
    held = await bus.pull(made.consumers[0], batch=5, timeout_s=5)
    await restart(server, kill=kill)
    confirmed = 0
    for delivery in held:  # leases survive, too
        try:
            await delivery.ack()
            confirmed += 1
        except LeaseLost:  # a killed server may have forgotten its last deliveries: it sends those again
            assert kill
    for i in range(20, 40):
        await bus.publish(f"{root}.log.a", note("r", str(i)), id=f"l{i}")
    await follower.reaches(40)
    assert follower.seqs == list(range(1, 41))
    left = await bus.pull(made.consumers[0], batch=50, timeout_s=5)
    assert 15 <= len(left) <= 20 - confirmed
    await follower.stop()


async def test_a_publish_in_an_outage_is_stored_once(server: NatsServer, bus: NatsBus) -> None:
    """L1 (docs/field_failures.md)."""
    made, root = await declared(bus, "r")
    await server.stop()
    waiting = [asyncio.create_task(bus.publish(f"{root}.work.a", group("r", f"g{i}"), id=f"{i}")) for i in range(8)]
    await asyncio.sleep(0)
    await server.start()
    await asyncio.gather(*waiting)
    assert await bus.depth(made.consumers[0]) == (8, 0, 0)


async def test_a_pull_waits_out_a_restart(server: NatsServer, bus: NatsBus) -> None:
    made, root = await declared(bus, "r")
    waiting = asyncio.create_task(bus.pull(made.consumers[0], batch=2, timeout_s=20))
    await asyncio.sleep(0.05)
    await restart(server, kill=True)
    await bus.publish(f"{root}.work.a", group("r"), id="a")
    [delivery] = await waiting
    await delivery.ack()


async def test_publishes_pulls_and_follow_stay_exact_through_repeated_kills(
    server: NatsServer, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L12, L1 (docs/field_failures.md)."""
    monkeypatch.setattr("driftline.messages.nats_bus.ACK_S", 1.0)
    made, root = await declared(bus, "r", ack_wait_s=2)
    follower = Follower(bus, made.stream("LOG"), f"{root}.log.>")
    done: set[str] = set()

    async def publish() -> None:
        for i in range(120):
            await bus.publish(f"{root}.work.a", group("r", f"g{i}"), id=f"w{i}")
            await bus.publish(f"{root}.log.a", note("r", str(i)), id=f"l{i}")

    async def work() -> None:
        while len(done) < 120:
            for delivery in await bus.pull(made.consumers[0], batch=8, timeout_s=10):
                with suppress(LeaseLost):  # a killed server forgets what it delivered last, and delivers it again
                    await delivery.ack()
                    done.add(delivery.message.group)  # type: ignore[attr-defined]

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(publish())
        tasks.create_task(work())
        for count in (10, 50, 90):
            await follower.reaches(count)
            await restart(server, kill=True)
    await follower.reaches(120)
    assert follower.seqs == list(range(1, 121))
    assert done == {f"g{i}" for i in range(120)}
    await follower.stop()


async def test_a_hung_broker_is_an_error_within_the_deadline_and_heals(
    server: NatsServer, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H12 (docs/field_failures.md)."""
    monkeypatch.setattr("driftline.messages.nats_bus.PUBLISH_S", 1.0)
    made, root = await declared(bus, "r")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        assert not await bus.healthy(0.2)
        with pytest.raises(BrokerUnavailable, match="no answer"):
            await bus.publish(f"{root}.work.a", group("r"), id="a")
    finally:
        os.kill(server.pid, signal.SIGCONT)
    again = await bus.publish(f"{root}.work.a", group("r"), id="a")
    assert again.duplicate  # the hung broker did get it, once
    assert (await bus.depth(made.consumers[0])).pending == 1


async def test_a_connection_that_reads_nothing_is_noticed_and_replaced(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driftline.messages.nats_connection.WATCHDOG_S", 0.1)
    _, root = await declared(bus, "r")
    epoch = bus._connection.epoch
    reading = bus._connection.client._reading_task
    assert reading is not None
    reading.cancel()
    await asyncio.wait({reading})
    assert bus._connection.client.is_connected  # the zombie: it looks alive
    await bus.publish(f"{root}.work.a", group("r"), id="a")
    assert bus._connection.epoch > epoch
    assert await bus.healthy()


async def test_an_exception_in_the_client_callbacks_does_not_stop_reading(server: NatsServer, bus: NatsBus) -> None:
    _, root = await declared(bus, "r")
    dropped = nats.errors.SlowConsumerError("a", "b", 1, None)  # type: ignore[arg-type]
    for error in (RuntimeError("x"), dropped, ValueError()):
        await bus._connection._on_error(error)
    await bus.publish(f"{root}.work.a", group("r"), id="a")


async def test_a_connection_closed_for_good_is_an_error_at_once(server: NatsServer, bus: NatsBus) -> None:
    made, root = await declared(bus, "r")
    waiting = asyncio.create_task(bus.pull(made.consumers[0], batch=1, timeout_s=30))
    await asyncio.sleep(0.05)
    await bus._connection.client._process_err("'unknown protocol operation'")
    with pytest.raises(BrokerUnavailable, match="for good"):
        await waiting
    with pytest.raises(BrokerUnavailable, match="for good"):
        await bus.publish(f"{root}.work.a", group("r"), id="a")
    assert not await bus.healthy()


async def test_following_survives_the_loss_of_its_consumer(server: NatsServer, bus: NatsBus) -> None:
    made, root = await declared(bus, "r")
    follower = Follower(bus, made.stream("LOG"), f"{root}.log.>")
    await bus.publish(f"{root}.log.a", note("r"), id="1")
    await follower.reaches(1)
    names = (await bus._connection.api(f"CONSUMER.NAMES.{made.stream('LOG')}", {}, timeout_s=5))["consumers"]
    for name in names:
        await bus._connection.api(f"CONSUMER.DELETE.{made.stream('LOG')}.{name}", timeout_s=5)
    await bus.publish(f"{root}.log.a", note("r"), id="2")
    await follower.reaches(2)
    assert follower.seqs == [1, 2]
    await follower.stop()


async def test_a_follower_notices_silence_and_goes_on_when_the_broker_does(
    server: NatsServer, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driftline.messages.nats_follow.SILENCE_S", 0.3)
    monkeypatch.setattr("driftline.messages.nats_follow.HEARTBEAT_S", 0.1)
    made, root = await declared(bus, "r")
    follower = Follower(bus, made.stream("LOG"), f"{root}.log.>")
    await bus.publish(f"{root}.log.a", note("r"), id="1")
    await follower.reaches(1)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(bus.publish(f"{root}.log.a", note("r"), id="2"))
    await asyncio.sleep(1.0)
    os.kill(server.pid, signal.SIGCONT)
    await waiting
    await follower.reaches(2)
    assert follower.seqs == [1, 2]
    await follower.stop()


async def test_a_retry_of_a_head_that_was_stored_unheard_has_won(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when the broker no longer knows the id: the last message says whose it is."""
    made, root = await declared(bus, "r")
    stream = replace(made.streams[1], duplicate_window_s=0.1)
    await bus.declare(Topology("r", (stream,), ()))
    first = await bus.publish(f"{root}.log.head", note("r"), id="h", expect_last=0)
    await asyncio.sleep(0.5)
    again = await bus.publish(f"{root}.log.head", note("r"), id="h", expect_last=0)
    assert (again.seq, again.duplicate) == (first.seq, True)


async def test_followers_leave_no_consumers_behind(server: NatsServer, bus: NatsBus) -> None:
    made, root = await declared(bus, "r")
    await bus.publish(f"{root}.log.a", note("r"), id="1")
    for _ in range(5):
        async with aclosing(bus.follow(made.stream("LOG"), f"{root}.log.>")) as messages:  # type: ignore[type-var]
            async for _stored in messages:
                break
    await bus._connection.client.flush()
    async with asyncio.timeout(8):  # the server deletes in its own time; by itself it would only after FORGET_S
        while (await bus._connection.api(f"STREAM.INFO.{made.stream('LOG')}", timeout_s=5))["state"]["consumer_count"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_consumer_deleted_during_a_pull_is_made_again(server: NatsServer, bus: NatsBus) -> None:
    made, root = await declared(bus, "r")
    waiting = asyncio.create_task(bus.pull(made.consumers[0], batch=1, timeout_s=20))
    await asyncio.sleep(0.05)
    await bus._connection.api(f"CONSUMER.DELETE.{made.stream('WORK')}.workers", timeout_s=5)
    await bus.publish(f"{root}.work.a", group("r"), id="a")
    [delivery] = await waiting
    await delivery.ack()


async def test_pulling_from_a_stream_that_was_never_declared_names_it(bus: NatsBus) -> None:
    with pytest.raises(ConfigError, match="DL-none-WORK"):
        await bus.pull(small_topology("none").consumers[0], batch=1, timeout_s=1)


async def test_no_broker_is_an_error_that_names_the_address_and_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening: connections are refused
        url = f"nats://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BrokerUnavailable, match=r"broker\.url = 'nats://127.*start nats-server there"):
            await NatsBus.connect(url, name="x", connect_timeout_s=0.3)


async def test_something_that_is_not_a_broker_is_an_error_within_the_deadline() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(mute, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(BrokerUnavailable):
            await NatsBus.connect(f"nats://127.0.0.1:{port}", name="x", connect_timeout_s=0.5)


async def test_an_address_that_is_none_is_an_error() -> None:
    with pytest.raises(BrokerUnavailable, match=r"broker\.url"):
        await NatsBus.connect("nats://no-such-host.invalid:4222", name="x", connect_timeout_s=0.5)


async def test_payloads_up_to_the_limit_pass_and_one_byte_more_is_refused(bus: NatsBus) -> None:
    made, root = await declared(bus, "r")
    limit = bus._connection.max_payload - HEADROOM
    await bus.publish_bytes(f"{root}.blob.a.0", bytes(limit), id="i" * 1000)
    assert await bus.get_bytes(made.stream("BLOB"), f"{root}.blob.a.0") == bytes(limit)
    with pytest.raises(PayloadTooLarge):
        await bus.publish_bytes(f"{root}.blob.a.1", bytes(limit + 1), id="b")
    assert await bus.healthy()


async def test_many_publishes_at_once_into_a_full_stream_each_end(bus: NatsBus) -> None:
    _, root = await declared(bus, "r", work_bytes=1 << 20)
    results = await asyncio.gather(
        *(bus.publish_bytes(f"{root}.work.a", os.urandom(64 * 1024), id=str(i)) for i in range(64)), return_exceptions=True
    )
    stored = [r for r in results if not isinstance(r, BaseException)]
    assert all(isinstance(r, BrokerFull) for r in results if isinstance(r, BaseException))
    assert 10 <= len(stored) <= 16


async def test_batches_are_bounded_by_bytes_and_all_of_it_arrives(bus: NatsBus) -> None:
    made, root = await declared(bus, "r", work_bytes=256 << 20)
    for i in range(60):
        await bus.publish(f"{root}.work.a", note("r", size=120_000, seed=i), id=str(i))
    total = 0
    while deliveries := await bus.pull(made.consumers[0], batch=60, timeout_s=0.5):
        assert len(deliveries) * 480_000 <= 16 << 20
        total += len(deliveries)
        await asyncio.gather(*(d.ack() for d in deliveries))
    assert total == 60


async def test_more_blobs_at_once_than_the_window_holds(bus: NatsBus) -> None:
    await declared(bus, "r")
    blobs = [os.urandom(6_000_000) for _ in range(10)]
    refs = await asyncio.gather(*(put_blob(bus, "r", blob) for blob in blobs))
    for blob, ref in zip(blobs, refs, strict=True):
        assert await get_blob(bus, "r", ref) == blob


async def test_a_lost_acknowledgement_is_an_error(server: NatsServer, bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftline.messages.nats_bus.ACK_S", 0.5)
    made, root = await declared(bus, "r")
    await bus.publish(f"{root}.work.a", group("r"), id="a")
    [delivery] = await bus.pull(made.consumers[0], batch=1, timeout_s=5)
    await server.stop()
    with pytest.raises(BrokerUnavailable):
        await delivery.ack()


async def test_closing_leaves_given_back_what_a_cancelled_pull_received(server: NatsServer) -> None:
    async with await NatsBus.connect(server.url, name="a") as first:
        made, root = await declared(first, "r")
        waiting = asyncio.create_task(first.pull(made.consumers[0], batch=1, timeout_s=10))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await first.publish(f"{root}.work.a", group("r"), id="a")
    async with await NatsBus.connect(server.url, name="b") as second:
        [delivery] = await second.pull(made.consumers[0], batch=1, timeout_s=5)
        assert delivery.deliveries <= 2


async def test_a_storm_of_malformed_messages_raises_nothing(bus: NatsBus) -> None:
    made, root = await declared(bus, "r")
    for i in range(100):
        await bus.publish_bytes(f"{root}.work.a", b"junk %d" % i, id=str(i))
    await bus.publish(f"{root}.work.a", group("r"), id="good")
    found: list[Delivery] = []
    while len(found) < 1:
        found += await bus.pull(made.consumers[0], batch=32, timeout_s=5)
    assert len(await dead_letters(bus, "r")) == 100


async def test_the_declared_topology_of_a_run_is_accepted_and_can_grow(bus: NatsBus) -> None:
    await bus.declare(topology("r"))
    await bus.declare(topology("r", queue_bytes=512 << 20))
    info = await bus._connection.api("STREAM.INFO.DL-r-GRADED", timeout_s=5)
    assert info["config"]["max_bytes"] == 512 << 20


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server with two users: `admin`, and `worker`, who may not publish to work."""
    server = NatsServer(tmp_path / "guarded")
    plain = server._config

    def config() -> str:
        return plain() + (
            "authorization { users = [\n"
            "  {user: admin, password: a}\n"
            '  {user: worker, password: w, permissions: {publish: {deny: ["dl.v1.r.work.>", "$JS.API.CONSUMER.MSG.NEXT.>"]}}}\n'
            "] }\n"
        )

    server._config = config  # type: ignore[method-assign]
    async with server:
        yield server


async def test_wrong_credentials_are_refused_at_once(guarded: NatsServer) -> None:
    with pytest.raises(BrokerDenied, match="credentials"):
        await NatsBus.connect(
            guarded.url, name="x", connect_timeout_s=30, credentials=Credentials(user="worker", password="no")
        )


async def test_a_denied_subject_fails_at_once_and_the_connection_lives(guarded: NatsServer) -> None:
    async with await NatsBus.connect(guarded.url, name="admin", credentials=Credentials(user="admin", password="a")) as admin:
        made, root = await declared(admin, "r")
        worker = Credentials(user="worker", password="w", inbox_prefix="_INBOX_worker")
        async with await NatsBus.connect(guarded.url, name="worker", credentials=worker) as bus:
            with pytest.raises(BrokerDenied, match="no permission for publish"):
                await bus.publish(f"{root}.work.a", group("r"), id="a")
            with pytest.raises(BrokerDenied):
                await bus.pull(made.consumers[0], batch=1, timeout_s=30)
            await bus.publish(f"{root}.log.a", note("r"), id="b")
            assert await bus.healthy()
