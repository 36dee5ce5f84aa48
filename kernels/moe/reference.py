"""Sigmoid routing with a selection bias, and the grouped expert MLP with a fixed-order fp32 combine (K3 report, section 2).

The bias selects and never weighs; the weights are the selected scores, renormalised. Combine sums the k expert outputs of a token in the order
of its id list, so a recorded list replays to the same rounding.
"""

from __future__ import annotations

import torch

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


def expert_mlp(
    z: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    beta: float,
    linear_beta: float,
) -> torch.Tensor:
    """z [N, Z]; ids, gates [N, k]; w1, w3 [E, I, Z], w2 [E, Z, I]. Returns [N, Z]: the gated sum over each token's experts, in slot order.

    Two schedules of the same sums, chosen by shape alone: all experts as one batched product when there are few tokens (decode is bound by
    launches, not arithmetic), otherwise rows sorted by expert and one product per expert.
    """
    tokens, top_k = ids.shape
    experts = w1.shape[0]
    wide = torch.promote_types(z.dtype, torch.float32)
    if tokens <= 8 * experts:
        every = z.expand(experts, -1, -1)
        hidden = situ_glu(every @ w1.mT, every @ w3.mT, beta, linear_beta)
        outs = (hidden @ w2.mT).transpose(0, 1)
        picked = outs.gather(1, ids[..., None].expand(-1, -1, z.shape[1]))
    else:
        order = torch.argsort(ids.reshape(-1), stable=True)
        rows = z.index_select(0, order // top_k)
        counts = torch.bincount(ids.reshape(-1), minlength=experts).tolist()
        parts = []
        for e, part in enumerate(torch.split(rows, counts)):
            if part.shape[0]:
                parts.append(situ_glu(part @ w1[e].t(), part @ w3[e].t(), beta, linear_beta) @ w2[e].t())
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        picked = torch.cat(parts).index_select(0, back).view(tokens, top_k, -1)
    return (picked.to(wide) * gates[..., None].to(wide)).sum(1).to(z.dtype)
