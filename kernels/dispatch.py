"""Which implementation of an operator runs: by the device of its tensors and one setting of the process, never by what the tensors hold.

Unset, the kernels run on Hopper GPUs, where they have been checked and timed (docs/kernels), and the references everywhere else. `DRIFTLINE_KERNELS=triton` in the
environment runs them on any CUDA device (one of another kind may lack the shared memory or the matrix instructions that they were laid out for),
`reference` on none: to see what a kernel changes.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["has_triton", "runs_triton"]

_SETTING = "DRIFTLINE_KERNELS"
_HOPPER = (9, 0)


@cache
def _setting() -> str | None:
    chosen = os.environ.get(_SETTING)
    if chosen not in (None, "triton", "reference"):
        raise ValueError(f"{_SETTING} is {chosen!r}; set it to triton or reference, or leave it unset")
    return chosen


@cache
def has_triton() -> bool:
    """Whether Triton is installed and kernels are not turned off. Read once a process. Raises ValueError for a setting that is neither."""
    return _setting() != "reference" and find_spec("triton") is not None


@cache
def _checked_on(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == _HOPPER


def runs_triton(*tensors: torch.Tensor | None) -> bool:
    """Whether the kernels take these: all that are given are on a CUDA device, and the kernels are there and on for it. At least one is given."""
    given = [t for t in tensors if t is not None]
    if not given or any(t.device.type != "cuda" for t in given) or not has_triton():
        return False
    return _setting() == "triton" or _checked_on(given[0].device)
