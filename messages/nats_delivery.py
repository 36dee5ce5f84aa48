"""One message delivered by JetStream, until exactly one of ack, nak or dead_letter ends it. Each waits for the broker's word."""

from __future__ import annotations

from typing import Protocol

from nats.aio.msg import Msg

from driftline.messages.dead_letters import Raw
from driftline.messages.errors import DriftlineError
from driftline.messages.subjects import ConsumerSpec
from driftline.messages.types import Message

__all__ = ["NatsDelivery"]


class _Broker(Protocol):
    """What a delivery needs of its bus."""

    async def confirm(self, reply: str, payload: bytes) -> None: ...
    async def settled(self, stream: str, subject: str, data: bytes) -> None: ...
    async def bury(self, stream: str, raw: Raw, reason: str, deliveries: int) -> None: ...


class NatsDelivery:
    message: Message

    def __init__(self, broker: _Broker, spec: ConsumerSpec, received: Msg) -> None:
        self._broker = broker
        self._spec = spec
        self._received = received
        self._ended = False

    @property
    def subject(self) -> str:
        return self._received.subject

    @property
    def deliveries(self) -> int:
        return self._received.metadata.num_delivered

    @property
    def ack_wait_s(self) -> float:
        return self._spec.ack_wait_s

    @property
    def seq(self) -> int:
        return self._received.metadata.sequence.stream

    async def ack(self) -> None:
        self._open()
        await self._broker.confirm(self._received.reply, b"+ACK")
        self._ended = True
        await self._broker.settled(self._spec.stream, self.subject, self._received.data)

    async def nak(self, delay_s: float = 0.0) -> None:
        self._open()
        payload = b'-NAK {"delay": %d}' % int(delay_s * 1e9) if delay_s > 0 else b"-NAK"
        await self._broker.confirm(self._received.reply, payload)
        self._ended = True

    async def renew(self) -> None:
        self._open()
        await self._broker.confirm(self._received.reply, b"+WPI")

    async def dead_letter(self, reason: str) -> None:
        self._open()
        received = self._received
        raw = Raw(self.seq, received.subject, received.headers or {}, received.data)
        await self._broker.bury(self._spec.stream, raw, reason, self.deliveries)
        await self._broker.confirm(received.reply, b"+TERM")
        self._ended = True

    def _open(self) -> None:
        if self._ended:
            raise DriftlineError("already acknowledged, given back or dead-lettered", field="delivery", value=self.subject)
