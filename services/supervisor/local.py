"""One run on this machine, from the first process to the run folder.

Guarantees: it ends by itself when the learner says the run is finished, or with the cause when a service cannot be kept alive;
Ctrl-C drains and a second one kills; either way the folder holds the summary of what happened and no process is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

import structlog

from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerUnavailable, DriftlineError
from driftline.messages.subjects import Subjects
from driftline.policy_store.manifest import PolicyHead
from driftline.services.config import Config
from driftline.services.runtime import connect, finished, prepare, run_topology
from driftline.services.supervisor.books import close_books
from driftline.services.supervisor.broker import EmbeddedBroker
from driftline.services.supervisor.children import ServiceSpec
from driftline.services.supervisor.folder import RunFolder
from driftline.services.supervisor.keeper import Keeper
from driftline.services.supervisor.restarts import RestartPolicy
from driftline.services.telemetry import Reporter
from driftline.services.watch.collector import Collector
from driftline.services.watch.curves import draw_curves
from driftline.services.watch.picture import Picture
from driftline.services.watch.report import report
from driftline.services.watch.screen import Screen
from driftline.services.watch.summary import summarise, write_summary
from driftline.services.watch.tensorboard import TensorBoardSink

__all__ = ["Ending", "LocalRun", "service_specs"]

log = structlog.get_logger("supervisor")

# After the end of the run the evaluator still measures the last version and the policy store verifies it.
FINISH_S = 180.0
CATCH_UP_S = 10.0


class Ending(Enum):
    """How a run ended: the exit code of `driftline run`, and the sentence in its report."""

    FINISHED = 0
    FAILED = 1
    NO_BROKER = 3
    STOPPED = 130


def service_specs(config: Config, folder: RunFolder, url: str) -> tuple[ServiceSpec, ...]:
    """Every process of the run. They read the run's own copy of the configuration, with the broker that is really there."""

    def spec(service: str, threads: int, instance: str = "") -> ServiceSpec:
        argv = [sys.executable, "-m", "driftline", service, "--config", str(folder.config), "--run-dir", str(folder.path),
                "--set", f'broker.url="{url}"', "--set", 'broker.store_dir=""']
        if config.broker.store_dir and not config.learner.checkpoint_dir:
            # Streams that outlive the run folder: what a continued run needs of the learner has to be where they are.
            checkpoints = Path(config.broker.store_dir).resolve() / "learner" / config.run.name
            argv += ["--set", f'learner.checkpoint_dir="{checkpoints}"']
        if instance:
            argv += ["--instance", instance]
        environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        return ServiceSpec(f"{service}-{instance}" if instance else service, tuple(argv), environment, stores=service not in ("dispatcher", "grader"))

    return (
        spec("learner", config.learner.threads),
        *(spec("rollout", config.rollout.threads, str(engine)) for engine in range(config.rollout.engines)),
        spec("dispatcher", 1),
        spec("grader", 1),
        spec("evaluator", config.evaluator.threads),
        spec("policy-store", 1),
    )


class LocalRun:
    def __init__(self, config: Config, folder: RunFolder, screen: Screen, specs: Sequence[ServiceSpec] | None = None,
                 policy: RestartPolicy | None = None) -> None:
        self._config, self._folder, self._screen = config, folder, screen
        self._specs, self._policy = specs, policy
        self.picture = Picture(config.run.name, config.run.steps)
        self._started = time.monotonic()
        self._asked = asyncio.Event()
        self._keeper: Keeper | None = None
        self._failure = ""
        self._findings: int | None = None

    async def run(self) -> Ending:
        with self._signals():
            ending = Ending.FAILED
            try:
                ending = await self._with_broker()
            except* DriftlineError as failures:
                self._failure = "\n".join(_leaves(failures))
                if failures.split(BrokerUnavailable)[1] is None:
                    ending = Ending.NO_BROKER
                log.error("run failed", cause=self._failure)
        wall_s = time.monotonic() - self._started
        await asyncio.to_thread(self._write, ending, wall_s)
        if self._failure:
            self._screen.say(f"the run failed: {self._failure}")
        return ending

    async def _with_broker(self) -> Ending:
        if self._config.broker.url:
            return await self._with_bus(self._config, None)
        store = Path(self._config.broker.store_dir) if self._config.broker.store_dir else self._folder.broker
        async with EmbeddedBroker(store) as broker:
            section = self._config.broker.model_copy(update={"url": broker.url, "store_dir": ""})
            return await self._with_bus(self._config.model_copy(update={"broker": section}), broker)

    async def _with_bus(self, config: Config, broker: EmbeddedBroker | None) -> Ending:
        bus = await connect(config, "driftline-run")
        try:
            await prepare(bus, config, "driftline-run")
            await _reopen(bus, config)
            ending = await self._with_services(bus, config, broker)
            if ending is not Ending.STOPPED:
                self._findings = await close_books(bus, config, self._folder, self._screen.say)
            return ending
        finally:
            with contextlib.suppress(TimeoutError, DriftlineError):
                async with asyncio.timeout(5):
                    await bus.close()

    async def _with_services(self, bus: Bus, config: Config, broker: EmbeddedBroker | None) -> Ending:
        reporter = Reporter(bus, config.run.name, "supervisor")

        async def publish(restarts: Counter[str]) -> None:
            self._screen.say("started again: " + ", ".join(f"{name} ({count})" for name, count in restarts.items()))
            await reporter.report({f"restarts.{name}": count for name, count in restarts.items()})

        sink = TensorBoardSink(self._folder.tensorboard)
        collector = Collector(bus, self.picture, run_topology(config).consumers, metrics=self._folder.metrics, sink=sink,
                              on_change=lambda message: self._screen.see(message, self.picture))
        specs = self._specs if self._specs is not None else service_specs(config, self._folder, config.broker.url)
        self._keeper = keeper = Keeper(specs, self._folder.logs, self._policy, on_restart=publish)
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(collector.run()), tasks.create_task(self._screen.draw(self.picture))]
                if broker is not None:
                    beside.append(tasks.create_task(broker.keep()))
                keeping = tasks.create_task(keeper.run())
                ended, asked = tasks.create_task(finished(bus, config.run.name)), tasks.create_task(self._asked.wait())
                await asyncio.wait({ended, asked, keeping}, return_when=asyncio.FIRST_COMPLETED)
                ending = Ending.STOPPED if asked.done() else Ending.FINISHED
                await self._end(keeper, keeping, ending)
                if ending is Ending.FINISHED and ended.done() and ended.result().failed:
                    ending, self._failure = Ending.FAILED, ended.result().reason
                await collector.catch_up(CATCH_UP_S)
                for task in (*beside, ended, asked):
                    task.cancel()
        finally:
            sink.close()
            self.picture.restarts = keeper.restarts + Counter({"nats-server": broker.restarts if broker else 0})
        return ending

    async def _end(self, keeper: Keeper, keeping: asyncio.Task[None], ending: Ending) -> None:
        """Let services end by themselves, then ask them, then kill them: each with a deadline."""
        drain_s = self._config.telemetry.drain_s
        if ending is Ending.FINISHED:
            keeper.ending()
            self._screen.say("finished; services are ending")
            if await self._gone(keeping, FINISH_S):
                return
        keeper.terminate()
        if not await self._gone(keeping, drain_s + 2.0):
            log.warning("killing services that do not drain", names=sorted(keeper.alive), drain_s=drain_s)
            keeper.kill()
            await keeping

    async def _gone(self, keeping: asyncio.Task[None], wait_s: float) -> bool:
        asked = asyncio.create_task(self._asked.wait()) if not self._asked.is_set() else None
        waiting: set[asyncio.Task[object]] = {keeping, asked} if asked else {keeping}
        await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if asked:
            asked.cancel()
        return keeping.done()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if not self._asked.is_set():
            self._screen.say("draining; once more to stop at once")
            self._asked.set()
        elif self._keeper is not None:
            self._keeper.kill()

    def _write(self, ending: Ending, wall_s: float) -> None:
        summary = summarise(self.picture, self._config, wall_s, audit_findings=self._findings)
        write_summary(summary, self._folder.summary)
        end = self.picture.finished
        failed = f"Failed:\n\n```\n{self._failure}\n```\n"
        sentence = {
            Ending.FINISHED: f"Finished: {end.reason}." if end and end.reason else "Finished.",
            Ending.STOPPED: "Stopped by a person before the end.",
            Ending.FAILED: failed, Ending.NO_BROKER: failed,
        }[ending]
        self._folder.report.write_text(report(self.picture, self._config, summary, sentence))
        draw_curves(self.picture, self._folder.curves)


async def _reopen(bus: Bus, config: Config) -> None:
    """A run on a lasting broker may be continued with more steps: what said it was finished no longer holds."""
    subjects = Subjects(config.run.name)
    head = await bus.last(subjects.stream("POLICY"), subjects.head)
    reached = head.message.version if head and isinstance(head.message, PolicyHead) else -1
    if reached < config.run.steps:
        await bus.purge(subjects.stream("CONTROL"), subjects.finished)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[str]:
    found: list[str] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [str(error)]
    return found
