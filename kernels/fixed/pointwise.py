"""Exponentials and their like by whole vectors: an element's bits are its operand's, wherever in a tensor it lies.

On a CPU torch computes what does not fill a vector at a thread's end by scalar code, which rounds otherwise than the vectors. Here a tensor is taken in pieces
that one thread computes and that vectors divide. On other devices, and in FAST, these are torch's functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from driftline.kernels.fixed.gradient import exactly
from driftline.kernels.mode import deterministic

__all__ = ["exp", "log", "sigmoid", "silu", "tanh"]

PIECE = 2048
"""Elements at a time where there are several threads: no more than any of torch's loops gives to one of them."""

VECTORS = 128
"""Elements that every piece is a multiple of: two vectors of 512 bits, unrolled, of the narrowest dtype."""


def _by_vectors(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """x of any shape; `function` takes `out=`."""
    flat = x.detach().contiguous().view(-1)
    count = flat.shape[0]
    whole = -(-count // VECTORS) * VECTORS
    if whole != count or flat.data_ptr() % 64:
        flat = torch.cat([flat, flat.new_zeros(whole - count)])
    out = torch.empty_like(flat)
    if whole <= PIECE or torch.get_num_threads() == 1:
        function(flat, out=out)
    else:
        for start in range(0, whole, PIECE):
            function(flat[start : start + PIECE], out=out[start : start + PIECE])
    return out[:count].view(x.shape)


def _chosen(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu" or not deterministic():
        return function(x)
    found: torch.Tensor = exactly(partial(_by_vectors, function), function, x)
    return found


def exp(x: torch.Tensor) -> torch.Tensor:
    return _chosen(torch.exp, x)


def log(x: torch.Tensor) -> torch.Tensor:
    return _chosen(torch.log, x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return _chosen(torch.sigmoid, x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    return _chosen(torch.tanh, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(x); of a half precision through fp32, rounded once."""
    if x.device.type != "cpu" or not deterministic():
        return torch.nn.functional.silu(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * sigmoid(wide)).to(x.dtype)
