"""What the gateway knows of an engine: what it may ask, what comes back, and how an engine says that it is full. No torch, no HTTP.

Guarantees: an `Ask` names everything that its tokens depend on, so two asks with the same tokens, temperature, seed and draw are sampled alike under one
version; the log-probability of a token is that of the distribution it was drawn from; `versions` say which policy drew it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from driftline.messages.errors import DriftlineError
from driftline.messages.types import Finish

__all__ = ["Ask", "EngineBusy", "EngineClient", "EngineFailed", "Message", "ModelCard", "Piece", "Text"]


class EngineBusy(DriftlineError):
    """The engine's queue is full. `retry_after_s` is when to try again, in whole seconds."""

    def __init__(self, problem: str, *, retry_after_s: int = 1, field: str = "", value: object = None, remedy: str = "") -> None:
        super().__init__(problem, field=field, value=value, remedy=remedy)
        self.retry_after_s = retry_after_s


class EngineFailed(DriftlineError):
    """A step failed, or the engine is gone: no fault of the request."""


class Message(NamedTuple):
    """One message of a conversation; role is "system", "user" or "assistant"."""

    role: str
    content: str


class Text(Protocol):
    """The model's tokenizer, as far as text is asked for."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """ConfigError when the chat template refuses them."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Ask:
    """One completion to sample. `seed` and `draw` (which of a request's n) decide its randomness; `stop_ids` end it beside the model's own ends unless
    `ignore_eos`. `adapter` "" is the base. `session` groups the turns of one conversation; a lower `priority` goes first."""

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    draw: int = 0
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    adapter: str = ""
    session: str = ""
    priority: int = 0


@dataclass(frozen=True)
class Piece:
    """What an ask has newly got: tokens with their log-probabilities and versions, all of one length. The last piece has `finish`, and how many prompt tokens
    needed no computing."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish: Finish | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class ModelCard:
    """What is served: `name`, the longest sequence (prompt and completion), and the adapters by name."""

    name: str
    context: int
    version: int = 0
    adapters: tuple[str, ...] = ()
    created: int = 0


class EngineClient(Protocol):
    @property
    def card(self) -> ModelCard: ...

    @property
    def text(self) -> Text: ...

    @property
    def failure(self) -> str:
        """Why nothing can be sampled any more; "" while all is well."""
        ...

    def sample(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """The pieces of one ask as they are sampled. Closing the generator cancels it. Raises EngineBusy before the first piece, EngineFailed at any time."""
        ...

    def numbers(self) -> Mapping[str, float]:
        """Gauges and counts by name, for /metrics: active, waiting, tokens_sampled, prompt_tokens, ..."""
        ...

