"""Causal attention of grouped queries in plain torch and differentiable: what the kernels must come near to, in fp32 or fp64."""

from __future__ import annotations

import torch

from driftline.kernels.gqa.layout import Layout

__all__ = ["attention"]


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scale: float, out_dtype: torch.dtype) -> torch.Tensor:
    """q [B, T, H, D]; keys [.., .., Hkv, D] and values [.., .., Hkv, Dv], whose rows `layout` names. Returns [B, T, H, Dv]: computed in fp32, or in fp64
    where q is fp64, and rounded once, to `out_dtype`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    if layout.mask is not None:
        return _seen(q.to(wide), keys.to(wide), values.to(wide), layout.mask, scale).to(out_dtype)
    query, key, held = q.flatten(0, 1).to(wide), keys.flatten(0, 1).to(wide), values.flatten(0, 1).to(wide)
    out = []
    for first, last, begin, count in spans(layout):
        rows = slice(begin, begin + count) if layout.rows is None else layout.rows[begin : begin + count].long()
        mask = torch.arange(count, device=q.device) < layout.seen[first:last, None]
        out.append(_seen(query[None, first:last], key[rows][None], held[rows][None], mask[None], scale)[0])
    return torch.cat([*out, query.new_empty(0, q.shape[2], values.shape[3])]).to(out_dtype).view(*q.shape[:3], values.shape[3])


def _seen(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Of a batch, mask [B, T, N]. The heads of a group are rows of one product."""
    batch, steps, heads, width = q.shape
    key_heads, value = keys.shape[2], values.shape[3]
    group = heads // key_heads
    query = (q * scale).view(batch, steps, key_heads, group, width).permute(0, 2, 1, 3, 4).reshape(batch, key_heads, steps * group, width)
    score = (query @ keys.permute(0, 2, 3, 1)).view(batch, key_heads, steps, group, keys.shape[1])
    # The least number and not -inf: a query that sees nothing then has weights, which take no gradient as its output is set to zero.
    p = torch.softmax(score.masked_fill(~mask[:, None, :, None], torch.finfo(score.dtype).min), dim=-1)
    out = (p.flatten(2, 3) @ values.transpose(1, 2)).view(batch, key_heads, steps, group, value)
    return out.permute(0, 2, 1, 3, 4).reshape(batch, steps, heads, value).masked_fill(~mask.any(-1)[..., None, None], 0)


def spans(layout: Layout) -> list[tuple[int, int, int, int]]:
    """(first row of q, the row past its last, where its keys begin, how many it has) of every sequence: on the host."""
    starts, begins, counts = layout.starts_q.tolist(), layout.starts_k.tolist(), layout.counts.tolist()
    return [(a, b, begin, count) for a, b, begin, count in zip(starts, starts[1:], begins, counts, strict=False)]
