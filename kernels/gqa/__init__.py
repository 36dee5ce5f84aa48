"""Causal attention of grouped queries, for prefill, decode and training. See docs/kernels/gqa.md.

A query's bits depend on that query and on the keys it sees: with the kernels always, and in deterministic mode everywhere. Not on the other sequences of the
batch, on padding, on the number of new tokens it is computed among, nor on later ones. Gradients are sums in a fixed order.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.gqa import ordered, reference
from driftline.kernels.gqa.layout import Layout, checked, layout_of
from driftline.kernels.mode import deterministic

__all__ = ["Layout", "attention"]


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, valid: torch.Tensor | None = None, scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None, layout: Layout | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T) v of every head, causal. Differentiable in q, keys and values.

    q [B, T, H, D]; keys [B, N, Hkv, D] and values [B, N, Hkv, Dv], of one dtype, H a multiple of Hkv: head h of q reads head h // (H / Hkv) of the keys. The T
    tokens of a row are the last T of its N columns, cached ones lie before; a query sees the columns up to its own. valid bool [B, N]: columns that are
    skipped where false. Tokens that are padded on the right of all real ones need no `valid`: no real query sees them; without a cache leave it out, it is
    cheaper. A query that sees no key gives zeros.

    Packed: B = 1 and cu_seqlens_q int32 or int64 [S + 1], where each sequence's rows of q begin, from 0 to T. cu_seqlens_k, of the same sequences' keys, where
    a sequence has more keys than queries: the queries are its newest.

    layout: what valid, cu_seqlens_q and cu_seqlens_k say, made once for all layers of a forward by `Layout.padded` or `Layout.packed`; it may also name the
    rows of keys ([B', N', Hkv, D], flattened) in any order. scale: D ** -0.5 by default. Returns [B, T, H, Dv] in out_dtype, q's by default; float32 keeps what
    rounding the output to bfloat16 loses.

    The kernels take bfloat16 and widths up to 128 that are multiples of 16; others are computed by the reference. Raises ValueError.
    """
    sizes = checked(q, keys, values, valid, cu_seqlens_q, cu_seqlens_k, layout)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out_dtype = q.dtype if out_dtype is None else out_dtype
    if not out_dtype.is_floating_point:
        raise ValueError(f"out_dtype is {out_dtype}; it must be a floating-point dtype")
    layout = layout_of(q, keys, valid, cu_seqlens_q, cu_seqlens_k) if layout is None else layout
    if runs_triton(q, keys, values):
        from driftline.kernels.gqa import autograd, triton_forward

        if triton_forward.takes(sizes, q.dtype):
            return autograd.attention(q, keys, values, layout, sizes, scale, out_dtype)
    form = ordered.attention if deterministic() else reference.attention
    return form(q, keys, values, layout, scale, out_dtype)
