"""What an optimizer step changed, found on the device while the step is rounded into the model: changes leave the device, not weights.

Guarantees: once what `start` returned was read to its end, or `finish`ed, the parameters hold what the masters round to, bit for bit as
`tensor.to(dtype)` rounds there; and what it yields, applied to the policy's tensors of before, gives those of after. What is compared with is what the
parameter holds, so no second copy of the policy is on the device, and that must be what readers have: after a version that was not committed,
`whole=True` says everything again.

    deltas = [DeviceDelta(sources, torch.bfloat16) for sources in chunks]         # once
    for delta in deltas:                                                          # at every step, each after its chunk's optimizer step
        started.append(delta.start())                                             # kernels and copies are queued, nothing is waited for
    for changed in started:
        for name, shards in changed.tensors():                                    # waits for the copies of this chunk only
            await draft.put_changes(name, shards)

Memory: beside the model the device holds two batches' changes, each at most 1.2 times as large as the `BATCH_BYTES` of policy they are of, and a third as
much of scratch; the host, in pinned memory, what was yielded and is still in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from driftline.kernels.policy_delta import Comparison, Rounding, SpanChanges
from driftline.messages.errors import ConfigError
from driftline.models.state import policy_dtype, public_tensors
from driftline.policy_store.forms import Changes
from driftline.policy_store.tensor import SHARD_BYTES, Bytes1D

__all__ = ["DENSE_SHARE", "DeviceDelta", "ShardContent", "Source", "Started"]

DENSE_SHARE = 0.4
"""Above it a shard's own bytes are fewer than its changes, 2 an element of bfloat16 against 6 a change, and its codec takes them whole anyway."""

BATCH_BYTES = 256 * 1024 * 1024
BATCHES_AHEAD = 2

ShardContent: TypeAlias = Changes | Bytes1D | None
"""A shard's changes, its whole new bytes, or nothing where it is as it was."""

_UNSIGNED: dict[torch.dtype, npt.DTypeLike] = {torch.int8: np.uint8, torch.int16: np.uint16, torch.int32: np.uint32}


class Source(NamedTuple):
    """A parameter under its module's name, and the fp32 master it is rounded from; none for one that is not trained."""

    name: str
    parameter: torch.Tensor
    master: torch.Tensor | None


class _Span(NamedTuple):
    """One shard of one public tensor."""

    name: str
    last: bool
    held: torch.Tensor
    master: torch.Tensor


@dataclass(frozen=True)
class _Batch:
    spans: tuple[_Span, ...]
    dtype: torch.dtype
    comparison: Comparison


class DeviceDelta:
    def __init__(self, sources: Sequence[Source], dtype: torch.dtype, *, dense_share: float = DENSE_SHARE) -> None:
        """`dtype`: the policy's; parameters are in it, or in fp32 holding values of it. They and the masters must stay where they are.

        Raises ConfigError when a parameter cannot hold the policy's values, and ValueError when it is not contiguous.
        """
        self._untrained: list[tuple[str, int]] = []
        kinds: dict[tuple[Rounding, torch.dtype, torch.dtype, bool], list[_Span]] = {}
        for source in sources:
            master = None if source.master is None else dict(public_tensors(source.name, source.master))
            for public, held in public_tensors(source.name, source.parameter):
                stored = policy_dtype(public, dtype)
                if master is None or not held.numel():
                    self._untrained.append((public, -(-held.numel() * stored.itemsize // SHARD_BYTES)))
                    continue
                spans = _shards(public, held, master[public], stored)
                aligned = held.data_ptr() % 16 == 0 and master[public].data_ptr() % 16 == 0
                kinds.setdefault((_rounding(public, held.dtype, stored), held.dtype, stored, aligned), []).extend(spans)
        self._batches = [
            _Batch(tuple(part), stored, Comparison([s.held for s in part], [s.master for s in part], rounding, dense_share=dense_share))
            for (rounding, _, stored, _), spans in kinds.items() for part in _parts(spans, stored)
        ]

    @torch.no_grad()
    def start(self, *, whole: bool = False) -> Started:
        """Begin to round the masters into the parameters and to copy out what that changes, on the current stream. `whole`: everything.

        Neither masters nor parameters may change before the result was read to its end or finished.
        """
        return Started(self._untrained, self._batches, whole)


class Started:
    """A step of a `DeviceDelta` on its way to the host."""

    def __init__(self, untrained: Sequence[tuple[str, int]], batches: Sequence[_Batch], whole: bool) -> None:
        self.changed = 0
        """Elements that changed, of the tensors read so far."""
        self._untrained, self._whole = untrained, whole
        self._left = deque(batches)
        self._pending: deque[_Pending] = deque()
        self._queue()

    def tensors(self) -> Iterator[tuple[str, list[ShardContent]]]:
        """Every tensor once, with one content a shard. Blocks while copies are under way: for a thread. The arrays are the caller's."""
        for name, shards in self._untrained:
            yield name, [None] * shards
        content: list[ShardContent] = []
        while self._pending:
            pending = self._pending.popleft()
            found = pending.contents()
            self.changed += pending.changed
            self._queue()
            for span, each in zip(pending.batch.spans, found, strict=True):
                content.append(each)
                if span.last:
                    yield span.name, content
                    content = []

    @torch.no_grad()
    def finish(self) -> None:
        """Round what was not read; what it changed is lost, and the next version must be said whole."""
        self._pending.clear()
        while self._left:
            self._left.popleft().comparison.run(write=True, wait=False)

    @torch.no_grad()
    def _queue(self) -> None:
        while self._left and len(self._pending) < BATCHES_AHEAD:
            self._pending.append(_Pending.queued(self._left.popleft(), self._whole))


@dataclass
class _Pending:
    """A batch whose changes are found, or will be when the stream gets there. Copies go by a stream of their own, past the optimizer's next work."""

    batch: _Batch
    whole: bool
    found: SpanChanges
    copies: _Copies
    starts: torch.Tensor
    counts: torch.Tensor
    changed: int = 0

    @classmethod
    def queued(cls, batch: _Batch, whole: bool) -> _Pending:
        found = batch.comparison.run(write=True, wait=False)
        copies = _Copies(found.at.device)
        starts, counts = copies.to_host(found.starts), copies.to_host(found.counts)
        copies.mark()
        return cls(batch, whole, found, copies, starts, counts)

    def contents(self) -> list[ShardContent]:
        """Of each span; afterwards the device holds nothing of it."""
        self.copies.wait()
        found, starts, counts = self.found, self.starts.tolist(), self.counts.tolist()
        self.changed = sum(counts)
        at, xor = self.copies.to_host(found.at[: starts[-1]]), self.copies.to_host(found.xor[: starts[-1]])
        wholes = {
            i: self.copies.to_host(span.held, self.batch.dtype) for i, span in enumerate(self.batch.spans)
            if self.whole or (counts[i] and starts[i] == starts[i + 1])
        }
        self.copies.mark()
        self.copies.wait()
        self.found = SpanChanges(*(part[:0] for part in (at, xor, self.starts, self.counts)))
        at_n, xor_n = at.numpy(), xor.numpy().view(_UNSIGNED[xor.dtype])
        out: list[ShardContent] = []
        for i, (first, last) in enumerate(pairwise(starts)):
            if i in wholes:
                out.append(wholes[i].view(torch.uint8).numpy())
            else:
                out.append(Changes(at_n[first:last], xor_n[first:last]) if last > first else None)
        return out


class _Copies:
    """Copies to the host of what the current stream has queued by now; on the CPU, what is already there."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _copy_stream(device) if device.type == "cuda" else None
        self._done: torch.cuda.Event | None = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """With a `dtype` a copy in it, else the tensor's own memory where that is the host's."""
        if self._stream is None:
            return tensor if dtype is None else tensor.to(dtype, copy=True)
        tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            out = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, pin_memory=True)
            return out.copy_(tensor.to(out.dtype), non_blocking=True)

    def mark(self) -> None:
        if self._stream is not None:
            self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._done.record(self._stream)

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _rounding(public: str, held: torch.dtype, stored: torch.dtype) -> Rounding:
    match held, stored:
        case (torch.float32, torch.float32):
            return Rounding.NONE
        case (torch.bfloat16, torch.bfloat16):
            return Rounding.BFLOAT16
        case (torch.float32, torch.bfloat16):
            return Rounding.BFLOAT16_IN_FLOAT32
    raise ConfigError(f"a parameter of {held} cannot hold a policy of {stored}", field=public, value=str(held), remedy="use float32 or bfloat16")


def _shards(name: str, held: torch.Tensor, master: torch.Tensor, stored: torch.dtype) -> list[_Span]:
    """One span a shard of the stored tensor, whatever the width of what holds it."""
    size = SHARD_BYTES // stored.itemsize
    flat, wanted = held.view(-1), master.view(-1)
    return [
        _Span(name, first + size >= flat.numel(), flat[first : first + size], wanted[first : first + size])
        for first in range(0, flat.numel(), size)
    ]


def _parts(spans: Sequence[_Span], stored: torch.dtype) -> Iterator[list[_Span]]:
    part: list[_Span] = []
    size = 0
    for span in spans:
        part.append(span)
        size += span.held.numel() * stored.itemsize
        if size >= BATCH_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
