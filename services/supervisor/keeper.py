"""The keeper: keeps every service of a run alive until the run ends, or says which one could not be kept and why.

Guarantees: a service that dies is started again, later each time; one that dies more often than its budget, or whose
configuration is wrong, fails the run with the tail of its log; when `stop` returned, no child is left.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import structlog

from driftline.messages.errors import DriftlineError
from driftline.services.runtime import Exit
from driftline.services.supervisor.children import Child, ServiceSpec, log_tail
from driftline.services.supervisor.restarts import GiveUp, RestartPolicy

__all__ = ["Keeper", "ServiceFailed"]

log = structlog.get_logger("supervisor")

# A service that saw the end of the run leaves at once; the keeper may hear of the end a little later.
END_NOTICE_S = 5.0


class ServiceFailed(DriftlineError):
    """A service cannot be kept alive, so the run cannot go on."""


class Keeper:
    def __init__(
        self, specs: Sequence[ServiceSpec], logs: Path, policy: RestartPolicy | None = None, *,
        on_restart: Callable[[Counter[str]], Awaitable[None]] | None = None,
    ) -> None:
        self.restarts: Counter[str] = Counter()
        self._specs, self._logs, self._policy = tuple(specs), logs, policy or RestartPolicy()
        self._on_restart = on_restart
        self._children: dict[str, Child] = {}
        self._ending = asyncio.Event()
        self._stopping = asyncio.Event()

    @property
    def alive(self) -> dict[str, int]:
        """Names and process ids."""
        return {name: child.pid for name, child in self._children.items()}

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    async def run(self) -> None:
        """Returns when every service ended after `ending`; raises ServiceFailed when one could not be kept."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for spec in self._specs:
                    tasks.create_task(self._keep(spec), name=spec.name)
        except* ServiceFailed as failures:
            raise failures.exceptions[0] from None
        finally:
            self._kill()

    def ending(self) -> None:
        """The run is over: from now on a service that ends with 0 has ended. One that fails is still started again: it may have
        been killed with its last words unsaid."""
        self._ending.set()

    def terminate(self) -> None:
        """Ask every service to drain; none is started again."""
        self._stop()
        for child in self._children.values():
            child.terminate()

    def _kill(self) -> None:
        for child in self._children.values():
            child.signal(signal.SIGKILL)

    def kill(self) -> None:
        self._stop()
        self._kill()

    def _stop(self) -> None:
        self._ending.set()
        self._stopping.set()

    async def _keep(self, spec: ServiceSpec) -> None:
        deaths: list[float] = []
        while not self._stopping.is_set():
            code = await self._live(spec)
            if self._stopping.is_set() or (code == Exit.OK and await _set_within(self._ending, END_NOTICE_S)):
                return
            deaths.append(time.monotonic())
            decision = self._policy.after(deaths)
            if code == Exit.CONFIG:
                raise self._failed(spec, "its configuration is wrong", code)
            if isinstance(decision, GiveUp):
                raise self._failed(spec, f"died {decision.deaths} times within {decision.window_s:g} s", code)
            log.warning("service died, starting it again", name=spec.name, exit_code=code, after_s=decision.after_s)
            if await _set_within(self._stopping, decision.after_s):
                return
            self.restarts[spec.name] += 1
            if self._on_restart is not None:
                await self._on_restart(self.restarts)

    async def _live(self, spec: ServiceSpec) -> int:
        """One life of a service. Cancelled, it takes the child with it."""
        child = await Child.start(spec, self.log(spec.name))
        self._children[spec.name] = child
        if self._stopping.is_set():  # asked to stop while it was being started: nothing of it is worth draining
            child.signal(signal.SIGKILL)
        try:
            return await child.wait()
        except asyncio.CancelledError:
            child.signal(signal.SIGKILL)
            await child.wait()
            raise
        finally:
            del self._children[spec.name]

    def _failed(self, spec: ServiceSpec, problem: str, code: int) -> ServiceFailed:
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        tail = log_tail(self.log(spec.name))
        return ServiceFailed(f"{problem} ({how}); {self.log(spec.name)} ends:\n{tail}", field="service", value=spec.name)


async def _set_within(event: asyncio.Event, wait_s: float) -> bool:
    try:
        async with asyncio.timeout(wait_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
