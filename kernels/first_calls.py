"""The first call of every operator at K3's widths, forward and backward and at prompt and decoding sizes: what a compile cache must hold so that no step waits.

A kernel is compiled for its shapes' divisibility and its pinned configuration, not for a length, so small inputs do. `compiled` makes the calls in processes of
their own, because the compiler works on one kernel at a time in each; Triton's cache on disk (TRITON_CACHE_DIR) is what they leave.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

import torch

from driftline.kernels.attention_residual import Bank, aggregate
from driftline.kernels.gated_norm import gated_norm
from driftline.kernels.gqa import attention
from driftline.kernels.grouped_linear import grouped_linear, groups_of
from driftline.kernels.kda import kda
from driftline.kernels.kda_decode import Window, fold, kda_decode, replay_decode
from driftline.kernels.linear import linear
from driftline.kernels.linear.heads import head_linear
from driftline.kernels.logprob import selected_logprobs
from driftline.kernels.mla_decode import mla_decode
from driftline.kernels.mla_prefill import mla_prefill
from driftline.kernels.mode import Numerics, using
from driftline.kernels.moe import expert_mlp, route
from driftline.kernels.mxfp4 import Mxfp4Weight
from driftline.kernels.policy_delta import xor_blocks
from driftline.kernels.rmsnorm import rmsnorm
from driftline.kernels.rope import rotate
from driftline.kernels.short_conv import short_conv, short_conv_decode, short_conv_replay
from driftline.kernels.situ_glu import situ_glu

__all__ = ["CALLS", "Compiled", "compiled", "first_call"]

TOKENS, HEADS, HIDDEN = 256, 12, 7168


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape).mul_(scale).to(dtype)


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
    pool, slots = noise(8, HEADS, 128, 128, dtype=torch.float32), torch.arange(rows, dtype=torch.int32)
    counts, window = torch.ones_like(slots), Window.empty(8, window_length, HEADS, 128, device=torch.get_default_device())
    q, k, v, z = (noise(rows, window_length, HEADS, 128) for _ in range(4))
    beta = noise(rows, window_length, HEADS)
    replay_decode(q, k, v, z, beta, *weights, pool, slots, window, counts)
    fold(*weights, pool, slots, window, counts)
    kda_decode(q[:, 0], k[:, 0], v[:, 0], z[:, 0], beta[:, 0], *weights, pool, slots)


def deterministic_call() -> None:
    """What only deterministic mode calls."""
    row = (1, TOKENS, HEADS, 128)
    with using(Numerics.DETERMINISTIC), torch.no_grad():
        given = (*(noise(*row) for _ in range(4)), noise(*row[:3]), noise(HEADS, dtype=torch.float32), noise(HEADS * 128, dtype=torch.float32))
        _, state = kda(*given)
        kda(*given, initial_state=state)
        kda(*given, initial_state=state, cu_seqlens=torch.tensor([0, TOKENS], dtype=torch.int32))
        up = noise(HEADS, 256, 512, scale=0.04)
        head_linear(head_linear(noise(TOKENS, HEADS, 128), up[:, :128].mT), up[:, 128:])


def convolution_call() -> None:
    channels = HEADS * 128
    weight = noise(channels, 4, dtype=torch.float32)
    both(lambda x, w: short_conv(x, w, noise(1, 3, channels))[0], noise(1, TOKENS, channels), weight)
    slots = torch.arange(4, dtype=torch.int32)
    short_conv_replay(noise(4, 4, channels), weight.detach(), noise(4, 7, channels), slots, torch.ones_like(slots))
    short_conv_decode(noise(4, channels), weight.detach(), noise(4, 3, channels), slots)


def experts(dtype: str, tokens: int, *, backward: bool) -> None:
    count, outer, inner = 64, 3584, 3072
    if dtype == "mxfp4":
        w: list[Any] = [Mxfp4Weight(torch.randint(0, 256, (count, n, k // 2), dtype=torch.uint8),
                                    torch.randint(117, 122, (count, n, k // 32), dtype=torch.uint8)) for n, k in ((inner, outer),) * 2 + ((outer, inner),)]
    else:
        w = [noise(count, n, k, scale=0.02).requires_grad_(backward) for n, k in ((inner, outer),) * 2 + ((outer, inner),)]
    ids = torch.argsort(torch.rand(tokens, count), 1)[:, :16].contiguous()
    z, gates = noise(tokens, outer).requires_grad_(backward), torch.rand(tokens, 16).requires_grad_(backward)
    w1, w3, w2 = w
    out = expert_mlp(z, ids, gates, w1, w3, w2, 4.0, 25.0)
    if backward:
        torch.autograd.grad(out, [z, gates, *(x for x in (w1, w3, w2) if isinstance(x, torch.Tensor))], torch.ones_like(out))


def router_call() -> None:
    x, weight = leaves(noise(TOKENS, HIDDEN), noise(896, HIDDEN, scale=HIDDEN**-0.5))
    for rows in (4, TOKENS):
        gates = route(x[:rows], weight, torch.zeros(896), 16, 1.0)[1]
    torch.autograd.grad(gates, [x, weight], torch.ones_like(gates))


def residual_call() -> None:
    bank, prefix, query, norm = leaves(noise(TOKENS, 8, HIDDEN), noise(TOKENS, HIDDEN), noise(HIDDEN, scale=0.01), noise(HIDDEN))
    mixed = aggregate(Bank.of(bank), prefix, query, norm, 1e-5).mixed
    torch.autograd.grad(mixed, [bank, prefix, query, norm], torch.ones_like(mixed))


def linear_call() -> None:
    for rows in (4, 512):
        both(linear, noise(rows, HIDDEN), noise(3584, HIDDEN, scale=0.01))


def logprob_call() -> None:
    ids = torch.randint(16384, (TOKENS,))
    both(lambda h, w: selected_logprobs(h, w, ids, 0.7)[0], noise(TOKENS, HIDDEN), noise(16384, HIDDEN, scale=0.01))


def attention_call() -> None:
    both(lambda *x: mla_prefill(*x), noise(TOKENS, HEADS, 192), noise(TOKENS, HEADS, 256), noise(TOKENS, 64))
    table = torch.arange(32, dtype=torch.int32).view(2, 16)
    mla_decode(noise(2, 1, 96, 576), noise(32, 64, 576), table, torch.full((2,), 1024, dtype=torch.int32))


def grouped_attention_call() -> None:
    for heads, key_heads, width in ((9, 3, 64), (32, 8, 128)):
        both(lambda *x: attention(*x), noise(1, TOKENS, heads, width), *(noise(1, TOKENS, key_heads, width) for _ in range(2)))
        held = [noise(2, 2048, key_heads, width) for _ in range(2)]
        for valid in (None, torch.ones(2, 2048, dtype=torch.bool)):
            attention(noise(2, 1, heads, width), *held, valid=valid)


def adapter_call() -> None:
    count, outer, inner, rank = 64, 3584, 3072, 64
    rows = groups_of(torch.argsort(torch.rand(TOKENS, count), 1)[:, :4].contiguous(), count)
    x, a, b = leaves(noise(TOKENS * 4, outer), noise(count, rank, outer, scale=0.02), noise(count, inner, rank))
    packed = Mxfp4Weight(torch.randint(0, 256, (count, inner, outer // 2), dtype=torch.uint8), torch.randint(117, 122, (count, inner, outer // 32), dtype=torch.uint8))
    y = grouped_linear(x, rows, packed) + grouped_linear(grouped_linear(x, rows, a), rows, b)
    torch.autograd.grad(y, [x, a, b], torch.ones_like(y))


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
    "kda and heads' products, deterministic": deterministic_call,
    "attention_residual": residual_call,
    "router": router_call,
    "moe mxfp4, 4 tokens": lambda: experts("mxfp4", 4, backward=False),
    "moe mxfp4, 4,096 tokens": lambda: experts("mxfp4", 4096, backward=False),
    "moe mxfp4, forward and backward": lambda: experts("mxfp4", TOKENS, backward=True),
    "moe bf16, forward and backward": lambda: experts("bf16", TOKENS, backward=True),
    "linear": linear_call,
    "logprob": logprob_call,
    "mla_prefill, mla_decode": attention_call,
    "gqa at two widths": grouped_attention_call,
    "rope": lambda: both(lambda x: rotate(x, torch.rand(TOKENS, 64), torch.rand(TOKENS, 64)), noise(TOKENS, HEADS, 128)),
    "grouped_linear of adapters of rank 64": adapter_call,
    "xor": xor_call,
}
"""By what they call; inputs are made on torch's default device."""

_LONGEST = ("moe mxfp4, forward and backward", "moe bf16, forward and backward", "kda, 12 heads (segments)", "moe mxfp4, 4,096 tokens")
"""Begun first, so that none of them is begun last."""


class Compiled(NamedTuple):
    """`seconds`: from the call to the end of its kernels, in a process that had already started."""

    name: str
    seconds: float


def first_call(name: str, device: str) -> Compiled:
    """Make one of `CALLS` on `device`, and wait for it."""
    with torch.device(device):
        if device != "cpu":
            torch.zeros(1).item()  # the device's own start is nobody's compiling
        start = time.perf_counter()
        CALLS[name]()
        if device != "cpu":
            torch.cuda.synchronize()
    return Compiled(name, time.perf_counter() - start)


def compiled(names: Sequence[str] | None = None, *, processes: int, device: str = "cuda") -> Iterator[Compiled]:
    """Make the calls (None: all) in `processes` processes, and yield each as it is done. Raises ValueError for an unknown name; what a call raises is raised here."""
    wanted = list(CALLS) if names is None else list(names)
    if unknown := [name for name in wanted if name not in CALLS]:
        raise ValueError(f"no call of that name: {unknown[0]!r}; give some of {', '.join(CALLS)}")
    wanted.sort(key=lambda name: name not in _LONGEST)
    with ProcessPoolExecutor(min(processes, len(wanted)), multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(first_call, name, device) for name in wanted]):
            yield done.result()
