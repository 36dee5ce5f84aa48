"""Pulling work from a durable consumer without leaving anything behind.

A pull asks twice: what is there now, and, if nothing is, for one message within a short slice. Each request has ended on the
server before the next is sent, so no request outlives its caller and ages messages nobody reads. A cancelled caller leaves a
`reaper` that waits out the request (at most one slice) and gives back what arrives. Batches are bounded in bytes, far below the
server's limit for a slow reader. A consumer that was deleted or lost with the server is created again from its specification.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog
from nats.aio.msg import Msg

from driftline.messages.errors import BrokerUnavailable, ConfigError, DriftlineError
from driftline.messages.nats_connection import Connection, ConnectionLost, Inbox, RequestTimeout
from driftline.messages.subjects import ConsumerSpec

__all__ = ["BATCH_BYTES", "Puller", "batch_completed", "consumer_config"]

log = structlog.get_logger(__name__)

BATCH_BYTES: Final = 16 * 1024 * 1024
SLICE_S: Final = 2.0
GRACE_S: Final = 0.5
ANSWER_S: Final = 2.0
_HEARTBEAT = "100"
_GONE = ("consumer deleted", "consumer is push based", "consumer not found")


def consumer_config(spec: ConsumerSpec) -> dict[str, Any]:
    """A durable consumer as JetStream's API takes it. The server never gives up on a message (`max_deliver` -1): it would keep
    it undelivered for ever. The bus counts deliveries and moves an exhausted message to the dead letters."""
    return {
        "durable_name": spec.durable,
        "name": spec.durable,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(spec.ack_wait_s * 1e9),
        "max_deliver": -1,
        "max_ack_pending": spec.max_ack_pending,
        "max_waiting": 512,
        "filter_subject": spec.subject,
        "replay_policy": "instant",
    }


def batch_completed(message: Msg) -> bool:
    """What a server says after the last message of a request from another account. Whoever has that message has gone on: these
    words are never about the request that is waited for, and taking them for its end would lose what it still brings."""
    return (message.headers or {}).get("Description", "").lower() == "batch completed"


@dataclass(frozen=True)
class _End:
    """How a request ended: with a status line of the server, or unanswered."""

    code: str
    text: str = ""

    @property
    def unanswered(self) -> bool:
        return self.code == ""

    @property
    def consumer_lost(self) -> bool:
        return self.code in ("503", "") or any(gone in self.text.lower() for gone in _GONE)


class Puller:
    """Pulls for one bus. `ensure` creates a consumer that is missing."""

    def __init__(self, connection: Connection, ensure: Callable[[ConsumerSpec, float], Awaitable[None]]) -> None:
        self._connection = connection
        self._ensure = ensure
        self._reapers: set[asyncio.Task[None]] = set()
        self._spare: tuple[Inbox, int] | None = None  # of the last pull, and the connection's epoch: a subscription costs more than a pull

    async def pull(self, spec: ConsumerSpec, batch: int, timeout_s: float) -> list[Msg]:
        """1 to `batch` messages, or none after `timeout_s`. An outage within the timeout is waited out; one that lasts
        longer raises BrokerUnavailable."""
        if batch < 1:
            raise ConfigError("must be at least 1", field="batch", value=batch)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        trouble: BrokerUnavailable | None = None
        first = True
        while first or loop.time() < deadline:
            first = False
            left = deadline - loop.time()
            try:
                await self._connection.wait_connected(max(left, 0.05))
                messages, lost = await self._ask(spec, batch, left)
                trouble = None
                if messages:
                    return messages
                if lost:
                    await self._ensure(spec, max(deadline - loop.time(), ANSWER_S))
            except (ConnectionLost, RequestTimeout) as error:
                trouble = error
                self._connection.check()
                # Not a poll: the pause keeps a broker that answers "not yet" from being asked in a tight loop.
                await asyncio.sleep(max(0.0, min(0.1, deadline - loop.time())))
        if trouble is not None:
            raise trouble
        return []

    async def _ask(self, spec: ConsumerSpec, batch: int, left: float) -> tuple[list[Msg], bool]:
        inbox = await self._open()
        epoch = self._connection.epoch
        taken: list[Msg] = []
        outstanding = 0.0
        ended = False
        try:
            end = await self._request(inbox, spec, taken, batch, None)
            if taken or end.consumer_lost or left <= 0:
                ended = not end.unanswered
                return taken, end.consumer_lost
            outstanding = min(left, SLICE_S)
            end = await self._request(inbox, spec, taken, 1, outstanding)
            outstanding = 0.0
            ended = not end.unanswered
            if taken and batch > 1:
                ended = False
                ended = not (await self._request(inbox, spec, taken, batch - 1, None)).unanswered
            return taken, end.consumer_lost and not taken
        except ConnectionLost:
            if taken:  # what did arrive is ours until its ack_wait ends
                return taken, False
            raise
        except BaseException:
            self._reap(inbox, taken, outstanding)
            inbox = None  # type: ignore[assignment]
            raise
        finally:
            if inbox is not None and ended and self._spare is None:
                self._spare = inbox, epoch
            elif inbox is not None:
                await self._close(inbox)

    async def _open(self) -> Inbox:
        """An inbox nothing is outstanding on: the one of the last pull, if its requests all ended and the connection is the same."""
        if self._spare is not None:
            (inbox, epoch), self._spare = self._spare, None
            if epoch == self._connection.epoch:
                return inbox
            await self._close(inbox)
        return await self._connection.inbox()

    async def _request(self, inbox: Inbox, spec: ConsumerSpec, into: list[Msg], batch: int, wait_s: float | None) -> _End:
        """One request, read to its end: `batch` messages, a final status, or silence."""
        body: dict[str, Any] = {"batch": batch, "max_bytes": BATCH_BYTES}
        if wait_s is None:
            body["no_wait"] = True
        else:
            body["expires"] = int(wait_s * 1e9)
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{spec.stream}.{spec.durable}"
        await self._connection.ask(inbox, subject, json.dumps(body).encode())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (ANSWER_S if wait_s is None else wait_s + GRACE_S)
        got = 0
        while got < batch:
            message = await inbox.get(deadline - loop.time())
            if message is None:
                return _End("")
            status = None if message.reply else (message.headers or {}).get("Status", "")
            if status is None:  # only a delivery can be acknowledged
                into.append(message)
                got += 1
            elif status != _HEARTBEAT and not batch_completed(message):
                return _End(status, (message.headers or {}).get("Description", ""))
        return _End("200")

    async def _close(self, inbox: Inbox) -> None:
        await inbox.close()
        await self._give_back(inbox.take())

    def _reap(self, inbox: Inbox, taken: list[Msg], wait_s: float) -> None:
        task = asyncio.create_task(self._reaper(inbox, taken, wait_s), name="pull reaper")
        self._reapers.add(task)
        task.add_done_callback(self._reapers.discard)

    async def _reaper(self, inbox: Inbox, taken: list[Msg], wait_s: float) -> None:
        try:
            await self._give_back(taken)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + wait_s + GRACE_S
            while (message := await inbox.get(deadline - loop.time())) is not None:
                if message.reply:
                    await self._give_back([message])
                elif (message.headers or {}).get("Status") != _HEARTBEAT and not batch_completed(message):
                    break
        except DriftlineError as error:
            log.debug("pull given up", error=str(error))
        finally:
            await inbox.close()

    async def _give_back(self, messages: list[Msg]) -> None:
        for message in messages:
            if message.reply:
                await self._connection.tell(message.reply, b"-NAK")

    async def close(self) -> None:
        """Let the reapers finish: each takes at most a slice."""
        if self._spare is not None:
            (spare, _), self._spare = self._spare, None
            await spare.close()
        if self._reapers:
            _, late = await asyncio.wait(self._reapers, timeout=SLICE_S + 2 * GRACE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
