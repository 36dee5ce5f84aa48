"""Latent attention in deterministic mode: one form for any number of new tokens, in which a query's bits are its own and its rows' alone.

The latents are keys and values at once (absorbed), taken in parts of a fixed number of rows counted from the sequence's first. Neither the tokens beside a
query, nor padding, nor the piece it is prefilled in, nor what is cached in gaps changes a bit. The gradient is that of the fast forms: expanded where the
kernels run, absorbed elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.fixed.attention import attention_batch
from driftline.kernels.fixed.gradient import exactly
from driftline.kernels.linear import linear
from driftline.kernels.linear.heads import head_linear
from driftline.kernels.mla_decode import mla_decode
from driftline.models.latent_attention import PAGE, Columns, Heads, expanded, in_pages
from driftline.models.lora.latent import LatentUpdate

__all__ = ["attend_exactly"]

WORKSPACE = 2**29
"""Bytes of partial sums that a call of the kernels may hold: fewer queries are scored at a time where they would take more."""

PAIRS = 8 * 132 * 64
"""(query, head) pairs of a call: enough to fill a Hopper GPU eight times over. What a call's later queries see is read for its earlier ones too, for nothing."""

KERNELS_TAKE = torch.bfloat16

_LATENTS = (64, 128, 256, 512)
_SHARED = 64


def attend_exactly(q: torch.Tensor, rows: torch.Tensor, heads: Heads, columns: Columns) -> torch.Tensor:
    """As `latent_attention.attend`: q [B, T, H, nope + shared], rows [B, N + T, rank + shared] -> [B, T, H, value]."""
    update = heads.update
    by_kernels = q.dtype == KERNELS_TAKE and runs_triton(q, rows)
    if by_kernels and torch.is_grad_enabled() and (update is None or isinstance(update, LatentUpdate)):
        # Written out for the gradient, as the kernels have one for that form alone.
        terms = () if update is None else (update.a, update.b)
        out: torch.Tensor = exactly(partial(_forward, heads=heads, columns=columns), partial(_expanded, heads=heads, columns=columns), q, rows, heads.up, *terms)
        return out
    return _forward(q, rows, heads.up, heads=heads, columns=columns)


def _with_terms(heads: Heads, up: torch.Tensor, terms: tuple[torch.Tensor, ...]) -> Heads:
    update = heads.update
    if terms and isinstance(update, LatentUpdate):
        update = replace(update, a=terms[0], b=terms[1])
    return replace(heads, up=up, update=update)


def _forward(q: torch.Tensor, rows: torch.Tensor, up: torch.Tensor, *terms: torch.Tensor, heads: Heads, columns: Columns) -> torch.Tensor:
    heads = _with_terms(heads, up, terms)
    nope = heads.nope
    latent = head_linear(q[..., :nope], up[:, :nope].mT)
    if heads.update is not None:
        latent = latent + heads.update.queries(q[..., :nope])
    query = torch.cat([latent, q[..., nope:]], dim=-1)
    form, gradient = partial(_scored, heads=heads, columns=columns), partial(_absorbed, heads=heads, columns=columns)
    o: torch.Tensor = exactly(form, gradient, query, rows)
    values = head_linear(o, up[:, nope:])
    return values if heads.update is None else values + heads.update.values(o)


def _scored(query: torch.Tensor, rows: torch.Tensor, *, heads: Heads, columns: Columns) -> torch.Tensor:
    """query [B, T, H, rank + shared] over the rows: [B, T, H, rank] in query's dtype."""
    batch, steps, count, width = query.shape
    kernels = query.dtype == KERNELS_TAKE and heads.rank in _LATENTS and width - heads.rank == _SHARED and runs_triton(query, rows)
    if kernels:
        return _by_pages(query, rows, heads, columns)
    ordered = rows.gather(1, columns.order[..., None].expand(-1, -1, width)) if columns.held.shape[1] else rows
    seen = columns.held.sum(1)[:, None] + torch.arange(1, steps + 1, device=query.device)
    o = attention_batch(query.reshape(batch, steps * count, width), ordered, ordered[..., : heads.rank], seen.repeat_interleave(count, 1), heads.scale)
    return o.to(query.dtype).view(batch, steps, count, -1)


def _by_pages(query: torch.Tensor, rows: torch.Tensor, heads: Heads, columns: Columns) -> torch.Tensor:
    batch, steps, count, _ = query.shape
    pages, table = in_pages(rows, columns)
    longest = table.shape[1] * PAGE
    window = max(1, min(WORKSPACE // (4 * batch * count * heads.rank * -(-longest // 2048)), PAIRS // (batch * count)))
    held = (columns.held.sum(1)).to(torch.int32)
    out = query.new_empty(batch, steps, count, heads.rank)
    for start in range(0, steps, window):
        stop = min(start + window, steps)
        part = query[:, start:stop].contiguous()
        out[:, start:stop] = mla_decode(part, pages, table, held + stop, latent=heads.rank, scale=heads.scale, max_length=columns.order.shape[1],
                                        out_dtype=query.dtype)
    return out


def _absorbed(query: torch.Tensor, rows: torch.Tensor, *, heads: Heads, columns: Columns) -> torch.Tensor:
    """`_scored` in torch's own products."""
    batch, steps, count, _ = query.shape
    score = (query.transpose(1, 2).reshape(batch, count * steps, -1) @ rows.mT).view(batch, count, steps, -1) * heads.scale
    score = score.to(torch.promote_types(score.dtype, torch.float32)).masked_fill(~columns.mask[:, None], -torch.inf)
    p = torch.softmax(score, dim=-1).to(query.dtype)
    return (p.view(batch, count * steps, -1) @ rows[..., : heads.rank]).view(batch, count, steps, -1).transpose(1, 2)


def _expanded(q: torch.Tensor, rows: torch.Tensor, up: torch.Tensor, *terms: torch.Tensor, heads: Heads, columns: Columns) -> torch.Tensor:
    """The whole attention with keys and values written out of `up` and the update, which are tensors here and not layers."""
    given = _with_terms(heads, up, terms)
    update = given.update

    def expand(latents: torch.Tensor) -> torch.Tensor:
        out = linear(latents, up.flatten(0, 1))
        if isinstance(update, LatentUpdate):
            out = out + linear(linear(latents, update.a), update.b.flatten(0, 1)) * update.scale
        return out

    return expanded(q, rows, replace(given, expand=expand), columns)
