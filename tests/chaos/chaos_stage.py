"""One real run under a schedule of faults, to its end, and what its books say then.

Every service is the process it is in production (`python -m driftline NAME`), kept alive by the supervisor's own Keeper; the broker is a
nats-server of `driftline.messages.server`; between them is a slow network. Guarantees: faults come in the order of the schedule, each after the
version it names; a run in which nothing moves for `STALL_S` is ended as stalled, with where it stood; when `perform` has returned or raised, no
process is left. `Result.problems` is empty when the run kept every promise.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos_books import Books, follow_policy, read_ledger
from chaos_echo import Echo
from chaos_proxy import DelayingProxy
from chaos_replay import replay_own_record
from chaos_schedule import KINDS, Act, Fault, Plane, kind_of
from loop_cases import tiny

from driftline.messages.dead_letters import dead_letters
from driftline.messages.errors import DriftlineError
from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer
from driftline.services.audit.read import audit
from driftline.services.audit.report import Bounds
from driftline.services.config import Config
from driftline.services.runtime import finished, run_topology
from driftline.services.supervisor.children import guard
from driftline.services.supervisor.folder import RunFolder
from driftline.services.supervisor.keeper import Keeper
from driftline.services.supervisor.local import service_specs
from driftline.services.supervisor.restarts import RestartPolicy

__all__ = ["Result", "chaos_config", "perform"]

STALL_S = 240.0  # twice a group's deadline and a start of everything
SERVES_S = 90.0
END_S = 120.0
FULL_REPLAY_STEPS = 16  # a shorter run is replayed by the trainer alone, to be quick
# Processes are found by it whoever their parent has become.
MARK = "DRIFTLINE_CHAOS"
PATIENT = RestartPolicy(budget=100_000, window_s=3600.0, first_s=0.1, longest_s=0.5)


class Stalled(DriftlineError):
    """Nothing moved for too long."""


@dataclass
class Result:
    """One seed's record in the summary."""

    seed: int
    steps: int
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    broker_stops: int = 0
    broker_kills: int = 0
    pauses: int = 0
    cut_offs: int = 0
    duplicates: dict[str, int] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    restarts: dict[str, int] = field(default_factory=dict)
    resumed: dict[str, int] = field(default_factory=dict)  # how the learner came back, by its own words
    versions: int = 0
    groups: int = 0
    ids: int = 0
    lost: int = 0
    doubled: int = 0
    dead_letters: dict[str, int] = field(default_factory=dict)  # by where they were and why
    outcomes: dict[str, int] = field(default_factory=dict)
    digest: str = ""
    audit_findings: int = 0
    replay_equal: bool | None = None
    left_over: int = 0
    wall_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        return asdict(self)


def chaos_config(run: str, folder: Path, /, *, steps: int, seed: int = 0, **sections: dict[str, Any]) -> Config:
    """Small steps that come quickly: words of lengths at which the shipped policy is sometimes right, and sometimes not."""
    document: dict[str, dict[str, Any]] = {
        "run": {"steps": steps, "seed": seed, "dir": str(folder), "groups_per_step": 3, "group_size": 4, "max_lag": 2, "group_deadline_s": 120.0},
        "tasks": {"family": "spell_backward", "params": {"min_word_len": 5, "max_word_len": 8}, "heldout": 8},
        "sampling": {"max_tokens": 12},
        "rollout": {"engines": 2},
        "learner": {"checkpoint_every": 2, "max_recompute": 4},
        "evaluator": {"every": 6, "samples": 1},
        "policy": {"full_every": 4},
        "policy_store": {"keep_versions": 10},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    return tiny(run, **document)


class _Stage:
    def __init__(self, config: Config, folder: RunFolder, server: NatsServer, proxy: DelayingProxy, result: Result) -> None:
        self.config, self.folder, self.server, self.proxy, self.result = config, folder, server, proxy, result
        self.books = Books()
        mark = {MARK: str(folder.path)}
        specs = [replace(spec, environment={**spec.environment, **mark}) for spec in service_specs(config, folder, proxy.url)]
        self.keeper = Keeper(specs, folder.logs, PATIENT)
        self._guard: asyncio.subprocess.Process | None = None
        self._moved = asyncio.Event()
        self._ended = False

    def on_head(self, version: int) -> None:
        self._moved.set()

    async def reach(self, version: int) -> bool:
        """Whether the run got there before its end."""
        while self.books.head < version and not self._ended:
            self._moved.clear()
            await self._moved.wait()
        return self.books.head >= version

    def end(self) -> None:
        self._ended = True
        self._moved.set()

    async def play(self, schedule: Sequence[Fault], bus: NatsBus, echo: Echo) -> None:
        """Each fault has its own moment. Those on one target follow each other: a process is not killed twice at once."""
        turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

        async def one(fault: Fault) -> None:
            reached = await self.reach(fault.version)
            await asyncio.sleep(fault.after_s)
            async with turns[fault.target]:
                if reached and (not self._ended or fault.version == self.config.run.steps):
                    await self.commit(fault, bus, echo)
                else:
                    self.result.missed.append(f"{fault.act} {fault.target} after {fault.version}")

        async with asyncio.TaskGroup() as tasks:
            for fault in schedule:
                tasks.create_task(one(fault), name=f"{fault.act} {fault.target}")

    async def commit(self, fault: Fault, bus: NatsBus, echo: Echo) -> None:
        self.note(fault)
        match fault.act:
            case Act.KILL:
                await self.kill(fault.target)
            case Act.KILL_STARTING:
                await self.kill(fault.target)
                await self.kill_starting(fault.target)
            case Act.PAUSE:
                await self.pause(fault)
            case Act.CUT_OFF:
                await self.cut_off(fault)
            case Act.DUPLICATE:
                await echo.again(bus, Plane(fault.target), fault.count)
            case Act.STOP_BROKER | Act.KILL_BROKER:
                await self.restart_broker(fault)

    def note(self, fault: Fault) -> None:
        line = {"at": round(time.time(), 3), "head": self.books.head, **asdict(fault)}
        with (self.folder.path / "faults.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")

    async def serving(self, name: str) -> int:
        """The process id of a service that has started serving. One that is paused or cut off serves as well as it can."""
        log = self.folder.logs / f"{name}.log"
        async with asyncio.timeout(SERVES_S):
            while True:
                pid = self.keeper.alive.get(name)
                if pid is not None and log.exists() and _has_started(log.read_text(errors="replace"), pid):
                    return pid
                await asyncio.sleep(0.05)

    async def kill(self, name: str) -> None:
        try:
            pid = await self.serving(name)
        except TimeoutError:
            self.result.problems.append(f"{name} did not serve within {SERVES_S:g} s, killed all the same")
            pid = self.keeper.alive.get(name, 0)
        self._kill(name, pid)

    async def kill_starting(self, name: str) -> None:
        """The one that follows, as soon as it exists."""
        dead = self.keeper.alive.get(name)
        async with asyncio.timeout(SERVES_S):
            while (pid := self.keeper.alive.get(name)) is None or pid == dead:  # noqa: ASYNC110 - nothing announces a child
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        self._kill(name, pid)

    def _kill(self, name: str, pid: int) -> None:
        if self.keeper.alive.get(name) == pid and _signal(pid, signal.SIGKILL):
            self.result.kills[kind_of(name)] += 1
        else:
            self.result.missed.append(f"kill {name}: it died by itself")

    async def pause(self, fault: Fault) -> None:
        """It is dead to the others and then it is not: what it held has been given to someone else meanwhile."""
        pid = await self.serving(fault.target)
        if not _signal(pid, signal.SIGSTOP):
            self.result.missed.append(f"pause {fault.target}: it died by itself")
            return
        self.result.pauses += 1
        await asyncio.sleep(fault.seconds)
        if self.keeper.alive.get(fault.target) == pid:
            _signal(pid, signal.SIGCONT)

    async def cut_off(self, fault: Fault) -> None:
        self.result.cut_offs += 1
        async with self.proxy.cut_off(fault.target):
            await asyncio.sleep(fault.seconds)

    async def restart_broker(self, fault: Fault) -> None:
        await self.unguard_broker()  # before anything else may get the dead server's process id
        if fault.act is Act.STOP_BROKER:
            await self.server.stop()
            self.result.broker_stops += 1
        else:
            await self.server.kill()
            self.result.broker_kills += 1
        await asyncio.sleep(fault.seconds)
        await self.server.start()
        await self.guard_broker()

    async def guard_broker(self) -> None:
        """A harness that is killed itself leaves no broker behind; services end with their parent anyway."""
        await self.unguard_broker()
        if self.server.pid is not None:
            self._guard = await guard(self.server.pid)

    async def unguard_broker(self) -> None:
        if self._guard is not None:
            self._guard.kill()
            await self._guard.wait()
            self._guard = None

    async def watch_for_stalls(self) -> None:
        """Heads are what a run is for; while none comes something is wrong or slow."""
        head, since = -1, time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            if self.books.head != head:
                head, since = self.books.head, time.monotonic()
            elif time.monotonic() - since > STALL_S:
                raise Stalled(f"no version after {head} for {STALL_S:g} s", field="run", value=self.config.run.name,
                              remedy=f"look at {self.folder.logs}")

    async def closed(self, bus: NatsBus) -> None:
        """Until every admitted group has its outcome: what is killed after the end must still be finished by the next."""
        async with asyncio.timeout(END_S):
            while True:
                await read_ledger(bus, self.config.run.name, self.books)
                if not self.books.lost():
                    return
                await asyncio.sleep(0.5)


async def perform(
    seed: int, steps: int, schedule: Sequence[Fault], folder: Path, *, kills: int, **sections: dict[str, Any]
) -> Result:
    """Run it; each kind must have been killed `kills` times. `folder` keeps the run's folder, logs and store; the caller removes it when it likes the result."""
    began = time.monotonic()
    result = Result(seed, steps)
    config = chaos_config(f"chaos{seed}", folder, steps=steps, seed=seed, **sections)
    run_folder = RunFolder.create(config)
    server = NatsServer(folder / "store")
    try:
        async with server, DelayingProxy(server.host, server.port, seed) as proxy:
            stage = _Stage(config, run_folder, server, proxy, result)
            async with await NatsBus.connect(server.url, name="chaos") as bus, Echo(server.url, config.run.name, seed) as echo:
                await bus.declare(run_topology(config))
                await stage.guard_broker()
                try:
                    await _act(stage, schedule, bus, echo)
                    await _settle(stage, bus, result)
                finally:
                    await stage.unguard_broker()
            result.duplicates = {plane.value: count for plane, count in echo.published.items()}
            result.restarts = dict(sorted(stage.keeper.restarts.items()))
    except* Exception as group:
        result.problems += [f"{type(error).__name__}: {error}" for error in _leaves(group)]
    result.resumed = resumes(run_folder.logs / "learner.log")
    result.problems += [f"{count} times the learner came back {how}" for how, count in result.resumed.items() if how in ("inexact", "fresh")]
    result.left_over = len(await _gone(run_folder.path))
    if result.left_over:
        result.problems.append(f"{result.left_over} processes were left behind")
    result.problems += [f"{kind} was killed {count} times, not {kills}; missed: {result.missed}" for kind, count in result.kills.items()
                        if count < kills]
    result.wall_s = round(time.monotonic() - began, 1)
    return result


async def _act(stage: _Stage, schedule: Sequence[Fault], bus: NatsBus, echo: Echo) -> None:
    run = stage.config.run.name
    async with asyncio.TaskGroup() as tasks:
        beside = [
            tasks.create_task(follow_policy(bus, run, stage.books, stage.on_head), name="policy"),
            tasks.create_task(stage.watch_for_stalls(), name="stalls"),
        ]
        keeping = tasks.create_task(stage.keeper.run(), name="keeper")
        playing = tasks.create_task(stage.play(schedule, bus, echo), name="faults")
        await finished(bus, run)
        stage.end()
        await playing
        await stage.closed(bus)
        stage.keeper.ending()
        for task in beside[1:]:
            task.cancel()
        _, late = await asyncio.wait({keeping}, timeout=END_S)
        if late:
            stage.result.problems.append(f"did not end within {END_S:g} s of the end of the run: {sorted(stage.keeper.alive)}")
            stage.keeper.kill()
            await keeping
        beside[0].cancel()


async def _settle(stage: _Stage, bus: NatsBus, result: Result) -> None:
    """What the broker holds when everyone has gone."""
    run, books = stage.config.run.name, stage.books
    await read_ledger(bus, run, books)
    result.problems += books.faults(stage.config.run.steps)
    result.versions, result.groups, result.ids = books.head + 1, len(books.admitted), len(books.ids)
    result.lost, result.doubled, result.outcomes = len(books.lost()), len(books.doubled()), books.outcomes()
    result.digest = books.heads[books.head].digest if books.heads else ""
    result.dead_letters = dict(Counter(f"{letter.kind}: {letter.reason[:120]}" for letter in await dead_letters(bus, run)))
    report = await audit(bus, run, bounds=Bounds(stage.config.run.max_lag, stage.config.run.groups_per_step))
    result.audit_findings = len(report.findings)
    result.problems += [f"audit: {finding.kind} {finding.id}: {finding.sentence}" for finding in report.findings]
    played = await replay_own_record(
        stage.server.url, run, stage.folder.config, stage.folder.path, learner_only=stage.config.run.steps < FULL_REPLAY_STEPS
    )
    result.replay_equal = played.equal and played.versions == result.versions
    result.problems += played.problems


def resumes(log: Path) -> dict[str, int]:
    """How often the learner came back how."""
    counts: Counter[str] = Counter()
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.get("event") == "resumed":
                counts[str(entry.get("optimizer"))] += 1
    return dict(sorted(counts.items()))


def _has_started(log: str, pid: int) -> bool:
    return any('"service started"' in line and f'"pid": {pid},' in line for line in log.splitlines())


def _signal(pid: int, number: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


async def _gone(run_folder: Path) -> list[int]:
    """The processes of the run that are still there after a moment: the kernel takes a killed one away by itself."""
    for _ in range(50):
        left = processes_of(run_folder)
        if not left:
            return []
        await asyncio.sleep(0.1)
    for pid in left:
        _signal(pid, signal.SIGKILL)
    return left


def processes_of(run_folder: Path) -> list[int]:
    found = []
    wanted = f"{MARK}={run_folder}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
