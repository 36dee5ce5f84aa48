"""Where a run is shown: a live view on a terminal, lines elsewhere, nothing in tests."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live

from driftline.messages.types import EvalResult, Message, Metrics
from driftline.services.watch.picture import Picture
from driftline.services.watch.render import eval_line, render, step_line

__all__ = ["LiveScreen", "PlainScreen", "Screen", "screen_for"]

PERIOD_S = 0.5


class Screen(Protocol):
    def say(self, text: str) -> None: ...
    def see(self, message: Message, picture: Picture) -> None: ...

    async def draw(self, picture: Picture) -> None:
        """Until cancelled."""


class PlainScreen:
    """One line per step and per evaluation, each once, for pipes and logs."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._shown: set[tuple[str, int]] = set()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def see(self, message: Message, picture: Picture) -> None:
        match message:
            case Metrics(service="learner") if message.step >= 0:
                version = int(message.values.get("version", message.step))
                self._once("step", version, step_line(picture.steps[version], picture))
            case EvalResult():
                self._once("eval", message.version, eval_line(message))

    def _once(self, kind: str, version: int, line: str) -> None:
        if (kind, version) not in self._shown:
            self._shown.add((kind, version))
            self.say(line)

    async def draw(self, picture: Picture) -> None:
        await asyncio.get_running_loop().create_future()


class LiveScreen:
    """The live view; what is said scrolls above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._started = time.time()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def see(self, message: Message, picture: Picture) -> None:
        """The view is drawn by the clock, not by messages: a burst of them must not cost anything."""

    async def draw(self, picture: Picture) -> None:
        with Live(self._view(picture), console=self._console, auto_refresh=False) as live:
            try:
                while True:
                    await asyncio.sleep(PERIOD_S)
                    live.update(self._view(picture), refresh=True)
            finally:
                live.update(self._view(picture), refresh=True)

    def _view(self, picture: Picture) -> RenderableType:
        return render(picture, now=time.time(), started_at=self._started)


def screen_for(plain: bool) -> Screen:
    """The live view, unless it is not wanted or there is no terminal to draw it on."""
    console = Console()
    return PlainScreen() if plain or not console.is_terminal else LiveScreen(console)
