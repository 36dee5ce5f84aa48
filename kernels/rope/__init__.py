"""Rotary position embedding: pairs of a head's elements turned by the angles of its position. See docs/kernels/rope.md.

A token's bits depend on that token and its angles. The tables are fp32 and so is what is computed with them; one rounding, to the input's dtype, at the end.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.rope import reference

__all__ = ["rotate"]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """x [..., H, D] turned by the angles whose cosines and sines are cos, sin [..., R / 2] fp32, of every token: (a cos - b sin, b cos + a sin) for each pair
    (a, b) of the first R <= D elements of a head; the rest is as it was. Pairs are elements i and i + R / 2 (Llama, Qwen and others as Hugging Face lays
    them out), or with `interleaved` 2i and 2i + 1. Returns x's shape and dtype. Differentiable in x. The kernel takes all dtypes but float64. Raises ValueError.
    """
    if not x.dtype.is_floating_point or x.dim() < 2:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}; it must be floating-point [..., H, D]")
    if cos.shape != sin.shape or cos.shape[:-1] != x.shape[:-2] or not 0 < 2 * cos.shape[-1] <= x.shape[-1]:
        raise ValueError(f"cos is {list(cos.shape)} and sin {list(sin.shape)}; both must be {[*x.shape[:-2]]} and, last, half of what is turned of {x.shape[-1]}")
    wanted = torch.promote_types(x.dtype, torch.float32)
    if any(t.dtype not in (torch.float32, wanted) for t in (cos, sin)):
        raise ValueError(f"cos and sin are {cos.dtype} and {sin.dtype}; they must be {torch.float32}: a table in {x.dtype} does not tell positions apart")
    if any(t.device != x.device for t in (cos, sin)):
        raise ValueError(f"cos and sin must be on the device of x, {x.device}")
    if runs_triton(x, cos, sin):
        from driftline.kernels.rope import autograd, triton

        if triton.takes(x, cos):
            return autograd.rotate(x, cos, sin, interleaved)
    return reference.rotate(x, cos, sin, interleaved)
