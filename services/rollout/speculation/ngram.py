"""Drafts from text that was there already: where the last few tokens stood before, what came behind them then.

Nothing is computed by a model and nothing is learned. A row's own history is looked up first, newest occurrence first, then its family's (a group's members answer
one question, and repeat one another). An index grows by a row's new tokens alone: a step costs O(1) a row whatever the history's length, and a prompt that members
share is entered once.
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
"""Tokens that a family's index takes, over which a new member's are left out: it is 100 bytes a token and order."""

_MANY = 32
"""Keys from which on arrays make them faster than a loop."""

_FACTOR, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


@dataclass
class _Text:
    """Where each n-gram (by order, under its key) of a row's text last ended. `indexed`: tokens that are in the index, or that others have in theirs."""

    ends: list[dict[int, int]]
    indexed: int


@dataclass
class _Family:
    """Where n-grams of any member last ended: which text, and at what place. Members' texts stay while the family has a running member."""

    running: set[Hashable] = field(default_factory=set)
    texts: list[array[int]] = field(default_factory=list)
    ends: list[dict[int, tuple[int, int]]] = field(default_factory=list)
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
        known = self._shared(row)
        text = self._texts.get(row.id)
        if text is None or len(row.history) < text.indexed:
            text = self._texts[row.id] = _Text([{} for _ in self._orders], max(0, len(row.history) - 1) if known else 0)
        newest = len(row.history) - 1  # an n-gram that ends there has nothing behind it yet
        if newest > text.indexed:
            for ends, order in zip(text.ends, self._orders, strict=True):
                first = max(text.indexed, order - 1)
                ends.update(zip(_keys(row.history, first, newest, order), range(first + 1, newest + 1), strict=True))
            text.indexed = newest

    def _shared(self, row: Row) -> bool:
        """Enter what the row has sampled since into its family's index; a prompt is entered once, by whoever comes first with it. False: it is not in one."""
        if self._families is None or row.family is None:
            return False
        family = self._families.setdefault(row.family, _Family(ends=[{} for _ in self._orders]))
        if row.id not in family.running:
            family.running.add(row.id)
            self._of[row.id] = row.family
        place = family.places.get(row.id)
        if place is None:
            if family.tokens + len(row.history) > _FAMILY_TOKENS:
                return False
            place = (len(family.texts), _common(family.texts[0], row.history) if family.texts else 0)
            family.texts.append(row.history)
        index, done = place
        family.texts[index] = row.history
        newest = len(row.history) - 1
        if newest > done:
            for ends, order in zip(family.ends, self._orders, strict=True):
                first = max(done, order - 1)
                ends.update(zip(_keys(row.history, first, newest, order), ((index, end) for end in range(first + 1, newest + 1)), strict=True))
            family.tokens += newest - done
        family.places[row.id] = (index, max(done, newest))
        return True

    def _found(self, row: Row, limit: int) -> list[int] | None:
        text = self._texts[row.id]
        family = self._families.get(row.family) if self._families is not None and row.family is not None else None
        for i, order in enumerate(self._orders):
            if len(row.history) < order:
                continue
            last = _keys(row.history, len(row.history) - 1, len(row.history), order)[0]
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


def _keys(tokens: array[int], first: int, last: int, order: int) -> list[int]:
    """64-bit keys of the n-grams of `order` that end at first .. last - 1 (first >= order - 1). Two n-grams with one key would be a wrong guess, no more."""
    if last <= first:
        return []
    part = tokens[first + 1 - order : last]
    if last - first >= _MANY:
        wide = np.frombuffer(part, dtype=np.dtype(f"i{part.itemsize}")).astype(np.uint64)
        keys = np.zeros(last - first, dtype=np.uint64)
        for j in range(order):
            keys = keys * np.uint64(_FACTOR) + wide[j : j + last - first] + np.uint64(1)
        found: list[int] = keys.tolist()
        return found
    found = []
    for i in range(last - first):
        key = 0
        for token in part[i : i + order]:
            key = (key * _FACTOR + token + 1) & _WORD
        found.append(key)
    return found


def _common(a: array[int], b: array[int]) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    one, two = (np.frombuffer(x[:length], dtype=np.dtype(f"i{x.itemsize}")) for x in (a, b))
    return int((one != two).argmax())
