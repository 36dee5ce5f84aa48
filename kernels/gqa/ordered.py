# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,override"
"""Attention of grouped queries in an order of operations that no shape changes: deterministic mode's form where no kernel runs.

torch's products, sums and exponentials give an element other bits in a tensor of another size; `kernels.fixed` has those that do not, and its attention takes
a query's keys tile by tile from the first. Here sequences are laid out for it: each with the keys that count alone, in their order, a group's heads as rows
that see the same keys. So a query's bits depend on it and on the keys it sees. The gradient is the reference's.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.fixed.attention import attention_batch
from driftline.kernels.gqa import reference
from driftline.kernels.gqa.layout import Layout

__all__ = ["attention"]


def _forward(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scale: float, out_dtype: torch.dtype) -> torch.Tensor:
    heads, key_heads, value = q.shape[2], keys.shape[2], values.shape[3]
    group = heads // key_heads
    query = q.flatten(0, 1)
    out = torch.zeros(query.shape[0], heads, value, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    if layout.valid is not None:
        batches = [(0, layout.sequences, 0, layout.longest_q, 0, layout.longest_k)]
    else:
        batches = [(i, i + 1, begin, last - begin, at, count) for i, (begin, last, at, count) in enumerate(reference.spans(layout))]
    for first, last, begin, steps, at, count in batches:
        several = last - first
        rows, columns = slice(begin, begin + several * steps), slice(at, at + several * count)
        if steps == 0 or count == 0:
            continue
        chosen = columns if layout.rows is None else layout.rows[columns].long()
        key, held = (
            t.flatten(0, 1)[chosen].view(several, count, key_heads, -1).transpose(1, 2).reshape(several * key_heads, count, -1) for t in (keys, values)
        )
        mine = query[rows].view(several, steps, key_heads, group, -1).transpose(1, 2).reshape(several * key_heads, steps * group, -1)
        seen = layout.seen[rows].view(several, 1, steps, 1).expand(-1, key_heads, -1, group).reshape(several * key_heads, steps * group)
        found = attention_batch(mine, key, held, seen.long(), scale)
        out[rows] = found.view(several, key_heads, steps, group, value).transpose(1, 2).reshape(several * steps, heads, value)
    return out.to(out_dtype).view(*q.shape[:3], value)


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, keys, values, layout: Layout, scale: float, out_dtype: torch.dtype):
        ctx.save_for_backward(q, keys, values)
        ctx.rest = layout, scale, out_dtype
        return _forward(q, keys, values, layout, scale, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = reference.attention(*leaves, *ctx.rest)
        return *torch.autograd.grad(out, leaves, grad), None, None, None


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scale: float, out_dtype: torch.dtype) -> torch.Tensor:
    """As `reference.attention`."""
    out: torch.Tensor = _Ordered.apply(q, keys, values, layout, scale, out_dtype)
    return out
