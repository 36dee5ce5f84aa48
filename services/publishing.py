"""Talking to the broker with patience: a full stream is back-pressure and a short outage is not the end of a service.

A publisher waits, bounded, for room; a puller finds nothing while the broker is away. `runtime` ends a service whose broker stays away (`broker.lost_after_s`).
"""

from __future__ import annotations

import asyncio
import time

import structlog

from driftline.messages.bus import Bus, Delivery, PubAck
from driftline.messages.errors import BrokerFull, BrokerUnavailable
from driftline.messages.subjects import ConsumerSpec
from driftline.messages.types import Message

__all__ = ["publish_patiently", "pull_patiently"]

log = structlog.get_logger("publishing")


async def publish_patiently(
    bus: Bus, subject: str, message: Message, *, id: str, wait_s: float, expect_last: int | None = None
) -> PubAck:
    """`bus.publish`, retried while the stream is full for at most `wait_s`. Raises BrokerFull after that, and what `publish` raises."""
    pause, deadline = 0.02, time.monotonic() + wait_s
    while True:
        try:
            return await bus.publish(subject, message, id=id, expect_last=expect_last)
        except BrokerFull:
            if time.monotonic() + pause > deadline:
                raise
            log.warning("broker is full, waiting", subject=subject, pause_s=pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 2.0)


async def pull_patiently(bus: Bus, consumer: ConsumerSpec, *, batch: int, timeout_s: float) -> list[Delivery]:
    """`bus.pull`; an empty list, after `timeout_s` more, when the broker does not answer."""
    try:
        return await bus.pull(consumer, batch=batch, timeout_s=timeout_s)
    except BrokerUnavailable as error:
        log.warning("broker does not answer, waiting", consumer=consumer.durable, cause=str(error))
        await asyncio.sleep(timeout_s)
        return []
