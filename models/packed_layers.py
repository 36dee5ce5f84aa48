"""What of a layer looks along a sequence, for packed sequences: the short convolution and latent attention.

Both give a token what the padded forms give it, from its own sequence alone. The convolution runs over one row in which each sequence follows its carried inputs,
so it needs no padding; attention takes the kernel of packed sequences where that runs, and the right-padded form of `attend` elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.mla_prefill import mla_prefill
from driftline.kernels.mode import deterministic
from driftline.kernels.short_conv import short_conv
from driftline.models.latent_attention import Columns, Heads, attend
from driftline.models.packed import Packed, Way, moved

__all__ = ["PackedColumns", "attend_by_bounds", "attend_packed", "convolve_packed"]


@dataclass(frozen=True)
class _Moves:
    """Between the sequences with what they carry and one row in which each follows it.

    source, target: from the carried rows [S c] and then the tokens [N], and back. token, token_of: from the row to the tokens. last, last_of: from the row to each
    sequence's last c places [S c].
    """

    source: Way
    target: Way
    token: Way
    token_of: Way
    last: Way
    last_of: Way

    @classmethod
    def of(cls, packed: Packed, carried: int) -> _Moves:
        device = packed.bounds.device
        begins = packed.bounds + torch.arange(packed.count + 1, device=device) * carried
        total = packed.tokens + packed.count * carried
        span = torch.arange(carried, device=device)
        token = torch.arange(packed.tokens, device=device) + (packed.sequence + 1) * carried
        target = torch.cat([(begins[:-1, None] + span).flatten(), token])
        last = (begins[1:, None] - carried + span).flatten()
        return cls(Way(_inverse(target, total), None), Way(target, None), Way(token, None), Way.of(_inverse(token, total)), Way(last, None),
                   Way.of(_inverse(last, total)))


def convolve_packed(x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """`short_conv` of packed sequences: x [1, N, C], weight [C, W], tail [S, W-1, C]. Returns [1, N, C] and the sequences' new tails.

    Differentiable in all three.
    """
    _, carried, width = tail.shape
    moves: _Moves = packed.remembered(("moves", carried), lambda: _Moves.of(packed, carried))
    row = moved(torch.cat([tail.reshape(-1, width), x[0]]), moves.source, moves.target)
    mixed, _ = short_conv(row[None], weight, row.new_zeros(1, carried, width))
    return moved(mixed[0], moves.token, moves.token_of)[None], moved(row, moves.last, moves.last_of).view_as(tail)


def _inverse(source: torch.Tensor, size: int) -> torch.Tensor:
    """Of a map whose values differ: int64 [size], -1 where nothing is taken from."""
    out = source.new_full((size,), -1)
    out[source] = torch.arange(source.shape[0], device=source.device)
    return out


@dataclass(frozen=True)
class PackedColumns:
    """held [S, C] bool: which cached columns of each sequence are valid; the new ones are `packed`. keep: whether anything will follow them."""

    held: torch.Tensor
    packed: Packed
    keep: bool = True

    @cached_property
    def padded(self) -> Columns:
        """The same, right-padded."""
        return Columns(self.held, self.packed.real)

    @cached_property
    def key_bounds(self) -> torch.Tensor:
        """int32 [S + 1]: where each sequence's keys begin, its valid cached columns and then its new ones."""
        counts = self.held.sum(1) + self.packed.lengths_s
        return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))

    @cached_property
    def keys(self) -> Way:
        """Of the keys [K], from the cached columns [S * C], flattened, and the new ones [N] behind them."""
        count, columns = self.held.shape
        owner = torch.cat([torch.arange(count, device=self.held.device).repeat_interleave(columns), self.packed.sequence])
        new = torch.arange(owner.shape[0], device=owner.device) >= count * columns
        absent = torch.cat([~self.held.flatten(), torch.zeros_like(self.packed.sequence, dtype=torch.bool)])
        rank = (2 * owner + new).masked_fill(absent, 2 * count)
        return Way(rank.argsort(stable=True)[: int(self.key_bounds[-1])], None)  # the one wait for the device: how many there are

    @cached_property
    def columns(self) -> Way:
        """Back, [S * C + N]: an invalid column is no key."""
        return Way.of(_inverse(self.keys.at, self.held.numel() + self.packed.tokens))


def attend_packed(q: torch.Tensor, cached: torch.Tensor, new: torch.Tensor, heads: Heads, columns: PackedColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """q [N, H, nope + shared]; cached [S, C, rank + shared] and new [N, rank + shared], normalised latents and shared keys.

    Returns [N, H, value], and the rows [S, C + longest, rank + shared] to cache, right-padded; those that were given where nothing follows.
    """
    packed = columns.packed
    by_bounds = not deterministic() and heads.uniform and q.dtype == torch.bfloat16 and runs_triton(q, cached, new)
    if by_bounds and not columns.keep:
        return attend_by_bounds(q, cached, new, heads, columns), cached
    rows = torch.cat([cached, packed.padded(new)], dim=1)
    if by_bounds:
        return attend_by_bounds(q, cached, new, heads, columns), rows
    return packed.unpadded(attend(packed.padded(q), rows, heads, columns.padded)), rows


def attend_by_bounds(q: torch.Tensor, cached: torch.Tensor, new: torch.Tensor, heads: Heads, columns: PackedColumns) -> torch.Tensor:
    """[N, H, value] as `attend_packed`, by the operator of packed sequences: keys and values of every head written out, none of them padding."""
    keys = new if not cached.shape[1] else moved(torch.cat([cached.flatten(0, 1), new]), columns.keys, columns.columns)
    kv = heads.expand(keys[:, : heads.rank]).view(keys.shape[0], q.shape[1], -1)
    bounds = columns.key_bounds if cached.shape[1] else None
    wide = torch.promote_types(q.dtype, torch.float32)
    o = mla_prefill(q, kv, keys[:, heads.rank :], cu_seqlens=columns.packed.bounds32, cu_seqlens_k=bounds, scale=heads.scale, out_dtype=wide)
    return o.to(q.dtype)
