"""Attention of rows that see a prefix of their keys, tile by tile of keys from the first: a query's bits are those of any other call that sees the same keys.

How many queries are computed together, what lies behind the keys that a query sees, and the other sequences leave no trace. Products come from `products`, the
exponentials' sums from `sums`; the tiles are taken in order, and one that a query does not see changes nothing of its sums.
"""

from __future__ import annotations

import math

import torch

from driftline.kernels.fixed.pointwise import exp
from driftline.kernels.fixed.products import LEAST, STEP, product, write_batch
from driftline.kernels.fixed.sums import total

__all__ = ["TILE", "attention_batch", "attention_rows"]

TILE = 64
"""Keys at a time. Another number is another order of sums: other bits."""


def attention_rows(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale q keys^T) values: q [R, D], keys [N, D], values [N, V], of one dtype; query r sees keys[: seen[r]], seen int64 [R]. Returns [R, V] in at least
    fp32; zeros for a query that sees none. For deterministic mode; not differentiable."""
    return attention_batch(q[None], keys[None], values[None], seen[None], scale)[0]


def attention_batch(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """The same of B sequences: q [B, R, D], keys [B, N, D], values [B, N, V], seen [B, R]. Returns [B, R, V]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, rows, depth = q.shape
    width = values.shape[-1]
    padded, deep, broad = (-(-n // step) * step for n, step in ((rows, LEAST), (depth, STEP), (width, STEP)))
    query = q.new_zeros(batch, padded, deep, dtype=wide)
    query[:, :rows, :depth] = q.to(wide) * scale
    limit = seen.new_zeros(batch, padded)
    limit[:, :rows] = seen
    acc = query.new_zeros(batch, padded, broad)
    top = query.new_full((batch, padded), -math.inf)
    summed = query.new_zeros(batch, padded)
    most = seen.amax(1).tolist() if rows else []
    score, part = query.new_zeros(batch, padded, TILE), torch.zeros_like(acc)
    for start in range(0, max(most, default=0), TILE):
        stop = min(start + TILE, keys.shape[1])
        key = query.new_zeros(batch, TILE, deep)
        key[:, : stop - start, :depth] = keys[:, start:stop].to(wide)
        value = query.new_zeros(batch, broad, TILE)
        value[:, :width, : stop - start] = values[:, start:stop].to(wide).mT
        here = [b for b in range(batch) if most[b] > start]
        _products(query, key, score, here)
        visible = start + torch.arange(TILE, device=q.device) < limit[..., None]
        masked = score.masked_fill(~visible, -math.inf)
        higher = torch.maximum(top, masked.amax(-1))
        finite = torch.where(higher == -math.inf, 0.0, higher)
        p = exp(masked - finite[..., None])
        shrink = exp(top - finite)
        _products(p, value, part, here)
        some = visible[..., 0]
        summed = torch.where(some, summed * shrink + total(p), summed)
        acc = torch.where(some[..., None], acc * shrink[..., None] + part, acc)
        top = higher
    return (acc / torch.where(summed > 0, summed, 1.0)[..., None])[:, :rows, :width]


def _products(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, which: list[int]) -> None:
    """a [B, M, K] w [B, N, K]^T into out [B, M, N], of the sequences `which`."""
    if a.device.type != "cpu":
        for b in which:
            out[b] = product(a[b], w[b])
        return
    if len(which) == a.shape[0]:
        write_batch(a, w, out)
        return
    index = torch.tensor(which)
    part = out.new_empty(len(which), *out.shape[1:])
    write_batch(a[index], w[index], part)
    out[index] = part
