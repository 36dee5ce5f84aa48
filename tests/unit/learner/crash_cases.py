"""`kill -9` at any await: a learner's tasks stop where they are, none of their cleanup runs, and the broker and disk keep what they have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from driftline.messages.memory import MemoryBus

__all__ = ["Killed", "live"]

# What was killed is never resumed and never collected: collecting a coroutine would run its `finally`.
_GRAVEYARD: list[object] = []


class Killed(Exception):
    """The life ended before the service did."""


class _Clock:
    """Counts the steps of every task; when they are used up the loop stops, and no task runs again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, steps: int | None) -> None:
        self.loop, self.left, self.taken = loop, steps, 0

    @property
    def dead(self) -> bool:
        return self.left is not None and self.left <= 0

    def step(self) -> None:
        self.taken += 1
        if self.left is not None:
            self.left -= 1


class _Mortal(Coroutine[Any, Any, Any]):
    """A coroutine that stands still once the clock has run out."""

    def __init__(self, body: Coroutine[Any, Any, Any], clock: _Clock) -> None:
        self._body, self._clock = body, clock

    def send(self, value: Any) -> Any:
        return self._go(lambda: self._body.send(value))

    def throw(self, *error: Any) -> Any:
        return self._go(lambda: self._body.throw(*error))

    def _go(self, resume: Callable[[], Any]) -> Any:
        if self._clock.dead:
            self._clock.loop.stop()
            future: Any = self._clock.loop.create_future()
            future._asyncio_future_blocking = True
            return future
        self._clock.step()
        return resume()

    def close(self) -> None:
        """Never: closing would run the body's cleanup."""

    def __await__(self) -> Any:
        return self._body.__await__()


def live(bus: MemoryBus, life: Callable[[], Awaitable[None]], *, steps: int | None = None) -> int:
    """Run `life` in a loop of its own, at most `steps` task steps of it. Returns the steps taken; raises Killed when they ran out."""
    loop = asyncio.new_event_loop()
    clock = _Clock(loop, steps)
    bodies: list[object] = []

    def factory(loop: asyncio.AbstractEventLoop, body: Any, **more: Any) -> asyncio.Task[Any]:
        mortal = _Mortal(body, clock)
        bodies.append(mortal)
        task: asyncio.Task[Any] = asyncio.Task(mortal, loop=loop, **more)
        bodies.append(task)
        return task

    loop.set_task_factory(factory)
    asyncio.set_event_loop(loop)
    whole = factory(loop, _bounded(life))
    whole.add_done_callback(lambda _: loop.stop())
    loop.run_forever()
    bus.broker._waiters.clear()
    executor = loop._default_executor  # type: ignore[attr-defined]
    if executor is not None:
        executor.shutdown(wait=True)  # what a thread was doing may as well have been done before the kill
    asyncio.set_event_loop(None)
    if not whole.done():
        _GRAVEYARD.append((loop, bodies))
        raise Killed(f"after {clock.taken} steps")
    whole.result()
    loop.close()
    return clock.taken


async def _bounded(life: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.timeout(120):
        await life()
