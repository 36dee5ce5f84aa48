"""How a step becomes one launch. On a GPU a CUDA graph; the runner's logic asks for no more than `Capture`, so it holds on any device.

A captured step reads and writes the memory that it was captured with, the weights' too: weights that change in place are the next replay's. All graphs share one pool
of memory for what is made within, because they never run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch

from driftline.services.rollout.runner.step import Outputs
from driftline.services.rollout.runner.watch import Watch

__all__ = ["Capture", "Captured", "CudaCapture"]


class Captured(NamedTuple):
    """replay: run it again; it leaves its results in `outputs`. kept: memory that it reads."""

    replay: Callable[[], None]
    outputs: Outputs
    kept: tuple[torch.Tensor, ...]


class Capture(Protocol):
    def __call__(self, compute: Callable[[], Outputs]) -> Captured:
        """`compute` may be run more than once. Raises RuntimeError where it cannot be captured."""


class CudaCapture:
    """CUDA graphs on one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def __call__(self, compute: Callable[[], Outputs]) -> Captured:
        """Run `compute` twice, for its kernels are compiled and its tables made at the first time, and capture the third."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            with Watch():
                compute()
            compute()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        graph, watch = torch.cuda.CUDAGraph(), Watch()
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()  # a capture that runs out of memory cannot ask for what is cached elsewhere
        with torch.cuda.stream(self._stream), watch:
            # Other threads may use the device meanwhile: only this one's mistakes are refused.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = compute()
            except RuntimeError:
                with suppress(RuntimeError):  # of a capture that is broken; the first error says why
                    graph.capture_end()
                raise
            graph.capture_end()
        self._pool = self._pool or graph.pool()
        return Captured(graph.replay, outputs, tuple(watch.outside.values()))
