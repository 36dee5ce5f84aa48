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

@dataclass(frozen=True)
class Tile:
    """`rows` x `columns` of the output a program, `depth` of K a step of its pipeline of `stages`, by `warps` warps. `cost`: nanoseconds that a program
    took on an H200 for 64 of K in bf16, with a program's share of each of the 132 multiprocessors busy."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    cost: float = 1.0

    def count(self, rows: int, columns: int) -> int:
        """Programs for an output of this shape."""
        return -(-rows // self.rows) * -(-columns // self.columns)


HALF = (
    Tile(128, 256, 64, warps=8, stages=4, cost=677),
    Tile(128, 128, 64, warps=8, stages=4, cost=388),
    Tile(128, 64, 64, warps=4, stages=4, cost=314),
    Tile(64, 128, 128, warps=4, stages=4, cost=253),
    Tile(64, 64, 128, warps=4, stages=6, cost=206),
    Tile(64, 32, 256, warps=4, stages=4, cost=160),
)
"""For operands of 2 bytes. The pinned configurations; a sweep of `benchmarks/kernels/linear.py` times each of them at each shape."""

FLOAT32 = (Tile(64, 64, 16, warps=4, stages=3),)
"""For fp32 operands, which no matrix instruction multiplies exactly: fused multiply-adds in order, one tile for all shapes."""


def tiles_of(dtype: torch.dtype) -> tuple[Tile, ...]:
    return FLOAT32 if dtype.itemsize == 4 else HALF


def tile_for(rows: int, columns: int, dtype: torch.dtype) -> Tile:
    """The tile of the least time for an output of this shape: one program's times the turns that 132 multiprocessors take. The earlier in the table of
    equals."""
    return min(tiles_of(dtype), key=lambda tile: -(-tile.count(rows, columns) // _MULTIPROCESSORS) * tile.cost)
