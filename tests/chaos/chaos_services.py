"""Services started and stopped one by one, with nobody who keeps them alive: for tests of order, of absence and of the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loop_cases import tiny

from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer
from driftline.messages.subjects import Subjects, topology
from driftline.messages.types import EvalResult, Outcome, OutcomeEvent, RunFinished
from driftline.policy_store.blobs import JetStreamBlobs
from driftline.policy_store.reader import PolicyReader
from driftline.services.audit.read import audit
from driftline.services.audit.report import Report
from driftline.services.config import Config
from driftline.services.runtime import finished
from driftline.services.supervisor.children import Child
from driftline.services.supervisor.folder import RunFolder
from driftline.services.supervisor.local import service_specs

__all__ = ["ALL", "TWIN", "WAIT_S", "Broker", "Services", "broker", "callers", "complete", "outcomes_of", "services", "small"]

ALL = ("dispatcher", "rollout-0", "grader", "learner", "evaluator", "policy-store")
TWIN = "learner-twin"
WAIT_S = 240.0
SERVES_S = 120.0


def small(run: str, folder: Path, /, **sections: dict[str, Any]) -> Config:
    """A run of a few quick steps, of which nearly every group can be trained on."""
    document: dict[str, dict[str, Any]] = {
        "run": {"steps": 3, "dir": str(folder), "groups_per_step": 2, "group_size": 4, "max_lag": 1},
        "tasks": {"family": "spell_backward", "params": {"min_word_len": 5, "max_word_len": 8}, "heldout": 8},
        "sampling": {"max_tokens": 12},
        "evaluator": {"every": 0, "samples": 1},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    return tiny(run, **document)


@dataclass
class Services:
    config: Config
    folder: RunFolder
    url: str

    def __post_init__(self) -> None:
        rollout = self.config.rollout.model_copy(update={"engines": 4})
        known = service_specs(self.config.model_copy(update={"rollout": rollout}), self.folder, self.url)
        self._specs = {spec.name: spec for spec in known}
        self._specs[TWIN] = replace(self._specs["learner"], name=TWIN)
        self._children: dict[str, Child] = {}

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._children)

    def log(self, name: str) -> str:
        file = self.folder.logs / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    async def start(self, *names: str) -> None:
        for name in names:
            self._children[name] = await Child.start(self._specs[name], self.folder.logs / f"{name}.log")

    async def serving(self, name: str) -> int:
        """Its process id, once it has said that it serves."""
        child = self._children[name]
        async with asyncio.timeout(SERVES_S):
            while not any('"service started"' in line and f'"pid": {child.pid},' in line for line in self.log(name).splitlines()):  # noqa: ASYNC110 - a log announces nothing
                await asyncio.sleep(0.02)
        return child.pid

    async def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code, as a shell would see it."""
        child = self._children.pop(name)
        child.terminate() if how is signal.SIGTERM else child.signal(how)
        async with asyncio.timeout(WAIT_S):
            return await child.wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self._children[name].pid, number)

    async def exit_code(self, name: str) -> int:
        """Of one that ends by itself."""
        async with asyncio.timeout(WAIT_S):
            code = await self._children[name].wait()
        del self._children[name]
        return code

    async def ended(self) -> dict[str, int]:
        """Exit codes of all that were running, which end by themselves."""
        return {name: await self.exit_code(name) for name in self.running}

    async def kill(self) -> None:
        for name in self.running:
            await self.stop(name, signal.SIGKILL)


@asynccontextmanager
async def services(config: Config, url: str) -> AsyncIterator[Services]:
    running = Services(config, RunFolder.create(config), url)
    try:
        yield running
    finally:
        await running.kill()


@dataclass
class Broker:
    """A run's broker as a test sees it."""

    bus: NatsBus
    run: str

    async def reach(self, version: int) -> int:
        """The version there is, once it is at least this."""
        await self.bus.declare(topology(self.run))  # the test may be here before the first service
        reader = PolicyReader(self.bus, JetStreamBlobs(self.bus, self.run), self.run)
        async with asyncio.timeout(WAIT_S), aclosing(reader.watch()) as heads:  # type: ignore[type-var]
            async for head in heads:
                if head.version >= version:
                    return head.version
        raise AssertionError("the head is no longer followed")

    async def end(self) -> RunFinished:
        async with asyncio.timeout(WAIT_S):
            return await finished(self.bus, self.run)

    async def audited(self) -> Report:
        return await audit(self.bus, self.run)

    async def outcome(self, kind: Outcome) -> OutcomeEvent:
        """The first group that ended so."""
        subjects = Subjects(self.run)
        events = self.bus.follow(subjects.stream("LEDGER"), f"{subjects.root}.ledger.outcome.>")
        async with asyncio.timeout(WAIT_S), aclosing(events) as found:  # type: ignore[type-var]
            async for stored in found:
                if isinstance(stored.message, OutcomeEvent) and stored.message.outcome is kind:
                    return stored.message
        raise AssertionError("the ledger is no longer followed")

    async def measured(self) -> set[int]:
        """Versions that were evaluated."""
        subjects = Subjects(self.run)
        found = set()
        for raw in await self.bus.read(subjects.stream("EVAL"), f"{subjects.root}.eval.>"):
            stored = await self.bus.last(subjects.stream("EVAL"), raw.subject)
            if stored is not None and isinstance(stored.message, EvalResult):
                found.add(stored.message.version)
        return found


@asynccontextmanager
async def broker(server: NatsServer, run: str) -> AsyncIterator[Broker]:
    async with await NatsBus.connect(server.url, name="test") as bus:
        yield Broker(bus, run)


def complete(report: Report) -> bool:
    return not report.findings and report.open == 0 and report.finished is not None


def outcomes_of(report: Report, *kinds: Outcome) -> int:
    return sum(report.outcomes.get(kind.value, 0) for kind in kinds)


async def callers(port: int, wanted: Iterable[str]) -> None:
    """Until clients of these names have knocked at `port`, where there is something that is not a broker yet: it hangs up on each."""
    missing, everyone = set(wanted), asyncio.Event()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "X", "version": "2.10.0", "proto": 1, "headers": True, "max_payload": 1048576}
        writer.write(f"INFO {json.dumps(info)}\r\n".encode())
        try:
            said = await reader.readline()
            missing.discard(str(json.loads(said.removeprefix(b"CONNECT ")).get("name")))
        except (OSError, ValueError):
            pass
        finally:
            writer.close()
        if not missing:
            everyone.set()

    server = await asyncio.start_server(hang_up, "127.0.0.1", port)
    async with asyncio.timeout(WAIT_S), server:
        await everyone.wait()
