"""Coordinated caches: what every layer keeps of the same positions, moved together or not at all.

A `Cache` is a value: no operation changes the one it was given, so a fork is a reference until one of the branches grows, and a training pass can
differentiate through it. Batch is always the first axis. Layers that keep a column per position share one validity mask: a padded column is skipped and
never moved, and a position is the number of valid columns before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

__all__ = ["Cache", "KdaState", "KeyValues", "LayerState", "MlaRows"]


class LayerState(Protocol):
    """What one layer keeps. `cat` widens columns to the longest; `columns` takes some of them, which a state without columns ignores."""

    def take(self, index: torch.Tensor) -> Self: ...

    @classmethod
    def cat(cls, parts: Sequence[Self], width: int) -> Self: ...

    def columns(self, index: torch.Tensor) -> Self: ...

    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class KdaState:
    """tail [B, W-1, 3 H K]: last raw convolution inputs of q, k, v; state [B, H, K, V] in fp32 (fp64 in fp64 models)."""

    tail: torch.Tensor
    state: torch.Tensor

    def take(self, index: torch.Tensor) -> KdaState:
        return KdaState(self.tail.index_select(0, index), self.state.index_select(0, index))

    @classmethod
    def cat(cls, parts: Sequence[KdaState], width: int) -> KdaState:
        return cls(torch.cat([p.tail for p in parts]), torch.cat([p.state for p in parts]))

    def columns(self, index: torch.Tensor) -> KdaState:
        return self

    def nbytes(self) -> int:
        return self.tail.nbytes + self.state.nbytes


@dataclass(frozen=True)
class MlaRows:
    """rows [B, N, kv_lora + rope]: normalised latent and shared key dimensions of each cached position."""

    rows: torch.Tensor

    def take(self, index: torch.Tensor) -> MlaRows:
        return MlaRows(self.rows.index_select(0, index))

    @classmethod
    def cat(cls, parts: Sequence[MlaRows], width: int) -> MlaRows:
        return cls(torch.cat([_widened(p.rows, width) for p in parts]))

    def columns(self, index: torch.Tensor) -> MlaRows:
        return MlaRows(self.rows.index_select(1, index))

    def nbytes(self) -> int:
        return self.rows.nbytes


@dataclass(frozen=True)
class KeyValues:
    """keys [B, N, Hkv, D], rotated to their positions, and values [B, N, Hkv, Dv] of each cached position."""

    keys: torch.Tensor
    values: torch.Tensor

    def take(self, index: torch.Tensor) -> KeyValues:
        return KeyValues(self.keys.index_select(0, index), self.values.index_select(0, index))

    @classmethod
    def cat(cls, parts: Sequence[KeyValues], width: int) -> KeyValues:
        return cls(torch.cat([_widened(p.keys, width) for p in parts]), torch.cat([_widened(p.values, width) for p in parts]))

    def columns(self, index: torch.Tensor) -> KeyValues:
        return KeyValues(self.keys.index_select(1, index), self.values.index_select(1, index))

    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True)
class Cache:
    """layers: one state per layer; valid [B, N] bool: which cached columns are real; lengths int64 [B]: tokens seen, which is the next one's position."""

    layers: tuple[LayerState, ...]
    valid: torch.Tensor
    lengths: torch.Tensor

    @property
    def batch(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def columns(self) -> int:
        return int(self.valid.shape[1])

    def take(self, index: torch.Tensor) -> Cache:
        """The rows `index` [M] in that order; repeated rows are forks."""
        layers = tuple(x.take(index) for x in self.layers)
        return Cache(layers, self.valid.index_select(0, index), self.lengths.index_select(0, index))

    def repeat(self, times: int) -> Cache:
        """Each row `times` times, in order: the members of a group sharing a prompt."""
        return self.take(torch.arange(self.batch, device=self.lengths.device).repeat_interleave(times))

    @staticmethod
    def cat(caches: Sequence[Cache]) -> Cache:
        """Stack batches; shorter ones get invalid columns on the right. Layers must be of the same kinds."""
        width = max(c.columns for c in caches)
        layers = tuple(type(parts[0]).cat(parts, width) for parts in zip(*(c.layers for c in caches), strict=True))
        return Cache(layers, torch.cat([_widened(c.valid, width) for c in caches]), torch.cat([c.lengths for c in caches]))

    def compact(self) -> Cache:
        """Drop columns that are invalid in every row; values are unchanged."""
        keep = self.valid.any(0)
        if bool(keep.all()):
            return self
        index = keep.nonzero().squeeze(1)
        return Cache(tuple(x.columns(index) for x in self.layers), self.valid.index_select(1, index), self.lengths)

    def nbytes(self) -> int:
        """Bytes held by all layers and the mask."""
        return self.valid.nbytes + self.lengths.nbytes + sum(x.nbytes() for x in self.layers)


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """x [B, N, ...] with zeros in columns N..width."""
    short = width - x.shape[1]
    return torch.cat([x, x.new_zeros(x.shape[0], short, *x.shape[2:])], dim=1) if short else x
