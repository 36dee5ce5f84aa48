"""Traps of nats-py and nats-server that others fell into, one test each: docs/protocol.md has the table. Real servers throughout.

What does not appear here is in test_nats_faults.py and test_bus_conformance.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import nats
import pytest
from messages_samples import group, note
from test_nats_faults import Follower, declared, restart

from driftline.messages import (
    BrokerFull,
    BrokerUnavailable,
    HeadConflict,
    IntegrityError,
    NatsBus,
    NatsServer,
    Subjects,
    get_blob,
    put_blob,
    topology,
)
from driftline.messages.blobs import delete_blob
from driftline.messages.nats_connection import ConnectionLost
from driftline.policy_store.blobs import JetStreamBlobs
from driftline.policy_store.manifest import PolicyHead
from driftline.policy_store.reader import PolicyReader


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[NatsBus]:
    async with await NatsBus.connect(server.url, name="trap") as bus:
        yield bus


def edited(server: NatsServer, edit: Callable[[str], str]) -> NatsServer:
    """The same server with another configuration file."""
    plain = server._config
    server._config = lambda: edit(plain())  # type: ignore[method-assign]
    return server


async def test_every_publish_the_server_refuses_ends_and_frees_its_place(bus: NatsBus) -> None:
    """nats-py #985: `publish_async` futures never resolve on an API error, and their semaphore leaks until every call stalls.

    More refusals than the window has places, of both kinds: a full stream, and a compare-and-set that lost.
    """
    made, root = await declared(bus, "r", work_bytes=200_000)
    full = await asyncio.gather(
        *(bus.publish_bytes(f"{root}.work.a", bytes(50_000), id=f"w{i}") for i in range(300)), return_exceptions=True
    )
    lost = await asyncio.gather(
        *(bus.publish(f"{root}.log.head", note("r", str(i)), id=f"h{i}", expect_last=0) for i in range(300)),
        return_exceptions=True,
    )
    assert sum(isinstance(r, BrokerFull) for r in full) >= 296
    assert sum(isinstance(r, HeadConflict) for r in lost) == 299
    assert (bus._window._used_bytes, bus._window._used_count) == (0, 0)
    assert bus._connection._waiting == {}
    await bus.publish(f"{root}.log.a", note("r"), id="after")
    assert (await bus.depth(made.consumers[0])).pending <= 4


async def test_a_server_that_takes_too_much_at_once_gets_it_again(tmp_path: Path) -> None:
    """Ingest limit (429, error 10167): what the server has no room to queue it drops; without an acknowledgement it would vanish."""
    limited = edited(NatsServer(tmp_path), lambda text: text.replace("jetstream {", "jetstream {\n  max_buffered_msgs: 4"))
    refused = 0
    async with limited as server, await NatsBus.connect(server.url, name="ingest") as bus:
        made, root = await declared(bus, "r", work_bytes=256 << 20)
        request = bus._connection.request

        async def counted(*args: object, **options: object) -> object:
            nonlocal refused
            answer = await request(*args, **options)  # type: ignore[arg-type]
            refused += b"10167" in answer.data
            return answer

        bus._connection.request = counted  # type: ignore[assignment, method-assign]
        acks = await asyncio.gather(*(bus.publish_bytes(f"{root}.work.a", bytes(100_000), id=str(i)) for i in range(200)))
        assert refused > 0
        assert not any(ack.duplicate for ack in acks)
        assert await bus.depth(made.consumers[0]) == (200, 0, 0)


async def test_publishes_outstanding_at_a_kill_end_and_no_place_is_lost(server: NatsServer, bus: NatsBus) -> None:
    """Same family: acknowledgements outstanding at a restart. The server hangs, is killed and comes back; nothing waits for ever."""
    made, root = await declared(bus, "r")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    waiting = [asyncio.create_task(bus.publish(f"{root}.work.a", group("r", f"g{i}"), id=str(i))) for i in range(400)]
    await asyncio.sleep(0.1)
    assert bus._window._used_count == 256
    await restart(server, kill=True)
    await asyncio.gather(*waiting)
    assert (bus._window._used_bytes, bus._window._used_count) == (0, 0)
    assert (await bus.depth(made.consumers[0])).pending == 400


async def test_a_slow_consumer_with_a_failing_callback_is_no_zombie(bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-py PR #914, #361: an exception in `error_cb` leaves `is_connected=True` and nothing read, after a slow-consumer event."""
    made, root = await declared(bus, "r")
    for i in range(200):
        await bus.publish(f"{root}.log.a", note("r", "x" * 500), id=str(i))
    failed = asyncio.Event()

    def failing(error: Exception) -> None:
        failed.set()
        raise RuntimeError("a callback of ours that is wrong")

    monkeypatch.setattr(bus._connection, "_lose", failing)
    monkeypatch.setattr("driftline.messages.nats_connection.INBOX_BYTES", 5_000)
    follower = Follower(bus, made.stream("LOG"), f"{root}.log.>")
    async with asyncio.timeout(10):
        await failed.wait()
    monkeypatch.undo()
    assert (await bus.publish(f"{root}.log.a", note("r"), id="after")).seq == 201
    await follower.reaches(201)
    assert follower.seqs == list(range(1, 202))
    await follower.stop()


async def test_what_the_client_dropped_is_read_again(bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-py #298: beyond `pending_bytes_limit` the client drops silently. A follower starts over where it was and misses nothing."""
    made, root = await declared(bus, "r")
    for i in range(300):
        await bus.publish(f"{root}.log.a", note("r", "x" * 500), id=str(i))
    lose, lost = bus._connection._lose, asyncio.Event()

    def losing(error: ConnectionLost) -> None:
        lost.set()
        lose(error)

    monkeypatch.setattr(bus._connection, "_lose", losing)
    with monkeypatch.context() as patch:
        patch.setattr("driftline.messages.nats_connection.INBOX_BYTES", 5_000)
        follower = Follower(bus, made.stream("LOG"), f"{root}.log.>")
        async with asyncio.timeout(10):
            await lost.wait()
    await follower.reaches(300)
    assert follower.seqs == list(range(1, 301))
    await follower.stop()


@pytest.mark.parametrize("which", ["_on_disconnected", "_on_reconnected"])
async def test_a_callback_that_raises_does_not_stop_the_reconnecting(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """nats-py #204: an exception in `disconnected_cb` ends the reconnecting for ever."""
    from driftline.messages.nats_connection import Connection

    real = getattr(Connection, which)

    async def failing(self: Connection) -> None:
        await real(self)
        raise RuntimeError("a callback of ours that is wrong")

    monkeypatch.setattr(Connection, which, failing)
    async with await NatsBus.connect(server.url, name="trap") as bus:
        _, root = await declared(bus, "r")
        await restart(server)
        await bus.publish(f"{root}.work.a", group("r"), id="a")


async def test_a_client_that_stopped_reconnecting_is_an_error_and_not_a_silence(
    server: NatsServer, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py #204 again, should anything else end the reconnecting: the service is told to restart."""
    monkeypatch.setattr("driftline.messages.nats_connection.WATCHDOG_S", 0.1)
    _, root = await declared(bus, "r")

    async def failing() -> None:
        raise RuntimeError("inside the client")

    bus._connection.client._disconnected_cb = failing
    await restart(server)
    with pytest.raises(BrokerUnavailable, match="stopped reconnecting"):
        await bus.publish(f"{root}.work.a", group("r"), id="a")


async def test_a_payload_at_the_limit_with_many_headers_does_not_close_the_client(bus: NatsBus) -> None:
    """The client checks `max_payload` without the headers; one byte over and the server ends the connection for good."""
    from driftline.messages.nats_bus import HEADROOM

    made, root = await declared(bus, "r")
    limit = bus._connection.max_payload - HEADROOM
    await bus.publish_bytes(f"{root}.work.a", os.urandom(limit), id="i" * 1000)
    assert len(await bus.get_bytes(made.stream("WORK"), f"{root}.work.a") or b"") == limit
    assert await bus.healthy()


async def test_a_dead_letter_of_the_largest_message_fits(bus: NatsBus) -> None:
    """The same limit where headers are added to bytes that came in at the limit."""
    from driftline.messages import dead_letters
    from driftline.messages.nats_bus import HEADROOM

    made, root = await declared(bus, "r")
    limit = bus._connection.max_payload - HEADROOM
    await bus.publish_bytes(f"{root}.work.{'a' * 200}", os.urandom(limit), id="i" * 1000)
    assert await bus.pull(made.consumers[0], batch=1, timeout_s=2) == []
    [dead] = await dead_letters(bus, "r")
    assert len(dead.data) == limit
    assert await bus.healthy()


async def test_a_reader_of_a_blob_that_is_deleted_and_put_again_gets_it_or_an_error(bus: NatsBus) -> None:
    """ObjectStore overwrite race: a reader in the middle hangs when a writer puts the same name. Blobs are named by their content."""
    await declared(bus, "r")
    blob = os.urandom(12_000_000)
    ref = await put_blob(bus, "r", blob)

    async def read() -> bytes | None:
        try:
            return await get_blob(bus, "r", ref)
        except IntegrityError:
            return None

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(read()) for _ in range(6)]
        await delete_blob(bus, "r", ref)
        again = await put_blob(bus, "r", blob)
        readers += [tasks.create_task(read()) for _ in range(2)]
    assert again == ref
    assert all(reader.result() in (blob, None) for reader in readers)
    assert await get_blob(bus, "r", ref) == blob


async def test_reading_blobs_leaves_no_consumers_behind(bus: NatsBus) -> None:
    """nats-py #596, #703: ObjectStore reads through an ordered consumer that lingers, at 64 MB/s. Blobs are read by direct get."""
    made, _ = await declared(bus, "r")
    ref = await put_blob(bus, "r", os.urandom(3_000_000))
    for _ in range(20):
        await get_blob(bus, "r", ref)
    info = await bus._connection.api(f"STREAM.INFO.{made.stream('BLOB')}", timeout_s=5)
    assert info["state"]["consumer_count"] == 0


async def test_a_pull_after_one_that_found_nothing_gets_what_was_published_between(bus: NatsBus) -> None:
    """nats-py #933, #986: a `fetch` that timed out leaves a pull on the server, and the next one stalls."""
    made, root = await declared(bus, "r")
    for i in range(40):
        assert await bus.pull(made.consumers[0], batch=4, timeout_s=0.02) == []
        await bus.publish(f"{root}.work.a", group("r", f"g{i}"), id=str(i))
        [delivery] = await bus.pull(made.consumers[0], batch=4, timeout_s=10)
        assert delivery.deliveries == 1
        await delivery.ack()
    info = await bus._connection.api(f"CONSUMER.INFO.{made.stream('WORK')}.workers", timeout_s=5)
    assert info.get("num_waiting", 0) == 0


async def test_a_consumer_that_is_gone_before_the_pull_is_made_again(bus: NatsBus) -> None:
    """A consumer deleted while waiting gives an empty fetch, an already deleted one `ServiceUnavailableError`: both are healed."""
    made, root = await declared(bus, "r")
    await bus._connection.api(f"CONSUMER.DELETE.{made.stream('WORK')}.workers", timeout_s=5)
    await bus.publish(f"{root}.work.a", group("r"), id="a")
    [delivery] = await bus.pull(made.consumers[0], batch=1, timeout_s=10)
    await delivery.ack()


async def test_messages_published_after_a_cancelled_pull_do_not_age_undelivered(bus: NatsBus) -> None:
    """Cancelling `fetch` leaves the server-side pull alive: its messages are queued for nobody until `ack_wait`."""
    made, root = await declared(bus, "r", ack_wait_s=600)
    waiting = asyncio.create_task(bus.pull(made.consumers[0], batch=3, timeout_s=30))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    for i in range(3):
        await bus.publish(f"{root}.work.a", group("r", f"g{i}"), id=str(i))
    found: dict[str, int] = {}
    async with asyncio.timeout(20):
        while len(found) < 3:
            for delivery in await bus.pull(made.consumers[0], batch=3, timeout_s=5):
                found[delivery.message.group] = delivery.deliveries  # type: ignore[attr-defined]
                await delivery.ack()
    assert max(found.values()) <= 2
    assert await bus.depth(made.consumers[0]) == (0, 0, 0)


async def test_what_the_client_buffered_in_an_outage_and_the_retry_are_stored_once(
    server: NatsServer, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py #504, #507, #529, #354: a publish in an outage raises, and is still delivered from the client's buffer afterwards."""
    monkeypatch.setattr("driftline.messages.nats_bus.PUBLISH_S", 0.5)
    made, root = await declared(bus, "r")
    await server.stop()
    with pytest.raises(BrokerUnavailable):
        await bus.publish(f"{root}.work.a", group("r"), id="a")
    await bus._connection.client.publish(f"{root}.work.a", b"", headers={"Nats-Msg-Id": "b"})  # what nats-py keeps to send later
    await server.start()
    monkeypatch.setattr("driftline.messages.nats_bus.PUBLISH_S", 10.0)
    await bus.publish(f"{root}.work.a", group("r"), id="a")
    await bus.publish(f"{root}.work.a", group("r"), id="b")
    assert (await bus.depth(made.consumers[0])).pending == 2


async def test_a_head_moved_during_a_restart_is_seen_within_two_polls(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-py #510: after a restart a KV watch or an ordered push resumes after 20 s. Here the store is asked once a poll."""
    async with await NatsBus.connect(server.url, name="reads") as reads, await NatsBus.connect(server.url, name="writes") as writes:
        await writes.declare(topology("r"))
        subject = Subjects("r").head

        def head(version: int) -> PolicyHead:
            return PolicyHead(run="r", version=version, manifest="0" * 32, digest="1" * 32, learner_step=version, at=0.0)

        first = await writes.publish(subject, head(0), id="0", expect_last=0)
        reader = PolicyReader(reads, JetStreamBlobs(reads, "r"), "r")
        looks = 0
        look = reader.head

        async def counted() -> PolicyHead | None:
            nonlocal looks
            found = await look()
            looks += 1
            return found

        monkeypatch.setattr(reader, "head", counted)
        async with aclosing(reader.watch(poll_s=0.2)) as heads:  # type: ignore[type-var]
            assert (await anext(heads)).version == 0
            following = asyncio.ensure_future(anext(heads))
            await restart(server, kill=True)
            await writes.publish(subject, head(1), id="1", expect_last=first.seq)
            looks = 0
            async with asyncio.timeout(30):
                assert (await following).version == 1
        assert looks <= 2


async def test_a_push_after_a_restart_wakes_a_follower_without_a_poll(server: NatsServer, bus: NatsBus) -> None:
    """The same for `follow`, which has no poll: it notices the loss itself and goes on from the last it saw."""
    made, root = await declared(bus, "r")
    follower = Follower(bus, made.stream("LOG"), f"{root}.log.>")
    await bus.publish(f"{root}.log.a", note("r"), id="1")
    await follower.reaches(1)
    await restart(server, kill=True)
    await bus.publish(f"{root}.log.a", note("r"), id="2")
    await follower.reaches(2)
    assert follower.seqs == [1, 2]
    await follower.stop()


class Link:
    """A TCP proxy. Black-holed, it keeps its connections and forwards nothing, as a firewall that drops packets does."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._held: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.connections = 0

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        upstream, out = await asyncio.open_connection("127.0.0.1", self._port)
        gate = self._open
        for source, sink in ((reader, out), (upstream, writer)):
            task = asyncio.create_task(self._pump(source, sink, gate))
            self._held.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        while data := await source.read(65536):
            await gate.wait()
            sink.write(data)
            await sink.drain()
        sink.close()

    def drop_what_is_connected(self) -> None:
        """Connections made from now on are forwarded; those there are never again."""
        self._open.clear()
        self._open = asyncio.Event()
        self._open.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        finally:
            listener.close()
            for task in self._held:
                task.cancel()
            await asyncio.gather(*self._held, return_exceptions=True)


async def test_a_black_holed_link_is_left_for_a_new_one(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-py #671: on a link that drops every packet the reconnect waits up to 15 minutes for the old socket to close."""
    monkeypatch.setattr("driftline.messages.nats_connection.WATCHDOG_S", 0.2)
    monkeypatch.setattr("driftline.messages.nats_connection.STUCK_RECONNECT_S", 0.5)
    link = Link(server.port)
    async with link.listening() as url, await NatsBus.connect(url, name="far") as bus:
        made, root = await declared(bus, "r")
        await bus.publish(f"{root}.work.a", group("r", "g0"), id="0")
        assert link.connections == 1
        link.drop_what_is_connected()
        big = [asyncio.create_task(bus.publish_bytes(f"{root}.log.a", bytes(1_000_000), id=f"b{i}")) for i in range(8)]
        await bus.publish(f"{root}.work.a", group("r", "g1"), id="1")
        await asyncio.gather(*big)
        assert link.connections > 1
        assert (await bus.depth(made.consumers[0])).pending == 2


async def test_closing_during_acknowledgements_loses_none_that_was_confirmed(server: NatsServer, bus: NatsBus) -> None:
    """nats-py #100: `drain()` waits for nobody's tasks, and the acknowledgements of those still at work are lost."""
    made, root = await declared(bus, "r", ack_wait_s=600)
    for i in range(40):
        await bus.publish(f"{root}.work.a", group("r", f"g{i}"), id=str(i))
    async with await NatsBus.connect(server.url, name="leaves") as leaving:
        held = await leaving.pull(made.consumers[0], batch=40, timeout_s=5)
        acks = [asyncio.create_task(delivery.ack()) for delivery in held]
        await asyncio.sleep(0)
        await leaving.close()
        results = await asyncio.gather(*acks, return_exceptions=True)
    refused = sum(isinstance(result, BrokerUnavailable) for result in results)
    assert refused + sum(result is None for result in results) == len(held) == 40
    # Every acknowledgement that returned counts; one that raised may have arrived all the same.
    assert (await bus.depth(made.consumers[0])).ack_pending <= refused


async def test_acknowledgements_in_flight_when_the_socket_breaks_are_made_again(server: NatsServer, bus: NatsBus) -> None:
    """`ack()` of nats-py is fire-and-forget: acknowledge 100, abort the socket, and all 100 are delivered again."""
    made, root = await declared(bus, "r", ack_wait_s=600)
    for i in range(100):
        await bus.publish(f"{root}.work.a", group("r", f"g{i}"), id=str(i))
    held = await bus.pull(made.consumers[0], batch=100, timeout_s=5)
    assert len(held) == 100
    acks = [asyncio.create_task(delivery.ack()) for delivery in held]
    await asyncio.sleep(0)
    transport = bus._connection.client._transport._io_writer.transport
    transport.abort()
    await asyncio.gather(*acks)
    assert await bus.depth(made.consumers[0]) == (0, 0, 0)


async def test_a_client_without_our_care_does_close_on_a_payload_at_the_limit(server: NatsServer) -> None:
    """The trap itself, so that the headroom is known to be needed: exactly `max_payload` bytes and one header end nats-py's client."""
    closed = asyncio.Event()

    async def on_closed() -> None:
        closed.set()

    async def quiet(error: Exception) -> None:
        pass

    client = await nats.connect(server.url, max_reconnect_attempts=-1, closed_cb=on_closed, error_cb=quiet)
    await client.publish("a", bytes(client.max_payload), headers={"k": "v"})
    async with asyncio.timeout(20):
        await closed.wait()
    assert client.is_closed


async def test_the_clients_flush_overtakes_a_subscription_and_nothing_here_waits_for_it(server: NatsServer, bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap: a ping is written at once, past a subscription that waits for the writer, so its pong says nothing. What is asked through the inbox
    of a new connection comes back all the same: requests stand in the same line as the subscription."""
    written: list[bytes] = []
    client = await nats.connect(server.url)
    transport = client._transport
    assert transport is not None
    write, writelines = transport.write, transport.writelines
    monkeypatch.setattr(transport, "write", lambda data: (written.append(data), write(data))[1])
    monkeypatch.setattr(transport, "writelines", lambda data: (written.extend(data), writelines(data))[1])
    await client.subscribe("late")
    await client.flush()
    await client.flush()
    assert [line.split()[0] for line in written] == [b"PING", b"SUB", b"PING"]
    await client.close()
    for _ in range(20):
        async with await NatsBus.connect(server.url, name="early") as early:
            assert await early.healthy()
            assert (await early._connection.api("INFO", timeout_s=5))["streams"] == 0
