"""A step that can be made again bit for bit: on a CUDA device sums must be taken in one order, which costs a little and is asked for here.

Recovery and replay compare digests, so the learner's process always computes so. On the CPU the order is fixed by the number of threads. That a token has the
same bits by every way through a model is another promise, and a run's choice: `driftline.kernels.mode`.
"""

from __future__ import annotations

import os

import torch

__all__ = ["compute_deterministically"]


def compute_deterministically(device: str) -> None:
    """For this process. Before its first product on the device: cuBLAS reads its workspace setting when it starts."""
    if device.startswith("cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Else every buffer that a kernel is about to fill is filled with NaN before: a launch and a pass of memory for each.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
