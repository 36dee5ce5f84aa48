"""The Bus over NATS JetStream. What `publish` returned is stored, `ack` means the broker confirmed it, and no call waits
beyond its deadline.

A publish is retried under the same message id until `PUBLISH_S`; the broker stores it once, and a compare-and-set that lost
to its own first attempt is recognised as won. At most `WINDOW_BYTES` are unacknowledged at any time, below the server's ingest
limit. A delivery count beyond the consumer's `max_deliver` ends in the dead letters at the next pull, by whoever pulls (no
advisory can be lost). See `nats_connection` for the connection, `nats_pull` and `nats_follow` for reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Final, Self

import structlog
from nats.aio.msg import Msg

from driftline.messages import frames, nats_follow
from driftline.messages.bus import Delivery, Depth, PubAck, Stored
from driftline.messages.dead_letters import Raw, dead_headers, dead_id, dead_subject
from driftline.messages.errors import (
    BrokerDenied,
    BrokerFull,
    BrokerUnavailable,
    ConfigError,
    HeadConflict,
    IntegrityError,
    LeaseLost,
    MalformedMessage,
    PayloadTooLarge,
)
from driftline.messages.nats_connection import Connection, Credentials, NoResponders, RequestTimeout
from driftline.messages.nats_delivery import NatsDelivery
from driftline.messages.nats_pull import Puller, consumer_config
from driftline.messages.subjects import ConsumerSpec, Retention, StreamSpec, Topology
from driftline.messages.types import Message

__all__ = ["NatsBus"]

log = structlog.get_logger(__name__)

PUBLISH_S: Final = 10.0
ACK_S: Final = 5.0
ATTEMPT_S: Final = 3.0
ADMIN_S: Final = 10.0
READ_S: Final = 10.0
HEADROOM: Final = 64 * 1024  # headers count towards the server's max_payload; one byte over closes the connection for good
WINDOW_BYTES: Final = 32 * 1024 * 1024
WINDOW_COUNT: Final = 256
PAUSES_S: Final = (0.02, 0.05, 0.1, 0.25, 0.5)

_WRONG_LAST = {10071, 10164}
_FULL = {10077, 10047, 10023, 10122}
_TOO_LARGE = {10054}
_BUSY = {10167, 10008, 10041, 10149}  # the last: a consumer asked for while its predecessor is being deleted
_EXISTS_DIFFERENTLY = {10058}
_NOT_DELETED = {10057, 10043}
_STREAM_MISSING = 10059


class NatsBus:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._window = _Window(WINDOW_BYTES, WINDOW_COUNT)
        self._puller = Puller(connection, self._declare_consumer)
        self._work_queues: dict[str, bool] = {}

    @classmethod
    async def connect(
        cls, url: str, *, name: str, connect_timeout_s: float = 10.0, credentials: Credentials | None = None
    ) -> Self:
        """Connect, waiting at most `connect_timeout_s` for a broker that is not there yet (BrokerUnavailable). Refused
        credentials raise BrokerDenied at once."""
        connection = await Connection.open(
            url, name=name, timeout_s=connect_timeout_s, credentials=credentials or Credentials()
        )
        return cls(connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def declare(self, topology: Topology) -> None:
        for stream in topology.streams:
            await self._declare_stream(stream)
        for consumer in topology.consumers:
            await self._declare_consumer(consumer, ADMIN_S)

    async def missing(self, topology: Topology) -> tuple[str, ...]:
        found: set[str] = set()
        total = 1
        while len(found) < total:
            answer = await self._admin("STREAM.NAMES", {"offset": len(found)})
            if "error" in answer:
                raise _refusal(answer["error"], topology.run)
            page = answer.get("streams") or ()
            found.update(page)
            total = int(answer.get("total", 0)) if page else 0
        self._work_queues |= {spec.name: spec.retention is Retention.WORK_QUEUE for spec in topology.streams if spec.name in found}
        return tuple(spec.name for spec in topology.streams if spec.name not in found)

    async def publish(self, subject: str, message: Message, *, id: str, expect_last: int | None = None) -> PubAck:
        frame, headers = await frames.prepare(self, message)
        if expect_last is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expect_last)
        return await self._store(subject, frame, headers, id)

    async def publish_bytes(self, subject: str, data: bytes, *, id: str) -> PubAck:
        return await self._store(subject, data, {}, id)

    async def get_bytes(self, stream: str, subject: str) -> bytes | None:
        raw = await self._direct(stream, subject)
        return None if raw is None else raw.data

    async def pull(self, consumer: ConsumerSpec, *, batch: int, timeout_s: float) -> list[Delivery]:
        received = await self._puller.pull(consumer, batch, timeout_s)
        deliveries: list[Delivery] = []
        for message in received:
            delivery = await self._receive(consumer, message)
            if delivery is not None:
                deliveries.append(delivery)
        return deliveries

    async def last(self, stream: str, subject: str) -> Stored | None:
        raw = await self._direct(stream, subject)
        return None if raw is None else Stored(raw.seq, raw.subject, await frames.open_frame(self, raw.subject, raw.data))

    async def follow(self, stream: str, subject: str, *, start: int = 1) -> AsyncIterator[Stored]:
        """A message that cannot be decoded is copied to the dead letters, logged, and passed over: it stays in the stream. Who may
        only read logs it."""
        async with aclosing(self.follow_raw(stream, subject, start=start)) as messages:
            async for raw in messages:
                try:
                    message = await frames.open_frame(self, raw.subject, raw.data)
                except (MalformedMessage, IntegrityError) as error:
                    with contextlib.suppress(BrokerDenied):
                        await self.bury(stream, raw, str(error), 1)
                    continue
                yield Stored(raw.seq, raw.subject, message)

    def follow_raw(self, stream: str, subject: str, *, start: int = 1) -> AsyncGenerator[Raw, None]:
        return nats_follow.follow_raw(self._connection, stream, subject, start)

    async def read(self, stream: str, subject: str, *, start: int = 1, limit: int = 1000) -> list[Raw]:
        found: list[Raw] = []
        seq = start
        while len(found) < limit:
            raw = await self._get(stream, {"seq": seq, "next_by_subj": subject})
            if raw is None:
                break
            found.append(raw)
            seq = raw.seq + 1
        return found

    async def depth(self, consumer: ConsumerSpec) -> Depth:
        verb = f"CONSUMER.INFO.{consumer.stream}.{consumer.durable}"
        info = await self._admin(verb, None)
        if "error" in info:
            raise _refusal(info["error"], consumer.stream)
        return Depth(int(info["num_pending"]), int(info["num_ack_pending"]), int(info["num_redelivered"]))

    async def subjects(self, stream: str, filter: str) -> Mapping[str, int]:
        found: dict[str, int] = {}
        seen, total = 0, 1
        while seen < total:  # the server answers with at most 100,000 a time, in the order of their names
            info = await self._admin(f"STREAM.INFO.{stream}", {"subjects_filter": filter, "offset": seen})
            if "error" in info:
                raise _refusal(info["error"], stream)
            page = info.get("state", {}).get("subjects") or {}
            found |= {subject: int(count) for subject, count in page.items()}
            seen, total = seen + len(page), int(info.get("total", 0)) if page else 0
        return found

    async def purge(self, stream: str, subject: str) -> None:
        answer = await self._admin(f"STREAM.PURGE.{stream}", {"filter": subject})
        if "error" in answer:
            raise _refusal(answer["error"], stream)

    async def delete(self, stream: str, seq: int) -> bool:
        answer = await self._admin(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
        if (error := answer.get("error")) is None:
            return True
        # One code for every failure of the store: whether the message is there is asked of the stream.
        if error.get("err_code") in _NOT_DELETED and await self._get(stream, {"seq": seq}) is None:
            return False
        raise _refusal(error, stream)

    async def healthy(self, timeout_s: float = 2.0) -> bool:
        """Whether the broker answers a ping and JetStream answers at all; False, too, when the connection is dead for good."""
        try:
            await self._connection.rtt(timeout_s)
            return "error" not in await self._connection.api("INFO", timeout_s=timeout_s)
        except BrokerUnavailable:
            return False

    async def close(self) -> None:
        await self._puller.close()
        await self._connection.close()

    async def bury(self, stream: str, raw: Raw, reason: str, deliveries: int) -> None:
        """Store a dead letter; the original is the caller's to terminate."""
        log.warning("dead letter", stream=stream, subject=raw.subject, seq=raw.seq, reason=reason)
        _, subject = dead_subject(raw.subject)
        headers = dead_headers(reason=reason, subject=raw.subject, stream=stream, seq=raw.seq, deliveries=deliveries)
        await self._store(subject, raw.data, headers, dead_id(stream, raw.seq))

    async def confirm(self, reply: str, payload: bytes) -> None:
        """Send an acknowledgement of some kind and wait until the broker confirms it.

        A server that was killed may have forgotten a delivery it made just before; it says nothing to its acknowledgement,
        and delivers it anew: LeaseLost.
        """
        try:
            await self._retry(reply, payload, None, ACK_S)
        except BrokerUnavailable as error:
            self._connection.check()
            if not self._connection.connected:
                raise
            raise LeaseLost(
                f"not confirmed within {ACK_S:g} s", field="delivery", value=reply, remedy="expect it to be delivered again"
            ) from error

    async def settled(self, stream: str, subject: str, data: bytes) -> None:
        """After the acknowledgement of a work-queue message: nobody will read its claim again."""
        claim = frames.claim_in(data)
        if claim is None or not await self._is_work_queue(stream):
            return
        try:
            await frames.drop_claim(self, claim)
        except (BrokerUnavailable, BrokerFull) as error:
            log.warning("a claimed blob was left behind", subject=subject, digest=claim.digest, error=str(error))

    async def _receive(self, spec: ConsumerSpec, message: Msg) -> Delivery | None:
        """A delivery fit to be worked on, or None: then it has been dead-lettered or handed back."""
        delivery = NatsDelivery(self, spec, message)
        try:
            if delivery.deliveries > spec.max_deliver:
                await delivery.dead_letter(f"delivered {spec.max_deliver} times without an acknowledgement")
                return None
            try:
                delivery.message = await frames.open_frame(self, message.subject, message.data)
            except (MalformedMessage, IntegrityError) as error:
                await delivery.dead_letter(str(error))
                return None
        except BrokerUnavailable as error:
            # Neither lost nor raised: unacknowledged, it comes again when the broker is back.
            log.warning("a delivery was left to be redelivered", subject=message.subject, error=str(error))
            return None
        return delivery

    async def _store(self, subject: str, data: bytes, headers: dict[str, str], id: str) -> PubAck:
        frames.check_address(subject, id)
        limit = self._connection.max_payload - HEADROOM
        if len(data) > limit:
            raise PayloadTooLarge(f"the broker takes {limit} bytes", field=subject, value=len(data), remedy="use put_blob")
        headers = {**headers, "Nats-Msg-Id": id}
        async with self._window.hold(len(data)):
            answer = await self._retry(subject, data, headers, PUBLISH_S)
        if (error := answer.get("error")) is None:
            return PubAck(int(answer["seq"]), bool(answer.get("duplicate", False)))
        if error.get("err_code") in _WRONG_LAST and (own := await self._already_stored(subject, id)) is not None:
            return own
        raise _refusal(error, subject)

    async def _already_stored(self, subject: str, id: str) -> PubAck | None:
        """Whether the last message on `subject` is this very one: then an attempt whose answer was lost has won."""
        name = await self._stream_of(subject)
        raw = await self._direct(name, subject)
        return PubAck(raw.seq, True) if raw is not None and raw.headers.get("Nats-Msg-Id") == id else None

    async def _retry(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None, timeout_s: float
    ) -> dict[str, Any]:
        """Ask until there is an answer, in attempts, for at most `timeout_s`; then BrokerUnavailable."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        trouble: RequestTimeout | None = None
        silence = 0
        for attempt in range(10_000):
            left = deadline - loop.time()
            if left <= 0:
                break
            try:
                message = await self._connection.request(
                    subject, payload, headers=headers, timeout_s=min(ATTEMPT_S, left)
                )
            except RequestTimeout as error:
                self._connection.check()
                trouble = error
                # No listener is what a restarting server says, for a second or two; a stream that is missing stays silent.
                silence = silence + 1 if isinstance(error, NoResponders) else 0
                if silence and loop.time() > deadline - timeout_s * 0.5:
                    break
            else:
                answer = json.loads(message.data) if message.data.startswith(b"{") else {}
                if answer.get("error", {}).get("err_code") not in _BUSY:
                    return answer if isinstance(answer, dict) else {}
                trouble = RequestTimeout(answer["error"].get("description", ""), field="request", value=subject)
            await asyncio.sleep(min(PAUSES_S[min(attempt, len(PAUSES_S) - 1)], max(deadline - loop.time(), 0.0)))
        if isinstance(trouble, NoResponders):
            raise BrokerUnavailable("no stream takes this subject", field="subject", value=subject,
                                    remedy="declare the topology, or wait for JetStream") from trouble  # fmt: skip
        raise BrokerUnavailable(
            f"no answer in {timeout_s:g} s: {trouble.problem if trouble else 'out of time'}", field="subject", value=subject,
            remedy="is the broker running?",
        ) from trouble  # fmt: skip

    async def _admin(self, verb: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        return await self._retry(f"$JS.API.{verb}", json.dumps(body).encode() if body is not None else b"", None, ADMIN_S)

    async def _direct(self, stream: str, subject: str) -> Raw | None:
        return await self._get(stream, {"last_by_subj": subject})

    async def _get(self, stream: str, body: Mapping[str, Any]) -> Raw | None:
        """One stored message, read without the stream's leader; None if there is none."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + READ_S
        attempt = 0
        while True:
            try:
                message = await self._connection.request(
                    f"$JS.API.DIRECT.GET.{stream}", json.dumps(body).encode(), timeout_s=min(ATTEMPT_S, READ_S)
                )
                break
            except RequestTimeout as error:
                self._connection.check()
                pause = PAUSES_S[min(attempt, len(PAUSES_S) - 1)]
                late = loop.time() + pause > deadline
                # A stream that does not exist has no listener; one that a restarting server has not yet opened neither.
                if late or (isinstance(error, NoResponders) and attempt >= len(PAUSES_S)):
                    raise BrokerUnavailable(f"cannot be read: {error.problem}", field="stream", value=stream) from error
                attempt += 1
                await asyncio.sleep(pause)
        headers = message.headers or {}
        status = headers.get("Status")
        if status == "404":
            return None
        if status is not None and "Nats-Sequence" not in headers:
            raise BrokerUnavailable(headers.get("Description", status), field="stream", value=stream)
        return Raw(int(headers["Nats-Sequence"]), headers["Nats-Subject"], headers, message.data)

    async def _stream_of(self, subject: str) -> str:
        answer = await self._admin("STREAM.NAMES", {"subject": subject})
        names = answer.get("streams") or []
        if not names:
            raise ConfigError("no stream takes this subject", field="subject", value=subject)
        return str(names[0])

    async def _is_work_queue(self, stream: str) -> bool:
        if stream not in self._work_queues:
            info = await self._admin(f"STREAM.INFO.{stream}", None)
            self._work_queues[stream] = info.get("config", {}).get("retention") == Retention.WORK_QUEUE.value
        return self._work_queues[stream]

    async def _declare_stream(self, spec: StreamSpec) -> None:
        config = _stream_config(spec)
        answer = await self._admin(f"STREAM.CREATE.{spec.name}", config)
        if answer.get("error", {}).get("err_code") in _EXISTS_DIFFERENTLY:
            answer = await self._admin(f"STREAM.UPDATE.{spec.name}", config)
        if "error" in answer:
            raise _refusal(answer["error"], spec.name)
        self._work_queues[spec.name] = spec.retention is Retention.WORK_QUEUE

    async def _declare_consumer(self, spec: ConsumerSpec, timeout_s: float) -> None:
        verb = f"$JS.API.CONSUMER.CREATE.{spec.stream}.{spec.durable}.{spec.subject}"
        body = json.dumps({"stream_name": spec.stream, "config": consumer_config(spec)}).encode()
        answer = await self._retry(verb, body, None, timeout_s)
        if "error" in answer:
            raise _refusal(answer["error"], spec.stream)


class _Window:
    """At most so many bytes and messages unacknowledged; first come, first served, and one of any size always passes."""

    def __init__(self, max_bytes: int, max_count: int) -> None:
        self._bytes, self._count = max_bytes, max_count
        self._used_bytes = self._used_count = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    def hold(self, size: int) -> _Hold:
        return _Hold(self, size)

    def _fits(self, size: int) -> bool:
        if self._used_count == 0:
            return True
        return self._used_count < self._count and self._used_bytes + size <= self._bytes

    async def enter(self, size: int) -> None:
        if not self._queue and self._fits(size):
            self._take(size)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(size)
            raise

    def _take(self, size: int) -> None:
        self._used_bytes += size
        self._used_count += 1

    def leave(self, size: int) -> None:
        self._used_bytes -= size
        self._used_count -= 1
        while self._queue:
            size, turn = self._queue[0]
            if turn.done():
                self._queue.popleft()
            elif self._fits(size):
                self._queue.popleft()
                self._take(size)
                turn.set_result(None)
            else:
                break


class _Hold:
    def __init__(self, window: _Window, size: int) -> None:
        self._window, self._size = window, size

    async def __aenter__(self) -> None:
        await self._window.enter(self._size)

    async def __aexit__(self, *error: object) -> None:
        self._window.leave(self._size)


def _stream_config(spec: StreamSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": spec.retention.value,
        "discard": spec.discard.value,
        "storage": "file",
        "num_replicas": 1,
        "max_bytes": spec.max_bytes,
        "max_msgs": spec.max_msgs,
        "max_msgs_per_subject": spec.max_msgs_per_subject,
        "max_age": int(spec.max_age_s * 1e9),
        "max_consumers": -1,
        "max_msg_size": -1,
        "duplicate_window": int((min(spec.duplicate_window_s, spec.max_age_s) if spec.max_age_s else spec.duplicate_window_s) * 1e9),
        "allow_direct": True,
    }


def _refusal(error: Mapping[str, Any], subject: str) -> Exception:
    """The broker's error as ours."""
    code, text = error.get("err_code"), str(error.get("description", "refused"))
    if code in _WRONG_LAST:
        return HeadConflict(text, field="subject", value=subject, remedy="read the last message again")
    if code in _FULL:
        return BrokerFull(text, field="subject", value=subject, remedy="wait for consumers, or raise the stream's limit")
    if code in _TOO_LARGE:
        return PayloadTooLarge(text, field="subject", value=subject)
    if error.get("code", 500) >= 500:
        return BrokerUnavailable(text, field="subject", value=subject)
    if code == _STREAM_MISSING:
        return ConfigError(text, field="stream", value=subject, remedy="declare the topology first")
    return ConfigError(f"{text} (error {code})", field="stream", value=subject)
