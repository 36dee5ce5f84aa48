"""Rows times the matrix of their group in plain torch: `linear` for one group after the other, a packed matrix unpacked when its turn comes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.linear import linear
from driftline.kernels.moe.plan import Plan
from driftline.kernels.mxfp4.reference import dequantised
from driftline.kernels.mxfp4.weights import ExpertWeight

__all__ = ["grouped_linear"]


class _Frozen(torch.autograd.Function):
    """`linear` of one packed matrix, which is unpacked again for the gradient: no stack is ever held unpacked."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: type, *parts: torch.Tensor) -> torch.Tensor:
        ctx.kind = kind
        ctx.save_for_backward(*parts)
        return linear(x, dequantised(kind(*parts), x.dtype)[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = ctx.saved_tensors
        return dy @ dequantised(ctx.kind(*parts), dy.dtype)[0], None, *(None for _ in parts)


def grouped_linear(x: torch.Tensor, rows: Plan, weight: ExpertWeight) -> torch.Tensor:
    """x [P, K] in the plan's order, weight [G, N, K]; returns [P, N]. Waits for the plan, which says how many rows a group has."""
    starts = rows.starts.tolist()
    # unbound once: the gradient of a selection would be a whole stack of zeros for each group
    matrices = weight.unbind(0) if isinstance(weight, torch.Tensor) else None
    parts: list[torch.Tensor] = []
    for group, (first, last) in enumerate(pairwise(starts)):
        if first == last:
            continue
        some = x[first:last]
        if matrices is not None:
            parts.append(linear(some, matrices[group]))
        else:
            parts.append(_Frozen.apply(some, type(weight), *(part[group : group + 1] for part in weight)))  # type: ignore[no-untyped-call]
    parts.append(x.new_zeros(x.shape[0] - starts[-1], weight.shape[1]))
    return torch.cat(parts)
