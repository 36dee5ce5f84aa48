"""The host tier: pages and states that left the device, byte for byte, in one buffer of a fixed size.

On CUDA the buffer is pinned and copies run on a stream of their own: what leaves is gathered on the device first, so its page may be written again at once;
what returns is waited for by the device and never by the host. On a CPU a copy is a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import NamedTuple

import torch

from driftline.messages.errors import ConfigError
from driftline.services.rollout.prefix.extents import Extent, Extents

__all__ = ["HostTier", "Kind", "entry_bytes"]


class Kind(Enum):
    PAGE = "page"
    STATE = "state"


class _Part(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class HostTier:
    """`budget` bytes of host memory beside a pool on `device`. ConfigError for no bytes."""

    def __init__(self, budget: int, device: torch.device | str = "cpu") -> None:
        if budget <= 0:
            raise ConfigError("a host tier without memory", field="host_cache_mb", value=budget, remedy="leave the tier out, or give it megabytes")
        self.device = torch.device(device)
        cuda = self.device.type == "cuda"
        with torch.inference_mode(False):  # a tensor of inference mode could not be written outside of it
            self._bytes = torch.empty(budget, dtype=torch.uint8, pin_memory=cuda)
        self._side = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]
        self._extents = Extents(budget)
        self._layouts: dict[Kind, tuple[_Part, ...]] = {}

    @property
    def budget(self) -> int:
        return self._extents.size

    @property
    def used(self) -> int:
        return self._extents.size - self._extents.free

    def take(self, size: int) -> Extent | None:
        return self._extents.take(size)

    def give(self, extent: Extent) -> None:
        self._extents.give(extent)

    def gaps(self) -> tuple[Extent, ...]:
        return self._extents.gaps()

    @torch.no_grad()
    def put(self, kind: Kind, extents: Sequence[Extent], tensors: Sequence[torch.Tensor]) -> None:
        """tensors, each [n, ...] on the device: entry i of all goes to extents[i], of `entry_bytes(tensors)`."""
        count = len(extents)
        flat = torch.cat([t.reshape(count, -1).contiguous().view(torch.uint8) for t in tensors], dim=1)
        self._layouts[kind] = tuple(_Part(tuple(t.shape[1:]), t.dtype) for t in tensors)
        with self._aside():
            for begin, end, run in _runs(extents):
                self._at(run).copy_(flat[begin:end].view(-1), non_blocking=True)
        if self._side is not None:
            flat.record_stream(self._side)

    @torch.no_grad()
    def get(self, kind: Kind, extents: Sequence[Extent], load: Callable[[list[torch.Tensor]], None]) -> None:
        """Hands `load` the tensors [n, ...] that were put there, on the device, ready for its current stream."""
        flat = torch.empty((len(extents), extents[0].size), dtype=torch.uint8, device=self.device)
        with self._aside():
            for begin, end, run in _runs(extents):
                flat[begin:end].view(-1).copy_(self._at(run), non_blocking=True)
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
            flat.record_stream(self._side)
        tensors, at = [], 0
        for part in self._layouts[kind]:
            until = at + part.dtype.itemsize * torch.Size(part.shape).numel()
            tensors.append(flat[:, at:until].clone().view(part.dtype).reshape(len(extents), *part.shape))
            at = until
        load(tensors)

    def _at(self, extent: Extent) -> torch.Tensor:
        return self._bytes[extent.start : extent.start + extent.size]

    def _aside(self) -> torch.cuda.StreamContext | nullcontext[None]:
        """The side stream, behind all that the current one was given."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._side)


def _runs(extents: Sequence[Extent]) -> Iterator[tuple[int, int, Extent]]:
    """Extents begin to end that lie one behind the other, as one: a copy each."""
    begin = 0
    for end in range(1, len(extents) + 1):
        if end == len(extents) or extents[end].start != sum(extents[end - 1]):
            yield begin, end, Extent(extents[begin].start, sum(extents[end - 1]) - extents[begin].start)
            begin = end


def entry_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of one entry of tensors [n, ...]."""
    return sum(t.nbytes for t in tensors) // len(tensors[0])
