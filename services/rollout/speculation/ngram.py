"""Drafts from text that was there already: where the last few tokens stood before, what came behind them then.

Nothing is computed by a model and nothing is learned. A row's own history is looked up first, newest occurrence first, then its family's (a group's members answer
one question, and repeat one another). The index of a row grows by the row's new tokens alone: a step costs O(1) a row whatever the history's length.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from driftline.messages.errors import ConfigError
from driftline.services.rollout.speculation.drafts import Drafts, Row, Seen

__all__ = ["NgramDrafter"]

_FAMILY_TOKENS = 1 << 17
"""Tokens of finished members that a family keeps at most: its index is 100 bytes a token and order."""


@dataclass
class _Text:
    """A text and where each of its n-grams (by order) last ended. `indexed`: tokens that are in the index."""

    tokens: array[int]
    ends: list[dict[tuple[int, ...], int]]
    indexed: int = 0

    def extend(self, tokens: array[int], orders: Sequence[int]) -> None:
        """Now `tokens`, which begins as before. An n-gram that ends at the newest token has nothing behind it yet and is entered with the next one."""
        self.tokens = tokens
        for end in range(self.indexed, len(tokens) - 1):
            for ends, order in zip(self.ends, orders, strict=True):
                if end + 1 >= order:
                    ends[tuple(tokens[end + 1 - order : end + 1])] = end + 1
        self.indexed = max(self.indexed, len(tokens) - 1)


@dataclass
class _Family:
    """Where n-grams of any member last ended: which text, and at what place. Members' texts stay while the family has a running member."""

    running: set[Hashable] = field(default_factory=set)
    texts: list[array[int]] = field(default_factory=list)
    ends: list[dict[tuple[int, ...], tuple[int, int]]] = field(default_factory=list)
    places: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    tokens: int = 0


class NgramDrafter:
    """`longest` to `shortest`: orders tried, longest first, 1 <= shortest <= longest <= 16. `families`: look into other members' texts, too. ConfigError."""

    taps: tuple[int, ...] = ()
    sampled = False

    def __init__(self, *, shortest: int = 2, longest: int = 4, families: bool = True) -> None:
        if not 1 <= shortest <= longest <= 16:
            raise ConfigError("orders of n-grams that cannot be", field="speculation n-grams", value=f"{shortest} to {longest}", remedy="1 <= shortest <= longest <= 16")
        self._orders = tuple(range(longest, shortest - 1, -1))
        self._texts: dict[Hashable, _Text] = {}
        self._families: dict[Hashable, _Family] | None = {} if families else None
        self._of: dict[Hashable, Hashable] = {}

    def propose(self, rows: Sequence[Row], limits: Sequence[int], *, probs: bool = False) -> Drafts:
        """Deterministic in the rows' histories and their order of growth. No distributions: the rule takes these drafts as certain."""
        for row in rows:
            self._learn(row)
        width = max(limits, default=0)
        tokens = np.zeros((len(rows), width), dtype=np.int64)
        counts = np.zeros(len(rows), dtype=np.int32)
        for i, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            tokens[i] = row.history[-1]
            found = self._found(row, limit) if limit > 0 else None
            if found is not None:
                counts[i] = len(found)
                tokens[i, : len(found)] = found
        return Drafts(tokens, counts)

    def saw(self, rows: Sequence[Row], seen: Seen) -> None:
        """Needs to see nothing but histories."""

    def retire(self, row: Hashable) -> None:
        self._texts.pop(row, None)
        name = self._of.pop(row, None)
        if self._families is None or name is None:
            return
        family = self._families[name]
        family.running.discard(row)
        family.places.pop(row, None)
        if not family.running:
            del self._families[name]

    def _learn(self, row: Row) -> None:
        text = self._texts.get(row.id)
        if text is None or len(row.history) < text.indexed:
            text = self._texts[row.id] = _Text(row.history, [{} for _ in self._orders])
        text.extend(row.history, self._orders)
        if self._families is None or row.family is None:
            return
        family = self._families.setdefault(row.family, _Family(ends=[{} for _ in self._orders]))
        if row.id not in family.running:
            family.running.add(row.id)
            self._of[row.id] = row.family
        self._teach(family, row)

    def _teach(self, family: _Family, row: Row) -> None:
        """Enter what the row has sampled since; a member's prompt is entered once, by whoever comes first with it."""
        place = family.places.get(row.id)
        if place is None:
            if family.tokens + len(row.history) > _FAMILY_TOKENS:
                return
            first = not family.texts
            place = (len(family.texts), 0 if first else _common(family.texts[0], row.history))
            family.texts.append(row.history)
        index, done = place
        family.texts[index] = row.history
        for end in range(done, len(row.history) - 1):
            for ends, order in zip(family.ends, self._orders, strict=True):
                if end + 1 >= order:
                    ends[tuple(row.history[end + 1 - order : end + 1])] = (index, end + 1)
        newest = max(done, len(row.history) - 1)
        family.tokens += newest - done
        family.places[row.id] = (index, newest)

    def _found(self, row: Row, limit: int) -> list[int] | None:
        text = self._texts[row.id]
        family = self._families.get(row.family) if self._families is not None and row.family is not None else None
        for i, order in enumerate(self._orders):
            if len(row.history) < order:
                continue
            last = tuple(row.history[-order:])
            own = text.ends[i].get(last)
            if own is not None:
                return _behind(row.history, own, limit)
            if family is not None and (other := family.ends[i].get(last)) is not None:
                return list(family.texts[other[0]][other[1] : other[1] + limit])
        return None


def _behind(tokens: array[int], start: int, limit: int) -> list[int]:
    """`limit` tokens from `start`; a loop shorter than that goes round again."""
    found = list(tokens[start : start + limit])
    period = len(tokens) - start
    while len(found) < limit:
        found.append(found[len(found) - period])
    return found


def _common(a: array[int], b: array[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
