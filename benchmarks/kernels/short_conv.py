"""The short convolution (prefill, backward, decode, replay) and the gated norm at K3's width: 36,864 channels, 96 heads of 128.

    python benchmarks/kernels/short_conv.py [--quick] [--sweep] [--only TEXT] [--commit ID]

Bytes are every input read once and every result written once. Peers: the figures of ai-dynamo/aiconfigurator for an H200 (its collections of SGLang and of
vLLM), torch's grouped `conv1d` and SiLU, eager, and the references of this repository, eager: torch's operators one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from harness import Row, arguments, finish, graphed, measure, peak_bytes

from driftline.kernels.gated_norm import gated_norm
from driftline.kernels.gated_norm import reference as norm_reference
from driftline.kernels.short_conv import short_conv, short_conv_decode, short_conv_replay

CHANNELS, HEADS, EPS = 36_864, 96, 1e-5
SGLANG_PREFILL = {512: 0.041, 1024: 0.072, 2048: 0.130, 4096: 0.242, 8192: 0.46636, 16384: 0.915, 32768: 1.813}  # ms by tokens: causal_conv1d_fn_qkv3
VLLM_UPDATE = {1: 0.01716, 4: 0.02996, 8: 0.04612}  # ms by tokens of 64 rows: causal_conv1d_update
QUOTED = "aiconfigurator, H200, "


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def torch_conv(x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """In bfloat16 throughout, as torch's operator takes it: x [B, T, C]."""
    return F.silu(F.conv1d(torch.cat([tail, x], 1).mT, weight[:, None], groups=weight.shape[0])).mT


def both_ways(run: Callable[..., object], inputs: list[torch.Tensor], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = run(*inputs)
    first = out[0] if isinstance(out, tuple) else out
    assert isinstance(first, torch.Tensor)
    return torch.autograd.grad(first, inputs, grad)


def conv_rows(steps: int, *, whole: bool) -> list[Row]:
    x, weight, tail = noise(1, steps, CHANNELS), noise(CHANNELS, 4, dtype=torch.float32), noise(1, 3, CHANNELS)
    case = f"convolution, {steps} tokens of 36,864 channels"
    run = partial(short_conv, x, weight, tail)
    ours, peak = measure(run).median_ms, peak_bytes(run)
    out = [Row(case, ours, QUOTED + "SGLang", SGLANG_PREFILL.get(steps), bytes=2 * x.nbytes, peak=peak)]
    if whole:
        eager = partial(torch_conv, x, weight.bfloat16(), tail)
        peer, peer_ms = "torch conv1d and silu, eager", measure(eager, rounds=10).median_ms
        out.append(Row(case, ours, peer, peer_ms, bytes=2 * x.nbytes, peak=peak, peer_peak=peak_bytes(eager)))
        wide, narrow = [t.requires_grad_() for t in (x, weight, tail)], [t.detach().bfloat16().requires_grad_() for t in (x, weight, tail)]
        grad = noise(1, steps, CHANNELS)
        train, theirs = partial(both_ways, short_conv, wide, grad), partial(both_ways, torch_conv, narrow, grad)
        out.append(Row(case + ", forward and backward", measure(train, rounds=20).median_ms, peer, measure(theirs, rounds=5).median_ms,
                       bytes=5 * x.nbytes, peak=peak_bytes(train), peer_peak=peak_bytes(theirs)))
    return out


def decode_rows(rows: int = 64) -> list[Row]:
    weight, slots = noise(CHANNELS, 4, dtype=torch.float32), torch.randperm(2 * rows, device="cuda")[:rows].to(torch.int32)
    x, tails = noise(rows, CHANNELS), noise(2 * rows, 3, CHANNELS)
    run = partial(short_conv_decode, x, weight, tails, slots)
    moved = 8 * x.nbytes + weight.nbytes
    out = [Row("convolution, decode of 64 rows", graphed(run).median_ms, QUOTED + "vLLM", VLLM_UPDATE[1], bytes=moved, note="in a graph")]
    for tokens in (4, 8):
        x, history = noise(rows, tokens, CHANNELS), noise(2 * rows, 3 + tokens, CHANNELS)
        accepted = torch.randint(0, tokens + 1, (rows,), device="cuda", dtype=torch.int32)
        replays = partial(short_conv_replay, x, weight, history, slots, accepted)
        moved = 3 * x.nbytes + 6 * rows * CHANNELS * 2 + weight.nbytes
        out.append(Row(f"convolution, window of {tokens} of 64 rows", graphed(replays).median_ms, QUOTED + "vLLM", VLLM_UPDATE[tokens], bytes=moved,
                       note="in a graph"))
    return out


def norm_rows(steps: int, *, whole: bool) -> list[Row]:
    o, weight, gate = noise(steps, HEADS, 128), noise(128, dtype=torch.float32), noise(steps, HEADS, 128)
    case = f"gated norm, {steps} tokens of 96 heads"
    run, eager = partial(gated_norm, o, weight, gate, EPS), partial(norm_reference.gated_norm, o, weight, gate, EPS)
    ours, theirs_ms = measure(run).median_ms, measure(eager, rounds=10).median_ms
    out = [Row(case, ours, "torch, eager", theirs_ms, bytes=3 * o.nbytes, peak=peak_bytes(run), peer_peak=peak_bytes(eager))]
    if whole:
        inputs, grad = [t.requires_grad_() for t in (o, weight, gate)], noise(steps, HEADS, 128)
        train = partial(both_ways, partial(gated_norm, eps=EPS), inputs, grad)
        theirs = partial(both_ways, partial(norm_reference.gated_norm, eps=EPS), inputs, grad)
        out.append(Row(case + ", forward and backward", measure(train, rounds=20).median_ms, "torch, eager", measure(theirs, rounds=5).median_ms,
                       bytes=8 * o.nbytes, peak=peak_bytes(train), peer_peak=peak_bytes(theirs)))
    return out


def rows(quick: bool, only: str) -> list[Row]:
    out = []
    if only in "convolution":
        for steps in (2048,) if quick else (512, 2048, 8192, 32768):
            out += conv_rows(steps, whole=steps == 8192)
            torch.cuda.empty_cache()
        out += decode_rows()
    if only in "gated norm":
        for steps in (64,) if quick else (64, 8192):
            out += norm_rows(steps, whole=steps == 8192)
            torch.cuda.empty_cache()
    return out


def sweep() -> list[Row]:
    from driftline.kernels.gated_norm import triton as norm
    from driftline.kernels.short_conv import triton as conv

    out = []
    x, weight, tail = noise(1, 8192, CHANNELS), noise(CHANNELS, 4, dtype=torch.float32), noise(1, 3, CHANNELS)
    grad = noise(1, 8192, CHANNELS)
    for channels, steps, warps in ((256, 64, 2), (256, 128, 2), (512, 64, 4), (512, 64, 2), (512, 128, 4), (128, 64, 1)):
        configuration = conv.Configuration(channels, steps, warps)
        out.append(Row(f"forward, {configuration}", measure(partial(conv.forward, x, weight, tail, None, configuration)).median_ms, bytes=2 * x.nbytes))
        out.append(Row(f"backward, {configuration}", measure(partial(conv.backward, x, weight, tail, grad, configuration)).median_ms, bytes=3 * x.nbytes))
        window, history = noise(64, 4, CHANNELS), noise(64, 7, CHANNELS)
        slots = torch.randperm(64, device="cuda").to(torch.int32)
        run = partial(conv.replay, window, weight, history, slots, slots % 5, configuration)
        out.append(Row(f"window of 4, {configuration}", measure(run).median_ms, bytes=3 * window.nbytes + 6 * 64 * CHANNELS * 2))
    o, gain, gate, dy = noise(8192, HEADS, 128), noise(128, dtype=torch.float32), noise(8192, HEADS, 128), noise(8192, HEADS, 128)
    for tile in (norm.ROWS, 8):
        out.append(Row(f"gated norm forward, {tile} rows a tile", measure(partial(norm.forward, o, gain, gate, EPS, tile)).median_ms, bytes=3 * o.nbytes))
    for built in norm.CANDIDATES:
        out.append(Row(f"gated norm backward, {built}", measure(partial(norm.backward, o, gain, gate, dy, EPS, built)).median_ms, bytes=5 * o.nbytes))
    return out


def main() -> None:
    options = arguments(__doc__)
    if options.sweep:
        finish("short_conv", sweep(), write=False)
    else:
        finish("short_conv", rows(options.quick, options.only), commit=options.commit, note="bfloat16 inputs of N(0, 1), fp32 weights", write=not options.quick)


if __name__ == "__main__":
    main()
