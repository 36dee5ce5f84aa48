"""Which tile of the product one program computes: a table, and a choice by the shape alone.

The tile is no part of the numbers. Every tile of one operand width goes through K in the same steps of the matrix instruction, from the first to the
last and into one fp32 accumulator, so an element's bits are the same from each of them; what the choice changes is how many programs there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["FLOAT32", "HALF", "Tile", "tile_for", "tiles_of"]

_MULTIPROCESSORS = 132
"""Of a Hopper GPU in its SXM form. A constant, so that the choice is the same on every machine."""

_BYTES_A_CLOCK = 36
"""What one multiprocessor takes from L2 in a clock when all of them do: L2 gives 5,120 bytes a clock, less what its two halves exchange."""


@dataclass(frozen=True)
class Tile:
    """`rows` x `columns` of the output a program, `depth` of K a step of its pipeline of `stages`, by `warps` warps."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def clocks(self) -> float:
        """Of a multiprocessor, for 64 of K in bf16: the larger of the matrix unit's and those that bringing in both operands takes."""
        return max(self.rows * self.columns / 32, (self.rows + self.columns) * 128 / _BYTES_A_CLOCK)

    def count(self, rows: int, columns: int) -> int:
        """Programs for an output of this shape."""
        return -(-rows // self.rows) * -(-columns // self.columns)


HALF = (
    Tile(128, 256, 64, warps=8, stages=4),
    Tile(128, 128, 64, warps=4, stages=3),
    Tile(128, 64, 64, warps=4, stages=4),
    Tile(64, 128, 64, warps=4, stages=6),
    Tile(64, 64, 64, warps=4, stages=6),
    Tile(64, 32, 64, warps=4, stages=8),
)
"""For operands of 2 bytes. The pinned configurations; a sweep of `benchmarks/kernels/linear.py` times each of them at each shape."""

FLOAT32 = (Tile(64, 64, 16, warps=4, stages=3),)
"""For fp32 operands, which no matrix instruction multiplies exactly: fused multiply-adds in order, one tile for all shapes."""


def tiles_of(dtype: torch.dtype) -> tuple[Tile, ...]:
    return FLOAT32 if dtype.itemsize == 4 else HALF


def tile_for(rows: int, columns: int, dtype: torch.dtype) -> Tile:
    """The tile of the fewest clocks for an output of this shape: those of one tile times the turns that 132 multiprocessors take. The earlier in the
    table of equals."""
    return min(tiles_of(dtype), key=lambda tile: -(-tile.count(rows, columns) // _MULTIPROCESSORS) * tile.clocks())
