"""An EngineClient of a script: what it samples is a function of the ask, and it fills up, fails, crawls and hangs on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from driftline.messages.errors import ConfigError
from driftline.messages.types import Finish
from driftline.models.tokenizer import ByteTokenizer, Role, Turn
from driftline.services.gateway.client import Ask, EngineBusy, EngineFailed, Message, ModelCard, Piece

CARD = ModelCard("tiny", 512, version=7, adapters=("tuned",), created=1_700_000_000)


class Bytes(ByteTokenizer):
    def encode_chat(self, messages: Sequence[Message]) -> list[int]:  # type: ignore[override]
        if not any(message.role == "user" for message in messages):
            raise ConfigError("the template wants a user", field="messages", remedy="ask something")
        return super().encode_chat([Turn(Role(message.role), message.content) for message in messages])


@dataclass
class ScriptedEngine:
    """Says `script`, then ends; with max_tokens before that, by length. `hang_after` tokens it waits for `release`."""

    script: str = "hello \U0001f600 world"
    full: bool = False
    fail_after: int | None = None
    hang_after: int | None = None
    failure: str = ""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    asks: list[Ask] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    closed: list[str] = field(default_factory=list)
    text: Bytes = field(default_factory=Bytes)
    card: ModelCard = CARD

    async def sample(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        self.asks.append(ask)
        if self.full:
            raise EngineBusy("the queue is full", retry_after_s=3, field="queue_mb", value=1, remedy="ask again later")
        self.running.add(ask.id)
        ended = False
        try:
            said = self.text.encode(self.script)
            for i, token in enumerate(cycle(said) if ask.ignore_eos else (*said, *self.text.eos_ids)):
                if i == self.fail_after:
                    raise EngineFailed("a step failed", field="weights", value=7)
                if i == self.hang_after:
                    await self.release.wait()
                await asyncio.sleep(0)
                stop = token in ask.stop_ids or (token in self.text.eos_ids and not ask.ignore_eos)
                finish = Finish.STOP if stop else Finish.LENGTH if i + 1 == ask.max_tokens else None
                ended = finish is not None
                yield Piece((token,), (-0.5 - i / 8,), (7 if i < 4 else 8,), finish, cached_tokens=2)
                if ended:
                    return
        finally:
            self.running.discard(ask.id)
            if not ended:
                self.closed.append(ask.id)

    def numbers(self) -> Mapping[str, float]:
        return {"active": len(self.running), "waiting": 0, "tokens_sampled": 5}
