"""Which implementation of an operator runs: by the device of its tensors, never by what is in them."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["has_triton", "runs_triton"]


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def runs_triton(*tensors: torch.Tensor | None) -> bool:
    """Whether the kernels take these: all that are given are on a CUDA device, and Triton is installed. At least one is given."""
    given = [t for t in tensors if t is not None]
    return bool(given) and all(t.device.type == "cuda" for t in given) and has_triton()
