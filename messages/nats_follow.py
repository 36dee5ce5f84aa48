"""Following a stream: history, then live, each message once and in order, whatever happens to the broker in between.

An ephemeral consumer that acknowledges nothing is read with pull requests, so at most one batch is buffered and a slow
follower slows nobody. The server sends a heartbeat twice a second: 1.5 s of silence, a lost connection, a gap in the consumer's
numbering or a vanished consumer (a restarted server has forgotten it) make a new one from the last sequence that was yielded.
It ends only when it is closed or cancelled, or when the broker denies it or the stream does not exist.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, Final

import structlog
from nats.aio.msg import Msg

from driftline.messages.dead_letters import Raw
from driftline.messages.errors import BrokerUnavailable, ConfigError
from driftline.messages.nats_connection import Connection, ConnectionLost, Inbox, RequestTimeout
from driftline.messages.nats_pull import batch_completed

__all__ = ["follow_raw"]

log = structlog.get_logger(__name__)

BATCH: Final = 256
BATCH_BYTES: Final = 4 * 1024 * 1024
HEARTBEAT_S: Final = 0.5
SILENCE_S: Final = 1.5
EXPIRES_S: Final = 20.0
FORGET_S: Final = 10.0
CREATE_S: Final = 2.0
BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_HEARTBEAT = "100"
_STREAM_MISSING = 10059


class _Restart(Exception):
    """This consumer cannot be trusted any more; make another."""


async def follow_raw(connection: Connection, stream: str, subject: str, start: int) -> AsyncGenerator[Raw, None]:
    last = max(start, 1) - 1
    failures = 0
    while True:
        connection.check()
        try:
            reader = await _Reader.open(connection, stream, subject, last + 1)
        except (ConnectionLost, RequestTimeout) as error:
            log.debug("follow waits for the broker", stream=stream, error=str(error))
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
            failures += 1
            continue
        try:
            while True:
                raw = await reader.next()
                failures = 0
                if raw.seq > last:
                    last = raw.seq
                    yield raw
        except (_Restart, ConnectionLost, RequestTimeout) as error:
            connection.check()
            log.debug("follow starts over", stream=stream, after=last, why=str(error))
        finally:
            await reader.close()


class _Reader:
    """One ephemeral consumer and the batch being read from it."""

    def __init__(self, connection: Connection, stream: str, consumer: str, inbox: Inbox) -> None:
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._inbox = inbox
        self._epoch = connection.epoch
        self._open = 0  # messages the current request may still bring
        self._delivered = 0

    @classmethod
    async def open(cls, connection: Connection, stream: str, subject: str, start: int) -> _Reader:
        config: dict[str, Any] = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": start,
            "ack_policy": "none",
            "replay_policy": "instant",
            "filter_subject": subject,
            "inactive_threshold": int(FORGET_S * 1e9),
            "mem_storage": True,
            "num_replicas": 1,
        }
        await connection.wait_connected(CREATE_S)
        inbox = await connection.inbox()
        try:
            body = {"stream_name": stream, "config": config}
            answer = await connection.api(f"CONSUMER.CREATE.{stream}", body, timeout_s=CREATE_S)
            if (error := answer.get("error")) is not None:
                _refuse(stream, subject, error)
            return cls(connection, stream, answer["name"], inbox)
        except BaseException:
            await inbox.close()
            raise

    async def next(self) -> Raw:
        while True:
            if self._epoch != self._connection.epoch:
                raise _Restart("the connection was lost")
            if self._open == 0:
                await self._request()
            message = await self._inbox.get(SILENCE_S)
            if message is None:
                raise _Restart(f"no message and no heartbeat for {SILENCE_S} s")
            if message.reply:
                self._open -= 1
                return self._accept(message)
            self._status(message)

    async def _request(self) -> None:
        body = {
            "batch": BATCH,
            "max_bytes": BATCH_BYTES,
            "expires": int(EXPIRES_S * 1e9),
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
        }
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        await self._connection.ask(self._inbox, subject, json.dumps(body).encode())
        self._open = BATCH

    def _accept(self, message: Msg) -> Raw:
        sequence = message.metadata.sequence
        if sequence.consumer != self._delivered + 1:
            raise _Restart(f"delivery {sequence.consumer} after {self._delivered}")
        self._delivered += 1
        return Raw(sequence.stream, message.subject, message.headers or {}, message.data)

    def _status(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status", "")
        if status == _HEARTBEAT:
            # Sent behind everything delivered so far: what it counts and we did not see was dropped on the way.
            if int(headers.get("Nats-Last-Consumer", 0)) > self._delivered:
                raise _Restart(f"{self._delivered} of {headers['Nats-Last-Consumer']} deliveries arrived")
            return
        if batch_completed(message):
            return
        description = headers.get("Description", "")
        # 408: the request expired; 409 with these words: its bytes are used up. Anything else is about the consumer.
        if status == "408" or (status == "409" and "maxbytes" in description.lower().replace(" ", "")):
            self._open = 0
            return
        raise _Restart(f"status {status} {description}")

    async def close(self) -> None:
        await self._inbox.close()
        if self._connection.connected:
            await self._connection.tell(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._consumer}")


def _refuse(stream: str, subject: str, error: dict[str, Any]) -> None:
    code, text = error.get("err_code"), error.get("description", "")
    if code == _STREAM_MISSING:
        raise ConfigError("no such stream", field="stream", value=stream, remedy="declare the topology first")
    if error.get("code", 500) >= 500:
        raise RequestTimeout(text, field="stream", value=stream)
    raise BrokerUnavailable(f"cannot be followed: {text}", field="stream", value=f"{stream} {subject}")
