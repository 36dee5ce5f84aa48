"""Where sequences part: remembered without their rows, so that the next prompt that comes by leaves a state there.

A model with a recurrent state can be continued only from where a state was kept, and where that pays is known only once a second sequence has
come by and gone elsewhere. The memory is bounded; it is of tokens alone and so outlives a version: the template that every prompt begins with is
known at the first prompt under the next policy. A digest that collides costs a state in a poor place, never a wrong hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from driftline.services.rollout.prefix.keys import PAGE, CacheKey
from driftline.services.rollout.prefix.node import NOTHING, Tokens, chunk, digest_of

__all__ = ["Branches"]

REMEMBERED = 1 << 15
"""Positions: about half a kilobyte each."""


@dataclass
class _Position:
    """`then`: the tokens behind it, up to a page; `parted`: others were behind it, too."""

    then: bytes
    parted: bool = False
    repeated: bool = False


class Branches:
    def __init__(self, capacity: int = REMEMBERED) -> None:
        self._capacity = capacity
        self._positions: OrderedDict[bytes, _Position] = OrderedDict()
        self._ends: OrderedDict[bytes, None] = OrderedDict()

    def see(self, key: CacheKey, tokens: Tokens, begin: int = 0, before: bytes = NOTHING) -> None:
        """A prompt was let in. Its first `begin` tokens, whose digest is given, are cached: what lies before them was seen with whoever left them."""
        last = None
        for digest, _, then in _positions(tokens, begin, before):
            known = self._positions.get(digest)
            if known is None:
                known = self._positions[digest] = _Position(then)
            else:
                self._positions.move_to_end(digest)
                known.parted |= not _agree(known.then, then)
                if len(then) > len(known.then):
                    known.then = then
            last = (digest, known, then)
        if last is not None:
            end = blake2b(last[2] + repr(key).encode(), key=last[0], digest_size=16).digest()
            last[1].repeated |= end in self._ends
            self._ends[end] = None
            self._ends.move_to_end(end)
        while len(self._positions) > self._capacity:
            self._positions.popitem(last=False)
        while len(self._ends) > self._capacity:
            self._ends.popitem(last=False)

    def parting(self, tokens: Tokens, begin: int = 0, before: bytes = NOTHING) -> int | None:
        """The last position behind `begin`, a multiple of PAGE, where these tokens and others part, or where the same prompt comes again."""
        found = None
        for digest, position, then in _positions(tokens, begin, before):
            if position > begin and self.parts_at(digest, then):
                found = position
        return found

    def parts_at(self, digest: bytes, then: bytes) -> bool:
        """Whether others, or the same again, come behind what has this digest; `then` comes now."""
        known = self._positions.get(digest)
        return known is not None and (known.parted or known.repeated or not _agree(known.then, then))


def _positions(tokens: Tokens, begin: int, digest: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Digest of all tokens before a position from `begin` on, the position, and the tokens of the page behind it, which has at least one."""
    if begin:
        yield digest, begin, chunk(tokens, begin, begin + PAGE)
    for position in range(begin + PAGE, len(tokens), PAGE):
        digest = digest_of(digest, chunk(tokens, position - PAGE, position))
        yield digest, position, chunk(tokens, position, position + PAGE)


def _agree(a: bytes, b: bytes) -> bool:
    return a.startswith(b) or b.startswith(a)
