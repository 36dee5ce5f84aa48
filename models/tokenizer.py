"""What a model's text is to it: the protocol every tokenizer keeps, and the byte-level one.

Guarantees: `encode_chat` of one user turn is `encode_prompt` of its text; an id that ends a completion is in `eos_ids`, all of them; `decode` takes any ids a
policy can sample and never raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

__all__ = ["ByteTokenizer", "Role", "Tokenizer", "Turn"]


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


class Turn(NamedTuple):
    """One message of a conversation."""

    role: Role
    content: str


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """One more than the largest id it makes or knows."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a completion; the first is the one an answer is to end with."""
        ...

    @property
    def pad(self) -> int:
        """What fills a row behind its end: any id of the vocabulary, never read."""
        ...

    def encode(self, text: str) -> list[int]:
        """The text alone, nothing before or after it."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """What a model is given to answer `text`."""
        ...

    def encode_chat(self, turns: Sequence[Turn]) -> list[int]:
        """What a model is given to answer the last turn. ConfigError when the model's chat template refuses these turns."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids without the special ones."""
        ...


class ByteTokenizer:
    """A byte-level tokenizer: every text is encodable, ids are bytes, nothing to train or download.

    Ids 0..255 are bytes; 256 begins a sequence, 257 ends one, 258 pads. A prompt is `bos + text + newline`; a completion ends with eos. Turns are lines below
    one another.
    """

    bos, eos, pad = 256, 257, 258
    eos_ids = (eos,)
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_prompt(self, text: str) -> list[int]:
        return [self.bos, *self.encode(text), 10]

    def encode_chat(self, turns: Sequence[Turn]) -> list[int]:
        return self.encode_prompt("\n".join(turn.content for turn in turns))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the byte ids; special ids are skipped, invalid UTF-8 becomes U+FFFD (a policy may sample anything)."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")
