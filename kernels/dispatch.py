"""Which implementation of an operator runs: by the device of its tensors and one setting of the process, never by what the tensors hold.

`DRIFTLINE_KERNELS=triton` in the environment turns the kernels on, `reference` turns them off: to see what a kernel changes, and while one has not been
checked on the kind of device at hand. Unset, it is off: of the kernels only those of `policy_delta`, which do not ask here, have run on one so far.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["has_triton", "runs_triton"]

_SETTING = "DRIFTLINE_KERNELS"


@cache
def has_triton() -> bool:
    """Whether Triton is installed and kernels are on. Read once a process. Raises ValueError for a setting that is neither."""
    chosen = os.environ.get(_SETTING, "reference")
    if chosen not in ("triton", "reference"):
        raise ValueError(f"{_SETTING} is {chosen!r}; set it to triton or reference")
    return chosen == "triton" and find_spec("triton") is not None


def runs_triton(*tensors: torch.Tensor | None) -> bool:
    """Whether the kernels take these: all that are given are on a CUDA device, and the kernels are there and on. At least one is given."""
    given = [t for t in tensors if t is not None]
    return bool(given) and all(t.device.type == "cuda" for t in given) and has_triton()
