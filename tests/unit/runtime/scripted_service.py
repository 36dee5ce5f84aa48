"""A process for the runtime's tests: `python scripted_service.py WHAT [port]`, over a bus in its own memory."""

from __future__ import annotations

import asyncio
import sys
import time

from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerUnavailable, HeadConflict, IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import RunFinished
from driftline.services.config import Config
from driftline.services.runtime import Context, connect, finished, serve


def say(word: str) -> None:
    print(word, flush=True)


class Deaf(MemoryBus):
    async def healthy(self, timeout_s: float = 2.0) -> bool:
        return False


class Scripted:
    def __init__(self, context: Context, what: str) -> None:
        self.context, self.what = context, what
        self.asked = asyncio.Event()
        if what == "drain":
            self.drain = self.asked.set

    async def run(self) -> None:
        bus, run = self.context.bus, self.context.config.run.name
        match self.what:
            case "raise":
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(asyncio.sleep(60))
                    tasks.create_task(self.fail(RuntimeError("the cause of it all")))
            case "damaged":
                raise IntegrityError("digest differs", field="blob", value="abc")
            case "conflict":
                raise HeadConflict("another learner", field="head", value=3)
            case "finish":
                await bus.publish(Subjects(run).finished, RunFinished(run=run, version=1, reason="steps"), id="end")
                say((await finished(bus, run)).reason)
            case "drain":
                say("ready")
                await self.asked.wait()
                say("drained")
            case "stubborn":
                say("ready")
                while True:
                    try:
                        await asyncio.sleep(60)
                    except asyncio.CancelledError:
                        say("refused")
            case "blocked":
                await asyncio.sleep(0.5)
                time.sleep(0.5)  # noqa: ASYNC251 - what a synchronous parse of something huge does to a loop
                await asyncio.sleep(0.5)
                say("measured")
                await asyncio.sleep(60)
            case _:
                await self.context.reporter.report({"done": 3})
                say("ready")
                try:
                    await asyncio.sleep(60)
                finally:
                    say("cleaned up")

    async def fail(self, error: Exception) -> None:
        raise error


async def memory(config: Config, name: str) -> Bus:
    return Deaf() if sys.argv[1] == "deaf" else MemoryBus()


async def unreachable(config: Config, name: str) -> Bus:
    raise BrokerUnavailable("no answer", field="broker.url", value=config.broker.url)


if __name__ == "__main__":
    what, port = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    drain_s = 0.3 if what == "stubborn" and port == 1 else 30
    config = Config.model_validate({
        "telemetry": {"http_port": port if port > 1 else 0, "drain_s": drain_s},
        "broker": {"url": "nats://127.0.0.1:1" if what == "real" else "", "connect_timeout_s": 0.5, "lost_after_s": 0.01},
    })
    way = {"real": connect, "alone": connect, "unreachable": unreachable}.get(what, memory)
    sys.exit(serve("scripted", lambda context: Scripted(context, what), config, connect=way))
