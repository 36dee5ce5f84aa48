"""KDA forward and backward at K3's heads (96 of 128 channels, and 12: one of eight devices) beside flash-linear-attention's, in one process.

    python benchmarks/kernels/kda.py [--quick] [--sweep] [--only TEXT] [--commit ID]

Ours first: every row, and the file is written; then the peer's, shape by shape, the file being written again after each, so that a run that is cut off
keeps what it had. The peer's first forward and backward of a number of heads tune for minutes (277 s for 96 heads on an H200). It runs as K3 calls it:
norms, gate and beta in its kernels, safe gate, lower bound -5, its own switch to another library off. FlashKDA's figures are quoted, not measured.

`--sweep` times the backward's candidate configurations, one of its kernels varied at a time, and writes nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("FLA_FLASH_KDA", "0")

import harness
import torch

from driftline.kernels.kda import kda
from driftline.kernels.kda.triton_backward import PINNED, Config, backward

HEADS = (96, 12)
STEPS = (4096, 8192, 32768, 131072)

FORWARD_BYTES, BACKWARD_BYTES = 5 * 256 + 2, 9 * 256 + 4
"""A token and head: q, k, v, z in and o out; q, k, v, z, do in and four gradients out; beta."""

FORWARD_FLOPS, BACKWARD_FLOPS = 180e3, 440e3
"""A token and head, chunks of 64: 4 products with the state forward and 8 backward, and those inside the chunk."""

FLASHKDA_MS = {(96, 4096): 0.460, (96, 8192): 0.891, (96, 16384): 1.747, (96, 32768): 3.460, (12, 8192): 0.596}
"""Forward, one H200, bf16, vLLM's flashkda_fwd: collected by ai-dynamo/aiconfigurator (Apache-2.0)."""


@dataclass(frozen=True)
class Shape:
    steps: int
    heads: int
    slow: bool

    @property
    def name(self) -> str:
        return f"T={self.steps} H={self.heads} {'slow' if self.slow else 'fast'} gates"


def shapes(quick: bool, only: str) -> list[Shape]:
    """Every length with fast gates; slow ones, as at initialisation, at 8,192 tokens."""
    if quick:
        found = [Shape(4096, heads, False) for heads in HEADS]
    else:
        found = [Shape(steps, heads, slow) for heads in HEADS for steps in STEPS for slow in (False, True) if not slow or steps == 8192]
    return [shape for shape in found if only in f"forward {shape.name}" or only in f"backward {shape.name}"]


def inputs(shape: Shape) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, z, beta, A_log, dt_bias and do. Slow: dt log-uniform in [0.001, 0.1], so -0.005 to -0.48 nats a token; fast: -2.5 in the mean."""
    random = torch.Generator("cuda").manual_seed(shape.steps + shape.heads)

    def noise(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16, generator=random)

    row = (1, shape.steps, shape.heads, 128)
    q, k, v, z, do = (noise(*row) for _ in range(5))
    dt = torch.exp(torch.rand(shape.heads * 128, device="cuda", generator=random) * 4.605 - 6.908)
    bias = torch.log(torch.expm1(dt)) if shape.slow else torch.zeros_like(dt)
    z = z * 0.1 if shape.slow else z
    return [q, k, v, z, noise(*row[:3]), torch.zeros(shape.heads, device="cuda"), bias], do


def ours(given: list[torch.Tensor]) -> torch.Tensor:
    q, k, v, z, beta, a_log, dt_bias = given
    return kda(q, k, v, z, beta, a_log, dt_bias)[0]


def peer(given: list[torch.Tensor]) -> torch.Tensor:
    from fla.ops.kda import chunk_kda

    q, k, v, z, beta, a_log, dt_bias = given
    out: tuple[torch.Tensor, torch.Tensor | None] = chunk_kda(q=q, k=k, v=v, g=z, beta=beta, A_log=a_log, dt_bias=dt_bias, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                    use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=-5.0)
    return out[0]


@dataclass(frozen=True)
class Measured:
    forward_ms: float
    backward_ms: float
    forward_peak: int
    backward_peak: int


def measured(op: Callable[[list[torch.Tensor]], torch.Tensor], shape: Shape, quick: bool) -> Measured:
    """The backward is timed alone, on one forward's graph; its peak is of both together."""
    given, do = inputs(shape)
    rounds = 5 if quick or shape.steps >= 32768 else 15
    with torch.no_grad():
        forward = harness.measure(partial(op, given), rounds=rounds)
        forward_peak = harness.peak_bytes(partial(op, given))
    leaves = [x.requires_grad_() for x in given]
    out = op(leaves)
    back = harness.measure(partial(torch.autograd.grad, out, leaves, do, retain_graph=True), rounds=rounds)
    del out

    def both() -> object:
        return torch.autograd.grad(op(leaves), leaves, do)

    peak = harness.peak_bytes(both)
    torch.cuda.empty_cache()
    return Measured(forward.median_ms, back.median_ms, forward_peak, peak)


def rows(shape: Shape, mine: Measured, theirs: Measured | None, name: str | None) -> list[harness.Row]:
    tokens = shape.steps * shape.heads
    quoted = FLASHKDA_MS.get((shape.heads, shape.steps))
    note = f"FlashKDA {quoted} ms, quoted" if quoted else ""
    return [
        harness.Row(f"forward {shape.name}", mine.forward_ms, name, theirs.forward_ms if theirs else None, bytes=FORWARD_BYTES * tokens,
                    flops=FORWARD_FLOPS * tokens, peak=mine.forward_peak, peer_peak=theirs.forward_peak if theirs else None, note=note),
        harness.Row(f"backward {shape.name}", mine.backward_ms, name, theirs.backward_ms if theirs else None, bytes=BACKWARD_BYTES * tokens,
                    flops=BACKWARD_FLOPS * tokens, peak=mine.backward_peak, peer_peak=theirs.backward_peak if theirs else None, note="peak of both passes"),
    ]


def candidates() -> dict[str, Config]:
    """The pinned configuration and what may beat it: one kernel's numbers changed at a time."""
    return {
        "pinned": PINNED,
        "scan: 2 stages": replace(PINNED, scan_stages=2),
        "scan: 8 warps": replace(PINNED, scan_warps=8),
        "products: 255 registers": replace(PINNED, products_registers=255),
        "values: 64 channels, 168 registers": replace(PINNED, values_wide=64, values_registers=168),
        "values: 168 registers": replace(PINNED, values_registers=168),
        "gradients: 168 registers": replace(PINNED, gradients_registers=168),
        "gradients: 16 channels": replace(PINNED, gradients_wide=16),
    }


def sweep() -> None:
    """Besides the time, how far each candidate's dk and dz are from the pinned one's, relative: roundings apart, they are the same function."""
    for shape in (Shape(8192, 96, False), Shape(8192, 12, False)):
        (q, k, v, z, beta, a_log, dt_bias), do = inputs(shape)
        pinned = None
        for name, config in candidates().items():
            call = partial(backward, q, k, v, z, beta, a_log, dt_bias, -5.0, None, None, do, None, config=config)
            found = call()
            pinned = pinned or found
            off = max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in ((found.k, pinned.k), (found.z, pinned.z)))
            timing = harness.measure(call, rounds=10)
            print(f"backward {shape.name:28} {name:40} {timing.median_ms:8.3f} ms  (10 % {timing.p10_ms:.3f}, 90 % {timing.p90_ms:.3f})  off by {off:.1e}",
                  flush=True)


def version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as of

    try:
        return of(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    asked: argparse.Namespace = harness.arguments(__doc__)
    if asked.sweep:
        sweep()
        return
    wanted = shapes(asked.quick, asked.only)
    mine = {shape: measured(ours, shape, asked.quick) for shape in wanted}
    theirs: dict[Shape, Measured] = {}
    name = f"fla-core {version('fla-core') or 'of the path'}"

    def write(note: str) -> None:
        every: list[Any] = [row for shape in wanted for row in rows(shape, mine[shape], theirs.get(shape), name if shape in theirs else None)]
        harness.finish("kda", every, commit=asked.commit, note=note, write=not asked.quick)

    if find_spec("fla") is None:
        write("fla-core is not installed here: no peer was run")
        return
    write("before the peer")
    harness.shorten_tuning()
    for shape in wanted:
        try:
            theirs[shape] = measured(peer, shape, asked.quick)
        except torch.cuda.OutOfMemoryError:
            print(f"{name} has not the memory for {shape.name}", flush=True)
            torch.cuda.empty_cache()
        write("K3's call of the peer")


if __name__ == "__main__":
    main()
