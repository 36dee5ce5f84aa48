"""RMSNorm with K3's rounding order, a row at a time: what a row becomes depends on that row alone. See docs/kernels/rmsnorm.md."""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.mode import deterministic
from driftline.kernels.rmsnorm import exact, reference

__all__ = ["rmsnorm"]

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis: x [..., D], weight [D], both floating point, -> [..., D] of x's dtype.

    Normalised in fp32, rounded to x's dtype, then multiplied by the weight in it, as the K3 release does. Differentiable, to x and weight (once, where
    the kernels run). By the kernels where both are on a CUDA device, for rows of up to 16,384; else by the reference. Raises ValueError for arguments
    that do not go together.
    """
    reference.checked(x, weight, eps)
    if x.dtype not in _KERNEL_DTYPES or weight.dtype == torch.float64 or not runs_triton(x, weight):
        return exact.rmsnorm(x, weight, eps) if deterministic() else reference.rmsnorm(x, weight, eps)
    from driftline.kernels.rmsnorm.autograd import RmsNorm
    from driftline.kernels.rmsnorm.triton import LONGEST

    if x.shape[-1] > LONGEST:
        return exact.rmsnorm(x, weight, eps) if deterministic() else reference.rmsnorm(x, weight, eps)
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    normal: torch.Tensor = RmsNorm.apply(rows, weight.contiguous(), eps)  # type: ignore[no-untyped-call]
    return normal.view(x.shape)
