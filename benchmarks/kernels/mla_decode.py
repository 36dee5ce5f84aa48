"""Absorbed decode of multi-head latent attention, one K3 layer: 96 heads over paged rows of 512 + 64, bfloat16, a fixed part of 2,048 rows.

    python benchmarks/kernels/mla_decode.py [--quick] [--sweep] [--only TEXT] [--commit ID]

FLOPs: 2 * (576 + 512) a query, head and row; bytes: every row, query and output once. The peer is torch: two batched products and a softmax on rows that
already lie end to end (no pages), eager, scores in bfloat16; it is not batch-invariant.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from harness import Row, arguments, finish, measure, peak_bytes

from driftline.kernels.mla_decode import mla_decode
from driftline.kernels.mla_decode.shapes import SCALE, checked

HEADS, LATENT, WIDTH, PAGE = 96, 512, 576, 64
SWEPT = ((64, 8192, 1), (8, 32_768, 1), (64, 4096, 5), (4, 2048, 1))


class Case(NamedTuple):
    batch: int
    length: int
    window: int

    @property
    def name(self) -> str:
        return f"B {self.batch}, {self.length} rows" + (f", window of {self.window}" if self.window > 1 else "")

    @property
    def flops(self) -> float:
        return 2.0 * (WIDTH + LATENT) * HEADS * self.batch * self.length * self.window

    @property
    def bytes(self) -> float:
        return 2.0 * WIDTH * self.batch * self.length + self.batch * self.window * HEADS * (2.0 * WIDTH + 4.0 * LATENT)


CASES = (Case(64, 8192, 1), Case(1, 1024, 1), Case(1, 8192, 1), Case(1, 131_072, 1), Case(8, 32_768, 1), Case(64, 2048, 1), Case(256, 2048, 1), Case(64, 8192, 5), Case(8, 8192, 5))


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    each = case.length // PAGE
    pages = torch.randn(case.batch * each, PAGE, WIDTH, dtype=torch.bfloat16, device="cuda")
    table = torch.randperm(case.batch * each, device="cuda").to(torch.int32).view(case.batch, each)
    q = torch.randn(case.batch, case.window, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    return q, pages, table, torch.full((case.batch,), case.length, dtype=torch.int32, device="cuda")


def eager(q: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    batch, window, heads, width = q.shape
    score = (q.reshape(batch, window * heads, width) @ rows.mT).view(batch, window, heads, -1).float() * SCALE
    p = torch.softmax(score.masked_fill_(~seen[:, None], -torch.inf), dim=-1).to(q.dtype)
    return p.view(batch, window * heads, -1) @ rows[..., :LATENT]


def rows_of(quick: bool, only: str) -> list[Row]:
    out = []
    for case in CASES[: 2 if quick else None]:
        if only not in case.name:
            continue
        given = inputs(case)
        q, pages, table, _ = given
        run = partial(mla_decode, *given)
        ours, peak = measure(run).median_ms, peak_bytes(run)
        contiguous = pages[table.long()].view(case.batch, case.length, WIDTH)
        seen = torch.arange(case.length, device="cuda") <= torch.arange(case.length - case.window, case.length, device="cuda")[:, None]
        peer = partial(eager, q, contiguous, seen)
        out.append(Row(case.name, ours, "torch eager, contiguous rows", measure(peer, rounds=10).median_ms, bytes=case.bytes, flops=case.flops, peak=peak,
                       peer_peak=peak_bytes(peer)))
        del given, q, pages, table, run, contiguous, peer
        torch.cuda.empty_cache()
    return out


def sweep() -> list[Row]:
    from driftline.kernels.mla_decode import triton

    out = []
    for case in (Case(*swept) for swept in SWEPT):
        given = inputs(case)
        sizes = checked(*given, LATENT, None)
        for part in triton.PARTS:
            timing = measure(partial(triton.decode, *given, sizes, SCALE, torch.float32, part), rounds=15)
            out.append(Row(f"{case.name}: parts of {part}", timing.median_ms, bytes=case.bytes, flops=case.flops))
    return out


def main() -> None:
    options = arguments(__doc__)
    if options.sweep:
        finish("mla_decode", sweep(), write=False)
    else:
        finish("mla_decode", rows_of(options.quick, options.only), commit=options.commit, write=not options.quick)


if __name__ == "__main__":
    main()
