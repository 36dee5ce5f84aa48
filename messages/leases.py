"""Leases: a delivery stays ours while we work on it, and a lease that is lost stops the work.

`lease(delivery)` renews every third of `ack_wait` while its body runs. If no renewal is confirmed for a whole `ack_wait`, someone
else may have the message: the body is cancelled and LeaseLost is raised. `Leases` keeps many at once with one task, for
a service that collects deliveries before it can acknowledge any.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

import structlog

from driftline.messages.bus import Delivery
from driftline.messages.errors import BrokerDenied, BrokerUnavailable, LeaseLost

__all__ = ["Leases", "lease"]

log = structlog.get_logger(__name__)

_PARALLEL: Final = 64


class lease:
    """`async with lease(delivery): ...` renews it until the body ends. The body still acks, naks or dead-letters."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._lost: LeaseLost | None = None
        self._body: asyncio.Task[object] | None = None
        self._renewer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Delivery:
        self._body = asyncio.current_task()
        self._renewer = asyncio.create_task(self._renew(), name=f"lease {self._delivery.subject}")
        return self._delivery

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._renewer is not None
        assert self._body is not None
        self._renewer.cancel()
        await asyncio.wait({self._renewer})
        if self._lost is not None and kind is asyncio.CancelledError and self._body.uncancel() == 0:
            raise self._lost from error
        if not self._renewer.cancelled() and (failure := self._renewer.exception()) is not None and error is None:
            raise failure

    async def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        wait = self._delivery.ack_wait_s
        until = loop.time() + wait
        while True:
            await asyncio.sleep(wait / 3)
            asked = loop.time()
            try:
                async with asyncio.timeout_at(until):
                    await self._delivery.renew()
                until = asked + wait
            except (BrokerUnavailable, BrokerDenied, TimeoutError) as error:
                if loop.time() >= until or isinstance(error, BrokerDenied):
                    assert self._body is not None
                    self._lost = LeaseLost(
                        f"the lease was lost: not renewed for {wait:g} s", field="delivery", value=self._delivery.subject
                    )
                    self._lost.__cause__ = error
                    self._body.cancel()
                    return


class Leases:
    """Many leases, kept by one task: `async with Leases() as held: held.add(delivery); ...; held.discard(delivery)`.

    A delivery whose lease was lost leaves the set by itself and is in `lost` until `take_lost`: it will be delivered again.
    """

    def __init__(self) -> None:
        self._held: dict[Delivery, _Held] = {}
        self.lost: list[Delivery] = []
        self._changed = asyncio.Event()
        self._losing = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, delivery: Delivery) -> bool:
        return delivery in self._held

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._keep(), name="leases")
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        await asyncio.wait({self._keeper})
        if not self._keeper.cancelled() and (failure := self._keeper.exception()) is not None and error[0] is None:
            raise failure

    def add(self, delivery: Delivery) -> None:
        """Keep renewing `delivery`, which was just received."""
        now = asyncio.get_running_loop().time()
        self._held[delivery] = _Held(now + delivery.ack_wait_s / 3, now + delivery.ack_wait_s)
        self._changed.set()

    def discard(self, delivery: Delivery) -> None:
        """Stop renewing: it is about to be acknowledged, given back or dead-lettered."""
        self._held.pop(delivery, None)

    async def take_lost(self) -> list[Delivery]:
        """Wait for a loss, then return and forget what was lost."""
        await self._losing.wait()
        self._losing.clear()
        taken, self.lost = self.lost, []
        return taken

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            due = min((held.due for held in self._held.values()), default=loop.time() + 3600.0)
            try:
                async with asyncio.timeout_at(due):
                    await self._changed.wait()
            except TimeoutError:
                await self._renew_due(loop.time())

    async def _renew_due(self, now: float) -> None:
        due = [delivery for delivery, held in self._held.items() if held.due <= now]
        for first in range(0, len(due), _PARALLEL):
            async with asyncio.TaskGroup() as group:
                for delivery in due[first : first + _PARALLEL]:
                    group.create_task(self._renew(delivery))

    async def _renew(self, delivery: Delivery) -> None:
        loop = asyncio.get_running_loop()
        held = self._held.get(delivery)
        if held is None:
            return
        asked = loop.time()
        try:
            async with asyncio.timeout_at(held.until):
                await delivery.renew()
            held.until = asked + delivery.ack_wait_s
        except (BrokerUnavailable, TimeoutError) as error:
            if loop.time() >= held.until and self._held.pop(delivery, None) is not None:
                log.warning("lease lost", subject=delivery.subject, error=str(error))
                self.lost.append(delivery)
                self._losing.set()
        held.due = loop.time() + delivery.ack_wait_s / 3


class _Held:
    __slots__ = ("due", "until")

    def __init__(self, due: float, until: float) -> None:
        self.due, self.until = due, until
