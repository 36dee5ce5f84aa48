"""`x W^T` in deterministic mode without the kernels: rows in blocks of one shape, the gradient torch's own."""

from __future__ import annotations

from functools import partial

import torch

from driftline.kernels.fixed.gradient import exactly
from driftline.kernels.fixed.products import by_blocks
from driftline.kernels.linear import reference

__all__ = ["linear"]


def linear(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """As `reference.linear`; each row's bits are its own. Raises ValueError where this machine's products cannot be held to that."""
    out: torch.Tensor = exactly(partial(_forward, out_dtype=out_dtype), partial(reference.linear, out_dtype=out_dtype), x, weight)
    return out


def _forward(x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype | None) -> torch.Tensor:
    dtype = x.dtype if out_dtype is None else out_dtype
    found = by_blocks(x.reshape(-1, x.shape[-1]).to(dtype), weight.to(dtype))
    return found.view(*x.shape[:-1], weight.shape[0])
