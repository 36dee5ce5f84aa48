# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""XOR of spans against their base, in place, with every block's count of changed elements: each byte is read once and written once.

An element costs 2 reads and 1 write of its width, and an int32 a block. Inside a span everything is 32-bit words, 16 bytes an access, and the elements of
a word are counted without being taken apart; the last tile of a span, and a table with a span off 16 bytes, go element by element. One program a tile,
one store a block: no atomics, and a span's bytes and counts depend on that span alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from driftline.kernels.policy_delta.spans import BITS, Rounding, checked, checked_block
from driftline.kernels.policy_delta.triton import _integers

__all__ = ["CONFIGURATIONS", "DEFAULT", "Configuration", "Xor", "xor"]


class Configuration(NamedTuple):
    """32-bit words of a tile that are in registers at once, and warps a program."""

    words: int
    warps: int


DEFAULT = Configuration(4096, 8)
CONFIGURATIONS = (DEFAULT, Configuration(2048, 4), Configuration(1024, 4))
"""What runs, and what the benchmark's sweep times beside it."""


@triton.jit
def _changed(x, WIDTH: tl.constexpr):
    """How many elements of a word are not zero: for elements of 4 bytes as it is, else in two halves of 16 bits that can be added up separately."""
    if WIDTH == 4:
        return (x != 0).to(tl.int32)
    elif WIDTH == 2:
        top = x | ((x & 0x7FFF7FFF) + 0x7FFF7FFF)
        return (top >> 15) & 0x00010001
    else:
        top = x | ((x & 0x7F7F7F7F) + 0x7F7F7F7F)
        return ((top >> 7) & 0x00010001) + ((top >> 15) & 0x00010001)


@triton.jit
def _wide(base, new, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr):
    """A whole tile, by words. Returns the counts [ROWS]."""
    at = tl.arange(0, ROWS)[:, None] * (COLS * STEPS) + tl.arange(0, COLS)[None, :]
    packed = tl.zeros((ROWS, COLS), tl.int32)
    for step in range(STEPS):
        held = tl.load(base + at + step * COLS, eviction_policy="evict_first")
        x = tl.load(new + at + step * COLS, eviction_policy="evict_first") ^ held
        tl.store(new + at + step * COLS, x)
        packed += _changed(x, WIDTH)
    total = tl.sum(packed, axis=1)
    return total if WIDTH == 4 else (total & 0xFFFF) + ((total >> 16) & 0xFFFF)


@triton.jit
def _narrow(base, new, counts, elements, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """A tile that ends early (after `elements`) or lies off 16 bytes, few elements at a time: it must not cost the whole tiles registers. Stores the
    counts of its blocks."""
    for row in range(ROWS):
        begin = row * BLOCK
        if begin < elements:
            count = tl.zeros((CHUNK,), tl.int32)
            for step in range(BLOCK // CHUNK):
                at = begin + step * CHUNK + tl.arange(0, CHUNK)
                held = tl.load(base + at, mask=at < elements, other=0)
                x = tl.load(new + at, mask=at < elements, other=0) ^ held
                tl.store(new + at, x, mask=at < elements)
                count += (x != 0).to(tl.int32)
            tl.store(counts + row, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["base", "new", "elements"])
def _xor(table, row_of, base, new, elements, counts, TABLE: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
         STEPS: tl.constexpr):
    """ROWS blocks of COLS * STEPS words a program. `table` int64 [spans, 5]: addresses of base and new, elements, first tile, first block."""
    tile = tl.program_id(0).to(tl.int64)
    block = tile * ROWS
    if TABLE:
        row = table + tl.load(row_of + tile).to(tl.int64) * 5
        base = tl.load(row)
        new = tl.load(row + 1)
        elements = tl.load(row + 2)
        tile = tile - tl.load(row + 3)
        block = tl.load(row + 4) + tile * ROWS
    PER: tl.constexpr = 4 // WIDTH
    WORDS: tl.constexpr = ROWS * COLS * STEPS
    # From the tile's first element on everything is counted in 32 bits, however long the span is.
    left = tl.minimum(elements - tile * (WORDS * PER), WORDS * PER).to(tl.int32)
    whole = ALIGNED and left == WORDS * PER
    if whole:
        count = _wide(_integers(base, 4, True) + tile * WORDS, _integers(new, 4, True) + tile * WORDS, ROWS, COLS, STEPS, WIDTH)
        tl.store(counts + block + tl.arange(0, ROWS), count)
    else:
        BLOCK: tl.constexpr = COLS * STEPS * PER
        CHUNK: tl.constexpr = BLOCK if BLOCK < 1024 else 1024
        first = tile * (WORDS * PER)
        _narrow(_integers(base, WIDTH, False) + first, _integers(new, WIDTH, False) + first, counts + block, left, ROWS, BLOCK, CHUNK)


def _shape(block: int, width: int, configuration: Configuration) -> tuple[int, int, int]:
    """Blocks a program, words of a block that are in registers at once, and how often."""
    words = block * width // 4
    cols = min(words, configuration.words)
    return max(1, configuration.words // words), cols, words // cols


def xor(base: torch.Tensor, new: torch.Tensor, *, block: int, configuration: Configuration = DEFAULT) -> torch.Tensor:
    """As `reference.xor_blocks` of one span: one launch, no table, nothing is waited for."""
    checked([base], [new], Rounding.NONE, longest=None)
    checked_block(block)
    width, elements = base.element_size(), base.numel()
    rows, cols, steps = _shape(block, width, configuration)
    counts = torch.empty(triton.cdiv(elements, block), dtype=torch.int32, device=base.device)
    _xor[(triton.cdiv(elements, rows * block),)](
        counts, counts, base.data_ptr(), new.data_ptr(), elements, counts, TABLE=False, ALIGNED=(base.data_ptr() | new.data_ptr()) % 16 == 0,
        WIDTH=width, ROWS=rows, COLS=cols, STEPS=steps, num_warps=configuration.warps,
    )
    return counts


class Xor:
    """Pairs of spans that are combined again and again: their table is built once. The spans must stay where they are."""

    def __init__(self, base: Sequence[torch.Tensor], new: Sequence[torch.Tensor], *, block: int, configuration: Configuration = DEFAULT) -> None:
        """As `reference.xor_blocks`. At least one span."""
        checked(base, new, Rounding.NONE, longest=None)
        checked_block(block)
        self._spans, self._warps = (tuple(base), tuple(new)), configuration.warps
        self._width, self._device = base[0].element_size(), base[0].device
        self._shape = _shape(block, self._width, configuration)
        sizes = torch.tensor([span.numel() for span in base], dtype=torch.int64)
        blocks, tiles = ((sizes + (n - 1)) // n for n in (block, self._shape[0] * block))
        addresses = [torch.tensor([span.data_ptr() for span in side], dtype=torch.int64) for side in (base, new)]
        self._aligned = not any(bool((side % 16).any()) for side in addresses)
        self._blocks, self._tiles = int(blocks.sum()), int(tiles.sum())
        table = torch.stack([*addresses, sizes, tiles.cumsum(0) - tiles, blocks.cumsum(0) - blocks], 1)
        self._table = table.to(self._device)
        self._row_of = torch.repeat_interleave(torch.arange(len(base), dtype=torch.int32), tiles).to(self._device)

    def run(self) -> torch.Tensor:
        """int32 [blocks of all spans]. One launch on the current stream; nothing is waited for."""
        counts = torch.empty(self._blocks, dtype=torch.int32, device=self._device)
        rows, cols, steps = self._shape
        _xor[(self._tiles,)](
            self._table, self._row_of, 0, 0, 0, counts, TABLE=True, ALIGNED=self._aligned, WIDTH=self._width, ROWS=rows, COLS=cols, STEPS=steps,
            num_warps=self._warps,
        )
        return counts


assert set(BITS) == {1, 2, 4}, "a word holds whole elements of every width"
