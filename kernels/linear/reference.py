"""`x W^T` in plain torch, and what the operator takes."""

from __future__ import annotations

import torch

__all__ = ["checked", "linear"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def linear(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`x @ weight.T`, x [..., K], weight [N, K]. With `out_dtype` other than x's the product is made in it, of operands that are cast first."""
    if out_dtype is None or out_dtype == x.dtype:
        return torch.nn.functional.linear(x, weight)
    return torch.nn.functional.linear(x.to(out_dtype), weight.to(out_dtype))


def checked(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None) -> None:
    """Raise ValueError unless these can be multiplied."""
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; give [N, K], as torch.nn.Linear holds it")
    if x.dim() < 1 or x.shape[-1] != weight.shape[1] or weight.shape[1] == 0:
        raise ValueError(f"x of shape {tuple(x.shape)} does not end in the {weight.shape[1]} columns of weight {tuple(weight.shape)}; K must be the same and not 0")
    if x.dtype != weight.dtype or x.dtype not in _DTYPES:
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}; give both as one of {', '.join(map(str, _DTYPES))}")
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"out_dtype is {out_dtype}; give None, x's own {x.dtype}, or torch.float32")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device} and weight on {weight.device}; put them on one device")
