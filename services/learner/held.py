"""The members a learner holds: delivered, leased, and acknowledged only when their group has ended.

A delivery whose lease lapsed comes again and is held then; the member itself stays in the assembler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import structlog

from driftline.messages import Leases
from driftline.messages.bus import Delivery
from driftline.messages.errors import BrokerUnavailable

__all__ = ["HeldMembers"]

log = structlog.get_logger("learner")


class HeldMembers:
    """`async with HeldMembers() as held`, with `forget_lost` in a task beside."""

    def __init__(self) -> None:
        self._leases = Leases()
        self._held: dict[str, list[Delivery]] = {}

    async def __aenter__(self) -> Self:
        await self._leases.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._leases.__aexit__(kind, error, trace)

    def add(self, group: str, delivery: Delivery) -> None:
        self._leases.add(delivery)
        self._held.setdefault(group, []).append(delivery)

    async def forget_lost(self) -> None:
        while True:
            lost = set(await self._leases.take_lost())
            for name, deliveries in list(self._held.items()):
                self._held[name] = [d for d in deliveries if d not in lost]

    async def acknowledge(self, group: str) -> None:
        """The group's outcome is in the ledger."""
        await self.settle(self._held.pop(group, []))

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        async def one(delivery: Delivery) -> None:
            self._leases.discard(delivery)
            try:
                await delivery.ack()
            except BrokerUnavailable as error:  # delivered again, and dropped then: its group has ended
                log.warning("member not acknowledged", subject=delivery.subject, cause=str(error))

        async with asyncio.TaskGroup() as tasks:
            for delivery in deliveries:
                tasks.create_task(one(delivery))
