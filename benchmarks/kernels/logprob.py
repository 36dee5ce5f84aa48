"""Log-probabilities of given tokens at K3's vocabulary, forward and backward, beside torch with the logits held.

    python benchmarks/kernels/logprob.py [--quick] [--sweep] [--only TEXT] [--commit ID]

Peer: `log_softmax` of the fp32 of `hidden weight^T`, the token gathered and the entropy summed, eager, of which the product runs in cuBLAS. Products: one
forward; three backward to both (the logits are made again), two to `hidden` alone. Where the peer does not fit into the device, ours is alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from harness import Row, arguments, finish, measure, peak_bytes

from driftline.kernels.logprob import selected_logprobs

V, D = 163840, 7168
PEER_ROWS = 8192
"""Beyond these the peer's fp32 logits, their softmax and its gradient would be more than the device has."""

Both = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def tensors(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(count, D, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(V, D, device="cuda", dtype=torch.bfloat16).mul_(3 * D**-0.5)
    return hidden, weight, torch.randint(V, (count,), device="cuda")


def held(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(torch.nn.functional.linear(hidden, weight).float() / temperature, dim=-1)
    with torch.no_grad():
        entropy = torch.special.entr(logp.exp()).sum(-1)
    return logp.gather(-1, ids[:, None]).squeeze(-1), entropy


def step(fn: Both, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, *, to_weight: bool) -> Callable[[], object]:
    """Forward and backward in one call: what a learner does."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_(to_weight)
    wanted = (hidden, weight) if to_weight else (hidden,)
    return lambda: torch.autograd.grad(fn(hidden, weight, ids, 0.7)[0].sum(), wanted)


def rows(quick: bool, only: str) -> list[Row]:
    out = []
    for count in (64, 1024) if quick else (1, 64, 1024, 8192, 32_768):
        hidden, weight, ids = tensors(count)
        rounds = 5 if count > 8192 else 10
        product, operands = 2.0 * count * V * D, 2.0 * (count + V) * D
        ways: list[tuple[str, int, float, Callable[[Both], Callable[[], object]]]] = [
            ("forward", 1, operands, lambda fn, args=(hidden, weight, ids): partial(fn, *args, 0.7)),
            ("forward and backward to hidden", 3, operands, lambda fn, args=(hidden, weight, ids): step(fn, *args, to_weight=False)),
            ("forward and backward to both", 4, 2 * operands, lambda fn, args=(hidden, weight, ids): step(fn, *args, to_weight=True)),
        ]
        for way, products, least, call in ways:
            case = f"{way}, {count} rows"
            if only not in case:
                continue
            ours = call(selected_logprobs)
            ms, peak = measure(ours, rounds=rounds).median_ms, peak_bytes(ours)
            peer, peer_ms, peer_peak = None, None, None
            if count <= PEER_ROWS:
                theirs = call(held)
                peer, peer_ms, peer_peak = "torch, eager", measure(theirs, rounds=rounds).median_ms, peak_bytes(theirs)
            out.append(Row(case, ms, peer, peer_ms, flops=products * product, bytes=least, peak=peak, peer_peak=peer_peak))
            torch.cuda.empty_cache()
    return out


def sweep(only: str) -> None:
    from driftline.kernels.linear.tiles import Tile
    from driftline.kernels.logprob import triton as kernels

    candidates = (*kernels.TILES[2], Tile(128, 256, 64, warps=8, stages=3), Tile(128, 128, 64, warps=8, stages=4))
    for count in (64, 1024, 8192):
        if only not in str(count):
            continue
        hidden, weight, ids = tensors(count)
        inverse = torch.full((count,), 1 / 0.7, device="cuda")
        for tile in candidates:
            ms = measure(partial(kernels.forward, hidden, weight, ids, inverse, tile=tile), rounds=10).median_ms
            print(f"forward {count:5} rows {tile}: {ms:.4f} ms, {2 * count * V * D / ms / 1e9:.0f} TFLOP/s{' *' if tile == kernels.tile_for(count, 2) else ''}")
        normaliser = kernels.forward(hidden, weight, ids, inverse)[2]
        for width in (4096, 8192, 16384, 32768):
            call = partial(kernels.gradients, hidden, weight, ids, inverse, normaliser, inverse, to_hidden=True, to_weight=True, width=width)
            print(f"backward {count:5} rows, parts of {width}: {measure(call, rounds=5).median_ms:.4f} ms{' *' if width == kernels.part_width(count, 2) else ''}")


def main() -> None:
    args = arguments(__doc__)
    if args.sweep:
        sweep(args.only)
        return
    finish("logprob", rows(args.quick, args.only), commit=args.commit, write=not args.quick and not args.only)


if __name__ == "__main__":
    main()
