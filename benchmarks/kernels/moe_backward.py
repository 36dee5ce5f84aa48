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

from driftline.kernels.moe import gluon_backward as products
from driftline.kernels.moe import triton_backward as kernels
from driftline.kernels.moe.backward import Products, Wanted, backward
from driftline.kernels.moe.gluon_wgrad import weight_gradient
from driftline.kernels.moe.plan import plan
from driftline.kernels.moe.triton_tiles import Form
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
         rounds: int = 10, way: Products | None = None) -> harness.Row:
    experts = weights[0].shape[0]
    z, dy, (ids, gates) = rows(tokens), rows(tokens), routes(tokens, experts, skew)
    wanted = Wanted(True, True, *[to_weights] * 3)
    w1, w3, w2 = weights

    def ours() -> object:
        return backward(z, ids, gates, w1, w3, w2, BETAS, dy, wanted, products=way)

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
            name += f", {options['way'].name.lower()}" if "way" in options else ""  # type: ignore[attr-defined]
            found.append(case(name, form, weights, tokens, **options))  # type: ignore[arg-type]
        del weights
        torch.cuda.empty_cache()

    if quick:
        add("bfloat16, 16 experts", Form.BFLOAT16, 16, [(1024, {"peer": True, "rounds": 5}), (1024, {"to_weights": True, "peer": True, "rounds": 5})])
        add("mxfp4, 112 experts", Form.MXFP4, 112, [(1024, {"rounds": 5})])
        return found
    add("bfloat16, 112 experts", Form.BFLOAT16, 112, [(1024, {"peer": True}), (8192, {"peer": True}), (8192, {"to_weights": True, "peer": True})])
    add("mxfp4, 896 experts", Form.MXFP4, 896, [(64, {}), (64, {"way": Products.GATHERED}), (1024, {}), (8192, {}), (8192, {"way": Products.GATHERED}), (8192, {"skew": 1.2})])
    add("fp8, 896 experts", Form.FP8, 896, [(8192, {})])
    add("mxfp4, 112 experts", Form.MXFP4, 112, [(8192, {}), (8192, {"way": Products.GATHERED})])
    return found


def sweep(form: Form, experts: int, tokens: int = 8192) -> None:
    """Each kernel alone: the sorted products in each number of stages, where they take the weights, and the gathered ones."""
    w1, w3, w2 = stack(form, experts, HIDDEN, OUTER), stack(form, experts, HIDDEN, OUTER), stack(form, experts, OUTER, HIDDEN)
    z, dy, (ids, gates) = rows(tokens), rows(tokens), routes(tokens, experts)
    dh, du, out = (torch.randn(tokens * TOP, width, device="cuda", dtype=torch.bfloat16) for width in (HIDDEN, HIDDEN, OUTER))

    def said(label: str, steps: dict[str, Callable[[], object]]) -> None:
        times = {name: harness.measure(step, rounds=7).median_ms for name, step in steps.items()}
        print(f"{form.name}, {experts} experts, {label}: " + ", ".join(f"{name} {time:.3f}" for name, time in times.items()) + f", sum {sum(times.values()):.3f} ms",
              flush=True)

    if products.takes(w1) and products.takes(w2):
        table, pinned = plan(ids, experts, products.BLOCK), products.STAGES
        for stages in (4, 5, 6, 7) if form is Form.MXFP4 else (3, 4):
            products.STAGES = products.Stages(stages, stages)
            said(f"{stages} stages" + (" (pinned)" if stages == (pinned.packed if form is Form.MXFP4 else pinned.dense) else ""), {
                "sort_rows": lambda: kernels.sort_rows(z, table, TOP, out, renamed=form is Form.MXFP4),
                "d_hidden": lambda: products.d_hidden(out, w2, table, dh),
                "inner": lambda: products.inner(out, w1, w3, gates, dh, du, None, table, BETAS),
                "d_input": lambda: products.d_input(dh, du, w1, w3, table, out),
            })
        products.STAGES = pinned
    for blocks in kernels.CANDIDATES if form is Form.FP8 else [kernels.blocks_for(form, tokens * TOP, experts)]:
        table = plan(ids, experts, blocks.rows)
        inner = blocks if form is Form.FP8 else kernels.inner_blocks_for(form, tokens * TOP, experts)
        said(f"{tuple(blocks)}" + (" (pinned)" if blocks == kernels.blocks_for(form, tokens * TOP, experts) else ""), {
            "d_hidden": lambda t=table, b=blocks: kernels.d_hidden(dy, w2, t, TOP, dh, b),  # type: ignore[misc]
            "inner": lambda t=table, b=inner: kernels.inner(z, w1, w3, gates, dh, du, None, t, BETAS, b),  # type: ignore[misc]
            "d_input": lambda t=table, b=blocks: kernels.d_input(dh, du, w1, w3, t, out, b),  # type: ignore[misc]
        })


def time_weights(experts: int, tokens: int = 8192) -> None:
    z, d, (ids, _) = rows(tokens), torch.randn(tokens * TOP, HIDDEN, device="cuda", dtype=torch.bfloat16), routes(tokens, experts)
    target, table = torch.empty(experts, HIDDEN, OUTER, dtype=torch.bfloat16, device="cuda"), plan(ids, experts, products.BLOCK)
    some = torch.empty(tokens * TOP, OUTER, dtype=torch.bfloat16, device="cuda")
    kernels.sort_rows(z, table, TOP, some)
    time = harness.measure(lambda: weight_gradient(d, some, table, target, add=False), rounds=7).median_ms
    print(f"weight gradient, {experts} experts: {time:.3f} ms", flush=True)


def sweeps(only: str) -> None:
    for form, experts in ((Form.MXFP4, 896), (Form.MXFP4, 112), (Form.BFLOAT16, 448), (Form.BFLOAT16, 112), (Form.FP8, 448)):
        if only.lower() in f"{form.name} {experts}".lower():
            sweep(form, experts)
            torch.cuda.empty_cache()
    for experts in (448, 112):
        if only.lower() in f"weights {experts}":
            time_weights(experts)
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
