"""A byte-level tokenizer: every text is encodable, ids are bytes, nothing to train or download.

Ids 0..255 are bytes; 256 begins a sequence, 257 ends one, 258 pads. A prompt is `bos + text + newline`; a completion ends with eos.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ByteTokenizer"]


class ByteTokenizer:
    bos, eos, pad = 256, 257, 258
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_prompt(self, text: str) -> list[int]:
        return [self.bos, *self.encode(text), 10]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the byte ids; special ids are skipped, invalid UTF-8 becomes U+FFFD (a policy may sample anything)."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")
