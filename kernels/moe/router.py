"""Ordered top-k routing: fp32 scores, a bias that selects and never weighs, ties to the lowest index, gates that are the picked scores renormalised.

    s = sigmoid(x W^T) in fp32;  ids = top_k(s + bias);  gates = s[ids] / (sum s[ids] + 1e-20) * scaling          (K3 report, section 2)

On a CUDA device these are kernels whose rows depend on nothing but themselves, so a token is routed alike in every batch; elsewhere torch. A recorded
choice replays through the same scores: with the same x and weight its gates have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.mode import deterministic
from driftline.kernels.moe import exact

__all__ = ["route"]

_NARROW = (torch.bfloat16, torch.float16, torch.float32)


class _Route(torch.autograd.Function):
    """Keeps its operands, the ids and the picked scores [N, k]; the gradient passes through the picked scores alone."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, scaling: float, ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from driftline.kernels.moe import triton_router as kernels

        chosen, gates, picked = kernels.select(x, weight, bias, top_k, scaling, ids)
        if chosen is ids:
            chosen = chosen.clone()
        ctx.save_for_backward(x, weight, chosen, picked)
        ctx.scaling = scaling
        ctx.mark_non_differentiable(chosen)
        return chosen, gates

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor, d_gates: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None, None]:
        from driftline.kernels.moe import triton_router as kernels

        x, weight, ids, picked = ctx.saved_tensors
        to_x, to_weight = ctx.needs_input_grad[:2]
        return *kernels.gradients(x, weight, ids, picked, d_gates, ctx.scaling, to_x, to_weight), None, None, None, None


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, scaling: float, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, D], weight [E, D], bias [E], floating point; returns ids int64 [N, k], best first, and gates [N, k] in at least fp32.

    `ids` [N, k] replays a recorded choice: gates are those of the current scores at those ids, gradients reach the router, selection does not.
    Gradients reach x and weight, never the bias. Raises ValueError where shapes, dtypes or devices do not fit.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"weight: {tuple(weight.shape)} does not score rows of x {tuple(x.shape)}; give x [N, D] and weight [E, D]")
    experts = weight.shape[0]
    if bias.shape != (experts,):
        raise ValueError(f"bias: {tuple(bias.shape)}; give one number for each of the {experts} experts")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k: {top_k}; choose between 1 and {experts} experts")
    if ids is not None and (ids.shape != (x.shape[0], top_k) or ids.dtype.is_floating_point):
        raise ValueError(f"ids: {tuple(ids.shape)} {ids.dtype}; give the recorded integer ids, {(x.shape[0], top_k)}")
    if runs_triton(x, weight, bias, ids) and all(t.dtype in _NARROW for t in (x, weight, bias)):
        chosen, gates = _Route.apply(x, weight, bias, top_k, scaling, ids)  # type: ignore[no-untyped-call]
        return chosen, gates
    if deterministic():
        return exact.route(x, weight, bias, top_k, scaling, ids)
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = torch.sigmoid(x.to(wide) @ weight.to(wide).t())
    if ids is None:
        ids = torch.sort(scores.detach() + bias.detach().to(wide), dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    picked = scores.gather(-1, ids)
    return ids, picked / (picked.sum(-1, keepdim=True) + 1e-20) * scaling
