"""The causal attention of multi-head latent attention for prefill and training, keys and values expanded. See docs/kernels/mla_prefill.md.

A query's bits depend on that query and on the keys it sees: not on the other sequences of the pack, the piece it is prefilled in, nor later tokens. Its
gradients are sums in a fixed order.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.mla_prefill import reference
from driftline.kernels.mla_prefill.shapes import SCALE, bounds, checked

__all__ = ["SCALE", "mla_prefill"]


def mla_prefill(
    q: torch.Tensor, kv: torch.Tensor, k_shared: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    scale: float = SCALE, out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """softmax(scale (q_nope k^T + q_shared k_shared^T)) v of every head, causal, over packed sequences. Differentiable in q, kv and k_shared.

    q [T, H, nope + shared]; kv [S, H, nope + value], a key and a value of every head, as the up-projection of the latents leaves them; k_shared [S, shared],
    the part of the key that all heads share. K3: 128, 64, 128. cu_seqlens int32 [sequences + 1]: where each sequence's rows of q begin, from 0 to T; one
    sequence where None. cu_seqlens_k, of the same sequences' keys, where a sequence has more keys than queries: the queries are then its newest positions
    (prefill in pieces), so query i of n sees keys 0 .. keys - n + i; one that sees none gives zeros. The keys may end before S: rows behind the last sequence's
    are read by nobody, whatever they hold, and their gradients are zeros. Returns [T, H, value] in out_dtype, float32 or bfloat16:
    attention outputs rounded to bfloat16 are biased, which training shows.

    The kernels take bfloat16 and widths that are powers of two from 16 to 128; others are computed by the reference. They take no lengths to the host.
    Raises ValueError.
    """
    sizes = checked(q, kv, k_shared, cu_seqlens, cu_seqlens_k)
    if out_dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(f"out_dtype is {out_dtype}; it must be float32 or bfloat16, or float64 of float64 queries")
    if runs_triton(q, kv, k_shared, cu_seqlens, cu_seqlens_k):
        from driftline.kernels.mla_prefill import autograd, triton_forward

        if triton_forward.takes(sizes, q.dtype):
            return autograd.attention(q, kv, k_shared, *bounds(sizes, cu_seqlens, cu_seqlens_k, q.device), sizes, scale, out_dtype)
    return reference.mla_prefill(q, kv, k_shared, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, scale=scale, out_dtype=out_dtype)
