"""The expert MLP with its gradient on a GPU: the forward's kernels, then those of `backward`; between the two only the inputs are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.moe.backward import Wanted, backward
from driftline.kernels.mxfp4.weights import ExpertWeight

__all__ = ["expert_mlp_with_grad"]


def _kept(weight: ExpertWeight) -> tuple[torch.Tensor, ...]:
    return (weight,) if isinstance(weight, torch.Tensor) else tuple(weight)


class _ExpertMlp(torch.autograd.Function):
    """Saves z, ids, gates and the weights' own tensors: no activation, so a layer's share of the memory is what its inputs take anyway."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, w2: ExpertWeight, beta: float,
                linear_beta: float, options: dict[str, Any]) -> torch.Tensor:
        from driftline.kernels.moe import expert_mlp

        weights = (w1, w3, w2)
        ctx.kinds = tuple(type(w) for w in weights)
        ctx.counts = tuple(len(_kept(w)) for w in weights)
        ctx.save_for_backward(z, ids, gates, *(t for w in weights for t in _kept(w)))
        ctx.betas, ctx.microbatch = (beta, linear_beta), options["microbatch"]
        plain: Any = [w.detach() if isinstance(w, torch.Tensor) else w for w in weights]
        call: Any = expert_mlp
        out: torch.Tensor = call(z.detach(), ids, gates.detach(), *plain, beta, linear_beta, **options)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        z, ids, gates, *rest = ctx.saved_tensors
        weights: list[Any] = []
        for kind, count in zip(ctx.kinds, ctx.counts, strict=True):
            weights.append(rest[0] if count == 1 else kind(*rest[:count]))
            rest = rest[count:]
        asked = ctx.needs_input_grad
        wanted = Wanted(asked[0], asked[2], asked[3], asked[4], asked[5])
        w1, w3, w2 = weights
        found = backward(z, ids, gates.float(), w1, w3, w2, ctx.betas, dy.to(z.dtype), wanted, ctx.microbatch)
        d_gates = None if found.gates is None else found.gates.to(gates.dtype)
        return found.z, None, d_gates, found.w1, found.w3, found.w2, None, None, None


def expert_mlp_with_grad(
    z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, w2: ExpertWeight, beta: float, linear_beta: float, *,
    activations: Any, microbatch: int | None,
) -> torch.Tensor:
    """`driftline.kernels.moe.expert_mlp` on a CUDA device, its arguments and its result, with gradients to z, to the gates and to bfloat16 weights.

    Packed weights (Mxfp4Weight, Fp8Weight) are frozen. Raises ValueError when z is not bfloat16, or w1 and w3 lie in different forms.
    """
    if z.dtype is not torch.bfloat16:
        raise ValueError(f"z: {z.dtype} on a GPU; give bfloat16 rows")
    if type(w1) is not type(w3):
        raise ValueError(f"w3: a {type(w3).__name__} beside w1, a {type(w1).__name__}; give both in one form")
    out: torch.Tensor = _ExpertMlp.apply(z, ids, gates, w1, w3, w2, beta, linear_beta, {"activations": activations, "microbatch": microbatch})  # type: ignore[no-untyped-call]
    return out
