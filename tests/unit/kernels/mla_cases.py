"""Paged sequences of cached rows, with what no sequence holds poisoned."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Paged(NamedTuple):
    q: torch.Tensor
    pages: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def paged(lengths: list[int], *, heads: int, window: int = 1, latent: int = 512, shared: int = 64, page: int = 64, seed: int = 0, spare: int = 3,
          dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Paged:
    """q [B, T, H, width] and rows of N(0, 1), pages in a shuffled order; every row that no sequence holds is NaN."""
    random = torch.Generator(device).manual_seed(seed)
    width, needed = latent + shared, [-(-n // page) for n in lengths]
    room = max([*needed, 1]) + spare
    order = torch.randperm(sum(needed) + spare, generator=random, device=device)
    pages = torch.full((order.numel(), page, width), torch.nan, dtype=dtype, device=device)
    table = torch.full((len(lengths), room), -1, dtype=torch.int32, device=device)
    begin = 0
    for i, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        mine = order[begin : begin + count]
        table[i, :count] = mine.to(torch.int32)
        rows = torch.randn(count * page, width, generator=random, device=device).to(dtype)
        rows[length:] = torch.nan
        pages[mine] = rows.view(count, page, width)
        begin += count
    q = torch.randn(len(lengths), window, heads, width, generator=random, device=device).to(dtype)
    return Paged(q, pages, table, torch.tensor(lengths, dtype=torch.int32, device=device))
