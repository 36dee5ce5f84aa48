"""What every service process shares: one supervisor that starts it, watches it, and ends it with a reason.

Guarantees: a failed task ends the process with its cause in the log and the exit code below; SIGTERM and SIGINT drain, a
second signal leaves at once; the event loop's lag and the broker's round trip are measured all the time; a broker that
stays away ends the service, so that nothing waits for ever on a connection that will not come back.

Exit codes: 0 the run is finished or the service was drained, 1 a task failed, 2 the configuration is wrong or the broker refuses the credentials, 3 the broker
is unreachable, 4 stored bytes are damaged, 5 another process owns what this one tried to advance, 6 draining took too
long, 128 + n stopped by a second signal n.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol, TextIO, cast, runtime_checkable

import structlog

from driftline.messages.bus import Bus
from driftline.messages.credentials import Credentials, credentials_file, load_credentials
from driftline.messages.errors import (
    BrokerDenied,
    BrokerUnavailable,
    ConfigError,
    DriftlineError,
    HeadConflict,
    IntegrityError,
)
from driftline.messages.subjects import Subjects, Topology, topology
from driftline.messages.types import RunFinished
from driftline.services.config import Config
from driftline.services.security.permissions import Role, role_of
from driftline.services.telemetry import Health, Pages, Reporter, gauge, http_port

__all__ = ["Build", "Connect", "Context", "Drainable", "Exit", "Service", "configure_logging", "connect", "finished", "prepare", "run_topology", "serve"]

log = structlog.get_logger("runtime")

LAG_PERIOD_S = 0.25
BROKER_PERIOD_S = 1.0


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    CONFIG = 2
    BROKER = 3
    INTEGRITY = 4
    CONFLICT = 5
    DRAIN_TIMEOUT = 6


_CODES: tuple[tuple[type[DriftlineError], Exit], ...] = (
    (ConfigError, Exit.CONFIG), (BrokerDenied, Exit.CONFIG), (BrokerUnavailable, Exit.BROKER), (IntegrityError, Exit.INTEGRITY),
    (HeadConflict, Exit.CONFLICT),
)


class Service(Protocol):
    async def run(self) -> None:
        """Work until the run is finished. Cancellation means drain: give leases back and return."""


@runtime_checkable
class Drainable(Protocol):
    def drain(self) -> None:
        """Asked to stop: finish what is in hand and return from `run` by yourself. Without it, `run` is cancelled."""


@dataclass(frozen=True)
class Context:
    """What a service is built from."""

    bus: Bus
    config: Config
    instance: str
    run_dir: Path
    reporter: Reporter


Build = Callable[[Context], Service | Awaitable[Service]]
Connect = Callable[[Config, str], Awaitable[Bus]]


def run_topology(config: Config) -> Topology:
    broker = config.broker
    return topology(config.run.name, queue_bytes=broker.queue_bytes, blob_bytes=broker.blob_bytes, record_bytes=broker.record_bytes,
                    ledger_bytes=broker.ledger_bytes)


async def connect(config: Config, name: str) -> Bus:
    """The run's broker, as the role that `name` belongs to. Raises BrokerUnavailable, with the address and the remedy, when there
    is none in time, and BrokerDenied at once when it refuses the credentials."""
    from driftline.messages.nats_bus import NatsBus  # here, so that config and --help start without a client

    url, wait = config.broker.url, config.broker.connect_timeout_s
    remedy = "start one with `driftline nats`, or leave broker.url empty and use `driftline run`"
    if not url:
        raise ConfigError("a service on its own needs a broker's address", field="broker.url", value=url, remedy=remedy)
    try:
        async with asyncio.timeout(wait):
            return cast(Bus, await NatsBus.connect(url, name=name, credentials=_credentials(config, name)))
    except (TimeoutError, BrokerUnavailable) as error:
        cause = getattr(error, "problem", "") or f"no answer within {wait:g} s"
        raise BrokerUnavailable(cause, field="broker.url", value=url, remedy=remedy) from error


def _credentials(config: Config, name: str) -> Credentials | None:
    named = config.broker.credentials
    return load_credentials(credentials_file(named, role_of(name))) if named else None


async def prepare(bus: Bus, config: Config, name: str) -> None:
    """The run's streams: declared by who may, only looked for by others (a service that takes its role's file from a folder of
    credentials is such an other). Raises BrokerDenied or ConfigError, with what to do about it."""
    wanted = run_topology(config)
    remedy = "declare them once with `driftline provision --config FILE --credentials ADMIN`, and set broker.provision = false"
    if _may_declare(config, name):
        try:
            await bus.declare(wanted)
        except BrokerDenied as error:
            raise BrokerDenied("these credentials may not declare streams", field="broker.provision", value=True, remedy=remedy) from error
    elif missing := await bus.missing(wanted):
        raise ConfigError("the broker does not have these streams", field="run.name", value=", ".join(missing), remedy=remedy)


def _may_declare(config: Config, name: str) -> bool:
    broker = config.broker
    one_per_role = bool(broker.credentials) and Path(broker.credentials).is_dir()
    return broker.provision and (not one_per_role or role_of(name) is Role.ADMIN)


async def finished(bus: Bus, run: str) -> RunFinished:
    """Resolves when the learner has declared the run finished, at once if it already is."""
    subjects = Subjects(run)
    history = bus.follow(subjects.stream("CONTROL"), subjects.finished)
    async with aclosing(history) as events:  # type: ignore[type-var]
        async for stored in events:
            if isinstance(stored.message, RunFinished):
                return stored.message
    raise BrokerUnavailable("the control stream ended", field="stream", value=subjects.stream("CONTROL"))


def serve(name: str, build: Build, config: Config, *, instance: str = "", run_dir: Path | None = None,
          connect: Connect = connect) -> int:
    """Run one service to its end; returns the exit code. Blocks, and owns the process's signals meanwhile."""
    configure_logging(name, instance, config.telemetry.log_level)
    main = _main(name, build, config, instance, run_dir or Path(config.run.dir) / config.run.name, connect)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return int(runner.run(main))
    except BaseExceptionGroup as group:
        return _failed(_cause(group))
    except Exception as error:
        return _failed(error)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not built for this platform: the standard loop is slower and otherwise the same
        return None
    return uvloop.new_event_loop


async def _main(name: str, build: Build, config: Config, instance: str, run_dir: Path, connect: Connect) -> Exit:
    stop = _Stop(config.telemetry.drain_s)
    with stop:
        try:
            await _connected(name, build, config, instance, run_dir, connect, stop)
        except asyncio.CancelledError:
            if not stop.asked:
                raise
    log.info("service ended", drained=stop.asked)
    return Exit.OK


async def _connected(name: str, build: Build, config: Config, instance: str, run_dir: Path, connect: Connect,
                     stop: _Stop) -> None:
    health = Health(name, instance)
    bus = await connect(config, f"{name}-{instance}" if instance else name)
    pages = Pages(health, config.telemetry.http_host, http_port(config.telemetry.http_port, name, instance))
    try:
        await prepare(bus, config, name)
        reporter = Reporter(bus, config.run.name, name, instance, health)
        built = build(Context(bus, config, instance, run_dir, reporter))
        service = await built if isinstance(built, Awaitable) else built
        if config.telemetry.http_port:
            await pages.start()
        log.info("service started", pid=os.getpid(), run=config.run.name, http_port=pages.port)
        await _supervise(service, bus, health, config, stop)
    finally:
        await pages.stop()
        await _close(bus)


async def _supervise(service: Service, bus: Bus, health: Health, config: Config, stop: _Stop) -> None:
    async with asyncio.TaskGroup() as tasks:
        monitors = [
            tasks.create_task(_measure_loop(health, config.run.name), name="loop lag"),
            tasks.create_task(_watch_broker(bus, health, config), name="broker"),
        ]
        stop.service = service
        try:
            await service.run()
        finally:
            health.draining = True
            for monitor in monitors:
                monitor.cancel()


async def _measure_loop(health: Health, run: str) -> None:
    """How late the event loop wakes us: a blocked loop is the usual cause of a mysterious stall."""
    lag = gauge("driftline_loop_lag_seconds").labels(run, health.instance)
    while True:
        before = time.monotonic()
        await asyncio.sleep(LAG_PERIOD_S)
        health.loop_lag_s = max(0.0, time.monotonic() - before - LAG_PERIOD_S)
        health.loop_lag_max_s = max(health.loop_lag_max_s, health.loop_lag_s)
        lag.set(health.loop_lag_s)


async def _watch_broker(bus: Bus, health: Health, config: Config) -> None:
    trip = gauge("driftline_broker_rtt_seconds").labels(config.run.name, health.instance)
    answered = time.monotonic()
    while True:
        before = time.monotonic()
        if await bus.healthy():
            answered = time.monotonic()
            health.broker_rtt_s = answered - before
            trip.set(health.broker_rtt_s)
        else:
            health.broker_rtt_s = None
            silent = time.monotonic() - answered
            log.warning("broker does not answer", url=config.broker.url, silent_s=round(silent, 1))
            if silent > config.broker.lost_after_s:
                raise BrokerUnavailable(f"no answer for {silent:.0f} s", field="broker.url", value=config.broker.url,
                                        remedy="is the server running and reachable from here?")
        await asyncio.sleep(BROKER_PERIOD_S)


async def _close(bus: Bus) -> None:
    try:
        async with asyncio.timeout(5.0):
            await bus.close()
    except (TimeoutError, DriftlineError) as error:
        log.warning("broker connection not closed cleanly", cause=str(error) or type(error).__name__)


class _Stop:
    """Signals as a state: the first asks the service to drain and starts the clock, the second leaves at once."""

    def __init__(self, drain_s: float) -> None:
        self.asked = False
        self.service: Service | None = None
        self._drain_s = drain_s
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)
        # The service has ended and the process is about to: being asked to now must not change its exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.asked:
            log.warning("stopping at once", signal=number.name)
            _leave(128 + number)
        self.asked = True
        log.info("draining", signal=number.name, drain_s=self._drain_s)
        if isinstance(self.service, Drainable):
            self.service.drain()
            self._timer = self._loop.call_later(self._drain_s, self._cancel)
        else:
            self._cancel()

    def _cancel(self) -> None:
        if self._main is not None:
            self._main.cancel()
        self._timer = self._loop.call_later(self._drain_s, self._too_long)

    def _too_long(self) -> None:
        log.error("draining took too long", drain_s=self._drain_s, remedy="raise telemetry.drain_s")
        _leave(Exit.DRAIN_TIMEOUT)


def _leave(code: int) -> None:
    sys.stderr.flush()
    os._exit(code)


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that explains a group: the first that is ours, else the first."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(_cause(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((leaf for leaf in leaves if isinstance(leaf, DriftlineError)), leaves[0])


def _failed(error: BaseException) -> int:
    code = next((code for kind, code in _CODES if isinstance(error, kind)), Exit.FAILED)
    expected = code in (Exit.CONFIG, Exit.BROKER)
    log.error("service failed", cause=f"{type(error).__name__}: {error}", exit_code=int(code),
              exc_info=None if expected else error)
    return int(code)


def configure_logging(service: str, instance: str = "", level: str = "info", stream: TextIO | None = None) -> None:
    """JSON lines on `stream` (stderr), ours and the libraries' alike."""
    out = stream or sys.stderr
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]

    def stamp(_: object, __: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        return {"service": service, "instance": instance, **event}

    renderer = structlog.processors.JSONRenderer(default=str)
    structlog.configure(
        processors=[*shared, stamp, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, stamp, renderer],
    ))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
