"""The Bus: everything a service may do to the broker, as one Protocol with two implementations.

`NatsBus` speaks JetStream; `MemoryBus` has the same semantics in one process (redelivery after `ack_wait`, de-duplication by
content id, discard-new when full, compare-and-set), so a unit test and a deployment run the same service code.

Guarantees: a publish that returned is durable; the same content id published twice is stored once; a delivery that is neither
acknowledged nor renewed is delivered again; after `max_deliver` tries it is dead-lettered with its reason.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from driftline.messages.dead_letters import Archive
from driftline.messages.subjects import ConsumerSpec, Topology
from driftline.messages.types import Message

__all__ = ["Bus", "Delivery", "Depth", "PubAck", "Stored"]


class PubAck(NamedTuple):
    seq: int
    duplicate: bool


class Stored(NamedTuple):
    """A message as the stream holds it: its stream sequence, subject and decoded content."""

    seq: int
    subject: str
    message: Message


class Depth(NamedTuple):
    """A consumer's backlog: not yet delivered, delivered but not acknowledged, and redelivered so far."""

    pending: int
    ack_pending: int
    redelivered: int


@runtime_checkable
class Delivery(Protocol):
    """One delivered message. Exactly one of ack, nak or dead_letter ends it; `renew` extends the lease by `ack_wait`."""

    @property
    def message(self) -> Message: ...
    @property
    def subject(self) -> str: ...
    @property
    def deliveries(self) -> int:
        """How often this message was delivered, this time included: 1 for the first."""
        ...

    @property
    def ack_wait_s(self) -> float:
        """The lease: without `ack` or `renew` within it, the message is delivered again, perhaps to someone else."""
        ...

    async def ack(self) -> None:
        """Acknowledge and wait for the broker to confirm, so that a lost ack is an error and not a duplicate."""

    async def nak(self, delay_s: float = 0.0) -> None: ...
    async def renew(self) -> None: ...
    async def dead_letter(self, reason: str) -> None:
        """Store the message in the dead-letter stream with the reason, then terminate it."""


@runtime_checkable
class Bus(Archive, Protocol):
    async def declare(self, topology: Topology) -> None:
        """Create or update every stream and durable consumer; idempotent."""

    async def missing(self, topology: Topology) -> tuple[str, ...]:
        """The streams of `topology` that are not there; for who may use but not create them."""
        ...

    async def publish(self, subject: str, message: Message, *, id: str, expect_last: int | None = None) -> PubAck:
        """Store `message` durably. `id` is its content identity (`Nats-Msg-Id`), so a retry is safe.

        `expect_last` is the sequence the last message on this subject must have (0: none yet).
        Raises HeadConflict when it does not, BrokerFull when the stream refuses, BrokerUnavailable on no answer,
        PayloadTooLarge beyond the stream's message limit (large arrays are moved to the blob stream before that).
        """
        ...

    async def publish_bytes(self, subject: str, data: bytes, *, id: str) -> PubAck:
        """Store raw bytes (a blob chunk); same guarantees and errors as `publish`."""
        ...

    async def get_bytes(self, stream: str, subject: str) -> bytes | None:
        """The last raw message on `subject`, or None."""
        ...

    async def pull(self, consumer: ConsumerSpec, *, batch: int, timeout_s: float) -> list[Delivery]:
        """Up to `batch` deliveries; an empty list after `timeout_s`. Malformed messages are dead-lettered, not returned."""
        ...

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The newest message on `subject`, or None."""
        ...

    def follow(self, stream: str, subject: str, *, start: int = 1) -> AsyncIterator[Stored]:
        """History from stream sequence `start`, then live, in order, across reconnects; ends only when cancelled."""
        ...

    async def depth(self, consumer: ConsumerSpec) -> Depth: ...
    async def subjects(self, stream: str, filter: str) -> Mapping[str, int]:
        """Every subject under `filter` that has messages, and how many. What changes meanwhile may be missed: no snapshot."""
        ...

    async def purge(self, stream: str, subject: str) -> None: ...
    async def healthy(self, timeout_s: float = 2.0) -> bool: ...
    async def close(self) -> None:
        """Flush acknowledgements, then drain and disconnect."""
