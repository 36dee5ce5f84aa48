"""Batches for the attention of grouped queries: padded with skipped columns, and packed with and without cached keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

from driftline.kernels.gqa.layout import Layout, Sizes


class Case(NamedTuple):
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    layout: Layout

    @property
    def sizes(self) -> Sizes:
        batch, steps, heads, width = self.q.shape
        return Sizes(batch * steps, self.keys.shape[0] * self.keys.shape[1], heads, self.keys.shape[2], width, self.values.shape[3])

    def double(self) -> list[torch.Tensor]:
        return [t.detach().double().requires_grad_() for t in self[:3]]


class Widths(NamedTuple):
    heads: int = 4
    key_heads: int = 2
    width: int = 32
    value: int = 32


SMALL = Widths()


def drawn(batch: int, steps: int, columns: int, widths: Widths, layout: Layout, dtype: torch.dtype, seed: int, device: str) -> Case:
    random = torch.Generator(device).manual_seed(seed)
    shapes = ((batch, steps, widths.heads, widths.width), (batch, columns, widths.key_heads, widths.width), (batch, columns, widths.key_heads, widths.value))
    return Case(*(torch.randn(*shape, generator=random, device=device).to(dtype) for shape in shapes), layout)


def padded(batch: int, steps: int, columns: int, widths: Widths = SMALL, *, share: float | None = None, dtype: torch.dtype = torch.float16, seed: int = 0,
           device: str = "cpu") -> Case:
    """share: of the columns that are skipped, drawn at random, never a row's new tokens."""
    valid = None
    if share is not None:
        valid = torch.rand(batch, columns, generator=torch.Generator(device).manual_seed(seed + 1), device=device) >= share
        valid[:, columns - steps :] = True
    return drawn(batch, steps, columns, widths, Layout.padded(batch, steps, columns, valid=valid, device=device), dtype, seed, device)


def packed(queries: list[int], keys: list[int], widths: Widths = SMALL, *, shuffled: bool = False, dtype: torch.dtype = torch.float16, seed: int = 0,
           device: str = "cpu") -> Case:
    """shuffled: keys lie in any order and are named by their rows."""
    ends = [torch.tensor([0, *lengths], device=device).cumsum(0) for lengths in (queries, keys)]
    rows = torch.randperm(sum(keys), generator=torch.Generator(device).manual_seed(seed + 2), device=device).to(torch.int32) if shuffled else None
    layout = Layout.packed(ends[0], ends[1], sum(queries), sum(keys), rows=rows)
    return drawn(1, sum(queries), sum(keys), widths, layout, dtype, seed, device)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=0.1))
