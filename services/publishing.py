"""Publishing with patience: a full stream is back-pressure, so the publisher waits, bounded, instead of losing or failing at once."""

from __future__ import annotations

import asyncio
import time

import structlog

from driftline.messages.bus import Bus, PubAck
from driftline.messages.errors import BrokerFull
from driftline.messages.types import Message

__all__ = ["publish_patiently"]

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
