"""The attention residual beside FLA's `fused_attnres`, on K3's bank and on sources of their own: time, traffic and peak memory.

    python benchmarks/kernels/attention_residual.py [--quick] [--sweep] [--only TEXT] [--commit ID]

Both are called through autograd, forward and backward timed apart, with the same leaves: the bank [T, 8, D] as one tensor (FLA gets its slices) or five
tensors [T, D]. Bytes are the least: each source and gradient once each way. Peaks are beside the inputs, of a forward and a backward after which the mixture
itself is not held (neither implementation saves it).

FLA (fla-core 0.6.0) is timed where it can be imported, after an autotuning over a part of its configurations (four or eight warps, one to four sources a tile, two
stages: all of them take minutes); where it cannot, its figures are those below. Its public tests are run against ours: the file that FLA_TESTS names
(tests/ops/test_attnres.py of its repository), else the same cases against its `naive_attnres`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness import Row, arguments, finish, graphed, measure, peak_bytes

from driftline.kernels.attention_residual import Bank, OutputNorm, aggregate, attention_residual
from driftline.kernels.attention_residual import staged as kernels
from driftline.kernels.attention_residual.staged import Launch

WIDTH, EPS = 7168, 1e-5
ROWS = {"bank": 8, "separate": 4}

QUOTED = {("bank", 131_072): (23.0, 137.0, int((75.25 - 17.5) * 2**30)), ("separate", 131_072): (4.1, 11.5, None)}
"""FLA 0.6.0, Triton, measured on another H200 on another day: forward ms, backward ms, peak bytes beside the inputs. L = 9 slices of a bank; L = 5 apart."""

FLA_CASES = [
    (1, 1, 1000, 4096, False, torch.float16), (3, 1, 1000, 4096, False, torch.float16), (7, 1, 1000, 1000, False, torch.float16),
    (7, 1, 1000, 2000, False, torch.float16), (15, 1, 15, 4096, False, torch.float16), (29, 3, 63, 7186, False, torch.float16),
    (10, 2, 8000, 4096, False, torch.float32), (3, 1, 1000, 4096, True, torch.float16),
]
"""Of FLA's tests: (L, B, T, D, output norm, dtype). Its bound is 0.005 of the root mean square."""


def floor_bytes(tokens: int, sources: int, *, backward: bool, added: int = 0, delta: bool = False, width: int = WIDTH) -> int:
    """The least that must move, in bfloat16: forward reads the sources (and a delta) and writes the mixture (and the prefix); backward reads the sources, the
    gradient, the prefix's other gradient and the `added` rows that have sums already, and writes each source's gradient."""
    rows = sources + 1 + sources + added + delta if backward else sources + 1 + 2 * delta
    return rows * tokens * width * 2


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Inputs:
    def __init__(self, tokens: int, rows: int, separate: bool) -> None:
        self.tokens, self.separate = tokens, separate
        self.sources = [noise(tokens, WIDTH).requires_grad_() for _ in range(rows)] if separate else [noise(tokens, rows, WIDTH).requires_grad_()]
        self.prefix, self.do = noise(tokens, WIDTH).requires_grad_(), noise(tokens, WIDTH)
        self.query, self.norm = ((noise(WIDTH) * s).requires_grad_() for s in (WIDTH**-0.5, 1.0))
        self.leaves = [*self.sources, self.prefix, self.query, self.norm]

    def ours(self) -> torch.Tensor:
        if self.separate:
            return attention_residual([*self.sources, self.prefix], self.query, self.norm, EPS)
        return aggregate(Bank.of(self.sources[0]), self.prefix, self.query, self.norm, EPS).mixed

    def fla(self) -> torch.Tensor:
        slices = self.sources if self.separate else list(self.sources[0].unbind(1))
        out: torch.Tensor = fla().fused_attnres(self.query, [*slices, self.prefix], self.norm, rms_eps=EPS)
        return out


def fla() -> Any:
    return importlib.import_module("fla.ops.attnres")


def has_fla() -> bool:
    try:
        fla()
    except ImportError as missing:
        print(f"FLA is not timed: {missing}")
        return False
    fused = importlib.import_module("fla.ops.attnres.fused")
    for kernel in (fused.attnres_fwd_kernel, fused.attnres_bwd_kernel_dv):
        kernel.configs = [c for c in kernel.configs if c.num_warps in (4, 8) and c.num_stages == 2 and c.kwargs["BL"] <= 4]
    return True


def gradients(out: torch.Tensor, inputs: Inputs) -> object:
    return torch.autograd.grad(out, inputs.leaves, inputs.do, retain_graph=True)


def once(mix: Callable[[], torch.Tensor], inputs: Inputs) -> object:
    edge = torch.autograd.graph.get_gradient_edge(mix())
    return torch.autograd.grad([edge], inputs.leaves, [inputs.do])


def both_ways(inputs: Inputs, mix: Callable[[], torch.Tensor], rounds: int) -> tuple[float, float, int]:
    """(forward ms, backward ms, peak of the two beside the inputs)."""
    forward = measure(mix, rounds=rounds).median_ms
    backward = measure(partial(gradients, mix(), inputs), rounds=rounds).median_ms
    return forward, backward, peak_bytes(partial(once, mix, inputs))


def pair(layout: str, tokens: int, case: str, peer: bool) -> list[Row]:
    rows = ROWS[layout]
    inputs, rounds = Inputs(tokens, rows, layout == "separate"), 10 if tokens > 20_000 else 30
    ours = both_ways(inputs, inputs.ours, rounds)
    quoted = QUOTED.get((layout, tokens))
    theirs = both_ways(inputs, inputs.fla, rounds) if peer else quoted
    note = "FLA's figure from another run" if quoted and not peer else ""
    name = "fla 0.6.0" if theirs else None
    times = (None, None) if theirs is None else theirs[:2]
    forward = Row(f"{case}, forward", ours[0], name, times[0], bytes=floor_bytes(tokens, rows + 1, backward=False), note=note)
    backward = Row(f"{case}, backward", ours[1], name, times[1], bytes=floor_bytes(tokens, rows + 1, backward=True), peak=ours[2],
                   peer_peak=None if theirs is None else theirs[2], note=note)
    return [forward, backward]


def pairs(quick: bool, only: str, peer: bool) -> list[Row]:
    out = []
    for layout, rows in ROWS.items():
        for tokens in (32_768, 8192) if quick else (131_072, 32_768, 8192, 1024):
            case = f"{'K3 bank' if layout == 'bank' else 'separate'}, L={rows + 1}, {tokens} tokens"
            if only in case:
                out += pair(layout, tokens, case, peer)
                torch.cuda.empty_cache()
    return out


def training_pair(tokens: int, norm: bool, case: str) -> list[Row]:
    unmix = importlib.import_module("driftline.kernels.attention_residual.device").backward
    inputs, rounds = Inputs(tokens, 8, False), 10 if tokens > 20_000 else 30
    delta, weight, dmoved, into = noise(tokens, WIDTH), noise(WIDTH), noise(tokens, WIDTH), noise(tokens, 8, WIDTH)
    bank, prefix, query, key = (t.detach() for t in inputs.leaves)
    mix = partial(aggregate, Bank.of(bank), prefix, query, key, EPS, delta=delta, output_norm=OutputNorm(weight, EPS) if norm else None)
    back = partial(unmix, bank, into, 8, prefix, inputs.do, dmoved, query, key, EPS, weight if norm else None, EPS)
    return [Row(f"{case}, forward", measure(mix, rounds=rounds).median_ms, bytes=floor_bytes(tokens, 9, backward=False, delta=True)),
            Row(f"{case}, backward", measure(back, rounds=rounds).median_ms, bytes=floor_bytes(tokens, 9, backward=True, added=8, delta=True))]


def training(quick: bool, only: str) -> list[Row]:
    """One aggregation of a deep model: a residual add fused, gradients added to eight rows that have sums; with and without the output norm."""
    out = []
    for tokens in (8192,) if quick else (131_072, 8192):
        for norm in (False, True):
            case = f"K3 bank, L=9, {tokens} tokens, add{' and norm' if norm else ''}, sums kept"
            if only in case:
                out += training_pair(tokens, norm, case)
                torch.cuda.empty_cache()
    return out


def decode(only: str, peer: bool) -> list[Row]:
    out = []
    for tokens in (1, 64, 512):
        case = f"K3 bank, L=9, {tokens} tokens, forward in a graph"
        if only in case:
            inputs = Inputs(tokens, 8, False)
            with torch.no_grad():
                theirs = graphed(inputs.fla).median_ms if peer else None
                ours = graphed(inputs.ours).median_ms
            out.append(Row(case, ours, "fla 0.6.0" if peer else None, theirs, bytes=floor_bytes(tokens, 9, backward=False), note="L2 warm"))
    return out


def candidates(pinned: Launch, backward: bool) -> list[Launch]:
    """The pinned one first; then one program a multiprocessor and two, and sums over tokens in registers or in shared memory."""
    one, two = Launch(kernels.MULTIPROCESSORS, 255), Launch(2 * kernels.MULTIPROCESSORS, 128)
    out = [pinned, one, two, *((replace(one, sums_shared=True), replace(two, sums_shared=True)) if backward else ())]
    return list(dict.fromkeys(out))


def sweep_case(rows: int, separate: bool, backward: bool, norm: bool, only: str) -> None:
    tokens, unmix = 32_768, importlib.import_module("driftline.kernels.attention_residual.staged_backward").backward
    kept = rows if backward and not separate else 0
    case = f"{'backward' if backward else 'forward'} R={rows} {'separate' if separate else 'bank'}{' norm' if norm else ''}{f' kept={kept}' if kept else ''}"
    if only not in case:
        return
    inputs = Inputs(tokens, rows, separate)
    sources: Any = [s.detach() for s in inputs.sources] if separate else inputs.sources[0].detach()
    into: Any = [torch.empty_like(s) for s in sources] if separate else torch.zeros_like(sources)
    prefix, query, key = (t.detach() for t in (inputs.prefix, inputs.query, inputs.norm))
    weight = key if norm else None
    least = floor_bytes(tokens, rows + 1, backward=backward, added=kept)
    pinned = kernels.launch_of(kernels.BACKWARD if backward else kernels.FORWARD, rows, norm)[1]
    for launch in candidates(pinned, backward):
        run = partial(unmix, sources, into, kept, prefix, inputs.do, None, query, key, EPS, weight, EPS, launch) if backward else partial(
            kernels.forward, sources, prefix, None, query, key, EPS, weight, EPS, launch)
        time = measure(run, rounds=15).median_ms
        print(f"{case:36} {time:8.4f} ms {least / time / 1e9:6.2f} TB/s  {'pinned ' if launch == pinned else ''}{launch}", flush=True)


def sweep(only: str) -> None:
    """The candidates beside the pinned configuration, kernels alone, 32K tokens."""
    for rows, separate, backward, norm in ((8, False, False, False), (4, True, False, False), (8, False, True, False), (4, True, True, False), (8, False, True, True)):
        sweep_case(rows, separate, backward, norm, only)
        torch.cuda.empty_cache()


def as_fla(
    query: torch.Tensor, residuals: Any, rms_weight: torch.Tensor, output_rms_weight: torch.Tensor | None = None, rms_eps: float = 1e-6, scale: float = 1.0,
    return_weights: bool = False, checkpoint_level: int = 1,
) -> Any:
    """Ours under FLA's signature. The scale goes into the query; the weights, which ours does not give, are worked out beside it."""
    sources = list(residuals)
    out = attention_residual(sources, (query.reshape(-1).float() * scale).to(torch.float32), rms_weight, rms_eps,
                             output_norm=None if output_rms_weight is None else OutputNorm(output_rms_weight, rms_eps))
    if len(sources) == 1 and output_rms_weight is None:
        out = out + 0 * (query.reshape(-1) * rms_weight).sum().to(out.dtype)
    if not return_weights:
        return out
    with torch.no_grad():
        scores = [(s.float() * torch.rsqrt(s.float().square().mean(-1, keepdim=True) + rms_eps) * rms_weight.float()) @ (query.reshape(-1).float() * scale) for s in sources]
    return out, torch.stack(scores).softmax(0)


def published_tests() -> str:
    """FLA's public tests of the operator against ours; a line that says how it went."""
    module = fla()
    named = os.environ.get("FLA_TESTS")
    if named:
        import pytest

        theirs, module.fused_attnres = module.fused_attnres, as_fla
        try:
            code = pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", os.path.dirname(os.path.abspath(named)), named])
        finally:
            module.fused_attnres = theirs
        return f"FLA's {os.path.basename(named)} against ours: {'all passed' if code == 0 else f'pytest exit code {int(code)}'} (more than nine sources: the reference)"
    worst = 0.0
    for sources, batch, tokens, width, norm, dtype in FLA_CASES:
        v = torch.randn(sources, batch, tokens, width, device="cuda", dtype=dtype).requires_grad_()
        vectors = [torch.randn(width, device="cuda", dtype=dtype).requires_grad_() for _ in range(3 if norm else 2)]
        do = torch.randn(batch, tokens, width, device="cuda", dtype=dtype)
        results = []
        for mix in (as_fla, module.naive_attnres):
            out = mix(vectors[0], v, vectors[1], vectors[2] if norm else None, scale=width**-0.5)
            results.append([out, *torch.autograd.grad(out, [v, *vectors], do)])
        for ours, wanted in zip(*results, strict=True):
            worst = max(worst, float((ours.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-8)))
    return f"FLA's test cases against its naive_attnres: worst error {worst:.4f} of the root mean square, {'within' if worst < 0.005 else 'ABOVE'} its bound of 0.005"


def main() -> None:
    options = arguments(__doc__)
    if options.sweep:
        sweep(options.only)
        return
    peer = has_fla() and not options.quick
    note = published_tests() if peer and options.only in "published tests" else ""
    if note:
        print(note)
    rows = [*pairs(options.quick, options.only, peer), *training(options.quick, options.only), *decode(options.only, peer)]
    if not rows:
        sys.exit(f"no case's name holds {options.only!r}")
    finish("attention_residual", rows, commit=options.commit, note=note, write=not options.quick)


if __name__ == "__main__":
    main()
