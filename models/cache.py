"""Coordinated caches: MLA rows and KDA state of the same positions, moved together or not at all.

A `Cache` is a value: no operation changes the one it was given, so a fork is a reference until one of the branches grows, and a training pass can
differentiate through it. Batch is always the first axis. MLA rows carry a validity mask instead of positions: K3's attention has no positional
encoding, so a padded column is skipped and never moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Cache", "KdaState", "MlaRows"]


@dataclass(frozen=True)
class KdaState:
    """tail [B, W-1, 3 H K]: last raw convolution inputs of q, k, v; state [B, H, K, V] in fp32 (fp64 in fp64 models)."""

    tail: torch.Tensor
    state: torch.Tensor

    def take(self, index: torch.Tensor) -> KdaState:
        return KdaState(self.tail.index_select(0, index), self.state.index_select(0, index))


@dataclass(frozen=True)
class MlaRows:
    """rows [B, N, kv_lora + rope]: normalised latent and shared key dimensions of each cached position."""

    rows: torch.Tensor

    def take(self, index: torch.Tensor) -> MlaRows:
        return MlaRows(self.rows.index_select(0, index))


@dataclass(frozen=True)
class Cache:
    """layers: one KdaState or MlaRows per layer; valid [B, N] bool: which cached columns are real; lengths [B]: tokens seen."""

    layers: tuple[KdaState | MlaRows, ...]
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
        """Stack batches; shorter ones get invalid columns on the right."""
        columns = max(c.columns for c in caches)

        def widen(x: torch.Tensor) -> torch.Tensor:
            short = columns - x.shape[1]
            if not short:
                return x
            return torch.cat([x, x.new_zeros(x.shape[0], short, *x.shape[2:])], dim=1)

        layers: list[KdaState | MlaRows] = []
        for parts in zip(*(c.layers for c in caches), strict=True):
            if isinstance(parts[0], KdaState):
                states = [p for p in parts if isinstance(p, KdaState)]
                layers.append(KdaState(torch.cat([p.tail for p in states]), torch.cat([p.state for p in states])))
            else:
                rows = [p for p in parts if isinstance(p, MlaRows)]
                layers.append(MlaRows(torch.cat([widen(p.rows) for p in rows])))
        return Cache(tuple(layers), torch.cat([widen(c.valid) for c in caches]), torch.cat([c.lengths for c in caches]))

    def compact(self) -> Cache:
        """Drop columns that are invalid in every row; values are unchanged."""
        keep = self.valid.any(0)
        if bool(keep.all()):
            return self
        index = keep.nonzero().squeeze(1)
        layers = tuple(x if isinstance(x, KdaState) else MlaRows(x.rows.index_select(1, index)) for x in self.layers)
        return Cache(layers, self.valid.index_select(1, index), self.lengths)

    def nbytes(self) -> int:
        """Bytes held by all layers and the mask."""
        total = self.valid.nbytes + self.lengths.nbytes
        for x in self.layers:
            total += x.rows.nbytes if isinstance(x, MlaRows) else x.tail.nbytes + x.state.nbytes
        return total
