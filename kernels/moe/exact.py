"""Routing and the expert MLP in deterministic mode without the kernels: one schedule for any number of tokens, experts one after another, slots in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from driftline.kernels.fixed.gradient import exactly
from driftline.kernels.fixed.pointwise import sigmoid
from driftline.kernels.fixed.products import product
from driftline.kernels.fixed.sums import total
from driftline.kernels.moe import reference
from driftline.kernels.moe.activations import Activations, rounded
from driftline.kernels.mxfp4.reference import dequantised
from driftline.kernels.mxfp4.weights import ExpertWeight
from driftline.kernels.situ_glu import situ_glu

__all__ = ["expert_mlp", "route"]


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, scaling: float, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.route`, of equal scores the expert of the lower index; each token's choice and gates are its own."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if ids is None:
        with torch.no_grad():
            scores = _scores(x.detach(), weight.detach(), wide)
            ids = torch.sort(scores + bias.detach().to(wide), dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()

    def form(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _gates(_scores(x, weight, wide), ids, scaling)

    def gradient(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return reference.route(x, weight, bias, top_k, scaling, ids)[1]

    gates: torch.Tensor = exactly(form, gradient, x, weight)
    return ids, gates


def _scores(x: torch.Tensor, weight: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return sigmoid(product(x.to(wide), weight.to(wide)))


def _gates(scores: torch.Tensor, ids: torch.Tensor, scaling: float) -> torch.Tensor:
    picked = scores.gather(-1, ids.long())
    return picked / (total(picked)[..., None] + 1e-20) * scaling


def expert_mlp(
    z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, w2: ExpertWeight, beta: float, linear_beta: float, *,
    activations: Activations = Activations.SAME,
) -> torch.Tensor:
    """As `reference.expert_mlp`; each token's bits are its own. Packed weights are unpacked an expert at a time."""
    given = (w1, w3, w2)
    if all(isinstance(w, torch.Tensor) for w in given):
        tensors: tuple[Any, ...] = given

        def rebuilt(function: Callable[..., torch.Tensor], z: torch.Tensor, gates: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            return function(z, ids, gates, *weights, beta, linear_beta, activations=activations)
    else:
        tensors = ()

        def rebuilt(function: Callable[..., torch.Tensor], z: torch.Tensor, gates: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            return function(z, ids, gates, *given, beta, linear_beta, activations=activations)

    out: torch.Tensor = exactly(partial(rebuilt, _forward), partial(rebuilt, reference.expert_mlp), z, gates, *tensors)
    return out


def _of(weight: ExpertWeight, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] of one expert."""
    if isinstance(weight, torch.Tensor):
        return weight[expert].to(dtype)
    one = type(weight)(*(part[expert : expert + 1] for part in weight))
    return dequantised(one, dtype)[0]


def _forward(
    z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, w2: ExpertWeight, beta: float, linear_beta: float, *,
    activations: Activations,
) -> torch.Tensor:
    tokens, top_k = ids.shape
    experts = w1.shape[0]
    wide = torch.promote_types(z.dtype, torch.float32)
    exists = (ids >= 0) & (ids < experts)
    flat = torch.where(exists, ids, experts).reshape(-1)
    order = torch.argsort(flat, stable=True)
    rows = rounded(z, activations).index_select(0, order // max(top_k, 1))
    outs = z.new_zeros(flat.numel(), z.shape[1])
    start = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=experts + 1)[:experts].tolist()):
        if count:
            x = rows[start : start + count]
            hidden = situ_glu(product(x, _of(w1, expert, x.dtype)), product(x, _of(w3, expert, x.dtype)), beta, linear_beta)
            hidden = rounded(hidden, activations)
            outs[start : start + count] = product(hidden, _of(w2, expert, hidden.dtype)).to(z.dtype)
            start += count
    picked = torch.empty_like(outs)
    picked[order] = outs
    parts = picked.view(tokens, top_k, -1).to(wide) * torch.where(exists, gates, 0)[..., None].to(wide)
    out = z.new_zeros(z.shape, dtype=wide)
    for slot in range(top_k):
        out = out + parts[:, slot]
    return out.to(z.dtype)
