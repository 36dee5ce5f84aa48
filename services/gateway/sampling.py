"""One order's asks sampled side by side, their pieces as text.

Guarantees: leaving `sampled` early, however it is left, cancels every ask of the order; a stop string ends its choice with the token that completed it, and what the
engine had sampled beyond is dropped; at most `AHEAD` pieces wait for a slow reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from driftline.messages.types import Finish
from driftline.services.gateway.client import Ask, EngineClient, EngineFailed, Piece, Text
from driftline.services.gateway.detokenize import Detokenizer, StopStrings
from driftline.services.gateway.orders import Order

__all__ = ["Choice", "Delta", "sampled"]

AHEAD = 64


@dataclass(frozen=True)
class Delta:
    """What choice `index` newly has. `stop` is the string that ended it, where one did."""

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish: Finish | None = None
    stop: str | None = None
    cached_tokens: int = 0


@dataclass
class Choice:
    """All of one choice: the sum of its deltas."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None
    stop: str | None = None
    cached_tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.versions += delta.versions
        self.finish, self.stop = delta.finish or self.finish, delta.stop or self.stop
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)


class _Reader:
    """Turns the pieces of one ask into deltas."""

    def __init__(self, index: int, order: Order, text: Text) -> None:
        self._index = index
        self._detokenizer = Detokenizer(text.decode)
        self._cutter = StopStrings(order.stop, keep=order.keep_stop) if order.stop else None

    def read(self, piece: Piece) -> Delta:
        said, count, finish = "", len(piece.tokens), piece.finish
        if self._cutter is None:
            said = self._detokenizer.add(piece.tokens)
        else:
            for i, token in enumerate(piece.tokens):
                said += self._cutter.add(self._detokenizer.add((token,)))
                if self._cutter.found is not None:
                    count, finish = i + 1, Finish.STOP
                    break
        if finish is not None and not self._found:
            said += self._rest()
            finish = Finish.STOP if self._found else finish
        return Delta(self._index, said, piece.tokens[:count], piece.logprobs[:count], piece.versions[:count], finish, self._found, piece.cached_tokens)

    @property
    def _found(self) -> str | None:
        return self._cutter.found if self._cutter is not None else None

    def _rest(self) -> str:
        rest = self._detokenizer.end()
        return rest if self._cutter is None else self._cutter.add(rest) + self._cutter.end()


async def sampled(client: EngineClient, order: Order) -> AsyncGenerator[Delta, None]:
    """The deltas of all choices as they come, until each has its finish. Raises what the engine raises."""
    queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue(AHEAD)
    tasks = [asyncio.create_task(_sample(client, ask, _Reader(i, order, client.text), queue), name=f"ask {ask.id}") for i, ask in enumerate(order.asks)]
    try:
        left = len(tasks)
        while left:
            got = await queue.get()
            if isinstance(got, BaseException):
                raise got
            left -= got.finish is not None
            yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _sample(client: EngineClient, ask: Ask, reader: _Reader, queue: asyncio.Queue[Delta | BaseException]) -> None:
    try:
        async with aclosing(client.sample(ask)) as pieces:
            async for piece in pieces:
                delta = reader.read(piece)
                await queue.put(delta)
                if delta.finish is not None:
                    return
        raise EngineFailed("the engine ended without a finish", field="request", value=ask.id)
    except Exception as error:  # raised again where the order is waited for
        await queue.put(error)
