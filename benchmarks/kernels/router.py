"""The router at K3's shapes, forward and backward, beside torch's eager fp32 product, sigmoid, top-k and gather.

    python benchmarks/kernels/router.py [--quick] [--sweep] [--only TEXT] [--commit ID]

Up to 64 rows both are timed as replays of a graph, without the launches' own cost.
"""

from __future__ import annotations

import harness
import torch

from driftline.kernels.moe import triton_router as kernels
from driftline.kernels.moe.reference import route as plain
from driftline.kernels.moe.router import route

DEPTH, EXPERTS, TOP = 7168, 896, 16


def operands(rows: int, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.randn(EXPERTS, DEPTH, device="cuda") * DEPTH**-0.5
    return torch.randn(rows, DEPTH, device="cuda").bfloat16(), weight.to(kind), 0.05 * torch.randn(EXPERTS, device="cuda")


def forward(rows: int, kind: torch.dtype) -> harness.Row:
    x, weight, bias = operands(rows, kind)
    time = harness.graphed if rows <= 64 else harness.measure
    ours = time(lambda: route(x, weight, bias, TOP, 1.0)).median_ms
    theirs = time(lambda: plain(x, weight, bias, TOP, 1.0)).median_ms
    products = 1 if kind is torch.bfloat16 else 3
    return harness.Row(f"forward, {rows} rows, weight {str(kind)[6:]}", ours, "torch eager, fp32", theirs, bytes=x.nbytes + weight.nbytes,
                       flops=2 * products * rows * DEPTH * EXPERTS, peak=harness.peak_bytes(lambda: route(x, weight, bias, TOP, 1.0)),
                       peer_peak=harness.peak_bytes(lambda: plain(x, weight, bias, TOP, 1.0)))


def backward(rows: int) -> harness.Row:
    x, weight, bias = operands(rows, torch.bfloat16)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    times = []
    for op in (route, plain):
        gates = op(x, weight, bias, TOP, 1.0)[1]
        d_gates = torch.randn_like(gates)
        times.append(harness.measure(lambda g=gates, d=d_gates: torch.autograd.grad(g, leaves, d, retain_graph=True)).median_ms)  # type: ignore[misc]
    return harness.Row(f"backward, {rows} rows", times[0], "torch eager, fp32", times[1], bytes=2 * (x.nbytes + weight.nbytes), note="ours: sparse, by chosen pairs")


def main() -> None:
    arguments = harness.arguments(__doc__)
    torch.manual_seed(0)
    if arguments.sweep:
        x, weight, _ = operands(8192, torch.bfloat16)
        for tile in kernels.TILES:
            time = harness.measure(lambda t=tile: kernels.scores(x, weight, t, split=False), rounds=15)  # type: ignore[misc]
            print(f"scores, 8192 rows, {tuple(tile)}{' (pinned)' if tile == kernels.TILE else ''}: {time.median_ms:.4f} ms", flush=True)
        for rows in (64, 128, 512):
            for split in (True, False):
                time = harness.graphed(lambda r=rows, s=split: kernels.scores(x[:r], weight, split=s))  # type: ignore[misc]
                print(f"scores, {rows} rows, split {split}: {time.median_ms:.4f} ms", flush=True)
        return
    bf16, fp32 = torch.bfloat16, torch.float32
    plans = [(1, bf16), (64, bf16), (1024, bf16), (8192, bf16), (8192, fp32)] if not arguments.quick else [(64, bf16), (1024, bf16)]
    found = [forward(rows, kind) for rows, kind in plans]
    found += [backward(rows) for rows in ((1024,) if arguments.quick else (1024, 8192))]
    harness.finish("router", [row for row in found if arguments.only in row.case], commit=arguments.commit, note="K3: 7168 columns, 896 experts, top 16",
                   write=not arguments.quick)


if __name__ == "__main__":
    main()
