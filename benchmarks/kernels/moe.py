"""The expert MLP of one K3 MoE layer (896 experts, top-16, latent 3584, inner 3072) on a CUDA device, beside the quoted latencies of Marlin and torch's own products.

    python benchmarks/kernels/moe.py [--quick] [--sweep] [--only TEXT] [--commit ID]

Peers: `ai-dynamo/aiconfigurator` (Apache-2.0), H200, vLLM 0.24 and SGLang 0.5.14, Marlin W4A16, EP1, as quoted there (collected with SiLU in SiTU's place, balanced
routing); and, in this process, bfloat16 weights of fewer experts by a torch product an expert. Weights are random nibbles under scales of trained size. Eager
calls issue from Python; rows marked `graph` are replays of a graph, which is how small batches are run. `--sweep` times the candidate configurations.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2] / "src")]

import harness  # noqa: E402

from driftline.kernels.moe import expert_mlp, grouped  # noqa: E402
from driftline.kernels.moe.activations import Activations  # noqa: E402
from driftline.kernels.moe.grouped import Form, Grouping, Pinned, Product  # noqa: E402
from driftline.kernels.mxfp4 import ExpertWeight, Mxfp4Weight, to_fp8  # noqa: E402
from driftline.kernels.situ_glu import situ_glu  # noqa: E402

EXPERTS, TOP_K, LATENT, INNER = 896, 16, 3584, 3072
BETAS = (4.0, 25.0)
MARLIN = {1: 0.163, 8: 0.876, 32: 2.40, 64: 5.74, 128: 5.80, 256: 5.81, 512: 6.55, 1024: 9.06, 4096: 28.5, 8192: 42.97, 16384: 74.7}
"""ms, EP1 balanced: vLLM 0.24 (8,192 tokens: SGLang 0.5.14), Marlin W4A16 on one H200, ai-dynamo/aiconfigurator."""

MARLIN_SKEWED = {1: 0.163, 8: 0.874, 32: 2.07, 64: 3.42, 128: 4.35, 256: 6.06, 512: 7.46, 1024: 10.8, 4096: 26.5, 8192: 43.2, 16384: 79.2}
"""The same source, routing by a power law of exponent 1.2."""


def packed(out: int, width: int) -> Mxfp4Weight:
    codes = torch.randint(0, 256, (EXPERTS, out, width // 2), dtype=torch.uint8, device="cuda")
    return Mxfp4Weight(codes, torch.randint(117, 122, (EXPERTS, out, width // 32), dtype=torch.uint8, device="cuda"))


def routed(tokens: int, *, skewed: bool, device: str = "cuda") -> torch.Tensor:
    """int64 [tokens, 16], different experts in a row: each expert equally often, or the e-th most popular with odds e^-1.2."""
    if skewed:
        odds = torch.arange(1, EXPERTS + 1, device=device, dtype=torch.float32).pow(-1.2)[torch.randperm(EXPERTS, device=device)]
        return torch.multinomial(odds.expand(tokens, -1), TOP_K)
    turn = torch.arange(tokens * TOP_K, device=device).view(tokens, TOP_K)
    return (turn * 367 + 11) % EXPERTS  # 367 and 896 have no common divisor: each expert once in every 56 tokens


def layer(z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, weights: Sequence[ExpertWeight], activations: Activations = Activations.SAME) -> torch.Tensor:
    w1, w3, w2 = weights
    out: torch.Tensor = expert_mlp(z, ids, gates, w1, w3, w2, BETAS[0], BETAS[1], activations=activations)
    return out


def touched(ids: torch.Tensor) -> int:
    return int(torch.unique(ids).numel())


def least(ids: torch.Tensor, element: float) -> tuple[float, float]:
    """(bytes, FLOPs) that one call must move and do: the weights of the experts it reaches, its rows in and out, its products."""
    tokens = ids.shape[0]
    return touched(ids) * 3 * LATENT * INNER * element + 4 * tokens * LATENT, 6 * tokens * TOP_K * LATENT * INNER


def torch_products(z: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> None:
    """Eager torch, one product an expert, each with as many rows as it would have in a balanced batch; without the routing."""
    for e in range(w1.shape[0]):
        torch.mm(situ_glu(torch.mm(z, w1[e].t()), torch.mm(z, w3[e].t()), BETAS[0], BETAS[1]), w2[e].t())


def bfloat16_row(tokens: int) -> harness.Row:
    """An eighth of the experts as bfloat16, as many rows each as in the whole layer."""
    experts = EXPERTS // 8
    w1, w3 = (torch.randn(experts, INNER, LATENT, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(2))
    w2 = torch.randn(experts, LATENT, INNER, dtype=torch.bfloat16, device="cuda") * 0.02
    z = torch.randn(tokens // 8, LATENT, dtype=torch.bfloat16, device="cuda")
    ids = routed(tokens // 8, skewed=False) % experts
    gates = torch.rand(tokens // 8, TOP_K, device="cuda")
    rows = torch.randn(tokens * TOP_K // EXPERTS, LATENT, dtype=torch.bfloat16, device="cuda")
    ours = harness.measure(lambda: layer(z, ids, gates, (w1, w3, w2)), rounds=10)
    peer = harness.measure(lambda: torch_products(rows, w1, w3, w2), rounds=10)
    moved = 3 * experts * LATENT * INNER * 2.0
    return harness.Row(f"bf16 weights, {experts} experts, {tokens // 8} tokens", ours.median_ms, "torch, a product an expert, eager", peer.median_ms, bytes=moved,
                       flops=6 * tokens // 8 * TOP_K * LATENT * INNER)


def sweep(z: torch.Tensor, weights: Sequence[ExpertWeight], only: str) -> None:
    """Candidates for each size, timed; the one that is pinned is marked."""
    key = (Form.MXFP4, False)
    table = grouped.TABLE[key]
    narrow = {n: Grouping(((n, 0),)) for n in (16, 32)}
    eight, four = (Product(128, 8, 4), Product(256, 8, 4)), (Product(64, 4, 3), Product(128, 4, 3))
    two_steps = (Product(64, 4, 2, 2), Product(128, 4, 2, 2))
    wide = table[-1].grouping
    candidates = {
        1: [Pinned(narrow[16], *four), Pinned(narrow[16], *two_steps), Pinned(narrow[16], Product(64, 4, 2, 2), Product(64, 4, 2, 2))],
        64: [Pinned(narrow[16], *four), Pinned(narrow[16], *two_steps), Pinned(narrow[32], *two_steps)],
        512: [Pinned(narrow[16], *two_steps), Pinned(narrow[16], Product(64, 4, 2, 2), Product(64, 4, 2, 2)), Pinned(narrow[32], *four)],
        1024: [Pinned(narrow[32], *two_steps), Pinned(narrow[32], *four), Pinned(narrow[32], *eight, gathered=True)],
        2048: [Pinned(Grouping(((32, 0), (64, 0))), *four), Pinned(Grouping(((32, 0), (64, 0))), *eight, gathered=True)],
        4096: [Pinned(Grouping(((32, 0), (64, 0), (64, 32))), Product(128, 8, 3), Product(256, 8, 3)),
               Pinned(Grouping(((32, 0), (64, 0), (64, 32))), *eight, gathered=True)],
        8192: [Pinned(wide, Product(128, 8, 3), Product(256, 8, 3)), Pinned(wide, *eight, gathered=True),
               Pinned(Grouping(((128, 32),)), *eight, gathered=True)],
    }
    for tokens, given in candidates.items():
        if only and only != str(tokens):
            continue
        ids, gates = routed(tokens, skewed=False), torch.rand(tokens, TOP_K, device="cuda")
        held = grouped.pinned(Form.MXFP4, Activations.SAME, tokens * TOP_K, EXPERTS, LATENT)
        for configuration in dict.fromkeys([held, *given]):
            grouped.TABLE[key] = (configuration,) * len(table)
            time = harness.measure(lambda: layer(z[:tokens], ids, gates, weights), rounds=10)  # noqa: B023
            print(f"{tokens:6d} tokens  {time.median_ms:9.3f} ms  {'*' if configuration == held else ' '} {tuple(configuration)}", flush=True)
        grouped.TABLE[key] = table


def main() -> None:
    asked = harness.arguments(__doc__)
    torch.manual_seed(0)
    weights = (packed(INNER, LATENT), packed(INNER, LATENT), packed(LATENT, INNER))
    sizes = [1, 64, 8192] if asked.quick else sorted(MARLIN)
    z = torch.randn(max(sizes), LATENT, dtype=torch.bfloat16, device="cuda")
    if asked.sweep:
        sweep(z, weights, asked.only)
        return
    rows: list[harness.Row] = []

    def wanted(name: str) -> bool:
        return asked.only in name

    for tokens in sizes:
        for kind, skewed, peers in (("balanced", False, MARLIN), ("power law 1.2", True, MARLIN_SKEWED)):
            name = f"mxfp4 x bf16, {tokens} tokens, {kind}"
            if not wanted(name) or (skewed and asked.quick):
                continue
            ids, gates = routed(tokens, skewed=skewed), torch.rand(tokens, TOP_K, device="cuda")
            moved, flops = least(ids, 17 / 32)

            def call(ids: torch.Tensor = ids, gates: torch.Tensor = gates, tokens: int = tokens) -> torch.Tensor:
                return layer(z[:tokens], ids, gates, weights)

            time = harness.graphed(call, calls=5, rounds=10) if tokens <= 64 else harness.measure(call, rounds=10)
            note = "graph; " if tokens <= 64 else ""
            rows.append(harness.Row(name, time.median_ms, "Marlin W4A16 (quoted)", peers[tokens], bytes=moved, flops=flops, peak=harness.peak_bytes(call),
                                    note=f"{note}{touched(ids)} experts"))
    if not asked.quick:
        ids, gates = routed(8192, skewed=False), torch.rand(8192, TOP_K, device="cuda")
        for activations in (Activations.FP8_32, Activations.FP8_128):
            name = f"mxfp4 x {activations.value}, 8192 tokens, balanced"
            if wanted(name):
                moved, flops = least(ids, 17 / 32)
                time = harness.measure(lambda: layer(z[:8192], ids, gates, weights, activations), rounds=10)  # noqa: B023
                rows.append(harness.Row(name, time.median_ms, "Marlin W4A16 (quoted)", MARLIN[8192], bytes=moved, flops=flops,
                                        fp8=activations is Activations.FP8_128))
        if wanted("bf16 weights"):
            rows.append(bfloat16_row(8192))
        name = "fp8 weights x fp8_128, 8192 tokens, balanced"
        if wanted(name):
            whole = [to_fp8(weight).weight for weight in weights]
            time = harness.measure(lambda: layer(z[:8192], ids, gates, whole, Activations.FP8_128), rounds=10)
            moved, flops = least(ids, 1 + 4 / 128)
            rows.append(harness.Row(name, time.median_ms, "Marlin W4A16 (quoted)", MARLIN[8192], bytes=moved, flops=flops, fp8=True))
    harness.finish("moe", rows, commit=asked.commit)


if __name__ == "__main__":
    main()
