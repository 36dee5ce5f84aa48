"""SiTU-GLU at K3's widths, forward and backward, beside torch.compile of the same formula and torch eager.

    python benchmarks/kernels/situ_glu.py [--quick] [--sweep] [--only TEXT] [--commit ID]
"""

from __future__ import annotations

import harness
import torch
import triton

from driftline.kernels.situ_glu import reference, situ_glu
from driftline.kernels.situ_glu import triton as kernels

WIDTHS = {"shared experts": 6144, "dense layer": 33_792}


def rows_of(name: str, width: int, tokens: int, compiled: bool) -> list[harness.Row]:
    gate, up, grad = (torch.randn(tokens, width, device="cuda").bfloat16() for _ in range(3))
    theirs = torch.compile(reference.situ_glu) if compiled else reference.situ_glu
    peer = "torch.compile" if compiled else "torch eager"
    forward = [harness.measure(lambda op=op: op(gate, up, 4.0, 25.0)).median_ms for op in (situ_glu, theirs)]  # type: ignore[misc]
    leaves = (gate.requires_grad_(), up.requires_grad_())
    backward = []
    for op in (situ_glu, theirs):
        out = op(gate, up, 4.0, 25.0)
        backward.append(harness.measure(lambda out=out: torch.autograd.grad(out, leaves, grad, retain_graph=True)).median_ms)  # type: ignore[misc]
    case = f"{name}, {tokens} x {width}"
    return [harness.Row(f"forward, {case}", forward[0], peer, forward[1], bytes=3 * gate.nbytes),
            harness.Row(f"backward, {case}", backward[0], peer, backward[1], bytes=5 * gate.nbytes)]


def main() -> None:
    arguments = harness.arguments(__doc__)
    torch.manual_seed(0)
    if arguments.sweep:
        gate, up = (torch.randn(8192, 33_792, device="cuda").bfloat16() for _ in range(2))
        out = torch.empty_like(gate)
        for block, warps in ((1024, 4), (2048, 4), (4096, 8), (2048, 8)):
            grid = (triton.cdiv(gate.numel(), block),)
            time = harness.measure(lambda g=grid, b=block, w=warps: kernels._forward[g](gate, up, out, gate.numel(), 0, 0, 4.0, 25.0, 0.25, 0.04, BLOCK=b, num_warps=w,  # type: ignore[misc]
                                                                                         enable_fp_fusion=True))
            print(f"forward, block {block}, {warps} warps: {time.median_ms:.4f} ms", flush=True)
        return
    found = rows_of("shared experts", WIDTHS["shared experts"], 8192, compiled=not arguments.quick)
    if not arguments.quick:
        found += rows_of("shared experts, eager", WIDTHS["shared experts"], 8192, compiled=False)
        found += rows_of("dense layer", WIDTHS["dense layer"], 8192, compiled=True)
    harness.finish("situ_glu", [row for row in found if arguments.only in row.case], commit=arguments.commit, write=not arguments.quick)


if __name__ == "__main__":
    main()
