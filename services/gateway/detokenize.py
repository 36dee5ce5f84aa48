"""Text out of tokens as they come: what was said is never taken back.

Guarantees: the pieces of `add` and `end` together are the text of the tokens; a character whose bytes are split over tokens is said when it is whole; the cost
of a token does not grow with the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Detokenizer", "StopStrings"]

UNKNOWN = "\ufffd"

WINDOW = 24
"""Tokens decoded again at most. A text of nothing but broken characters would otherwise be decoded from its beginning for every token."""

OVERLAP = 8
"""Tokens kept in front when the window moves: a decoder may treat the first of a text in its own way, and a character has at most four bytes."""


class Detokenizer:
    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._said = 0  # characters of the window's text

    def add(self, tokens: Sequence[int]) -> str:
        """What the tokens add to the text. At most one character is held back: one whose bytes are not all there yet."""
        out = []
        for token in tokens:
            self._window.append(token)
            text = self._decode(self._window)
            whole = len(text) - 1 if text.endswith(UNKNOWN) else len(text)
            if whole > self._said:
                out.append(text[self._said : whole])
                self._said = whole
            if len(self._window) > WINDOW:
                self._move(held=len(text) - self._said)
        return "".join(out)

    def end(self) -> str:
        """What was held back."""
        text = self._decode(self._window)
        rest, self._said = text[self._said :], len(text)
        return rest

    def _move(self, held: int) -> None:
        del self._window[:-OVERLAP]
        self._said = len(self._decode(self._window)) - held


class StopStrings:
    """Cuts a text at the first of some strings. As long as what was added may be the beginning of one, it is held back."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """keep: the text includes the string that ended it."""
        self._stops, self._keep = tuple(stops), keep
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """What may be said by now. After `found`, nothing more."""
        if self.found is not None:
            return ""
        self._held += text
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits, key=lambda hit: hit[0])
            out = self._held[: at + (len(self.found) if self._keep else 0)]
            self._held = ""
            return out
        return self._release(self._beginning())

    def end(self) -> str:
        """What was held back, when no string was found."""
        return self._release(0)

    def _beginning(self) -> int:
        """The length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

    def _release(self, hold: int) -> str:
        cut = len(self._held) - hold
        out, self._held = self._held[:cut], self._held[cut:]
        return out
