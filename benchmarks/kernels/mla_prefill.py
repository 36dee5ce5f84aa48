"""Causal attention of one K3 layer with latent keys and values expanded: head dimensions 192 and 128, forward (fp32 output) and backward.

    python benchmarks/kernels/mla_prefill.py [--quick] [--sweep] [--only TEXT] [--commit ID]

FLOPs of a query, head and key it sees: 2 * (192 + 128) forward, 2 * (3 * 192 + 2 * 128) backward (the least; ours computes scores and their gradient twice,
2 * (5 * 192 - 192 + 3 * 128) in all, so that no sum needs an atomic). The peers are torch's own: cuDNN's attention at 192 and 128, FlashAttention-2 with values
padded to 192, both with the shared key copied to every head and bfloat16 output, backward as they have it. A peer that does not take the call is left out.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from harness import Row, arguments, finish, measure, peak_bytes
from torch.nn.attention import SDPBackend, sdpa_kernel

from driftline.kernels.mla_prefill import mla_prefill
from driftline.kernels.mla_prefill.shapes import SCALE, Sizes

NOPE, SHARED, VALUE = 128, 64, 128
PEERS = ((SDPBackend.CUDNN_ATTENTION, "torch cuDNN attention", VALUE), (SDPBackend.FLASH_ATTENTION, "torch FlashAttention-2, v padded", NOPE + SHARED))


class Case(NamedTuple):
    rows: int
    heads: int
    sequences: int = 1

    @property
    def name(self) -> str:
        return f"T {self.rows}, H {self.heads}" + (f", {self.sequences} sequences" if self.sequences > 1 else "")

    @property
    def pairs(self) -> float:
        each = self.rows // self.sequences
        return self.sequences * each * (each + 1) / 2.0 * self.heads

    @property
    def forward_flops(self) -> float:
        return 2.0 * self.pairs * (NOPE + SHARED + VALUE)

    @property
    def backward_flops(self) -> float:
        return 2.0 * self.pairs * (3 * (NOPE + SHARED) + 2 * VALUE)


CASES = (Case(8192, 96), Case(4096, 96), Case(32_768, 96), Case(8192, 12), Case(8192, 96, 8))


def inputs(case: Case) -> tuple[list[torch.Tensor], torch.Tensor]:
    shapes = ((case.rows, case.heads, NOPE + SHARED), (case.rows, case.heads, NOPE + VALUE), (case.rows, SHARED))
    given = [torch.randn(*shape, dtype=torch.bfloat16, device="cuda").requires_grad_() for shape in shapes]
    return given, torch.arange(case.sequences + 1, dtype=torch.int32, device="cuda") * (case.rows // case.sequences)


def padded(case: Case, given: list[torch.Tensor], value: int) -> list[torch.Tensor]:
    """q, k and v [sequences, H, T, width] with the shared key in every head and the values padded to `value`."""
    q, kv, shared = (t.detach() for t in given)
    k = torch.cat([kv[..., :NOPE], shared[:, None].expand(-1, case.heads, -1)], dim=-1)
    v = torch.nn.functional.pad(kv[..., NOPE:], (0, value - VALUE))
    return [t.view(case.sequences, -1, case.heads, t.shape[-1]).transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v)]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)


class Peer(NamedTuple):
    name: str
    forward_ms: float
    backward_ms: float
    forward_peak: int
    backward_peak: int


def peer_of(case: Case, given: list[torch.Tensor], backend: SDPBackend, name: str, value: int, rounds: int) -> Peer | None:
    with sdpa_kernel(backend):
        try:
            three = padded(case, given, value)
            with torch.no_grad():
                ahead, peak = measure(partial(attention, *three), rounds=rounds).median_ms, peak_bytes(partial(attention, *three))
            out = attention(*three)
            back = partial(torch.autograd.grad, out, three, torch.randn_like(out), retain_graph=True)
            return Peer(name, ahead, measure(back, rounds=rounds).median_ms, peak, peak_bytes(back))
        except RuntimeError as error:
            print(f"{case.name}: {name} does not take this: {str(error).splitlines()[0][:100]}")
            return None


def rows_of(quick: bool, only: str) -> list[Row]:
    rows = []
    for case in CASES[: 1 if quick else None]:
        if only not in case.name:
            continue
        given, starts = inputs(case)
        rounds = 5 if case.rows > 8192 else 15
        run = partial(mla_prefill, *given, cu_seqlens=starts)
        with torch.no_grad():
            ahead, peak = measure(run, rounds=rounds).median_ms, peak_bytes(run)
        out = run()
        back = partial(torch.autograd.grad, out, given, torch.randn_like(out), retain_graph=True)
        behind, back_peak = measure(back, rounds=rounds).median_ms, peak_bytes(back)
        del out, back
        peers = [peer for how in PEERS if (peer := peer_of(case, given, *how, rounds)) is not None]
        for peer in peers or [Peer("none takes this", 0.0, 0.0, 0, 0)]:
            rows.append(Row(f"{case.name}, forward", ahead, peer.name, peer.forward_ms, flops=case.forward_flops, peak=peak, peer_peak=peer.forward_peak))
            rows.append(Row(f"{case.name}, backward", behind, peer.name, peer.backward_ms, flops=case.backward_flops, peak=back_peak, peer_peak=peer.backward_peak))
        del given, run
        torch.cuda.empty_cache()
    return rows


def sweep() -> list[Row]:
    from driftline.kernels.mla_prefill import triton_backward, triton_forward

    case = CASES[0]
    given, starts = inputs(case)
    q, kv, shared = (t.detach() for t in given)
    sizes = Sizes(case.rows, case.rows, case.heads, NOPE, SHARED, VALUE)
    rows = []
    for configuration in triton_forward.CONFIGURATIONS:
        timing = measure(partial(triton_forward.forward, q, kv, shared, starts, starts, sizes, SCALE, torch.float32, configuration), rounds=10)
        rows.append(Row(f"forward {tuple(configuration)}", timing.median_ms, flops=case.forward_flops))
    out, lse = triton_forward.forward(q, kv, shared, starts, starts, sizes, SCALE, torch.float32)
    grad = torch.randn_like(out)
    pairs = [(one, triton_backward.KEYS_DEFAULT) for one in triton_backward.QUERIES] + [(triton_backward.QUERIES_DEFAULT, one) for one in triton_backward.KEYS[1:]]
    for of_queries, of_keys in pairs:
        timing = measure(partial(triton_backward.backward, q, kv, shared, starts, starts, out, lse, grad, sizes, SCALE, of_queries, of_keys), rounds=10)
        rows.append(Row(f"backward {tuple(of_queries)} {tuple(of_keys)}", timing.median_ms, flops=case.backward_flops))
    return rows


def main() -> None:
    options = arguments(__doc__)
    if options.sweep:
        finish("mla_prefill", sweep(), write=False)
    else:
        finish("mla_prefill", rows_of(options.quick, options.only), commit=options.commit, write=not options.quick)


if __name__ == "__main__":
    main()
