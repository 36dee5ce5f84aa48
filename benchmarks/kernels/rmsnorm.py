"""RMSNorm at the widths of a K3 layer, forward and backward, beside torch's own: eager in K3's rounding, compiled in K3's rounding, and `rms_norm`.

    python benchmarks/kernels/rmsnorm.py [--quick] [--sweep] [--only TEXT] [--commit ID]

Bytes: a row read and written once forward (4 an element of bfloat16), two read and one written backward (6). The fused `rms_norm` of torch multiplies by
the weight before it rounds, so it is not the same function; it is the fastest that torch has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from harness import Row, arguments, finish, measure, peak_bytes

from driftline.kernels.rmsnorm import reference, rmsnorm

EPS = 1e-5
WIDTHS = ((7168, 8192), (7168, 131_072), (7168, 64), (3584, 8192), (1536, 8192), (512, 8192), (128, 8192 * 96))
"""(elements of a row, rows): a layer's norms, the latent's, MLA's two, and KDA's over each head of 8,192 tokens."""

Fn = Callable[..., torch.Tensor]


def tensors(d: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, dy = (torch.randn(count, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return x, (1 + 0.3 * torch.randn(d, device="cuda")).bfloat16(), dy


def fused(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def backward_of(fn: Fn, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> Callable[[], object]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = fn(x, weight, EPS)
    return lambda: torch.autograd.grad(out, (x, weight), dy, retain_graph=True)


def rows(quick: bool, only: str) -> list[Row]:
    compiled = torch.compile(reference.rmsnorm, dynamic=False)
    peers: list[tuple[str, Fn]] = [("torch eager", reference.rmsnorm), ("torch rms_norm", fused)] + ([] if quick else [("torch.compile", compiled)])
    out = []
    for d, count in WIDTHS[:1] if quick else WIDTHS:
        x, weight, dy = tensors(d, count)
        ways: list[tuple[str, int, Callable[[Fn], Callable[[], object]]]] = [
            ("forward", 4, lambda fn, x=x, weight=weight: partial(fn, x, weight, EPS)),
            ("backward", 6, lambda fn, x=x, weight=weight, dy=dy: backward_of(fn, x, weight, dy)),
        ]
        for way, size, call in ways:
            case = f"{way} {count} x {d}"
            if only not in case:
                continue
            ours, peak = measure(call(rmsnorm), rounds=20).median_ms, peak_bytes(call(rmsnorm))
            for name, fn in peers:
                out.append(Row(case, ours, name, measure(call(fn), rounds=20).median_ms, bytes=size * count * d, peak=peak, peer_peak=peak_bytes(call(fn))))
        torch.cuda.empty_cache()
        torch.compiler.reset()
    return out


def sweep(only: str) -> None:
    from driftline.kernels.rmsnorm import triton as kernels

    for d, count in WIDTHS:
        if only not in f"{count} x {d}":
            continue
        x, weight, dy = tensors(d, count)
        pinned = kernels.shape_for(d)
        for warps in (pinned.warps // 2, pinned.warps, pinned.warps * 2):
            for many in (1, 2) if pinned.block <= 2048 else (1,):
                shape = replace(pinned, warps=warps, rows=pinned.rows * many)
                ms = measure(partial(kernels.forward, x, weight, EPS, shape=shape), rounds=20).median_ms
                print(f"forward  {count:7} x {d:5} warps {warps:2} rows {shape.rows:3}: {ms:.4f} ms{' *' if shape == pinned else ''}")
        for warps, programs, stages in ((pinned.back_warps, pinned.programs, 3), (pinned.back_warps, pinned.programs, 4), (pinned.back_warps, pinned.programs, 2),
                                        (pinned.back_warps, pinned.programs * 2, 3), (pinned.back_warps // 2, pinned.programs, 3)):
            shape = replace(pinned, back_warps=warps, programs=programs, stages=stages)
            ms = measure(partial(kernels.backward, x, weight, dy, EPS, shape=shape), rounds=20).median_ms
            print(f"backward {count:7} x {d:5} warps {warps:2} programs {programs:4} stages {stages}: {ms:.4f} ms{' *' if shape == pinned else ''}")
        torch.cuda.empty_cache()


def main() -> None:
    args = arguments(__doc__)
    if args.sweep:
        sweep(args.only)
        return
    finish("rmsnorm", rows(args.quick, args.only), commit=args.commit, write=not args.quick and not args.only)


if __name__ == "__main__":
    main()
