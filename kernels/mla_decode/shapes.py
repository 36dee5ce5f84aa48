"""What the decode of multi-head latent attention is given: queries, pages of cached rows, tables of pages, lengths; and what is refused."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["SCALE", "Sizes", "checked"]

SCALE = 192**-0.5
"""K3: (128 + 64)^-0.5, the width of a query before it is absorbed (config.json: qk_nope_head_dim + qk_rope_head_dim)."""


class Sizes(NamedTuple):
    batch: int
    window: int
    heads: int
    latent: int
    shared: int
    page: int
    longest: int
    """Rows that the tables have room for, or `max_length` where that is less."""


def checked(q: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, latent: int, max_length: int | None) -> Sizes:
    """The sizes of one call. Raises ValueError naming the argument, what it is and what it must be."""
    if q.dim() not in (3, 4):
        raise ValueError(f"q is {list(q.shape)}; it must be [B, H, latent + shared] or, for a window of queries, [B, T, H, latent + shared]")
    batch, heads, width = q.shape[0], q.shape[-2], q.shape[-1]
    if pages.dim() != 3 or pages.shape[2] != width:
        raise ValueError(f"pages is {list(pages.shape)}; it must be [pages, rows, {width}], as wide as q")
    if not 0 < latent < width:
        raise ValueError(f"latent is {latent}; it must be between 0 and the width {width}, of which the rest is the shared key")
    if table.dim() != 2 or table.shape[0] != batch or table.dtype != torch.int32:
        raise ValueError(f"table is {table.dtype} {list(table.shape)}; it must be int32 [{batch}, pages a row]")
    if lengths.shape != (batch,) or lengths.dtype != torch.int32:
        raise ValueError(f"lengths is {lengths.dtype} {list(lengths.shape)}; it must be int32 [{batch}]")
    if pages.dtype != q.dtype:
        raise ValueError(f"pages is {pages.dtype} and q {q.dtype}; both must be of one dtype")
    if any(t.device != q.device for t in (pages, table, lengths)):
        raise ValueError(f"pages, table and lengths must be on the device of q, {q.device}")
    room = table.shape[1] * pages.shape[1]
    if max_length is not None and not 0 <= max_length <= room:
        raise ValueError(f"max_length is {max_length}; the table has room for {room} rows: give the most rows that any sequence has, or None")
    window = q.shape[1] if q.dim() == 4 else 1
    return Sizes(batch, window, heads, latent, width - latent, pages.shape[1], room if max_length is None else max_length)
