"""The batch-invariant product at the shapes of a K3 layer, beside cuBLAS through torch: what one order of the sum for every batch costs.

    python benchmarks/kernels/linear.py [--quick] [--sweep] [--only TEXT] [--commit ID]

Up to 512 rows both are timed as replays of a graph, where a launch takes longer to issue than to run: weights larger than L2 still come from memory. The
peer is torch's `linear` or `mm`, eager, on the same tensors. `--sweep` times every pinned tile at every shape and marks the one that the rule takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from harness import Row, arguments, finish, graphed, measure

from driftline.kernels.linear import linear

GRAPHED_ROWS = 512


class Case(NamedTuple):
    """`rows` x `depth` by `depth` x `columns`; a gradient's operands are transposed."""

    name: str
    rows: int
    depth: int
    columns: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.name}, {self.rows} rows, {self.depth} to {self.columns}" + (" fp32" if self.dtype == torch.float32 else "")

    def cost(self) -> dict[str, float]:
        size = self.dtype.itemsize
        return {"flops": 2.0 * self.rows * self.depth * self.columns,
                "bytes": size * (self.rows * self.depth + self.depth * self.columns + self.rows * self.columns)}


LAYERS = (("KDA q", 7168, 12288), ("MLA kv_a", 7168, 576), ("MLA q_a", 7168, 1536), ("latent down", 7168, 3584), ("KDA o", 12288, 7168), ("dense gate", 7168, 33792))


def cases(quick: bool) -> list[Case]:
    layers = LAYERS[:2] if quick else LAYERS
    listed = [Case(f"forward {name}", rows, depth, columns) for rows in (1, 64, 512, 8192) for name, depth, columns in layers]
    listed += [Case(f"{way} {name}", 8192, depth, columns) for name, depth, columns in layers[:1] + layers[3:4] for way in ("dx", "dw")]
    return [*listed, Case("forward router", 8192, 7168, 896, torch.float32)]


def drawn(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda").mul_(columns**-0.5).to(dtype)


def calls(case: Case, tile: object = None) -> tuple[Callable[[], object], Callable[[], object]]:
    """(ours, torch's) on one set of tensors."""
    from driftline.kernels.linear.triton import matmul

    way = case.name.split()[0]
    x, weight, dy = (drawn(*shape, case.dtype) for shape in ((case.rows, case.depth), (case.columns, case.depth), (case.rows, case.columns)))
    options = {} if tile is None else {"tile": tile}
    match way:
        case "dx":
            out = torch.empty_like(x)
            return partial(matmul, dy, weight, out, b_rows=False, **options), partial(torch.mm, dy, weight)
        case "dw":
            out = torch.empty_like(weight)
            return partial(matmul, dy, x, out, a_rows=False, b_rows=False, **options), partial(torch.mm, dy.t(), x)
        case _:
            ours = partial(linear, x, weight) if tile is None else partial(matmul, x, weight, torch.empty_like(dy), **options)
            return ours, partial(torch.nn.functional.linear, x, weight)


def timed(case: Case, fn: Callable[[], object]) -> float:
    if case.rows <= GRAPHED_ROWS:
        return graphed(fn, rounds=10).median_ms
    return measure(fn, rounds=10 if case.dtype == torch.float32 else 20).median_ms


def sweep(quick: bool, only: str) -> None:
    from driftline.kernels.linear.tiles import tile_for, tiles_of

    for case in cases(quick):
        if only not in str(case) or case.dtype == torch.float32:
            continue
        output = {"dx": (case.rows, case.depth), "dw": (case.columns, case.depth)}.get(case.name.split()[0], (case.rows, case.columns))
        taken = tile_for(*output, case.dtype)
        found = [(timed(case, calls(case, tile)[0]), tile) for tile in tiles_of(case.dtype)]
        times = " ".join(f"{tile.rows}x{tile.columns}{'*' if tile == taken else ''}: {ms:.4f}" for ms, tile in found)
        print(f"{case!s:55} {times}  best {min(found, key=lambda one: one[0])[1].rows}x{min(found, key=lambda one: one[0])[1].columns}")


def rows(quick: bool, only: str) -> list[Row]:
    out = []
    for case in cases(quick):
        if only in str(case):
            ours, theirs = calls(case)
            out.append(Row(str(case), timed(case, ours), "torch, eager", timed(case, theirs), note="graph, warm L2" if case.rows <= GRAPHED_ROWS else "", **case.cost()))
            torch.cuda.empty_cache()
    return out


def main() -> None:
    args = arguments(__doc__)
    if args.sweep:
        sweep(args.quick, args.only)
        return
    finish("linear", rows(args.quick, args.only), commit=args.commit, write=not args.quick and not args.only)


if __name__ == "__main__":
    main()
