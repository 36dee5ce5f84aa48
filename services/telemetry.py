"""What a service says about itself: numbers on the metrics stream, and a health and a Prometheus page.

Guarantees: one call reports a number to both readers; reporting never fails a service (telemetry is lost, work is not);
the pages answer from memory, so a health check is never behind the work it checks.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
from prometheus_client import REGISTRY, Gauge, generate_latest

from driftline.messages.bus import Bus
from driftline.messages.errors import ConfigError, DriftlineError
from driftline.messages.subjects import Subjects
from driftline.messages.types import Metrics

__all__ = ["HTTP_OFFSETS", "Health", "Pages", "Reporter", "http_port"]

log = structlog.get_logger("telemetry")

# Each service's port is `telemetry.http_port` plus this; rollout engines add their instance number.
HTTP_OFFSETS: Mapping[str, int] = {
    "supervisor": 0, "dispatcher": 1, "grader": 2, "learner": 3, "evaluator": 4, "policy-store": 5, "gateway": 6,
    "rollout": 10,
}


def http_port(base: int, service: str, instance: str = "") -> int:
    """The port of a service's pages, or 0 when they are off."""
    if base == 0:
        return 0
    return base + HTTP_OFFSETS.get(service, 9) + (int(instance) if instance.isdigit() else 0)


@dataclass
class Health:
    """What /healthz answers. `progress_at` moves whenever the service reports, so an idle one can be told from a stuck one."""

    service: str
    instance: str
    started_at: float = field(default_factory=time.monotonic)
    loop_lag_s: float = 0.0
    loop_lag_max_s: float = 0.0
    broker_rtt_s: float | None = None
    progress_at: float = field(default_factory=time.monotonic)
    progress: dict[str, float] = field(default_factory=dict)
    draining: bool = False

    @property
    def ok(self) -> bool:
        return self.broker_rtt_s is not None and not self.draining

    def answer(self) -> dict[str, object]:
        now = time.monotonic()
        return {
            "ok": self.ok, "service": self.service, "instance": self.instance, "uptime_s": round(now - self.started_at, 3),
            "loop_lag_s": self.loop_lag_s, "loop_lag_max_s": self.loop_lag_max_s, "broker_rtt_s": self.broker_rtt_s,
            "progress_age_s": round(now - self.progress_at, 3), "progress": self.progress, "draining": self.draining,
        }


_gauges: dict[str, Gauge] = {}


def gauge(name: str) -> Gauge:
    """The process's gauge of this name, labelled by run and instance."""
    if name not in _gauges:
        _gauges[name] = Gauge(name, f"Driftline: {name}", ("run", "instance"))
    return _gauges[name]


class Reporter:
    """Publishes a service's numbers as `Metrics` and mirrors them as gauges `driftline_<service>_<key>`."""

    def __init__(self, bus: Bus, run: str, service: str, instance: str = "", health: Health | None = None) -> None:
        self._bus, self._run, self._service, self._instance, self._health = bus, run, service, instance, health
        self._subject = Subjects(run).metrics(service)

    async def report(self, values: Mapping[str, float], series: Mapping[str, Sequence[float]] | None = None,
                     *, step: int = -1) -> None:
        numbers = {key: float(value) for key, value in values.items()}
        for key, value in numbers.items():
            name = re.sub(r"[^a-zA-Z0-9_]", "_", f"driftline_{self._service}_{key}")
            gauge(name).labels(self._run, self._instance).set(value)
        if self._health is not None:
            self._health.progress, self._health.progress_at = numbers, time.monotonic()
        now = time.time()
        message = Metrics(
            run=self._run, service=self._service, instance=self._instance, at=now, step=step, values=numbers,
            series={key: [float(item) for item in items] for key, items in (series or {}).items()},
        )
        try:
            await self._bus.publish(self._subject, message, id=f"{self._subject}/{self._instance}/{time.time_ns()}")
        except DriftlineError as error:
            log.warning("metrics lost", service=self._service, cause=str(error))


class Pages:
    """`GET /healthz` (200 or 503, JSON) and `GET /metrics` (Prometheus text) on one port, and nothing else."""

    def __init__(self, health: Health, host: str, port: int, metrics: Callable[[], bytes] | None = None) -> None:
        self._health, self._host, self._port = health, host, port
        self._metrics = metrics or (lambda: generate_latest(REGISTRY))
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1]) if self._server else self._port

    async def start(self) -> None:
        try:
            self._server = await asyncio.start_server(self._answer, self._host, self._port, limit=8192)
        except OSError as error:
            raise ConfigError(f"cannot listen: {error.strerror}", field="telemetry.http_port",
                              value=f"{self._host}:{self._port}", remedy="choose a free block of ports, or 0") from None

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(5):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(request.split(b" ", 2)[1] if request.startswith(b"GET ") else b""))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError) as error:
            log.debug("request refused", cause=type(error).__name__)
        finally:
            writer.close()

    def _response(self, path: bytes) -> bytes:
        match path.split(b"?")[0]:
            case b"/healthz":
                status = "200 OK" if self._health.ok else "503 Service Unavailable"
                kind, body = "application/json", json.dumps(self._health.answer()).encode()
            case b"/metrics":
                status, kind, body = "200 OK", "text/plain; version=0.0.4; charset=utf-8", self._metrics()
            case _:
                status, kind, body = "404 Not Found", "text/plain", b"GET /healthz or /metrics\n"
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + body
