"""Duplicates that the broker cannot recognise: what was stored once is published again, byte for byte, under another message id.

A plain subscription hears every message of the work queues as it is stored, so the choice is among the newest (probably still being worked
on) and among all that were heard (their groups may have ended long ago). Both must change nothing.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any, Self

import nats
from chaos_schedule import Plane

from driftline.messages.nats_bus import NatsBus
from driftline.messages.subjects import Subjects

__all__ = ["Echo"]

REMEMBERED = 4096
FRESH = 32


class Echo:
    """`async with Echo(url, run, seed) as echo: await echo.again(bus, Plane.GRADED, 8)`."""

    def __init__(self, url: str, run: str, seed: int) -> None:
        self._url, self._run, self._rng = url, run, Random(f"echo {seed}")
        self._heard: dict[Plane, deque[tuple[str, bytes]]] = {plane: deque(maxlen=REMEMBERED) for plane in Plane}
        self._client: Any = None
        self.published = dict.fromkeys(Plane, 0)

    async def __aenter__(self) -> Self:
        self._client = await nats.connect(
            self._url, name="echo", max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=_expected,
        )
        root = Subjects(self._run).root
        await self._client.subscribe(f"{root}.groups", cb=self._listener(Plane.GROUPS))
        await self._client.subscribe(f"{root}.trajectories.>", cb=self._listener(Plane.TRAJECTORIES))
        await self._client.subscribe(f"{root}.graded.>", cb=self._listener(Plane.GRADED))
        for _ in range(2):  # the first ping overtakes subscriptions that the client has not written yet; the second is behind them
            await self._client.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    def _listener(self, plane: Plane) -> Any:
        heard = self._heard[plane]

        async def listen(message: Any) -> None:
            if not (message.headers or {}).get("Nats-Msg-Id", "").startswith("echo/"):
                heard.append((message.subject, message.data))

        return listen

    def heard(self, plane: Plane) -> int:
        return len(self._heard[plane])

    async def again(self, bus: NatsBus, plane: Plane, count: int) -> int:
        """How many were published: at most `count`, half of them from the newest."""
        heard = list(self._heard[plane])
        fresh = heard[-FRESH:]
        chosen = [self._rng.choice(fresh) for _ in range(count - count // 2) if fresh]
        chosen += [self._rng.choice(heard) for _ in range(count // 2) if heard]
        for subject, data in chosen:
            self.published[plane] += 1
            await bus.publish_bytes(subject, data, id=f"echo/{plane}/{self.published[plane]}")
        return len(chosen)


async def _expected(error: Exception) -> None:
    """The broker is stopped and killed here on purpose; the client comes back by itself."""
