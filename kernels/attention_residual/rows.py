"""A token's sources beside the prefix, as kernels are given them, and what is done to tensors that lie askew."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Rows", "apart", "is_even"]

EVEN = 16
"""Bytes that the widest access takes at once."""


def is_even(tensor: torch.Tensor) -> bool:
    """Whether every row of [N, D] or [N, rows, D] begins at a multiple of sixteen bytes. A few operations: it is asked for each tensor of each call."""
    size = tensor.element_size()
    places = tensor.data_ptr() | tensor.stride(0) * size
    return (places if tensor.dim() == 2 else places | tensor.stride(1) * size) % EVEN == 0


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its rows begin at multiples of sixteen bytes, else a copy of it where they do."""
    return tensor if is_even(tensor) else tensor.clone(memory_format=torch.contiguous_format)


class Rows:
    """[N, rows, D] with the rows of a token next to one another, or tensors [N, D] of their own. Padded to R pointers with the first; with none, the prefix
    stands in and is never read through them. `row`: elements from one source to the next; 0 where each has a pointer of its own."""

    def __init__(self, sources: torch.Tensor | Sequence[torch.Tensor], r: int, stand_in: torch.Tensor) -> None:
        self.row = sources.stride(1) if isinstance(sources, torch.Tensor) else 0
        held = (sources,) if isinstance(sources, torch.Tensor) else tuple(sources) or (stand_in,)
        self.tensors = held if self.row else held + (held[0],) * (r - len(held))
        self.strides = tuple(t.stride(0) for t in self.tensors)

    @property
    def even(self) -> bool:
        """Whether the rows of all begin at multiples of sixteen bytes."""
        return all(is_even(t) for t in self.tensors)
