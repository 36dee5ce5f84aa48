"""Sigmoid routing with a selection bias, and the grouped expert MLP with a fixed-order fp32 combine (K3 report, section 2).

The bias selects and never weighs; the weights are the selected scores, renormalised. Combine sums the k expert outputs of a token in the order
of its id list, so a recorded list replays to the same rounding.
"""

from __future__ import annotations

import torch

from driftline.kernels.moe.activations import Activations, rounded
from driftline.kernels.mxfp4.reference import dequantised
from driftline.kernels.mxfp4.weights import ExpertWeight
from driftline.kernels.situ_glu import situ_glu

__all__ = ["expert_mlp", "route"]


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
    launches, not arithmetic), otherwise rows sorted by expert and one product per expert. Packed weights are unpacked whole. An id outside 0..E-1 adds
    nothing.
    """
    tokens, top_k = ids.shape
    experts = w1.shape[0]
    wide = torch.promote_types(z.dtype, torch.float32)
    rows_of_z = _straight_through(z, activations)
    w1, w3, w2 = (dequantised(w, z.dtype).to(rows_of_z.dtype) for w in (w1, w3, w2))
    exists = (ids >= 0) & (ids < experts)
    ids, gates = torch.where(exists, ids, 0), torch.where(exists, gates, 0)

    def hidden(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return _straight_through(situ_glu(gate, up, beta, linear_beta), activations)

    if tokens <= 8 * experts:
        every = rows_of_z.expand(experts, -1, -1)
        outs = (hidden(every @ w1.mT, every @ w3.mT) @ w2.mT).transpose(0, 1)
        picked = outs.gather(1, ids[..., None].expand(-1, -1, z.shape[1]))
    else:
        order = torch.argsort(ids.reshape(-1), stable=True)
        rows = rows_of_z.index_select(0, order // top_k)
        counts = torch.bincount(ids.reshape(-1), minlength=experts).tolist()
        parts = []
        for e, part in enumerate(torch.split(rows, counts)):
            if part.shape[0]:
                parts.append(hidden(part @ w1[e].t(), part @ w3[e].t()) @ w2[e].t())
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        picked = torch.cat(parts).index_select(0, back).view(tokens, top_k, -1)
    return (picked.to(wide) * gates[..., None].to(wide)).sum(1).to(z.dtype)
