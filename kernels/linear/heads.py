"""Each head's rows by its own matrix, in deterministic mode: as `linear`, a row's result depends on that row alone."""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.fixed.gradient import exactly
from driftline.kernels.fixed.products import by_blocks
from driftline.kernels.mode import deterministic

__all__ = ["head_linear"]

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., H, K], weight [H, N, K] of one floating dtype, any strides -> [..., H, N] of it: `x[..., h, :] @ weight[h].T`, sums in fp32 and rounded once.

    Differentiable once. In FAST a batched product of torch, whose rows may know of each other. Raises ValueError for shapes, dtypes or devices that do not
    go together.
    """
    if weight.dim() != 3 or x.dim() < 2 or x.shape[-2] != weight.shape[0] or x.shape[-1] != weight.shape[2]:
        raise ValueError(f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; give [..., H, K] and [H, N, K]")
    if x.dtype != weight.dtype or not x.is_floating_point() or x.device != weight.device:
        raise ValueError(f"x is {x.dtype} on {x.device} and weight {weight.dtype} on {weight.device}; give one floating dtype on one device")
    if not deterministic():
        return _batched(x, weight)
    out: torch.Tensor = exactly(_forward, _batched, x, weight)
    return out


def _batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.einsum("...hk,hnk->...hn", x, weight)


def _forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    heads, columns, depth = weight.shape
    rows = x.reshape(-1, heads, depth)
    if x.dtype in _KERNEL_DTYPES and runs_triton(x, weight):
        from driftline.kernels.linear.triton_heads import matmul_heads

        return matmul_heads(rows, weight).view(*x.shape[:-1], columns)
    out = x.new_empty(rows.shape[0], heads, columns)
    for head in range(heads):
        out[:, head] = by_blocks(rows[:, head], weight[head])
    return out.view(*x.shape[:-1], columns)
