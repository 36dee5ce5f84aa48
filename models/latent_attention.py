"""Multi-head latent attention over cached rows, in the three forms that give one function: absorbed in plain torch, expanded, and absorbed over pages.

A query sees its sequence's cached columns that are valid and the new ones up to itself. `attend` chooses by device, dtype and shape: kernels on a CUDA
device (pages for a few new tokens without gradients, keys and values written out for more), plain torch elsewhere. Padded queries get something finite.
In deterministic mode `attend` takes one form for any number of new tokens (`exact_attention`), of which a query's bits do not tell the others apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.mla_decode import mla_decode
from driftline.kernels.mla_prefill import mla_prefill
from driftline.kernels.mode import deterministic

if TYPE_CHECKING:
    from driftline.models.lora.latent import LatentTerm

__all__ = ["PAGE", "Columns", "Heads", "absorbed", "attend", "expanded", "in_pages", "paged"]

PAGE = 64
LONGEST_WINDOW = 8
"""New tokens a row up to which rows are read absorbed: a step of decoding, or a draft."""


@dataclass(frozen=True)
class Columns:
    """held [B, N] bool: which cached columns are valid; new [B, T] bool: which of the new ones, right-padded, are real."""

    held: torch.Tensor
    new: torch.Tensor

    @cached_property
    def mask(self) -> torch.Tensor:
        """[B, T, N + T] bool: what a query sees. A padded one sees itself, so that its softmax is finite; nothing reads its output."""
        steps = self.new.shape[1]
        span = torch.arange(steps, device=self.new.device)
        causal = (span[:, None] >= span) & self.new[:, None, :] | torch.eye(steps, dtype=torch.bool, device=self.new.device)
        return torch.cat([self.held[:, None, :].expand(-1, steps, -1), causal.expand(self.new.shape[0], -1, -1)], dim=-1)

    @cached_property
    def order(self) -> torch.Tensor:
        """int64 [B, N + T]: each row's columns with the valid cached ones first, then the new ones, then the rest, each in their order."""
        last = torch.where(self.held, 0, 2)
        return torch.cat([last, torch.ones_like(self.new, dtype=last.dtype)], dim=1).argsort(dim=1, stable=True)

    @cached_property
    def counts(self) -> torch.Tensor:
        """int32 [B]: valid cached columns and all new ones, the padded too: they lie behind what a real query sees."""
        return (self.held.sum(1) + self.new.shape[1]).to(torch.int32)


@dataclass(frozen=True)
class Heads:
    """up [H, nope + value, rank]: the up-projection of the latents; expand: the same as a layer, latents [..., rank] -> [..., H (nope + value)]. update: what an
    adapter adds to it, which `up` is then without."""

    up: torch.Tensor
    expand: Callable[[torch.Tensor], torch.Tensor]
    nope: int
    scale: float
    update: LatentTerm | None = None

    @property
    def rank(self) -> int:
        return self.up.shape[2]

    @property
    def uniform(self) -> bool:
        """Whether `expand` may be applied to any row."""
        return self.update is None or self.update.uniform


def attend(q: torch.Tensor, rows: torch.Tensor, heads: Heads, columns: Columns) -> torch.Tensor:
    """q [B, T, H, nope + shared]; rows [B, N + T, rank + shared], normalised latents and shared keys, the new ones last. Returns [B, T, H, value]."""
    if deterministic():
        from driftline.models.exact_attention import attend_exactly

        return attend_exactly(q, rows, heads, columns)
    if q.dtype == torch.bfloat16 and runs_triton(q, rows):
        few = q.shape[1] <= LONGEST_WINDOW and columns.held.shape[1] > 0 and not torch.is_grad_enabled()
        if few or (not heads.uniform and not torch.is_grad_enabled()):
            return paged(q, rows, heads, columns)
        if heads.uniform:
            return expanded(q, rows, heads, columns)
    return absorbed(q, rows, heads, columns)


def absorbed(q: torch.Tensor, rows: torch.Tensor, heads: Heads, columns: Columns) -> torch.Tensor:
    """The latent rows are the keys and the values, so a fork never expands its prompt again."""
    batch, steps, count, _ = q.shape
    query = _latent_queries(q, heads).transpose(1, 2)
    score = (query.reshape(batch, count * steps, -1) @ rows.mT).view(batch, count, steps, -1) * heads.scale
    score = score.to(torch.promote_types(score.dtype, torch.float32)).masked_fill(~columns.mask[:, None], -math.inf)
    p = torch.softmax(score, dim=-1).to(q.dtype)
    o = (p.view(batch, count * steps, -1) @ rows[..., : heads.rank]).view(batch, count, steps, -1)
    values = torch.einsum("bhtr,hvr->bthv", o, heads.up[:, heads.nope :])
    return values if heads.update is None else values + heads.update.values(o.transpose(1, 2))


def paged(q: torch.Tensor, rows: torch.Tensor, heads: Heads, columns: Columns) -> torch.Tensor:
    """Absorbed, each row's columns gathered into pages of its own. Not differentiable."""
    pages, table = in_pages(rows, columns)
    o = mla_decode(_latent_queries(q, heads), pages, table, columns.counts, latent=heads.rank, scale=heads.scale, max_length=columns.order.shape[1],
                   out_dtype=_wide(q)).to(q.dtype)
    values = torch.einsum("bthr,hvr->bthv", o, heads.up[:, heads.nope :])
    return values if heads.update is None else values + heads.update.values(o)


def in_pages(rows: torch.Tensor, columns: Columns) -> tuple[torch.Tensor, torch.Tensor]:
    """(pages [P, PAGE, rank + shared], table int32 [B, P / B]) of each row's columns in their order, without gaps."""
    width = rows.shape[-1]
    order = torch.nn.functional.pad(columns.order, (0, -columns.order.shape[1] % PAGE))
    pages = rows.gather(1, order[..., None].expand(-1, -1, width)).view(-1, PAGE, width)
    return pages, torch.arange(pages.shape[0], dtype=torch.int32, device=rows.device).view(columns.order.shape[0], -1)


def expanded(q: torch.Tensor, rows: torch.Tensor, heads: Heads, columns: Columns) -> torch.Tensor:
    """Keys and values of every head written out, the batch packed into one row of sequences."""
    batch, steps, count, _ = q.shape
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * steps
    keys = None
    if columns.held.shape[1]:
        keys = torch.nn.functional.pad(columns.counts.cumsum(0, dtype=torch.int32), (1, 0))
        at = torch.arange(columns.order.numel(), device=q.device)
        owner = torch.searchsorted(keys[1:], at, right=True).clamp_(max=batch - 1)
        place = (at - keys[owner]).clamp_(max=columns.order.shape[1] - 1)  # past the last sequence lie rows that nobody reads
        packed = rows[owner, columns.order[owner, place]]
    else:
        packed = rows.reshape(-1, rows.shape[-1])
    kv = heads.expand(packed[:, : heads.rank]).view(packed.shape[0], count, -1)
    o = mla_prefill(q.reshape(batch * steps, count, -1), kv, packed[:, heads.rank :], cu_seqlens=starts, cu_seqlens_k=keys, scale=heads.scale, out_dtype=_wide(q))
    return o.to(q.dtype).view(batch, steps, count, -1)


def _latent_queries(q: torch.Tensor, heads: Heads) -> torch.Tensor:
    """[B, T, H, rank + shared]: the key's up-projection taken into the query."""
    latent = torch.einsum("bthn,hnr->bthr", q[..., : heads.nope], heads.up[:, : heads.nope])
    if heads.update is not None:
        latent = latent + heads.update.queries(q[..., : heads.nope])
    return torch.cat([latent, q[..., heads.nope :]], dim=-1)


def _wide(q: torch.Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
