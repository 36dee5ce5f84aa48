"""A slow and unfair network between the services and their broker.

Guarantees: bytes arrive unchanged and in order, late; how late is drawn per connection from the seed and changes every few seconds,
mostly nothing and at worst some hundreds of milliseconds. A client can be cut off by its name: what it sends and what is sent to it is held
back, and delivered when it is let back in, so its messages come late instead of never. At most `HELD_BYTES` wait in each direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Self

__all__ = ["DelayingProxy"]

CHUNK = 64 * 1024
HELD_BYTES = 8 * 1024 * 1024
# (share of the time, least and most delay of a chunk in seconds)
WEATHER = ((0.75, 0.0, 0.002), (0.18, 0.005, 0.04), (0.07, 0.1, 0.4))
CHANGES_S = (1.0, 4.0)


class _Weather:
    """How late a chunk is: a draw for every chunk, from a range that changes from time to time."""

    def __init__(self, seed: str) -> None:
        self._rng = Random(seed)
        self._until = 0.0
        self._low = self._high = 0.0

    def delay(self, now: float) -> float:
        if now >= self._until:
            self._until = now + self._rng.uniform(*CHANGES_S)
            kinds = self._rng.choices(WEATHER, [share for share, *_ in WEATHER])
            _, self._low, self._high = kinds[0]
        return self._rng.uniform(self._low, self._high)


class _Line:
    """One direction: read now, written when due."""

    def __init__(self, proxy: DelayingProxy, number: int, upward: bool) -> None:
        self.proxy, self.upward = proxy, upward
        self.weather = _Weather(f"{proxy.seed}/{number}/{'up' if upward else 'down'}")
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.held = 0
        self.changed = asyncio.Event()
        self.ended = False

    async def read(self, reader: asyncio.StreamReader, link: _Link) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0
        try:
            while data := await reader.read(CHUNK):
                if self.upward and link.name is None:
                    link.heard(data)
                due = max(due, loop.time() + self.weather.delay(loop.time()))
                self.waiting.append((due, data))
                self.held += len(data)
                self.changed.set()
                while self.held > HELD_BYTES:
                    await self._change()
        except OSError:
            pass  # the peer went away, as peers do here
        finally:
            self.ended = True
            self.changed.set()

    async def write(self, writer: asyncio.StreamWriter, link: _Link) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self.waiting:
                if self.ended:
                    return
                await self._change()
            due, data = self.waiting[0]
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self.proxy.let_through(link)
            self.waiting.popleft()
            writer.write(data)
            await writer.drain()
            self.held -= len(data)
            self.changed.set()

    async def _change(self) -> None:
        self.changed.clear()
        await self.changed.wait()


class _Link:
    """One connection. Its name is in the first words a NATS client says: CONNECT {"name": ...}."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._said = b""

    def heard(self, data: bytes) -> None:
        self._said += data
        start = self._said.find(b"CONNECT ")
        end = self._said.find(b"\r\n", start)
        if start >= 0 and end >= 0:
            self.name = str(json.loads(self._said[start + 8 : end]).get("name", ""))
            self._said = b""


class DelayingProxy:
    """`async with DelayingProxy(server.host, server.port, seed) as proxy: proxy.url`."""

    def __init__(self, host: str, port: int, seed: int) -> None:
        self.seed = seed
        self.connections = 0
        self._host, self._target = host, port
        self._open: dict[str, asyncio.Event] = {}
        self._links: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"nats://{self._host}:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self._host, 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for link in self._links:
            link.cancel()
        if self._links:
            await asyncio.wait(self._links)

    @asynccontextmanager
    async def cut_off(self, name: str) -> AsyncIterator[None]:
        """Nothing passes to or from the clients of this name meanwhile, new connections of theirs included."""
        gate = self._open[name] = asyncio.Event()
        try:
            yield
        finally:
            self._open.pop(name, None)
            gate.set()

    async def let_through(self, link: _Link) -> None:
        if link.name is not None and (gate := self._open.get(link.name)) is not None:
            await gate.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        task.add_done_callback(self._links.discard)
        self.connections += 1
        try:
            await self._join(reader, writer, self.connections)
        except OSError:
            pass  # no broker there just now: the client sees its connection close
        finally:
            writer.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        link = _Link()
        up_reader, up_writer = await asyncio.open_connection(self._host, self._target)
        up, down = _Line(self, number, True), _Line(self, number, False)
        tasks = [asyncio.ensure_future(work) for work in (
            up.read(reader, link), up.write(up_writer, link), down.read(up_reader, link), down.write(writer, link))]
        try:
            # Either side gone: the rest of what it said is delivered, then the connection ends. A client that was killed is no
            # reason to lose what it had sent: its last words arrive late, when it is dead.
            await asyncio.wait({tasks[1], tasks[3]}, return_when=asyncio.FIRST_COMPLETED)
            if tasks[3].done() and tasks[3].exception() is not None:
                await asyncio.wait({tasks[1]})
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    with contextlib.suppress(OSError):
                        task.result()
            up_writer.close()
