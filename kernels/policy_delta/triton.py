# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""The policy-delta operators as Triton kernels: one launch for any number of spans, by a table of their addresses.

Comparing is two passes, and the second reads almost nothing. `_find` reads both spans once, packs one bit an element into words, walks the set bits
while the block's lines are still in the cache, writes what is to be written in place (changed elements only), and leaves the block's changes in a
place of its own and their count; the counts are summed up; `_collect` moves the changes to where the sums say. So the order is that of the
positions, whatever the schedule. Bytes moved an element, rounding fp32 to bfloat16: 6, the sectors written, and 14 a change.

bfloat16 is rounded in integers, to nearest and ties to even, a NaN to 0x7FFF: what the card's own conversion gives, so what
`tensor.to(torch.bfloat16)` gives there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from driftline.kernels.policy_delta.spans import BITS, Rounding, SpanChanges, checked

__all__ = ["Comparison", "Table", "apply_xor", "fingerprint", "put"]

BLOCK = 4096
"""Elements of a span that one program compares; a position in a block fits an int16."""

_NEAR = 8
"""A block of at most 1 / 8 changes keeps them beside it in the first pass; of one with more, only the marks are kept."""

_WARPS, _COLLECT_WARPS, _GROUP, _CHUNK = 4, 4, 8, 64
_SCATTER = 1024
_WORDS = 4096
_ROUNDINGS = {Rounding.NONE: 0, Rounding.BFLOAT16: 1, Rounding.BFLOAT16_IN_FLOAT32: 2}


@triton.jit
def _integers(address, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to integers of WIDTH bytes at an address that was read from memory."""
    if WIDTH == 1:
        pointer = address.to(tl.pointer_type(tl.int8))
    elif WIDTH == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _bfloat16(word):
    """The bits of an fp32, int32, rounded to bfloat16: int32 from 0 to 65535."""
    bits = word.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded)
    return rounded.to(tl.int32)


@triton.jit
def _pair(old, new, at, mask, MASKED: tl.constexpr, WIDTH: tl.constexpr, ROUNDING: tl.constexpr):
    """The bits that are held and the bits that are wanted at the given positions."""
    if MASKED:
        before = tl.load(old + at, mask=mask, other=0)
        after = tl.load(new + at, mask=mask, other=0)
    else:
        before = tl.load(old + at)
        after = tl.load(new + at)
    if ROUNDING == 0:
        return before, after
    elif ROUNDING == 1:
        return before, _bfloat16(after).to(tl.int16)
    else:
        return (before >> 16).to(tl.int16), _bfloat16(after).to(tl.int16)


@triton.jit
def _population(word):
    """How many bits of an int32 are set, without the instruction that the interpreter lacks."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _marks(old, new, first, elements, MASKED: tl.constexpr, WIDTH: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    bit = tl.arange(0, 32)[None, :]
    at = first + tl.arange(0, BLOCK // 32)[:, None] * 32 + bit
    before, after = _pair(old, new, at, at < elements, MASKED, WIDTH, ROUNDING)
    return tl.sum((before != after).to(tl.int32) << bit, axis=1)


@triton.jit
def _walk(old, new, first, word, population, slot, at_out, xor_out, origin, lists, WIDTH: tl.constexpr, ROUNDING: tl.constexpr, WRITE: tl.constexpr,
          BLOCK: tl.constexpr):
    """The set bits of a block's words, one of every word at a time: list what each marks from `slot` on, its position less `origin`, and
    write it. (Four at a time was 4 % quicker at 1 % of changes and 15 % slower at 4 %.)"""
    place = first + tl.arange(0, BLOCK // 32) * 32
    for _ in range(tl.max(population, axis=0)):
        live = word != 0
        at = place + _population((word & -word) - 1)
        before, after = _pair(old, new, at, live, True, WIDTH, ROUNDING)
        tl.store(at_out + slot, (at - origin).to(at_out.dtype.element_ty), mask=live & lists)
        tl.store(xor_out + slot, before ^ after, mask=live & lists)
        if WRITE:
            if ROUNDING == 2:
                tl.store(old + at, after.to(tl.int32) << 16, mask=live)
            else:
                tl.store(old + at, after, mask=live)
        word = word & (word - 1)
        slot += 1


@triton.jit
def _find(table, row_of, counts, words, near_at, near_xor, WIDTH: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, ROUNDING: tl.constexpr,
          WRITE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, NEAR: tl.constexpr):
    block = tl.program_id(0)
    row = table + tl.load(row_of + block).to(tl.int64) * 4
    old = _integers(tl.load(row), OLD, ALIGNED)
    new = _integers(tl.load(row + 1), NEW, ALIGNED)
    elements = tl.load(row + 2).to(tl.int32)
    first = (block - tl.load(row + 3).to(tl.int32)) * BLOCK
    if first + BLOCK <= elements:
        word = _marks(old, new, first, elements, False, WIDTH, ROUNDING, BLOCK)
    else:
        word = _marks(old, new, first, elements, True, WIDTH, ROUNDING, BLOCK)
    population = _population(word)
    count = tl.sum(population, axis=0)
    tl.store(counts + block, count)
    if count <= NEAR:
        slot = block.to(tl.int64) * NEAR + (tl.cumsum(population, axis=0) - population)
        _walk(old, new, first, word, population, slot, near_at, near_xor, first, word == word, WIDTH, ROUNDING, WRITE, BLOCK)
    else:
        tl.store(words + block.to(tl.int64) * (BLOCK // 32) + tl.arange(0, BLOCK // 32), word)


@triton.jit
def _collect(table, row_of, listed, counts, words, near_at, near_xor, starts, at_out, xor_out, blocks, WIDTH: tl.constexpr, OLD: tl.constexpr,
             NEW: tl.constexpr, ROUNDING: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr, NEAR: tl.constexpr, GROUP: tl.constexpr,
             CHUNK: tl.constexpr):
    """GROUP blocks a program: a block has few changes, and what takes the time is to learn where they go."""
    block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    inside = block < blocks
    number = tl.load(row_of + block, mask=inside, other=0).to(tl.int64)
    first = (block - tl.load(table + number * 4 + 3).to(tl.int32)) * BLOCK
    total = tl.load(counts + block, mask=inside, other=0)
    start = tl.load(starts + block, mask=inside, other=0)
    count = tl.where((total <= NEAR) & (tl.load(listed + number) != 0), total, 0)
    for begin in range(0, tl.max(count, axis=0), CHUNK):
        i = begin + tl.arange(0, CHUNK)[None, :]
        mask = i < count[:, None]
        near = block[:, None].to(tl.int64) * NEAR + i
        to = start[:, None] + i
        tl.store(at_out + to, first[:, None] + tl.load(near_at + near, mask=mask, other=0).to(tl.int32), mask=mask)
        tl.store(xor_out + to, tl.load(near_xor + near, mask=mask, other=0), mask=mask)
    if tl.max(total, axis=0) > NEAR:
        for k in range(GROUP):
            one = tl.program_id(0) * GROUP + k
            if tl.load(counts + one, mask=one < blocks, other=0) > NEAR:
                which = tl.load(row_of + one).to(tl.int64)
                row = table + which * 4
                index = tl.arange(0, BLOCK // 32)
                word = tl.load(words + one.to(tl.int64) * (BLOCK // 32) + index)
                population = _population(word)
                slot = tl.load(starts + one) + (tl.cumsum(population, axis=0) - population)
                _walk(_integers(tl.load(row), OLD, False), _integers(tl.load(row + 1), NEW, False), (one - tl.load(row + 3).to(tl.int32)) * BLOCK,
                      word, population, slot, at_out, xor_out, 0, tl.load(listed + which + 0 * index) != 0, WIDTH, ROUNDING, WRITE, BLOCK)


@triton.jit(do_not_specialize=["rows", "steps"])
def _scatter(addresses, starts, at_in, values, rows, steps, WIDTH: tl.constexpr, XOR: tl.constexpr, BLOCK: tl.constexpr):
    """Each change finds its span by bisection: the table is small and stays in the cache, and no span costs a launch."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.load(starts + rows)
    low = tl.zeros((BLOCK,), tl.int32)
    high = tl.zeros((BLOCK,), tl.int32) + rows
    for _ in range(steps):
        middle = (low + high) // 2
        right = tl.load(starts + middle, mask=inside, other=0) <= i
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    pointer = _integers(tl.load(addresses + low, mask=inside, other=0), WIDTH, False) + tl.load(at_in + i, mask=inside, other=0)
    value = tl.load(values + i, mask=inside, other=0)
    if XOR:
        value = value ^ tl.load(pointer, mask=inside, other=0)
    tl.store(pointer, value, mask=inside)


@triton.jit
def _factor(i):
    x = i.to(tl.uint32) * 0x9E3779B1
    x = x ^ (x >> 15)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    return (x | 1).to(tl.int64)


@triton.jit
def _bytes_word(address, i, size):
    """Word i of a span by its bytes: for the end of a span, and for one that does not lie on a word."""
    word = tl.zeros_like(i)
    for k in tl.static_range(4):
        at = 4 * i + k
        byte = tl.load(_integers(address, 1, False) + at, mask=at < size, other=0).to(tl.int32) & 0xFF
        word = word | (byte << (8 * k))
    return word


@triton.jit
def _fingerprint(table, row_of, sums, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    number = tl.load(row_of + block).to(tl.int64)
    row = table + number * 3
    address = tl.load(row)
    size = tl.load(row + 1)
    i = (block - tl.load(row + 2).to(tl.int32)) * BLOCK + tl.arange(0, BLOCK)
    if ALIGNED:
        whole = (size // 4).to(tl.int32)
        if (block + 1 - tl.load(row + 2).to(tl.int32)) * BLOCK <= whole:
            word = tl.load(_integers(address, 4, True) + i)
        else:
            word = tl.load(_integers(address, 4, True) + i, mask=i < whole, other=0)
            word = word | tl.where(i == whole, _bytes_word(address, tl.where(i == whole, i, 0), size), 0)
    else:
        word = _bytes_word(address, i, size)
    unsigned = word.to(tl.int64) & 0xFFFFFFFF
    tl.atomic_add(sums + number, tl.sum(unsigned * _factor(i), axis=0))


class Table:
    """The addresses of spans, on the device. Holds the tensors, so that the addresses stay theirs."""

    def __init__(self, spans: Sequence[torch.Tensor], addresses: torch.Tensor | None = None) -> None:
        """`addresses` int64 [spans]: where they are on the device already."""
        self.spans = tuple(spans)
        self.width = spans[0].element_size()
        self.addresses = torch.tensor([s.data_ptr() for s in spans], dtype=torch.int64).to(spans[0].device) if addresses is None else addresses


class Comparison:
    """Pairs of spans that are compared again and again, as after every step of an optimizer: their table is built once."""

    def __init__(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], rounding: Rounding = Rounding.NONE, *, dense_share: float = 1.0) -> None:
        """As `reference.compare`. At least one span."""
        checked(old, new, rounding)
        self._old, self._new, self._rounding = tuple(old), tuple(new), rounding
        self._device = old[0].device
        sizes = torch.tensor([span.numel() for span in old], dtype=torch.int64)
        blocks = (sizes + (BLOCK - 1)) // BLOCK
        ends = blocks.cumsum(0)
        addresses = [torch.tensor([span.data_ptr() for span in side], dtype=torch.int64) for side in (old, new)]
        self._aligned = not any(bool((side % 16).any()) for side in addresses)
        self._blocks = int(ends[-1])
        self._table = torch.stack([*addresses, sizes, ends - blocks], 1).to(self._device)
        self._row_of = torch.repeat_interleave(torch.arange(len(old), dtype=torch.int32), blocks).to(self._device)
        self._last = (ends - 1).to(self._device)
        limits = (sizes.double() * dense_share).floor().long()
        self._limit = limits.to(self._device)
        self._at_most = int(limits.sum())

    def run(self, *, write: bool = False, wait: bool = True) -> SpanChanges:
        """What differs now. With `wait` the result is exactly as long as it must be, for which the device is waited for; without, as long as
        it could be, and nothing is waited for. Runs on the current stream."""
        options = {
            "WIDTH": self._rounding.width(self._old[0]), "OLD": self._old[0].element_size(), "NEW": self._new[0].element_size(),
            "ROUNDING": _ROUNDINGS[self._rounding], "BLOCK": BLOCK,
        }
        grid, near = (self._blocks,), BLOCK // _NEAR
        bits = BITS[options["WIDTH"]]
        counts = torch.empty(self._blocks, dtype=torch.int32, device=self._device)
        words = torch.empty(self._blocks * (BLOCK // 32), dtype=torch.int32, device=self._device)
        near_at = torch.empty(self._blocks * near, dtype=torch.int16, device=self._device)
        near_xor = torch.empty(self._blocks * near, dtype=bits, device=self._device)
        _find[grid](self._table, self._row_of, counts, words, near_at, near_xor, ALIGNED=self._aligned, NEAR=near, WRITE=write, num_warps=_WARPS, **options)
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        changed = torch.cat([zero, counts.cumsum(0)[self._last]]).diff()
        listed = changed <= self._limit
        kept = counts * listed[self._row_of]
        ends = kept.cumsum(0)
        starts = torch.cat([zero, ends[self._last]])
        length = int(starts[-1]) if wait else self._at_most
        at = torch.empty(length, dtype=torch.int32, device=self._device)
        xor = torch.empty(length, dtype=bits, device=self._device)
        if length or write:
            _collect[(triton.cdiv(self._blocks, _GROUP),)](
                self._table, self._row_of, listed, counts, words, near_at, near_xor, ends - kept, at, xor, self._blocks, NEAR=near, WRITE=write,
                GROUP=_GROUP, CHUNK=_CHUNK, num_warps=_COLLECT_WARPS, **options,
            )
        return SpanChanges(at, xor, starts, changed)


def apply_xor(spans: Table, changes: SpanChanges) -> None:
    """XOR the changes into the spans, in place."""
    _scattered(spans, changes.at, changes.xor, changes.starts, xor=True)


def put(spans: Table, at: torch.Tensor, values: torch.Tensor, starts: torch.Tensor) -> None:
    """Set elements, as `reference.put`."""
    _scattered(spans, at, values, starts, xor=False)


def _scattered(spans: Table, at: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, *, xor: bool) -> None:
    if values.element_size() != spans.width:
        raise ValueError(f"values of {values.element_size()} bytes for spans of {spans.width}")
    if at.numel():
        rows = len(spans.spans)
        _scatter[(triton.cdiv(at.numel(), _SCATTER),)](
            spans.addresses, starts, at, values.view(BITS[spans.width]), rows, (rows - 1).bit_length(), WIDTH=spans.width, XOR=xor, BLOCK=_SCATTER,
        )


def fingerprint(spans: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [spans], as `reference.fingerprint`."""
    device = spans[0].device
    sizes = torch.tensor([span.numel() * span.element_size() for span in spans], dtype=torch.int64)
    blocks = (sizes + (4 * _WORDS - 1)) // (4 * _WORDS)
    ends = blocks.cumsum(0)
    addresses = torch.tensor([span.data_ptr() for span in spans], dtype=torch.int64)
    table = torch.stack([addresses, sizes, ends - blocks], 1).to(device)
    row_of = torch.repeat_interleave(torch.arange(len(spans), dtype=torch.int32), blocks).to(device)
    sums = torch.zeros(len(spans), dtype=torch.int64, device=device)
    if int(ends[-1]):
        _fingerprint[(int(ends[-1]),)](table, row_of, sums, ALIGNED=not bool((addresses % 16).any()), BLOCK=_WORDS)
    return sums
