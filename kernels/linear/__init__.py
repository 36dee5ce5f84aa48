"""`x W^T` in which a row's result depends on that row alone: not on how many rows there are, where it stands, or what the others hold.

Prefill, decode and the learner's pass then multiply a token's activations to the same bits. See docs/kernels/linear.md.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.linear import exact, reference
from driftline.kernels.mode import deterministic

__all__ = ["linear"]


def linear(x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`x @ weight.T`: x [..., K], weight [N, K] of one dtype (bf16, fp16, fp32 or, by the reference, fp64) -> [..., N] of `out_dtype`: x's (None) or fp32.

    Sums are fp32, over K in order, and rounded once; fp32 operands are multiplied in full, never in TF32. Differentiable once, to both. By the kernels
    where both tensors are on a CUDA device, else by torch, which promises a row's own bits in deterministic mode alone. Raises ValueError for shapes, dtypes
    or devices that do not go together.
    """
    reference.checked(x, weight, out_dtype)
    if x.dtype == torch.float64 or not runs_triton(x, weight):
        return exact.linear(x, weight, out_dtype) if deterministic() else reference.linear(x, weight, out_dtype)
    from driftline.kernels.linear.autograd import Linear

    flat = x.reshape(-1, x.shape[-1])
    product: torch.Tensor = Linear.apply(flat, weight, x.dtype if out_dtype is None else out_dtype)  # type: ignore[no-untyped-call]
    return product.view(*x.shape[:-1], weight.shape[0])
