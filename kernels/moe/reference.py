"""Sigmoid routing with a selection bias, and the grouped expert MLP with a fixed-order fp32 combine (K3 report, section 2).

The bias selects and never weighs; the weights are the selected scores, renormalised. Combine sums the k expert outputs of a token in the order
of its id list, so a recorded list replays to the same rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.moe.activations import Activations, rounded
from driftline.kernels.mxfp4.reference import dequantised
from driftline.kernels.mxfp4.weights import ExpertWeight, Fp8Weight, Mxfp4Weight
from driftline.kernels.situ_glu import situ_glu

__all__ = ["expert_mlp", "products", "route"]


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, scaling: float, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, D], weight [E, D], bias [E]; returns ids int64 [N, k] (best first) and gates [N, k] in fp32.

    `ids` replays a recorded choice: gates are recomputed from the current scores at those ids, gradients reach the router, selection does not.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = torch.sigmoid(x.to(wide) @ weight.to(wide).t())
    if ids is None:
        ids = torch.topk(scores.detach() + bias.to(wide), top_k, dim=-1).indices
    picked = scores.gather(-1, ids)
    return ids, picked / (picked.sum(-1, keepdim=True) + 1e-20) * scaling


def _straight_through(x: torch.Tensor, activations: Activations) -> torch.Tensor:
    """x rounded, with the gradient of x."""
    if activations is Activations.SAME:
        return x
    return rounded(x.detach(), activations) + (x - x.detach())


class _Unpacking(torch.autograd.Function):
    """`products` of packed weights: one expert is unpacked at a time, and again for the gradient, so that neither holds a stack unpacked."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, used: Sequence[int] | None, kind: type[Mxfp4Weight] | type[Fp8Weight], *parts: torch.Tensor
    ) -> torch.Tensor:
        ctx.kind, ctx.used = kind, used
        ctx.save_for_backward(*parts)
        return _each(rows, used, kind(*parts), transposed=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = ctx.saved_tensors  # read once: a checkpoint gives them no second time
        return _each(grad, ctx.used, ctx.kind(*parts), transposed=False), None, None, *(None for _ in parts)


def _each(rows: torch.Tensor, used: Sequence[int] | None, weight: Mxfp4Weight | Fp8Weight, *, transposed: bool) -> torch.Tensor:
    """rows [E, T, ..] times each used matrix or its transpose, zeros for the others; rows of one expert [T, ..] by the plain product that an unpacked matrix
    would take."""
    if rows.ndim == 2:
        matrix = dequantised(weight, rows.dtype)[0]
        return rows @ (matrix.t() if transposed else matrix)
    shape = (*rows.shape[:2], weight.shape[1 if transposed else 2])
    out = rows.new_empty(shape) if used is None else rows.new_zeros(shape)
    for e in range(rows.shape[0]) if used is None else used:
        matrix = dequantised(_of(weight, e), rows.dtype)
        out[e : e + 1] = rows[e : e + 1] @ (matrix.mT if transposed else matrix)
    return out


def _of(weight: Mxfp4Weight | Fp8Weight, expert: int) -> Mxfp4Weight | Fp8Weight:
    """That one matrix, a stack of one."""
    return type(weight)(*(part[expert : expert + 1] for part in weight))


def products(rows: torch.Tensor, weight: ExpertWeight, used: Sequence[int] | None = None) -> torch.Tensor:
    """rows [E, T, K] and E matrices [N, K] in any form to [E, T, N], each expert's rows times its matrix; or the rows [T, K] of a stack's only matrix to
    [T, N]. Differentiable in rows, and in weights that are a tensor. Packed weights give the bits of unpacked ones, in forward and backward. `used`: the experts
    whose result somebody reads; what the others give is then anything finite, and packed ones are left packed."""
    if isinstance(weight, torch.Tensor):
        return rows @ weight.mT if rows.ndim == 3 else rows @ weight[0].t()
    out: torch.Tensor = _Unpacking.apply(rows, used, type(weight), *weight)  # type: ignore[no-untyped-call]
    return out


def expert_mlp(
    z: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    w1: ExpertWeight,
    w3: ExpertWeight,
    w2: ExpertWeight,
    beta: float,
    linear_beta: float,
    *,
    activations: Activations = Activations.SAME,
) -> torch.Tensor:
    """z [N, Z]; ids, gates [N, k]; w1, w3 [E, I, Z], w2 [E, Z, I]. Returns [N, Z]: the gated sum over each token's experts, in slot order.

    Two schedules of the same sums, chosen by shape alone: all experts as one batched product when there are few tokens (decode is bound by
    launches, not arithmetic), otherwise rows sorted by expert and one product per expert. Packed weights are unpacked an expert at a time, and only those of
    experts that a token has. An id outside 0..E-1 adds nothing.
    """
    tokens, top_k = ids.shape
    experts = w1.shape[0]
    wide = torch.promote_types(z.dtype, torch.float32)
    rows_of_z = _straight_through(z, activations)
    w1, w3, w2 = (w.to(rows_of_z.dtype) if isinstance(w, torch.Tensor) else w for w in (w1, w3, w2))
    exists = (ids >= 0) & (ids < experts)
    ids, gates = torch.where(exists, ids, 0), torch.where(exists, gates, 0)

    def hidden(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return _straight_through(situ_glu(gate, up, beta, linear_beta), activations)

    if tokens <= 8 * experts:
        every = rows_of_z.expand(experts, -1, -1)
        used = None if isinstance(w1, torch.Tensor) else sorted(set(ids.flatten().tolist()))
        outs = products(hidden(products(every, w1, used), products(every, w3, used)), w2, used).transpose(0, 1)
        picked = outs.gather(1, ids[..., None].expand(-1, -1, z.shape[1]))
    else:
        order = torch.argsort(ids.reshape(-1), stable=True)
        rows = rows_of_z.index_select(0, order // top_k)
        counts = torch.bincount(ids.reshape(-1), minlength=experts).tolist()
        parts = []
        for e, part in enumerate(torch.split(rows, counts)):
            if part.shape[0]:
                first, third, second = (w[e : e + 1] if isinstance(w, torch.Tensor) else _of(w, e) for w in (w1, w3, w2))
                parts.append(products(hidden(products(part, first), products(part, third)), second))
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        picked = torch.cat(parts).index_select(0, back).view(tokens, top_k, -1)
    return (picked.to(wide) * gates[..., None].to(wide)).sum(1).to(z.dtype)
