"""Rows times the matrix of their group: `x[r] W[group of r]^T`. A row's result depends on that row and its matrix alone. See docs/kernels/grouped_linear.md.

The products of adapters: a group is an expert, an adapter of a bank, or both; weights may be packed, and are then frozen.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.grouped_linear import reference
from driftline.kernels.moe.plan import Plan
from driftline.kernels.moe.plan import plan as _plan
from driftline.kernels.mxfp4.weights import ExpertWeight

__all__ = ["grouped_linear", "groups_of"]

_BLOCK = 64
"""Rows of a tile, the one height for which the kernels' plans are made."""


def groups_of(ids: torch.Tensor, groups: int) -> Plan:
    """Rows sorted by group, those of one group in their order. ids [N, k] integers; one outside 0..groups-1 has no group: its row lies behind all others."""
    return _plan(ids, groups, _BLOCK)


def grouped_linear(x: torch.Tensor, rows: Plan, weight: ExpertWeight) -> torch.Tensor:
    """x [P, K] floating, in the order of `rows` (made by `groups_of`, of P ids); weight [G, N, K] of x's dtype, or packed. Returns [P, N] of x's dtype.

    Rows without a group give zeros. Sums are fp32 over K in order, rounded once, as those of `linear`. Differentiable once, to x and to a weight that is a
    tensor. On a CUDA device, for bfloat16, kernels that wait for nothing; elsewhere `linear`, once for every group that has rows. Raises ValueError.
    """
    _check(x, rows, weight)
    tensors = [weight] if isinstance(weight, torch.Tensor) else list(weight)
    if x.dtype is not torch.bfloat16 or not runs_triton(x, *tensors):
        return reference.grouped_linear(x, rows, weight)
    from driftline.kernels.grouped_linear.autograd import GroupedLinear

    values, scale = (weight, None) if isinstance(weight, torch.Tensor) else weight
    out: torch.Tensor = GroupedLinear.apply(x, rows, type(weight), values, scale)  # type: ignore[no-untyped-call]
    return out


def _check(x: torch.Tensor, rows: Plan, weight: ExpertWeight) -> None:
    if len(weight.shape) != 3:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; give one matrix a group, [G, N, K]")
    if x.ndim != 2 or not x.is_floating_point() or x.shape[1] != weight.shape[2]:
        raise ValueError(f"x has shape {tuple(x.shape)} and dtype {x.dtype}; beside weight {tuple(weight.shape)} give floating rows [P, {weight.shape[2]}]")
    if isinstance(weight, torch.Tensor) and weight.dtype != x.dtype:
        raise ValueError(f"weight is {weight.dtype} and x {x.dtype}; give both as one")
    if rows.pairs.shape[0] != x.shape[0] or rows.starts.shape[0] != weight.shape[0] + 1 or rows.block != _BLOCK:
        raise ValueError(f"rows: a plan of {rows.pairs.shape[0]} rows in {rows.starts.shape[0] - 1} groups and tiles of {rows.block}; x has {x.shape[0]} rows and "
                         f"weight {weight.shape[0]} groups, and groups_of makes tiles of {_BLOCK}")
