"""The run's broker: the one the configuration names, or an embedded server that lives as long as the run.

Guarantees: an embedded server that dies is started again on its port and store, so services only see a reconnect; it ends
with this process whatever happens to it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from driftline.messages.errors import BrokerUnavailable
from driftline.messages.server import NatsServer
from driftline.services.supervisor.children import guard
from driftline.services.supervisor.restarts import GiveUp, RestartPolicy

__all__ = ["EmbeddedBroker"]

log = structlog.get_logger("supervisor")


class EmbeddedBroker:
    """`async with EmbeddedBroker(store_dir) as broker: broker.url`; run `keep` beside the services."""

    def __init__(self, store_dir: Path, policy: RestartPolicy | None = None) -> None:
        self.server = NatsServer(store_dir)
        self.restarts = 0
        self._policy = policy or RestartPolicy()
        self._guard: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return self.server.url

    async def __aenter__(self) -> EmbeddedBroker:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop()
        await self._unguard()

    async def keep(self) -> None:
        """Restart the server when it dies, for ever or until it dies too often (BrokerUnavailable, with its log's tail)."""
        deaths: list[float] = []
        while True:
            code = await self.server.wait()
            deaths.append(time.monotonic())
            decision = self._policy.after(deaths)
            if isinstance(decision, GiveUp):
                raise self.server.failure() or BrokerUnavailable("died too often", field="nats-server", value=self.url)
            log.warning("nats-server died, starting it again", exit_code=code, after_s=decision.after_s)
            await asyncio.sleep(decision.after_s)
            self.restarts += 1  # first: services may reconnect and end the run before the start is confirmed
            await self._start()

    async def _start(self) -> None:
        await self._unguard()
        await self.server.start()
        if self.server.pid is not None:
            self._guard = await guard(self.server.pid)

    async def _unguard(self) -> None:
        """Before anything else may get the dead server's process id."""
        if self._guard is not None:
            self._guard.kill()
            await self._guard.wait()
            self._guard = None
