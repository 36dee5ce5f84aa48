"""Absorbed decode of multi-head latent attention over paged rows. See docs/kernels/mla_decode.md.

A query's bits depend on that query and on the rows it sees: not on the other sequences, the window it is scored in, the pages its rows lie in, nor what
the pages hold beyond them.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.mla_decode import reference
from driftline.kernels.mla_decode.shapes import SCALE, checked

__all__ = ["SCALE", "mla_decode"]


def mla_decode(
    q: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, *, latent: int = 512, scale: float = SCALE, max_length: int | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """softmax(scale q rows^T) rows[:latent] of every head, over each sequence's cached rows.

    q [B, H, latent + shared], or [B, T, H, latent + shared] for a window of the T newest positions (a draft): query t of a sequence of n rows sees rows
    0 .. n - T + t. pages [pages, rows a page, latent + shared], of q's dtype: a row is the normalised latent and the shared key, and is key (whole) and value
    (its first `latent`) of every head. table int32 [B, P]: the pages of each sequence, in order. lengths int32 [B]: rows of each sequence, the window's own
    included; a query that sees no row gives zeros. max_length: the most rows of any sequence, which bounds the workspace (4 (latent + 2) bytes a query, head
    and 2,048 rows); by default what the tables have room for. Returns [B, H, latent] or [B, T, H, latent] in out_dtype, float32 or bfloat16.

    Not differentiable. The kernels take bfloat16, a latent of 64, 128, 256 or 512, a shared key of 64 and pages of a power of two; others are computed by the
    reference. Raises ValueError.
    """
    sizes = checked(q, pages, table, lengths, latent, max_length)
    if out_dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(f"out_dtype is {out_dtype}; it must be float32 or bfloat16, or float64 of float64 queries")
    if runs_triton(q, pages, table, lengths):
        from driftline.kernels.mla_decode import triton

        if triton.takes(sizes, q.dtype):
            return triton.decode(q.detach(), pages.detach(), table, lengths, sizes, scale, out_dtype)
    return reference.mla_decode(q, pages, table, lengths, latent=latent, scale=scale, max_length=max_length, out_dtype=out_dtype)
