"""The Bus in one process, for unit tests and replays, under the same conformance tests as `NatsBus`.

Same semantics: de-duplication by id, compare-and-set, refusal when full, redelivery after `ack_wait`, delivery counts, dead
letters, claim checks; messages pass through the codec, so what is not encodable fails here too. Leases expire by the event
loop's clock. Several `MemoryBus` on one `MemoryBroker` are several connections; `broker.down = True` is an outage.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Self

from driftline.messages import frames
from driftline.messages.bus import Delivery, Depth, PubAck, Stored
from driftline.messages.dead_letters import Raw, dead_headers, dead_id, dead_subject
from driftline.messages.errors import (
    BrokerUnavailable,
    ConfigError,
    DriftlineError,
    IntegrityError,
    MalformedMessage,
    PayloadTooLarge,
)
from driftline.messages.memory_stream import MemoryConsumer, MemoryStream, matches
from driftline.messages.subjects import ConsumerSpec, Retention, StreamSpec, Topology
from driftline.messages.types import Message

__all__ = ["MemoryBroker", "MemoryBus"]

MAX_PAYLOAD = 2 * 1024 * 1024 - 64 * 1024


class MemoryBroker:
    """The streams and consumers, and who waits for a change of them."""

    def __init__(self) -> None:
        self.down = False
        self.streams: dict[str, MemoryStream] = {}
        self.consumers: dict[tuple[str, str], MemoryConsumer] = {}
        self._waiters: set[asyncio.Future[None]] = set()

    def declare_stream(self, spec: StreamSpec) -> None:
        stream = self.streams.get(spec.name)
        if stream is None:
            self.streams[spec.name] = MemoryStream(spec)
        elif stream.spec.retention is not spec.retention:
            raise ConfigError("a stream cannot change its retention", field="stream", value=spec.name)
        else:
            stream.spec = spec

    def declare_consumer(self, spec: ConsumerSpec) -> MemoryConsumer:
        stream = self.stream(spec.stream)
        consumer = self.consumers.get((spec.stream, spec.durable))
        if consumer is None:
            consumer = self.consumers[spec.stream, spec.durable] = MemoryConsumer(spec, stream)
        else:
            consumer.spec = spec
        return consumer

    def stream(self, name: str) -> MemoryStream:
        stream = self.streams.get(name)
        if stream is None:
            raise ConfigError("no such stream", field="stream", value=name, remedy="declare the topology first")
        return stream

    def stream_for(self, subject: str) -> MemoryStream:
        for stream in self.streams.values():
            if any(matches(pattern, subject) for pattern in stream.spec.subjects):
                return stream
        raise BrokerUnavailable("no stream takes this subject", field="subject", value=subject, remedy="declare the topology")

    def changed(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def change(self, until: float) -> None:
        """Return at the next change, or at `until` by the loop's clock."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout_at(until):
                await waiter
        except TimeoutError:
            pass
        finally:
            self._waiters.discard(waiter)


class MemoryBus:
    def __init__(self, broker: MemoryBroker | None = None) -> None:
        self.broker = broker or MemoryBroker()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def declare(self, topology: Topology) -> None:
        self.check()
        for stream in topology.streams:
            self.broker.declare_stream(stream)
        for consumer in topology.consumers:
            self.broker.declare_consumer(consumer)

    async def missing(self, topology: Topology) -> tuple[str, ...]:
        self.check()
        return tuple(spec.name for spec in topology.streams if spec.name not in self.broker.streams)

    async def publish(self, subject: str, message: Message, *, id: str, expect_last: int | None = None) -> PubAck:
        self.check()
        frame, headers = await frames.prepare(self, message)
        await asyncio.sleep(0)
        return self._store(subject, frame, headers, id, expect_last)

    async def publish_bytes(self, subject: str, data: bytes, *, id: str) -> PubAck:
        await asyncio.sleep(0)  # a real call always yields, and a test should see what runs in between
        return self._store(subject, bytes(data), {}, id, None)

    async def get_bytes(self, stream: str, subject: str) -> bytes | None:
        raw = self._last(stream, subject)
        return None if raw is None else raw.data

    async def pull(self, consumer: ConsumerSpec, *, batch: int, timeout_s: float) -> list[Delivery]:
        if batch < 1:
            raise ConfigError("must be at least 1", field="batch", value=batch)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await asyncio.sleep(0)
        while True:
            self.check()
            state = self.broker.declare_consumer(consumer)
            if taken := state.take(batch, loop.time()):
                return await self._receive(state, taken)
            now = loop.time()
            if now >= deadline:
                return []
            await self.broker.change(min(deadline, state.next_expiry(now, deadline)))

    async def last(self, stream: str, subject: str) -> Stored | None:
        raw = self._last(stream, subject)
        return None if raw is None else Stored(raw.seq, raw.subject, await frames.open_frame(self, raw.subject, raw.data))

    async def follow(self, stream: str, subject: str, *, start: int = 1) -> AsyncIterator[Stored]:
        """A message that cannot be decoded is copied to the dead letters and passed over, as in `NatsBus`."""
        async with aclosing(self.follow_raw(stream, subject, start=start)) as messages:
            async for raw in messages:
                try:
                    message = await frames.open_frame(self, raw.subject, raw.data)
                except (MalformedMessage, IntegrityError) as error:
                    self.bury(stream, raw, str(error), 1)
                    continue
                yield Stored(raw.seq, raw.subject, message)

    async def follow_raw(self, stream: str, subject: str, *, start: int = 1) -> AsyncGenerator[Raw, None]:
        seq = start
        loop = asyncio.get_running_loop()
        while True:
            self.check()
            raw = self.broker.stream(stream).next_on(subject, seq)
            if raw is None:
                await self.broker.change(loop.time() + 60.0)
                continue
            seq = raw.seq + 1
            yield raw

    async def read(self, stream: str, subject: str, *, start: int = 1, limit: int = 1000) -> list[Raw]:
        self.check()
        await asyncio.sleep(0)
        found: list[Raw] = []
        while len(found) < limit and (raw := self.broker.stream(stream).next_on(subject, start)) is not None:
            found.append(raw)
            start = raw.seq + 1
        return found

    async def depth(self, consumer: ConsumerSpec) -> Depth:
        self.check()
        return self.broker.declare_consumer(consumer).depth()

    async def subjects(self, stream: str, filter: str) -> Mapping[str, int]:
        self.check()
        await asyncio.sleep(0)
        return self.broker.stream(stream).subjects(filter)

    async def purge(self, stream: str, subject: str) -> None:
        self.check()
        self.broker.stream(stream).purge(subject)
        self.broker.changed()

    async def delete(self, stream: str, seq: int) -> bool:
        self.check()
        await asyncio.sleep(0)
        held = self.broker.stream(stream)
        found = held.get(seq) is not None
        held.remove(seq)
        self.broker.changed()
        return found

    async def healthy(self, timeout_s: float = 2.0) -> bool:
        return not (self._closed or self.broker.down)

    async def close(self) -> None:
        self._closed = True
        self.broker.changed()

    def check(self) -> None:
        if self._closed:
            raise BrokerUnavailable("this bus is closed", field="bus", value="memory")
        if self.broker.down:
            raise BrokerUnavailable("the broker is down", field="broker", value="memory")

    def bury(self, stream: str, raw: Raw, reason: str, deliveries: int) -> None:
        _, subject = dead_subject(raw.subject)
        headers = dead_headers(reason=reason, subject=raw.subject, stream=stream, seq=raw.seq, deliveries=deliveries)
        self._store(subject, raw.data, headers, dead_id(stream, raw.seq), None)

    def _last(self, stream: str, subject: str) -> Raw | None:
        self.check()
        found = self.broker.streams.get(stream)
        if found is None:
            raise BrokerUnavailable("cannot be read: no such stream", field="stream", value=stream)
        return found.last_on(subject)

    def _store(self, subject: str, data: bytes, headers: dict[str, str], id: str, expect_last: int | None) -> PubAck:
        self.check()
        frames.check_address(subject, id)
        if len(data) > MAX_PAYLOAD:
            raise PayloadTooLarge(f"the broker takes {MAX_PAYLOAD} bytes", field=subject, value=len(data), remedy="use put_blob")
        now = asyncio.get_running_loop().time()
        ack = self.broker.stream_for(subject).store(subject, data, headers, id, expect_last, now)
        self.broker.changed()
        return ack

    async def _receive(self, state: MemoryConsumer, taken: list[tuple[Raw, int]]) -> list[Delivery]:
        deliveries: list[Delivery] = []
        for raw, count in taken:
            delivery = _MemoryDelivery(self, state, raw, count)
            if count > state.spec.max_deliver:
                await delivery.dead_letter(f"delivered {state.spec.max_deliver} times without an acknowledgement")
                continue
            try:
                delivery.message = await frames.open_frame(self, raw.subject, raw.data)
            except (MalformedMessage, IntegrityError) as error:
                await delivery.dead_letter(str(error))
                continue
            deliveries.append(delivery)
        return deliveries


class _MemoryDelivery:
    message: Message

    def __init__(self, bus: MemoryBus, consumer: MemoryConsumer, raw: Raw, count: int) -> None:
        self._bus = bus
        self._consumer = consumer
        self._raw = raw
        self._count = count
        self._ended = False

    @property
    def subject(self) -> str:
        return self._raw.subject

    @property
    def deliveries(self) -> int:
        return self._count

    @property
    def ack_wait_s(self) -> float:
        return self._consumer.spec.ack_wait_s

    @property
    def seq(self) -> int:
        return self._raw.seq

    async def ack(self) -> None:
        self._end()
        self._consumer.ack(self._raw.seq)
        self._bus.broker.changed()
        stream = self._consumer.stream
        claim = frames.claim_in(self._raw.data)
        if claim is not None and stream.spec.retention is Retention.WORK_QUEUE:
            await frames.drop_claim(self._bus, claim)

    async def nak(self, delay_s: float = 0.0) -> None:
        self._end()
        self._consumer.expire_at(self._raw.seq, asyncio.get_running_loop().time() + max(delay_s, 0.0))
        self._bus.broker.changed()

    async def renew(self) -> None:
        self._open()
        self._consumer.expire_at(self._raw.seq, asyncio.get_running_loop().time() + self.ack_wait_s)

    async def dead_letter(self, reason: str) -> None:
        self._open()
        self._bus.bury(self._consumer.spec.stream, self._raw, reason, self._count)
        self._end()
        self._consumer.ack(self._raw.seq)
        self._bus.broker.changed()

    def _open(self) -> None:
        self._bus.check()
        if self._ended:
            raise DriftlineError("already acknowledged, given back or dead-lettered", field="delivery", value=self.subject)

    def _end(self) -> None:
        self._open()
        self._ended = True
