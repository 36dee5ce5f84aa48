"""Absorbed decode of multi-head latent attention in plain torch: what the kernels must come near to, in fp32 or fp64."""

from __future__ import annotations

import torch

from driftline.kernels.mla_decode.shapes import SCALE, checked

__all__ = ["mla_decode"]


def mla_decode(
    q: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, *, latent: int = 512, scale: float = SCALE, max_length: int | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """As the package's `mla_decode`; computed in fp32, or in fp64 where q is fp64, and rounded once, to `out_dtype`."""
    sizes = checked(q, pages, table, lengths, latent, max_length)
    wide = torch.promote_types(q.dtype, torch.float32)
    position = torch.arange(sizes.longest, device=q.device)
    held = position < lengths[:, None]
    page = table[:, position // sizes.page].masked_fill(~held, 0).long()
    rows = pages[page, position % sizes.page].to(wide).masked_fill(~held[..., None], 0)
    query = q.reshape(sizes.batch, sizes.window, sizes.heads, -1).to(wide)
    score = torch.einsum("bthd,bnd->bthn", query, rows) * scale
    last = lengths[:, None] - sizes.window + torch.arange(sizes.window, device=q.device)
    seen = position <= last[:, :, None]
    p = torch.softmax(score.masked_fill(~seen[:, :, None], -torch.inf), dim=-1).masked_fill(~seen[:, :, None], 0)
    out = torch.einsum("bthn,bnd->bthd", p, rows[..., :latent])
    return out.reshape(*q.shape[:-1], latent).to(out_dtype)
