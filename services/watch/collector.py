"""The collector: reads a run's streams into a picture, and copies its numbers to metrics.jsonl and TensorBoard.

It only reads, so any number may watch a run, and watching slows nothing down. Streams are followed from their start: one that
attaches late sees the whole run. Telemetry alone may have gaps, when its stream was full.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

import structlog

from driftline.messages.bus import Bus
from driftline.messages.dead_letters import dead_letters
from driftline.messages.errors import DriftlineError
from driftline.messages.subjects import ConsumerSpec, Subjects
from driftline.messages.types import EvalResult, Message, Metrics
from driftline.services.watch.picture import Picture

__all__ = ["Collector", "Sink"]

log = structlog.get_logger("watch")

DEPTH_PERIOD_S = 1.0
DEAD_PERIOD_S = 5.0


class Sink(Protocol):
    """Where numbers go besides the picture."""

    def write(self, tag: str, value: float, step: int, at: float) -> None: ...
    def close(self) -> None: ...


class Collector:
    """`run` until cancelled; `on_change` is called after each message that the picture has seen."""

    def __init__(
        self, bus: Bus, picture: Picture, consumers: tuple[ConsumerSpec, ...] = (), *, metrics: Path | None = None,
        sink: Sink | None = None, on_change: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self.picture = picture
        self._bus, self._consumers, self._metrics, self._sink, self._on_change = bus, consumers, metrics, sink, on_change
        self._subjects = Subjects(picture.run)
        self._dead_after = 1
        self._seen: dict[str, int] = {}
        self._moved = asyncio.Event()

    @property
    def _streams(self) -> tuple[tuple[str, str], ...]:
        s = self._subjects
        planes = (("METRICS", f"{s.root}.metrics.>"), ("LEDGER", s.ledger), ("EVAL", f"{s.root}.eval.>"),
                  ("POLICY", f"{s.root}.policy.>"), ("CONTROL", s.finished))
        return tuple((s.stream(plane), subject) for plane, subject in planes)

    async def run(self) -> None:
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(self._metrics.open("a", encoding="utf-8")) if self._metrics else None
            async with asyncio.TaskGroup() as tasks:
                for stream, subject in self._streams:
                    tasks.create_task(self._follow(stream, subject, out), name=f"follow {stream}")
                tasks.create_task(self._depths(), name="depths")

    async def _follow(self, stream: str, subject: str, out: TextIO | None) -> None:
        async for stored in self._bus.follow(stream, subject):
            message = stored.message
            self.picture.see(message)
            if isinstance(message, (Metrics, EvalResult)):
                self._record(message, out)
            self._on_change(message)
            self._seen[stream] = stored.seq
            self._moved.set()

    async def catch_up(self, wait_s: float) -> None:
        """Wait until everything stored by now has been seen, so that a summary misses nothing; at most `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                for stream, subject in self._streams:
                    newest = await self._bus.last(stream, subject)
                    while newest is not None and self._seen.get(stream, 0) < newest.seq:
                        self._moved.clear()
                        await self._moved.wait()
                await self.count_dead()
        except (TimeoutError, DriftlineError) as error:
            log.warning("the summary may miss the newest messages", cause=str(error) or f"still reading after {wait_s:g} s")

    def _record(self, message: Metrics | EvalResult, out: TextIO | None) -> None:
        line: dict[str, Any]
        match message:
            case Metrics():
                tag = message.service + (f"-{message.instance}" if message.instance else "")
                step = message.step if message.step >= 0 else max(self.picture.version, 0)
                values = message.values
                line = {"at": message.at, "service": message.service, "instance": message.instance, "step": step,
                        **values, **message.series}
            case EvalResult():
                tag, step = "heldout", message.version
                values = {"sampled": message.reward_sampled, "greedy": message.reward_greedy,
                          "exact_sampled": message.exact_sampled, "exact_greedy": message.exact_greedy}
                line = {"at": message.at, "service": "evaluator", "step": step, "tasks": message.tasks, **values}
        if out is not None:
            out.write(json.dumps(line) + "\n")
            out.flush()
        if self._sink is not None:
            for key, value in values.items():
                self._sink.write(f"{tag}/{key}", value, step, message.at)

    async def _depths(self) -> None:
        """Queue depths and dead letters cannot be followed, only asked for."""
        rounds = 0
        while True:
            try:
                for consumer in self._consumers:
                    self.picture.depths[consumer.durable] = await self._bus.depth(consumer)
                if rounds % int(DEAD_PERIOD_S / DEPTH_PERIOD_S) == 0:
                    await self.count_dead()
            except DriftlineError as error:
                log.warning("depths not read", cause=str(error))
            rounds += 1
            await asyncio.sleep(DEPTH_PERIOD_S)

    async def count_dead(self) -> None:
        found = await dead_letters(self._bus, self.picture.run, start=self._dead_after)
        if found:
            self._dead_after = found[-1].seq + 1
            self.picture.dead_letters += len(found)
