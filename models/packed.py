"""Sequences packed behind one another in one row, [1, N]: no token is padding, and none sees another sequence.

The bounds lie on the device, where kernels read them, and the lengths on the host, where shapes are made; both say the same, and neither is read from the other
in a forward. A sequence may have no token or one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.function import once_differentiable

from driftline.models.cache import Cache

__all__ = ["Packed", "Way", "moved"]

T = TypeVar("T")


class Way(NamedTuple):
    """Where rows come from: row i of a result is row at[i], int64 [m], of what is given, or a filling where absent[i] (None: nowhere)."""

    at: torch.Tensor
    absent: torch.Tensor | None

    @classmethod
    def of(cls, source: torch.Tensor) -> Way:
        """source int64 [m], -1 for a filling."""
        return cls(source.clamp(min=0), source < 0)


def moved(x: torch.Tensor, source: torch.Tensor | Way, target: torch.Tensor | Way, fill: float = 0.0) -> torch.Tensor:
    """Rows of x [n, ...] at other places: row i of the result [m, ...] is x[source[i]], or `fill` where source [m] is -1.

    Each row goes to one place at most, target [n], -1 for none, so the gradient is a move back: no sums, nothing that depends on an order. Differentiable in x.
    A `Way` is made once for many moves.
    """
    there, back = (way if isinstance(way, Way) else Way.of(way) for way in (source, target))
    out: torch.Tensor = _Moved.apply(x, *there, *back, fill)  # type: ignore[no-untyped-call]
    return out


def _taken(x: torch.Tensor, index: torch.Tensor, absent: torch.Tensor | None, fill: float) -> torch.Tensor:
    if not x.shape[0]:
        return x.new_full((index.shape[0], *x.shape[1:]), fill)
    rows = x.index_select(0, index)
    return rows if absent is None else rows.masked_fill_(absent.view(-1, *[1] * (x.dim() - 1)), fill)


class _Moved(torch.autograd.Function):
    """Keeps the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index: torch.Tensor, absent: torch.Tensor | None, back: torch.Tensor, gone: torch.Tensor | None, fill: float
    ) -> torch.Tensor:
        ctx.save_for_backward(back, gone)
        return _taken(x, index, absent, fill)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back, gone = ctx.saved_tensors
        return _taken(gradient, back, gone, 0.0), None, None, None, None, None


@dataclass(frozen=True)
class Packed:
    """Sequence s of S is tokens[0, bounds[s]:bounds[s + 1]]: bounds int64 [S + 1] on the device, lengths the S differences on the host."""

    bounds: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> Packed:
        """Raises ValueError for no sequence at all, and for a negative length."""
        if not lengths or min(lengths) < 0:
            raise ValueError(f"lengths is {list(lengths)}: give at least one sequence, each of no token or more")
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)
        return cls(ends.to(device, non_blocking=True), tuple(lengths))

    @property
    def count(self) -> int:
        return len(self.lengths)

    @cached_property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def bounds32(self) -> torch.Tensor:
        """int32 [S + 1], as kernels take them."""
        return self.bounds.to(torch.int32)

    @cached_property
    def lengths_s(self) -> torch.Tensor:
        """int64 [S], the lengths on the device."""
        return self.bounds.diff()

    @cached_property
    def sequence(self) -> torch.Tensor:
        """int64 [N]: whose token each is."""
        count = torch.arange(self.count, device=self.bounds.device)
        return torch.repeat_interleave(count, self.lengths_s, output_size=self.tokens)

    @cached_property
    def offset(self) -> torch.Tensor:
        """int64 [N]: how many tokens of its sequence in this pack are before each."""
        return torch.arange(self.tokens, device=self.bounds.device) - self.bounds[self.sequence]

    @cached_property
    def real(self) -> torch.Tensor:
        """bool [S, longest]: which places of the right-padded form hold a token."""
        return torch.arange(self.longest, device=self.bounds.device) < self.lengths_s[:, None]

    @cached_property
    def _to_padded(self) -> Way:
        """Of the tokens, from the right-padded form flattened, [S * longest]."""
        at = torch.arange(self.longest, device=self.bounds.device) + self.bounds[:-1, None]
        if min(self.lengths) == self.longest:
            return Way(at.flatten(), None)
        return Way.of(at.masked_fill(~self.real, -1).flatten())

    @cached_property
    def _to_packed(self) -> Way:
        """Of the places of the right-padded form, from the tokens, [N]."""
        return Way(self.sequence * self.longest + self.offset, None)

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, made once: index tensors that every layer needs."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def padded(self, x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """x [N, ...] as [S, longest, ...], right-padded with `fill`. Differentiable in x."""
        return moved(x, self._to_padded, self._to_packed, fill).view(self.count, self.longest, *x.shape[1:])

    def unpadded(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, longest, ...] as [N, ...]: what `padded` was given. Differentiable in x."""
        return moved(x.reshape(self.count * self.longest, *x.shape[2:]), self._to_packed, self._to_padded)

    def checked(self, tokens: torch.Tensor, lengths: torch.Tensor | None, cache: Cache | None) -> None:
        """Raise ValueError unless a forward's other arguments go with this pack."""
        if tuple(tokens.shape) != (1, self.tokens):
            raise ValueError(f"tokens is {tuple(tokens.shape)}: these {self.count} sequences are one row of {self.tokens}")
        if lengths is not None:
            raise ValueError("lengths and packed are given: a pack has no padding, so leave lengths out")
        if cache is not None and cache.batch != self.count:
            raise ValueError(f"cache has {cache.batch} rows for {self.count} sequences: give one row a sequence, or none")
