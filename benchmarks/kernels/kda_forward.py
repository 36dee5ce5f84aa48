"""What KDA forward is made of: preparing chunks, walking them, and both; 96 heads and 12, of 128 channels.

    python benchmarks/kernels/kda_forward.py [--quick] [--sweep] [--only TEXT] [--commit ID]

`kda.py` times the whole beside its peer. This says where the time goes: a part's bytes are what it moves, so the fraction of the copy's rate is how near it
is to its own floor. `--sweep` times the candidate launches of the walk, panels, and segments or none for 12 to 48 heads, and writes nothing: what wins goes
to `walk_launch` and PANEL of `kernels/kda/forward.py` and to SEGMENT_HEADS of `segments.py`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial

import harness
import torch

from driftline.kernels.kda import forward as fw
from driftline.kernels.kda.operator import kernel_inputs
from driftline.kernels.kda.segments import segmented

PREPARED = fw.WORKSPACE_BYTES
PREPARE_BYTES, WALK_BYTES = 3 * 256 + 2 + PREPARED, PREPARED + 2 * 256
"""A token and head: q, k, z, beta in and the workspace out; the workspace and v in, o out."""

PREPARE_FLOPS = 2 * 2 * 64 * 128 + 2 * 2 * 16 * 128 + 9 * 2 * 16 * 16
WALK_FLOPS = 3 * 2 * 128 * 128 + 2 * 2 * 64 * 128
"""A token and head: products with 64 keys and norms, both for q and k, and nine of the inverse; three with the state and two with squares."""


@dataclass(frozen=True)
class Shape:
    steps: int
    heads: int

    @property
    def name(self) -> str:
        return f"T={self.steps} H={self.heads}"

    @property
    def tokens(self) -> int:
        return self.steps * self.heads


def inputs(shape: Shape) -> fw.Inputs:
    """Random, with gates from 0 to 5 nats."""

    def normal(*rest: int) -> torch.Tensor:
        return torch.randn(1, shape.steps, shape.heads, *rest, device="cuda", dtype=torch.bfloat16)

    heads = torch.zeros(shape.heads, device="cuda")
    return kernel_inputs(normal(128), normal(128), normal(128), normal(128), normal(), heads, heads.repeat(128), -5.0, None)


def parts(shape: Shape, rounds: int) -> list[harness.Row]:
    """Preparing and a plain walk of the whole length, then the operator as it runs."""
    x = inputs(shape)
    layout = fw.layout_of(1, shape.steps, None, fw.CHUNK)
    space = fw.Workspace.of(layout.pieces, shape.heads, x.q.device)
    o, final = torch.empty_like(x.v), torch.empty(1, shape.heads, fw.WIDTH, fw.WIDTH, device="cuda")
    prepare = harness.measure(partial(fw.prepare, x, layout, space, 0, layout.pieces), rounds=rounds)
    walk = harness.measure(partial(fw.walk, x, layout, space, None, o, final, 0, layout.pieces, fw.walk_launch(shape.heads)), rounds=rounds)
    del space
    whole = harness.measure(partial(fw.forward, x, None), rounds=rounds)
    return [
        harness.Row(f"prepare {shape.name}", prepare.median_ms, bytes=PREPARE_BYTES * shape.tokens, flops=PREPARE_FLOPS * shape.tokens),
        harness.Row(f"walk {shape.name}", walk.median_ms, bytes=WALK_BYTES * shape.tokens, flops=WALK_FLOPS * shape.tokens, note="without segments"),
        harness.Row(f"forward {shape.name}", whole.median_ms, bytes=(5 * 256 + 2) * shape.tokens, flops=(PREPARE_FLOPS + WALK_FLOPS) * shape.tokens,
                    peak=harness.peak_bytes(partial(fw.forward, x, None)), note="in segments" if segmented(shape.heads) else ""),
    ]


def sweep() -> None:
    def line(name: str, timing: harness.Timing) -> None:
        print(f"{name:60} {timing.median_ms:8.3f} ms  (10 % {timing.p10_ms:.3f}, 90 % {timing.p90_ms:.3f})", flush=True)

    for shape in (Shape(8192, 96), Shape(8192, 12)):
        x = inputs(shape)
        for launch in fw.WALK_CANDIDATES:
            line(f"forward {shape.name} {launch}", harness.measure(partial(fw.forward, x, None, launch=launch), rounds=10))
    x = inputs(Shape(32_768, 96))
    for panel in (1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22):
        line(f"forward T=32768 H=96 panel {panel}", harness.measure(partial(fw.forward, x, None, panel=panel), rounds=10))
    for heads in (12, 24, 48):
        for steps in (8192, 32_768):
            x = inputs(Shape(steps, heads))
            for segments in (False, True):
                line(f"forward T={steps} H={heads} {'in segments' if segments else 'plainly'}",
                     harness.measure(partial(fw.forward, x, None, in_segments=segments), rounds=10))


def main() -> None:
    asked: argparse.Namespace = harness.arguments(__doc__)
    if asked.sweep:
        sweep()
        return
    steps = (8192,) if asked.quick else (4096, 8192, 32_768)
    shapes = [Shape(t, heads) for heads in (96, 12) for t in steps if asked.only in Shape(t, heads).name]
    rows = [row for shape in shapes for row in parts(shape, 10 if asked.quick else 30)]
    harness.finish("kda_forward", rows, commit=asked.commit, note="parts of the forward pass; no peer here, see kda", write=not (asked.quick or asked.only))


if __name__ == "__main__":
    main()
