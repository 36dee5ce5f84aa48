"""Latent attention over a pool's pages, absorbed: the latents are keys and values, and nothing is written out of them.

By the paged kernel where it takes the shapes, a window of queries at a time; a long prefill in fast mode writes keys and values out instead, as a forward does, which
costs fewer products. Elsewhere by torch over each row's pages beside one another, in deterministic mode in the order of sums of `exact_attention`.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.fixed.attention import attention_batch
from driftline.kernels.linear.heads import head_linear
from driftline.kernels.mla_decode import mla_decode
from driftline.kernels.mla_prefill import mla_prefill
from driftline.kernels.mode import deterministic
from driftline.models.latent_attention import LONGEST_WINDOW, Heads
from driftline.models.paged.places import Places, View

__all__ = ["attend_latents"]

WORKSPACE = 2**29
"""Bytes of partial sums that a call of the kernel may hold: fewer queries are scored at a time where they would take more."""

PAIRS = 8 * 132 * 64
"""(query, head) pairs of a call: they fill a Hopper GPU eight times over."""

_LATENTS = (64, 128, 256, 512)
_SHARED = 64


def attend_latents(q: torch.Tensor, pages: torch.Tensor, heads: Heads, places: Places) -> torch.Tensor:
    """q [B, T, H, nope + shared] or [1, N, ...] of a pack; pages [pages, PAGE, rank + shared], the new rows in them. Returns [.., H, value] in q's dtype."""
    kernels = _run_kernels(q, pages)
    if kernels and places.packed is not None and places.steps > LONGEST_WINDOW and heads.uniform and not deterministic():
        return _written_out(q, pages, heads, places)
    query, form = _queries(q, heads), _by_pages if kernels and _fits(heads.rank, pages.shape[2]) else _by_rows
    if places.packed is None:
        o = form(query, pages, heads, places.view)
    else:
        o = query.new_empty(1, *query.shape[1:3], heads.rank)
        for view, at, real in places.parts:
            found = form(query[0].index_select(0, at).view(-1, view.steps, *query.shape[2:]), pages, heads, view)
            o[0, at[real]] = found.flatten(0, 1)[real]
    if deterministic():
        values = head_linear(o, heads.up[:, heads.nope :])
    else:
        values = torch.einsum("bthr,hvr->bthv", o, heads.up[:, heads.nope :])
    return values if heads.update is None else values + heads.update.values(o)


def _run_kernels(q: torch.Tensor, pages: torch.Tensor) -> bool:
    return q.dtype == torch.bfloat16 and runs_triton(q, pages)


def _fits(rank: int, width: int) -> bool:
    return rank in _LATENTS and width - rank == _SHARED


def _queries(q: torch.Tensor, heads: Heads) -> torch.Tensor:
    """[.., H, rank + shared]: the keys' up-projection taken into the queries."""
    own, up = q[..., : heads.nope], heads.up[:, : heads.nope]
    latent = head_linear(own, up.mT) if deterministic() else torch.einsum("bthn,hnr->bthr", own, up)
    if heads.update is not None:
        latent = latent + heads.update.queries(own)
    return torch.cat([latent, q[..., heads.nope :]], dim=-1)


def _by_pages(query: torch.Tensor, pages: torch.Tensor, heads: Heads, view: View) -> torch.Tensor:
    batch, steps, count, _ = query.shape
    out_dtype = query.dtype if deterministic() else torch.promote_types(query.dtype, torch.float32)
    window = max(1, min(WORKSPACE // (4 * batch * count * heads.rank * -(-view.width // 2048)), PAIRS // (batch * count), steps))
    parts = []
    for start in range(0, steps, window):
        stop = min(start + window, steps)
        # Never more than a row has: what lies behind may be NaN, and the kernel silences it with a weight of zero where a later query is said to see it.
        lengths = (view.last - (steps - stop)).clamp(min=0).to(torch.int32)
        parts.append(mla_decode(query[:, start:stop].contiguous(), pages, view.table, lengths, latent=heads.rank, scale=heads.scale, max_length=view.width,
                                out_dtype=out_dtype).to(query.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _by_rows(query: torch.Tensor, pages: torch.Tensor, heads: Heads, view: View) -> torch.Tensor:
    batch, steps, count, width = query.shape
    rows = pages.view(-1, width).index_select(0, view.rows.flatten()).view(batch, -1, width)
    if deterministic():
        o = attention_batch(query.reshape(batch, steps * count, width), rows, rows[..., : heads.rank], view.seen.repeat_interleave(count, 1), heads.scale)
        return o.to(query.dtype).view(batch, steps, count, -1)
    score = (query.reshape(batch, steps * count, width) @ rows.mT).view(batch, steps, count, -1) * heads.scale
    score = score.to(torch.promote_types(score.dtype, torch.float32)).masked_fill_(view.hidden[:, :, None], -torch.inf)
    p = torch.softmax(score, dim=-1).to(query.dtype)
    return (p.view(batch, steps * count, -1) @ rows[..., : heads.rank]).view(batch, steps, count, -1)


def _written_out(q: torch.Tensor, pages: torch.Tensor, heads: Heads, places: Places) -> torch.Tensor:
    assert places.packed is not None
    rows = pages.flatten(0, 1)[places.keys]
    kv = heads.expand(rows[:, : heads.rank]).view(rows.shape[0], q.shape[2], -1)
    o = mla_prefill(q[0], kv, rows[:, heads.rank :], cu_seqlens=places.packed.bounds32, cu_seqlens_k=places.key_bounds, scale=heads.scale,
                    out_dtype=torch.promote_types(q.dtype, torch.float32))
    return o.to(q.dtype)[None]
