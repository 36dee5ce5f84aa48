"""Grouped-query attention with rotated positions, one function for prefill, continuation and decode: new tokens against a cache, a new cache out.

Keys are cached as they were rotated, so a cached column is never turned again. A position is the number of real tokens before it, whatever padding stands between;
a row has seen no more tokens than it has columns, so no position is read from the device to know that the tables hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from driftline.kernels.gqa import Layout, attention
from driftline.kernels.rope import rotate
from driftline.models.attention import RMSNorm
from driftline.models.cache import Cache, KeyValues
from driftline.models.dense.config import DenseConfig
from driftline.models.dense.rope import Tables
from driftline.models.held import HeldKeyValues
from driftline.models.linear import Linear
from driftline.models.packed import Packed

__all__ = ["Attention", "Places", "Turns"]


class Turns(NamedTuple):
    """cos, sin [B, T, head_dim / 2] of the positions of new tokens whose keys are held in a pool."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Places:
    """Where the new tokens of a forward stand, the same for every layer.

    cos, sin [B, T, head_dim / 2] of their positions; layout: which keys each sees; valid bool [rows, N + T]: which columns of the cache after them are real, of a
    packed row those of its padded form; `packed`: its sequences, or None; keep: whether something follows them, without which a packed row is never padded.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    layout: Layout
    valid: torch.Tensor
    packed: Packed | None
    keep: bool

    @classmethod
    def padded(cls, cache: Cache, steps: int, lengths: torch.Tensor | None, tables: Tables, dtype: torch.dtype) -> Places:
        """Of `steps` new tokens a row, of which the first `lengths` [B] are real (None: all). `dtype`: of the activations."""
        span = torch.arange(steps, device=cache.valid.device)
        now = cache.valid.new_ones(cache.batch, steps) if lengths is None else span < lengths[:, None]
        valid = torch.cat([cache.valid, now], dim=1)
        # Without a cache, padding stands behind all that a real token sees.
        layout = Layout.padded(cache.batch, steps, valid.shape[1], valid=valid if cache.columns else None, device=valid.device)
        return cls(*tables.at(cache.lengths[:, None] + span, cache.columns + steps, _wide(dtype)), layout, valid, None, True)

    @classmethod
    def of_pack(cls, cache: Cache, packed: Packed, tables: Tables, dtype: torch.dtype, *, keep: bool) -> Places:
        """Of sequences behind one another, each with its row of the cache. `dtype`: of the activations."""
        valid = torch.cat([cache.valid, packed.real], dim=1)
        rows, starts = None, packed.bounds32
        if cache.columns:
            # Each sequence's real columns in their order, those of no sequence last: a stable sort, so that no count comes to the host.
            count = torch.arange(packed.count, device=valid.device)[:, None]
            columns, real = (valid, []) if keep else (cache.valid, [packed.sequence])
            owner = torch.cat([torch.where(columns, count, packed.count).flatten(), *real])
            rows = owner.argsort(stable=True).to(torch.int32)
            starts = nn.functional.pad(valid.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
        layout = Layout.packed(packed.bounds32, starts, packed.tokens, packed.tokens if rows is None else rows.numel(), longest_q=packed.longest,
                               longest_k=valid.shape[1], rows=rows)
        positions = (cache.lengths[packed.sequence] + packed.offset)[None]
        return cls(*tables.at(positions, cache.columns + packed.longest, _wide(dtype)), layout, valid, packed, keep)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Attention(nn.Module):
    def __init__(self, config: DenseConfig, layer: int) -> None:
        super().__init__()
        width, self.dim = config.hidden_size, config.head_dim
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.scale = self.dim**-0.5
        self.rotates = config.rotates(layer)
        self.q_proj = Linear(width, self.heads * self.dim, bias=config.qkv_bias)
        self.k_proj = Linear(width, self.groups * self.dim, bias=config.qkv_bias)
        self.v_proj = Linear(width, self.groups * self.dim, bias=config.qkv_bias)
        self.o_proj = Linear(self.heads * self.dim, width, bias=config.output_bias)
        self.normed = config.qk_norm
        if self.normed:
            self.q_norm, self.k_norm = RMSNorm(self.dim, config.rms_norm_eps), RMSNorm(self.dim, config.rms_norm_eps)

    def initial(self, batch: int, like: torch.Tensor) -> KeyValues:
        """No columns, of `like`'s dtype and device."""
        return KeyValues(like.new_zeros(batch, 0, self.groups, self.dim), like.new_zeros(batch, 0, self.groups, self.dim))

    def forward(self, x: torch.Tensor, held: KeyValues | HeldKeyValues, places: Places | Turns) -> tuple[torch.Tensor, KeyValues | HeldKeyValues]:
        """x [B, T, D], or [1, N, D] packed. Returns the same shape, and the cache with a column more for every place of the (padded) rows; keys that are held in a
        pool take the new ones in place and know whose they are."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.dim))
        k = self.k_proj(x).unflatten(-1, (self.groups, self.dim))
        v = self.v_proj(x).unflatten(-1, (self.groups, self.dim))
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q, k = rotate(q, places.cos, places.sin), rotate(k, places.cos, places.sin)
        after: KeyValues | HeldKeyValues = held
        if isinstance(held, KeyValues):
            assert isinstance(places, Places)
            keys, values, after = _joined(held, k, v, places)
            o = attention(q, keys, values, layout=places.layout, scale=self.scale)
        else:
            o = held.attended(q, k, v, self.scale)
        out: torch.Tensor = self.o_proj(o.flatten(-2))
        return out, after


def _joined(held: KeyValues, k: torch.Tensor, v: torch.Tensor, places: Places) -> tuple[torch.Tensor, torch.Tensor, KeyValues]:
    """The keys and values that the layout names, and the cache after the new ones; where nothing follows a packed row, the cache as it was."""
    packed, before = places.packed, held.keys.shape[1] > 0
    if packed is not None and not places.keep:
        if before:
            k, v = (torch.cat([old.flatten(0, 1), new[0]])[None] for old, new in ((held.keys, k), (held.values, v)))
        return k, v, held
    new_k, new_v = (k, v) if packed is None else (packed.padded(k[0]), packed.padded(v[0]))
    after = KeyValues(torch.cat([held.keys, new_k], dim=1), torch.cat([held.values, new_v], dim=1))
    return (k, v, after) if packed is not None and not before else (after.keys, after.values, after)
