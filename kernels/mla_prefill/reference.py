"""The causal attention of multi-head latent attention over packed sequences, in plain torch and differentiable: a loop over the sequences."""

from __future__ import annotations

import torch

from driftline.kernels.mla_prefill.shapes import SCALE, bounds, checked

__all__ = ["mla_prefill"]


def mla_prefill(
    q: torch.Tensor, kv: torch.Tensor, k_shared: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    scale: float = SCALE, out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """As the package's `mla_prefill`; computed in fp32, or in fp64 where q is fp64, and rounded once, to `out_dtype`."""
    sizes = checked(q, kv, k_shared, cu_seqlens, cu_seqlens_k)
    begins, begins_k = (ends.tolist() for ends in bounds(sizes, cu_seqlens, cu_seqlens_k, q.device))
    wide = torch.promote_types(q.dtype, torch.float32)
    out = []
    for a, b, c, d in zip(begins, begins[1:], begins_k, begins_k[1:], strict=False):
        query, pair, shared = q[a:b].to(wide), kv[c:d].to(wide), k_shared[c:d].to(wide)
        key, value = pair[..., : sizes.nope], pair[..., sizes.nope :]
        score = torch.einsum("thn,shn->hts", query[..., : sizes.nope], key) + torch.einsum("thr,sr->hts", query[..., sizes.nope :], shared)
        position = torch.arange(b - a, device=q.device) + (d - c) - (b - a)
        seen = torch.arange(d - c, device=q.device) <= position[:, None]
        p = torch.softmax((score * scale).masked_fill(~seen, -torch.inf), dim=-1).masked_fill(~seen, 0)
        out.append(torch.einsum("hts,shv->thv", p, value))
    return torch.cat(out).to(out_dtype)
