"""RANKED: changed elements by their rank among elements of the same exponent, coded within a few per cent of what entropy allows.

A step of the optimizer is about as long for every weight, so it moves a small weight by ulps and leaves a large one as it is. Sorted by
the exponent of the *old* weight, which the reader has too, each bucket changes at random with its own probability: the positions cost
half of what they do without knowing the exponent. One primitive codes everything but signs: *which m of these n*, as
Rice-coded gaps of the rarer side. Positions are one such subset per bucket; a magnitude's levels are nested subsets, "of those that
moved by at least j, which moved further". The format byte by byte, and why it is so: docs/delta_format.md.

RANKED is exact for any bits (a difference is an integer modulo 2^width), but not its own inverse, unlike SPARSE and DENSE: it can only
be applied to the weights it was made against.

This is the reference, in numpy. `native_ranked.h` writes the same bytes and refuses the same payloads.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.messages.errors import IntegrityError
from driftline.policy_store.forms import Changes

__all__ = ["BUCKETS", "EXPONENT_MOST", "NO_EXPONENT", "ROOM", "Elements", "ranked_changes", "ranked_encode", "ranked_window"]

BUCKETS = 16
"""Exponents from `top` down; the last bucket has all below. Sizes are flat from 14 buckets up."""

LAYERS = 32
"""Levels coded as subsets; what lies above is spelled out."""

TAIL = 16
"""With so few left, a subset's line in the head would cost more than it saves: their levels are spelled out."""

TAIL_MOST = 24
"""A level this far above the last layer is an escape: the magnitude follows in whole bytes."""

LOW_MOST = 48
"""Low bits of a magnitude kept apart from its level; with the sign they still fit one 64-bit read at any bit."""

OUTLIERS = 256
"""One element in so many may lie above `top`: an infinity or a few large weights must not empty the buckets."""

ROOM = 64
"""A head may make a shard of a few elements larger than it was; the planes of the other forms have more of them."""

EXPONENT_MOST = 11
"""Bits of an exponent, as float64 has them."""

NO_EXPONENT = (0, 0)
_SAMPLE = 64
_HEAD = struct.Struct("<BBHH")

Elements = npt.NDArray[np.unsignedinteger[Any]]
_Ints = npt.NDArray[np.int64]
_Bits = npt.NDArray[np.uint8]


class _Window(NamedTuple):
    low: int
    bits: int
    top: int

    def keys(self, elements: Elements) -> npt.NDArray[np.uint8]:
        """The bucket of each element."""
        exponent = (elements >> np.asarray(self.low, elements.dtype)).astype(np.int64) & ((1 << self.bits) - 1)
        keys: npt.NDArray[np.uint8] = np.clip(self.top - exponent, 0, BUCKETS - 1).astype(np.uint8)
        return keys


def ranked_window(payload: bytes | memoryview) -> tuple[int, int]:
    """The exponent field (lowest bit, bits) that a payload was coded by."""
    if len(payload) < _HEAD.size:
        raise _malformed("too short")
    low, bits, _, _ = _HEAD.unpack_from(payload)
    return low, bits


# ---------------------------------------------------------------- writing


@dataclass
class _Writer:
    head: bytearray = field(default_factory=bytearray)
    low: list[_Bits] = field(default_factory=list)
    unary: list[_Ints] = field(default_factory=list)
    escapes: list[bytes] = field(default_factory=list)

    def subset(self, chosen: _Ints, n: int, *, first: bool) -> None:
        """Which of n, by their ascending positions. `first`: of a bucket, whose size the reader does not know."""
        inverted = 2 * chosen.size > n
        coded = _others(chosen, n) if inverted else chosen
        self.head += _varint(2 * (chosen.size if first else coded.size) + inverted)
        if first and inverted:
            self.head += _varint(coded.size)
        if coded.size == 0:
            return
        gaps = np.diff(coded, prepend=-1) - 1
        k = _rice(n, coded.size)
        if first:
            # Changes that come in runs want a smaller parameter than changes at random.
            k = min(range(max(0, k - 3), k + 1), key=lambda k: int((gaps >> k).sum()) + coded.size * (k + 1))
            self.head.append(k)
        self.unary.append(gaps >> k)
        self.low.append(_to_bits(gaps & ((1 << k) - 1), k))

    def bucket(self, ranks: _Ints, differences: Elements, n: int) -> None:
        self.subset(ranks, n, first=True)
        above = np.minimum(differences, -differences).astype(np.uint64) - np.uint64(1)
        lengths = int(_bit_length(above).sum())
        kept = min(max(lengths // above.size - (2 if above.size > TAIL else 1), 0), LOW_MOST)
        self.head.append(kept)
        negative = differences.astype(np.uint64) != above + np.uint64(1)
        self.low.append(_to_bits((above & np.uint64((1 << kept) - 1)) << np.uint64(1) | negative, kept + 1))
        level = above >> np.uint64(kept)
        layer = 0
        while above.size > TAIL and layer < LAYERS:
            further = np.flatnonzero(level > layer)
            self.subset(further, level.size, first=False)
            above, level = above[further], level[further]
            layer += 1
        rest = np.minimum(level - np.uint64(layer), np.uint64(TAIL_MOST)).astype(np.int64)
        self.unary.append(rest)
        escaped = above[rest == TAIL_MOST] + np.uint64(1)
        self.escapes.append(escaped.astype(differences.dtype).tobytes())


def ranked_encode(base: Elements, changes: Changes, exponent: tuple[int, int]) -> bytes | None:
    """The payload that makes `changes`, at least one, to `base`, or None when it would be larger than the shard and `ROOM`.

    `exponent` is (lowest bit, bits) of the dtype's exponent, `NO_EXPONENT` for one bucket.
    """
    window = _Window(*exponent, _top(base, *exponent))
    keys = window.keys(base)
    changed_keys = keys[changes.at]
    differences = (base[changes.at] ^ changes.xor) - base[changes.at]
    writer = _Writer()
    present = 0
    for bucket in range(BUCKETS):
        members = np.flatnonzero(changed_keys == bucket)
        if members.size:
            present |= 1 << bucket
            elements = np.flatnonzero(keys == bucket)
            writer.bucket(np.searchsorted(elements, changes.at[members]).astype(np.int64), differences[members], elements.size)
    escapes = b"".join(writer.escapes)
    payload = b"".join([
        _HEAD.pack(*window, present), _varint(len(writer.head)), _varint(len(escapes) // base.itemsize), bytes(writer.head),
        np.packbits(np.concatenate(writer.low), bitorder="little").tobytes(), _unary(np.concatenate(writer.unary)), escapes,
    ])
    return payload if len(payload) <= base.nbytes + ROOM else None


def _top(base: Elements, low: int, bits: int) -> int:
    """The smallest exponent that at most one in `OUTLIERS` of a sample of `base` exceed."""
    if bits == 0:
        return 0
    step = max(base.size // _SAMPLE, _SAMPLE)
    whole = base.size // step * step
    sample = np.concatenate([base[:whole].reshape(-1, step)[:, :_SAMPLE].reshape(-1), base[whole:][:_SAMPLE]])
    counts = np.bincount((sample >> np.asarray(low, base.dtype)).astype(np.int64) & ((1 << bits) - 1), minlength=1 << bits)
    above = sample.size - np.cumsum(counts)
    return int(np.argmax(above <= sample.size // OUTLIERS))


def _rice(n: int, c: int) -> int:
    """The best Rice parameter for c of n at random: A. Kiely, "Selecting the Golomb Parameter in Rice Coding" (2004), in integers."""
    return max(((2 * n - c) * 12 // (25 * c)).bit_length() - 1, 0)


def _others(chosen: _Ints, n: int) -> _Ints:
    kept = np.ones(n, np.bool_)
    kept[chosen] = False
    return np.flatnonzero(kept)


def _bit_length(values: npt.NDArray[np.uint64]) -> _Ints:
    return np.searchsorted(np.uint64(1) << np.arange(64, dtype=np.uint64), values, side="right")


def _to_bits(values: npt.NDArray[Any], width: int) -> _Bits:
    """`width` bits of each value, lowest first."""
    shifts = np.arange(width, dtype=np.uint64)
    return (values.astype(np.uint64)[:, None] >> shifts & np.uint64(1)).astype(np.uint8).reshape(-1)


def _unary(counts: _Ints) -> bytes:
    """So many zeros and a one, for each count."""
    ends = np.cumsum(counts + 1)
    bits = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
    bits[ends - 1] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


# ---------------------------------------------------------------- reading


class _Subset(NamedTuple):
    """A subset's line of the head: `chosen` of `of` elements, of which `codes` are coded."""

    chosen: int
    of: int
    codes: int
    inverted: bool
    k: int


@dataclass
class _Bucket:
    ranks: _Subset
    kept: int
    layers: list[_Subset]

    @property
    def tail(self) -> int:
        return self.layers[-1].chosen if self.layers else self.ranks.chosen

    @property
    def low_bits(self) -> int:
        return sum(part.codes * part.k for part in [self.ranks, *self.layers]) + self.ranks.chosen * (self.kept + 1)

    @property
    def codes(self) -> int:
        return sum(part.codes for part in [self.ranks, *self.layers]) + self.tail


class _Head:
    """The bytes of a head, read one line after the other."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def byte(self, most: int) -> int:
        if self.at >= len(self.data) or self.data[self.at] > most:
            raise _malformed("its head")
        self.at += 1
        return self.data[self.at - 1]

    def varint(self, most: int) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = self.byte(255)
            value |= (byte & 127) << shift
            if byte < 128:
                if value > most:
                    raise _malformed(f"a count of {value}, of at most {most}")
                return value
        raise _malformed("a count without end")

    def subset(self, n: int, *, first: bool) -> _Subset:
        count, inverted = divmod(self.varint(2 * n + 1), 2)
        codes = self.varint(n) if first and inverted else count
        chosen = count if first or not inverted else n - codes
        of = chosen + codes if first and inverted else n
        if codes > n or chosen > n or of > n or (first and chosen == 0):
            raise _malformed(f"{chosen} of {n}")
        if codes == 0:
            k = 0
        else:
            k = self.byte(31) if first else _rice(n, codes)
        return _Subset(chosen, of, codes, bool(inverted), k)


class _Streams:
    """The low bits and the zero runs, read in the order they were written."""

    def __init__(self, low: memoryview, runs: _Ints) -> None:
        self.bits = np.unpackbits(np.frombuffer(low, np.uint8), bitorder="little")
        self.low_at, self.runs, self.run_at = 0, runs, 0

    def low(self, count: int, width: int) -> npt.NDArray[np.uint64]:
        bits = self.bits[self.low_at : self.low_at + count * width].reshape(count, width)
        self.low_at += count * width
        values: npt.NDArray[np.uint64] = (bits.astype(np.uint64) << np.arange(width, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
        return values

    def zeros(self, count: int) -> _Ints:
        self.run_at += count
        return self.runs[self.run_at - count : self.run_at]

    def subset(self, subset: _Subset) -> _Ints:
        gaps = (self.zeros(subset.codes) << subset.k) + self.low(subset.codes, subset.k).astype(np.int64)
        # A gap alone may pass the end by far; clipped, the sum of all cannot overflow.
        positions = np.cumsum(np.minimum(gaps, subset.of) + 1) - 1
        if positions.size and positions[-1] >= subset.of:
            raise _malformed(f"positions beyond {subset.of}")
        return _others(positions, subset.of) if subset.inverted else positions


def ranked_changes(payload: bytes | memoryview, base: Elements) -> Changes:
    """What a payload does to `base`, which is only read."""
    view = memoryview(payload)
    width = base.itemsize
    if len(view) < _HEAD.size:
        raise _malformed("too short")
    low, bits, top, present = _HEAD.unpack_from(view)
    if low >= 8 * width or bits > 16 or low + bits > 8 * width or present == 0 or top >> bits:
        raise _malformed(f"exponent {top} of {bits} bits from bit {low}, buckets {present:#x}")
    head = _Head(view[_HEAD.size :])
    size, escapes = head.varint(len(view)), head.varint(len(view))
    rest = head.data[head.at :]
    if size > len(rest):
        raise _malformed("its head is cut off")
    plan = _plan(rest[:size], present, base.size)
    rest = rest[size:]
    low_bytes = (sum(bucket.low_bits for bucket in plan.values()) + 7) // 8
    if low_bytes + escapes * width > len(rest):
        raise _malformed(f"{len(rest)} bytes for {low_bytes} and {escapes} escapes")
    unary = np.unpackbits(np.frombuffer(rest[low_bytes : len(rest) - escapes * width], np.uint8), bitorder="little")
    ones = np.flatnonzero(unary)
    if ones.size != sum(bucket.codes for bucket in plan.values()):
        raise _malformed(f"{ones.size} codes")
    streams = _Streams(rest[:low_bytes], np.diff(ones, prepend=-1) - 1)
    escaped = np.frombuffer(rest[len(rest) - escapes * width :], base.dtype)
    keys = _Window(low, bits, top).keys(base)
    at, differences = [], []
    for key, bucket in plan.items():
        ranks = streams.subset(bucket.ranks)
        found, escaped = _differences(bucket, streams, escaped, base.dtype)
        elements = np.flatnonzero(keys == key)
        if (bucket.ranks.inverted and elements.size != bucket.ranks.of) or int(ranks[-1]) >= elements.size:
            raise _malformed(f"a bucket of {bucket.ranks.of} is one of {elements.size}")
        at.append(elements[ranks])
        differences.append(found)
    if escaped.size:
        raise _malformed(f"{escaped.size} escapes too many")
    where = np.concatenate(at)
    order = np.argsort(where)
    where = where[order]
    old = base[where]
    return Changes(where.astype(np.int32), old ^ (old + np.concatenate(differences)[order]))


def _plan(data: memoryview, present: int, n: int) -> dict[int, _Bucket]:
    head = _Head(data)
    plan = {}
    changed = 0
    for key in (key for key in range(BUCKETS) if present >> key & 1):
        ranks = head.subset(n, first=True)
        bucket = _Bucket(ranks, head.byte(LOW_MOST), [])
        while bucket.tail > TAIL and len(bucket.layers) < LAYERS:
            bucket.layers.append(head.subset(bucket.tail, first=False))
        changed += ranks.chosen
        plan[key] = bucket
    if head.at != len(data) or changed > n:
        raise _malformed(f"a head of {len(data)} bytes for {changed} elements")
    return plan


def _differences(bucket: _Bucket, streams: _Streams, escaped: Elements, dtype: np.dtype[Any]) -> tuple[Elements, Elements]:
    """A bucket's differences, and the escapes it leaves."""
    low = streams.low(bucket.ranks.chosen, bucket.kept + 1)
    level = np.zeros(low.size, np.uint64)
    alive = np.arange(low.size)
    for layer in bucket.layers:
        alive = alive[streams.subset(layer)]
        level[alive] += np.uint64(1)
    rest = streams.zeros(alive.size)
    if rest.size and int(rest.max()) > TAIL_MOST:
        raise _malformed("a level without end")
    level[alive] += rest.astype(np.uint64)
    sizes = ((low >> np.uint64(1)) + (level << np.uint64(bucket.kept)) + np.uint64(1)).astype(dtype)
    spelled = alive[rest == TAIL_MOST]
    if spelled.size > escaped.size:
        raise _malformed("an escape is missing")
    sizes[spelled] = escaped[: spelled.size]
    found = np.where(low & np.uint64(1), -sizes, sizes)
    if not found.all():
        raise _malformed("a change that changes nothing")
    return found, escaped[spelled.size :]


def _malformed(problem: str) -> IntegrityError:
    return IntegrityError(f"not a ranked payload: {problem}", field="payload")
