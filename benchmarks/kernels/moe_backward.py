"""The expert MLP's backward at K3's shapes: gradients of z and of the gates, and of bfloat16 weights; the peer is torch's grouped products with autograd.

    python benchmarks/kernels/moe_backward.py [--quick] [--sweep] [--only TEXT] [--commit ID]

Ours starts from the inputs alone and makes g, u and h again; torch's backward reads what its forward saved, which its peak shows. FLOPs are those of the
products with no padding: 10 R Z I for R pairs (4 of them the second making of g and u), 6 R Z I more for the weights' gradients. Bytes: each operand and result
once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import harness
import torch

from driftline.kernels.moe import triton_backward as kernels
from driftline.kernels.moe.backward import Wanted, backward
from driftline.kernels.moe.plan import plan
from driftline.kernels.moe.triton_tiles import Form
from driftline.kernels.moe.triton_wgrad import CANDIDATES as WEIGHT_CANDIDATES
from driftline.kernels.moe.triton_wgrad import PINNED as WEIGHT_PINNED
from driftline.kernels.moe.triton_wgrad import Side, WeightBlocks, weight_gradient
from driftline.kernels.mxfp4.weights import ExpertWeight, Fp8Weight, Mxfp4Weight
from driftline.kernels.situ_glu import reference as situ

OUTER, HIDDEN, TOP = 3584, 3072, 16
BETAS = (4.0, 25.0)


def stack(form: Form, experts: int, out: int, width: int) -> ExpertWeight:
    """Random values of about unit gain, made in place: 896 experts in bfloat16 are 20 GB a matrix."""
    match form:
        case Form.BFLOAT16:
            return torch.empty(experts, out, width, dtype=torch.bfloat16, device="cuda").normal_(std=width**-0.5)
        case Form.MXFP4:
            packed = torch.empty(experts, out, width // 2, dtype=torch.uint8, device="cuda").random_(0, 256)
            return Mxfp4Weight(packed, torch.empty(experts, out, width // 32, dtype=torch.uint8, device="cuda").random_(118, 121))
        case Form.FP8:
            values = torch.empty(experts, out, width, dtype=torch.uint8, device="cuda").random_(0, 0x60)
            values.bitwise_or_(torch.empty_like(values).random_(0, 2).mul_(128))
            return Fp8Weight(values.view(torch.float8_e4m3fn), torch.full((experts, out, width // 128), 2.0**-9, device="cuda"))


def routes(tokens: int, experts: int, skew: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 and gates fp32 [N, 16]; with a skew, expert e is drawn in proportion to (e + 1)^-skew."""
    scores = torch.empty(tokens, experts, device="cuda").exponential_().log_().neg_()
    scores -= skew * torch.arange(1, experts + 1, device="cuda").log()
    gates = torch.rand(tokens, TOP, device="cuda") + 0.1
    return scores.topk(TOP, dim=-1).indices, gates / gates.sum(-1, keepdim=True)


def rows(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, OUTER, device="cuda").bfloat16()


def stack_bytes(weights: tuple[ExpertWeight, ...]) -> int:
    return sum(t.nbytes for w in weights for t in ((w,) if isinstance(w, torch.Tensor) else w))


def torchs(z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The same MLP of torch's grouped products, rows sorted by expert."""
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=w1.shape[0]).cumsum(0).to(torch.int32)
    some = z[order // TOP]
    hidden = situ.situ_glu(torch._grouped_mm(some, w1.mT, offs=ends), torch._grouped_mm(some, w3.mT, offs=ends), *BETAS)
    out = torch._grouped_mm(hidden, w2.mT, offs=ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return (out[back].view(*ids.shape, -1).float() * gates[..., None]).sum(1).to(z.dtype)


def torchs_time(leaves: list[torch.Tensor], ids: torch.Tensor, dy: torch.Tensor, rounds: int) -> tuple[float | None, int | None, str]:
    """Median of autograd's backward alone, the peak of forward and backward, and what to note."""
    z, gates, *weights = leaves
    asked = [leaf for leaf in leaves if leaf.requires_grad]

    def again(out: torch.Tensor, keep: bool) -> object:
        return torch.autograd.grad(out, asked, dy, retain_graph=keep)

    try:
        time = harness.measure(partial(again, torchs(z, ids, gates, *weights), True), rounds=rounds).median_ms
        return time, harness.peak_bytes(lambda: again(torchs(z, ids, gates, *weights), False)), "torch keeps its activations"
    except (RuntimeError, AttributeError, NotImplementedError) as reason:
        torch.cuda.empty_cache()
        return None, None, f"torch's grouped product refused: {str(reason).splitlines()[0][:80]}"


def case(name: str, form: Form, weights: tuple[ExpertWeight, ...], tokens: int, *, skew: float = 0.0, to_weights: bool = False, peer: bool = False,
         rounds: int = 10) -> harness.Row:
    experts = weights[0].shape[0]
    z, dy, (ids, gates) = rows(tokens), rows(tokens), routes(tokens, experts, skew)
    wanted = Wanted(True, True, *[to_weights] * 3)
    w1, w3, w2 = weights

    def ours() -> object:
        return backward(z, ids, gates, w1, w3, w2, BETAS, dy, wanted)

    time = harness.measure(ours, rounds=rounds).median_ms
    peak = harness.peak_bytes(ours)
    pairs, held = tokens * TOP, stack_bytes(weights)
    their_time, their_peak, note = None, None, ""
    if peer:
        leaves = [z.requires_grad_(), gates.requires_grad_(), *(w.detach().requires_grad_(to_weights) for w in weights if isinstance(w, torch.Tensor))]
        their_time, their_peak, note = torchs_time(leaves, ids, dy, rounds)
    return harness.Row(f"{name}, {tokens} tokens", time, "torch grouped_mm, autograd" if their_time else None, their_time,
                       bytes=held * (2 if to_weights else 1) + 3 * z.nbytes, flops=(16 if to_weights else 10) * pairs * OUTER * HIDDEN, peak=peak, peer_peak=their_peak,
                       note=note)


def cases(arguments: object) -> list[harness.Row]:
    quick, only = getattr(arguments, "quick", False), getattr(arguments, "only", "")
    found: list[harness.Row] = []

    def add(label: str, form: Form, experts: int, plans: list[tuple[int, dict[str, object]]]) -> None:
        if only not in label:
            return
        weights = (stack(form, experts, HIDDEN, OUTER), stack(form, experts, HIDDEN, OUTER), stack(form, experts, OUTER, HIDDEN))
        for tokens, options in plans:
            name = label + (" power-law" if options.get("skew") else "") + (" + weights" if options.get("to_weights") else "")
            found.append(case(name, form, weights, tokens, **options))  # type: ignore[arg-type]
        del weights
        torch.cuda.empty_cache()

    if quick:
        add("bfloat16, 16 experts", Form.BFLOAT16, 16, [(1024, {"peer": True, "rounds": 5}), (1024, {"to_weights": True, "peer": True, "rounds": 5})])
        add("mxfp4, 112 experts", Form.MXFP4, 112, [(1024, {"rounds": 5})])
        return found
    add("bfloat16, 112 experts", Form.BFLOAT16, 112, [(1024, {"peer": True}), (8192, {"peer": True}), (8192, {"to_weights": True, "peer": True})])
    add("mxfp4, 896 experts", Form.MXFP4, 896, [(64, {}), (1024, {}), (8192, {}), (8192, {"skew": 1.2})])
    add("fp8, 896 experts", Form.FP8, 896, [(8192, {})])
    add("mxfp4, 112 experts", Form.MXFP4, 112, [(8192, {})])
    return found


def sweep(form: Form, experts: int, tokens: int = 8192) -> None:
    """Each kernel alone in each candidate configuration."""
    w1, w3, w2 = stack(form, experts, HIDDEN, OUTER), stack(form, experts, HIDDEN, OUTER), stack(form, experts, OUTER, HIDDEN)
    z, dy, (ids, gates) = rows(tokens), rows(tokens), routes(tokens, experts)
    dh, du, out = (torch.randn(tokens * TOP, width, device="cuda", dtype=torch.bfloat16) for width in (HIDDEN, HIDDEN, OUTER))

    def timed(blocks: kernels.Blocks) -> dict[str, float]:
        table = plan(ids, experts, blocks.rows)
        steps: dict[str, Callable[[], object]] = {
            "d_hidden": lambda: kernels.d_hidden(dy, w2, table, TOP, dh, blocks),
            "inner": lambda: kernels.inner(z, w1, w3, gates, dh, du, None, table, BETAS, blocks),
            "d_input": lambda: kernels.d_input(dh, du, w1, w3, table, out, blocks),
        }
        return {name: harness.measure(step, rounds=7).median_ms for name, step in steps.items()}

    for blocks in kernels.CANDIDATES[form]:
        times = timed(blocks)
        pinned = " (pinned)" if blocks == kernels.blocks_for(form, tokens * TOP, experts) else ""
        said = ", ".join(f"{name} {time:.3f}" for name, time in times.items())
        print(f"{form.name}, {experts} experts, {tuple(blocks)}{pinned}: {said}, sum {sum(times.values()):.3f} ms", flush=True)


def sweep_weights(experts: int, tokens: int = 8192) -> None:
    z, d, (ids, _) = rows(tokens), torch.randn(tokens * TOP, HIDDEN, device="cuda", dtype=torch.bfloat16), routes(tokens, experts)
    target, table = torch.empty(experts, HIDDEN, OUTER, dtype=torch.bfloat16, device="cuda"), plan(ids, experts, 64)

    def timed(blocks: WeightBlocks) -> float:
        return harness.measure(lambda: weight_gradient(Side(d, False), Side(z, True), table, TOP, target, add=False, blocks=blocks), rounds=7).median_ms

    for blocks in WEIGHT_CANDIDATES:
        pinned = " (pinned)" if blocks == WEIGHT_PINNED else ""
        print(f"weight gradient, {experts} experts, {tuple(blocks)}{pinned}: {timed(blocks):.3f} ms", flush=True)


def sweeps(only: str) -> None:
    for form, experts in ((Form.MXFP4, 896), (Form.MXFP4, 112), (Form.BFLOAT16, 448), (Form.BFLOAT16, 112), (Form.FP8, 448)):
        if only.lower() in f"{form.name} {experts}".lower():
            sweep(form, experts)
            torch.cuda.empty_cache()
    for experts in (448, 112):
        if only.lower() in f"weights {experts}":
            sweep_weights(experts)
            torch.cuda.empty_cache()


def main() -> None:
    arguments = harness.arguments(__doc__)
    torch.manual_seed(0)
    if arguments.sweep:
        sweeps(arguments.only)
        return
    harness.finish("moe_backward", cases(arguments), commit=arguments.commit, note="K3: Z 3584, I 3072, top 16; dgrad counts the second making of g and u",
                   write=not arguments.quick)


if __name__ == "__main__":
    main()
