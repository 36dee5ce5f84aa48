"""What the first call of every operator costs at K3's shapes, forward and backward, with an empty compile cache.

    python benchmarks/kernels/cold_start.py [--quick] [--only TEXT] [--commit ID]

Each operator is called once on small inputs of K3's widths (a kernel is compiled for its shapes' divisibility and its pinned configuration, not for a
length); wall time from the call to the end of its kernels. Prompt and decoding sizes that take different kernels are both called. The peer is FLA
0.6.0, whose first `chunk_kda` forward and backward took 277 s on an H200 (all but some seconds of it tuning).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="driftline-cold-")

import harness
import torch

from driftline.kernels.attention_residual import Bank, aggregate
from driftline.kernels.gated_norm import gated_norm
from driftline.kernels.kda import kda
from driftline.kernels.kda_decode import Window, fold, kda_decode, replay_decode
from driftline.kernels.linear import linear
from driftline.kernels.logprob import selected_logprobs
from driftline.kernels.mla_decode import mla_decode
from driftline.kernels.mla_prefill import mla_prefill
from driftline.kernels.moe import expert_mlp, route
from driftline.kernels.mxfp4 import Mxfp4Weight
from driftline.kernels.policy_delta import xor_blocks
from driftline.kernels.rmsnorm import rmsnorm
from driftline.kernels.short_conv import short_conv, short_conv_decode, short_conv_replay
from driftline.kernels.situ_glu import situ_glu

FLA_MS = 277_000.0
TOKENS, HEADS, HIDDEN = 256, 12, 7168


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").mul_(scale).to(dtype)


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in tensors]


def both(fn: Callable[..., torch.Tensor], *given: torch.Tensor) -> None:
    wanted = leaves(*given)
    out = fn(*wanted)
    torch.autograd.grad(out, wanted, torch.ones_like(out))


def kda_call(heads: int) -> None:
    row = (1, TOKENS, heads, 128)
    both(lambda *x: kda(*x)[0], noise(*row), noise(*row), noise(*row), noise(*row), noise(*row[:3]), noise(heads, dtype=torch.float32),
         noise(heads * 128, dtype=torch.float32))


def decode_call() -> None:
    rows, window_length = 4, 4
    weights = noise(HEADS, dtype=torch.float32), noise(HEADS * 128, dtype=torch.float32)
    pool, slots = noise(8, HEADS, 128, 128, dtype=torch.float32), torch.arange(rows, device="cuda", dtype=torch.int32)
    counts, window = torch.ones_like(slots), Window.empty(8, window_length, HEADS, 128, device="cuda")
    q, k, v, z = (noise(rows, window_length, HEADS, 128) for _ in range(4))
    beta = noise(rows, window_length, HEADS)
    replay_decode(q, k, v, z, beta, *weights, pool, slots, window, counts)
    fold(*weights, pool, slots, window, counts)
    kda_decode(q[:, 0], k[:, 0], v[:, 0], z[:, 0], beta[:, 0], *weights, pool, slots)


def convolution_call() -> None:
    channels = HEADS * 128
    weight = noise(channels, 4, dtype=torch.float32)
    both(lambda x, w: short_conv(x, w, noise(1, 3, channels))[0], noise(1, TOKENS, channels), weight)
    slots = torch.arange(4, device="cuda", dtype=torch.int32)
    short_conv_replay(noise(4, 4, channels), weight.detach(), noise(4, 7, channels), slots, torch.ones_like(slots))
    short_conv_decode(noise(4, channels), weight.detach(), noise(4, 3, channels), slots)


def experts(dtype: str, tokens: int, *, backward: bool) -> None:
    count, outer, inner = 64, 3584, 3072
    if dtype == "mxfp4":
        w: list[Any] = [Mxfp4Weight(torch.randint(0, 256, (count, n, k // 2), dtype=torch.uint8, device="cuda"),
                                    torch.randint(117, 122, (count, n, k // 32), dtype=torch.uint8, device="cuda")) for n, k in ((inner, outer),) * 2 + ((outer, inner),)]
    else:
        w = [noise(count, n, k, scale=0.02).requires_grad_(backward) for n, k in ((inner, outer),) * 2 + ((outer, inner),)]
    ids = torch.argsort(torch.rand(tokens, count, device="cuda"), 1)[:, :16].contiguous()
    z, gates = noise(tokens, outer).requires_grad_(backward), torch.rand(tokens, 16, device="cuda").requires_grad_(backward)
    w1, w3, w2 = w
    out = expert_mlp(z, ids, gates, w1, w3, w2, 4.0, 25.0)
    if backward:
        torch.autograd.grad(out, [z, gates, *(x for x in (w1, w3, w2) if isinstance(x, torch.Tensor))], torch.ones_like(out))


def router_call() -> None:
    x, weight = leaves(noise(TOKENS, HIDDEN), noise(896, HIDDEN, scale=HIDDEN**-0.5))
    for rows in (4, TOKENS):
        gates = route(x[:rows], weight, torch.zeros(896, device="cuda"), 16, 1.0)[1]
    torch.autograd.grad(gates, [x, weight], torch.ones_like(gates))


def residual_call() -> None:
    bank, prefix, query, norm = leaves(noise(TOKENS, 8, HIDDEN), noise(TOKENS, HIDDEN), noise(HIDDEN, scale=0.01), noise(HIDDEN))
    mixed = aggregate(Bank.of(bank), prefix, query, norm, 1e-5).mixed
    torch.autograd.grad(mixed, [bank, prefix, query, norm], torch.ones_like(mixed))


def linear_call() -> None:
    for rows in (4, 512):
        both(linear, noise(rows, HIDDEN), noise(3584, HIDDEN, scale=0.01))


def logprob_call() -> None:
    ids = torch.randint(16384, (TOKENS,), device="cuda")
    both(lambda h, w: selected_logprobs(h, w, ids, 0.7)[0], noise(TOKENS, HIDDEN), noise(16384, HIDDEN, scale=0.01))


def attention_call() -> None:
    both(lambda *x: mla_prefill(*x), noise(TOKENS, HEADS, 192), noise(TOKENS, HEADS, 256), noise(TOKENS, 64))
    table = torch.arange(32, device="cuda", dtype=torch.int32).view(2, 16)
    mla_decode(noise(2, 1, 96, 576), noise(32, 64, 576), table, torch.full((2,), 1024, dtype=torch.int32, device="cuda"))


def xor_call() -> None:
    xor_blocks(noise(8192), noise(8192), block=4096)


CALLS: dict[str, Callable[[], None]] = {
    "rmsnorm": lambda: both(lambda x, w: rmsnorm(x, w, 1e-5), noise(TOKENS, HIDDEN), noise(HIDDEN)),
    "gated_norm": lambda: both(lambda o, w, g: gated_norm(o, w, g, 1e-5), noise(TOKENS, HEADS, 128), noise(128), noise(TOKENS, HEADS, 128)),
    "situ_glu": lambda: both(lambda g, u: situ_glu(g, u, 4.0, 25.0), noise(TOKENS, 3072), noise(TOKENS, 3072)),
    "short_conv, decode and window": convolution_call,
    "kda, 12 heads (segments)": lambda: kda_call(12),
    "kda, 96 heads": lambda: kda_call(96),
    "kda_decode, replay_decode, fold": decode_call,
    "attention_residual": residual_call,
    "router": router_call,
    "moe mxfp4, 4 tokens": lambda: experts("mxfp4", 4, backward=False),
    "moe mxfp4, 4,096 tokens": lambda: experts("mxfp4", 4096, backward=False),
    "moe mxfp4, forward and backward": lambda: experts("mxfp4", TOKENS, backward=True),
    "moe bf16, forward and backward": lambda: experts("bf16", TOKENS, backward=True),
    "linear": linear_call,
    "logprob": logprob_call,
    "mla_prefill, mla_decode": attention_call,
    "xor": xor_call,
}


def main() -> None:
    asked = harness.arguments(__doc__)
    torch.mm(noise(64, 64), noise(64, 64))
    torch.cuda.synchronize()
    rows, spent = [], 0.0
    for name, call in CALLS.items():
        if asked.only not in name:
            continue
        times = []
        for _ in range(2):
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        spent += times[0]
        rows.append(harness.Row(name, times[0], note=f"second call {times[1]:.1f} ms"))
        print(f"{name:40} {times[0] / 1e3:7.2f} s, then {times[1]:.1f} ms", flush=True)
    rows.append(harness.Row("all of them", spent, "FLA's chunk_kda alone (quoted)", FLA_MS))
    harness.finish("cold_start", rows, commit=asked.commit, note="wall time of first calls, empty compile cache", write=not asked.only)


if __name__ == "__main__":
    main()
