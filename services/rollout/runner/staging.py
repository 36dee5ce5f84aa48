"""Arrays of the host to the device and back: all that a step takes in one copy, and nothing waited for until its results are asked for.

On a GPU the host's side is page-locked memory of torch's own cache, which gives a block out again only after the copy from it is done, so a step may be prepared while
the one before runs. Rows of padding change no state: they have the slot -1, no tokens before them and page 0, which is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from driftline.services.rollout.runner.batch import DecodeBatch

__all__ = ["Fetch", "Inputs", "Shape", "Staged", "sent"]

_LINE = 64
"""Bytes that each array begins at a multiple of, so that a kernel finds every batch aligned alike."""

_DTYPES: dict[torch.dtype, Any] = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


class Shape(NamedTuple):
    """Of a decoding step's arrays: rows, tokens a row, pages a row; whether windows are replayed; the vocabulary of the drafts' distributions (0: there are none) and
    their dtype, which is kept: a rounded one is not what the drafts were drawn from."""

    rows: int
    window: int
    pages: int
    replays: bool
    vocabulary: int = 0
    probs: torch.dtype = torch.float32


class Inputs(NamedTuple):
    """A `DecodeBatch` on the device; keys are the bits of the unsigned numbers."""

    tokens: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    keys: torch.Tensor
    positions: torch.Tensor
    temperatures: torch.Tensor
    accepted: torch.Tensor | None
    counts: torch.Tensor
    probs: torch.Tensor | None


class Staged:
    """The memory of one shape's inputs on the device; it stays where it is while batches come and go."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        rows = shape.rows
        self._fields: list[tuple[str, torch.dtype, tuple[int, ...], int]] = []
        self._bytes = 0
        for name, kind, size in (
            ("tokens", torch.int64, (rows, shape.window)), ("keys", torch.int64, (rows,)), ("positions", torch.int64, (rows,)),
            ("slots", torch.int32, (rows,)), ("tables", torch.int32, (rows, shape.pages)), ("lengths", torch.int32, (rows,)),
            ("accepted", torch.int32, (rows,)), ("counts", torch.int32, (rows,)), ("temperatures", torch.float32, (rows,)),
        ):
            self._fields.append((name, kind, size, self._bytes))
            self._bytes += -(-int(np.prod(size)) * kind.itemsize // _LINE) * _LINE
        self._memory = torch.zeros(self._bytes, dtype=torch.uint8, device=device)
        views: dict[str, torch.Tensor | None] = {name: self._view(kind, size, at) for name, kind, size, at in self._fields}
        if not shape.replays:
            views["accepted"] = None
        views["probs"] = torch.zeros(rows, shape.window - 1, shape.vocabulary, dtype=shape.probs, device=device) if shape.vocabulary else None
        self.inputs = Inputs(**views)  # type: ignore[arg-type]
        self.load(None)

    def _view(self, kind: torch.dtype, size: tuple[int, ...], at: int) -> torch.Tensor:
        return self._memory[at : at + int(np.prod(size)) * kind.itemsize].view(kind).view(size)

    def load(self, batch: DecodeBatch | None) -> None:
        """Write a batch of no more rows and pages, with rows of padding behind it; None: padding alone."""
        host = torch.zeros(self._bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        raw = host.numpy()
        for name, kind, size, at in self._fields:
            part = raw[at : at + int(np.prod(size)) * kind.itemsize].view(_DTYPES[kind]).reshape(size)
            if name == "slots":
                part.fill(-1)
            elif name == "temperatures":
                part.fill(1.0)
            given = None if batch is None else getattr(batch, name)
            if given is None:
                if name == "counts" and batch is not None:
                    part[: batch.rows] = batch.window - 1
                continue
            given = given.view(np.int64) if name == "keys" else given
            part[tuple(slice(length) for length in given.shape)] = given
        self._memory.copy_(host, non_blocking=True)
        if self.inputs.probs is not None and batch is not None and batch.probs is not None:
            self.inputs.probs[: batch.rows].copy_(batch.probs, non_blocking=True)


def sent(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device, unsigned numbers as the signed ones of their bits; nothing is waited for."""
    host = torch.from_numpy(np.ascontiguousarray(array).view(np.int64) if array.dtype == np.uint64 else np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)


class Fetch:
    """Results on their way to the host: what the tensors hold when this is made, whatever is written to them later."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._done: torch.cuda.Event | None = None
        if tensors and tensors[0].device.type == "cuda":
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()
        else:
            self._host = [t.clone() for t in tensors]

    def arrays(self) -> list[np.ndarray]:
        """Wait for the device. The arrays are the caller's, and page-locked memory is not kept for them."""
        if self._done is None:
            return [host.numpy() for host in self._host]
        self._done.synchronize()
        return [host.numpy().copy() for host in self._host]
