"""Grouped-query attention over a pool's pages.

The operator takes the rows by name, where its kernels run and of packed sequences. A step of decoding without kernels takes each row's pages beside one another: one
product for the batch, in the operator's own order of sums in deterministic mode.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.fixed.attention import attention_batch
from driftline.kernels.gqa import attention
from driftline.kernels.gqa.layout import Sizes
from driftline.kernels.mode import deterministic
from driftline.models.paged.places import Places, View

__all__ = ["attend_grouped"]


def attend_grouped(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, places: Places) -> torch.Tensor:
    """q [B, T, H, D] or [1, N, H, D] of a pack; keys and values [pages, PAGE, Hkv, D], the new ones in them. Returns q's shape and dtype."""
    if places.packed is not None or _run_kernels(q, keys):
        return attention(q, keys.view(1, -1, *keys.shape[2:]), values.view(1, -1, *values.shape[2:]), layout=places.layout, scale=scale)
    return _beside(q, keys, values, scale, places.view)


def _run_kernels(q: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether the operator has kernels for these: its reference would take the rows of a step one by one, and look at their lengths."""
    if not runs_triton(q, keys):
        return False
    from driftline.kernels.gqa import triton_forward

    sizes = Sizes(q.shape[0] * q.shape[1], keys.shape[0] * keys.shape[1], q.shape[2], keys.shape[2], q.shape[3], keys.shape[3])
    return triton_forward.takes(sizes, q.dtype)


def _beside(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, view: View) -> torch.Tensor:
    batch, steps, heads, width = q.shape
    groups, columns = keys.shape[2], view.width
    share = heads // groups
    wide = torch.promote_types(q.dtype, torch.float32)
    # A head's rows beside one another, which a product takes as they are.
    key, value = (x.view(-1, x.shape[3]).index_select(0, view.grouped(groups)).view(batch * groups, columns, -1) for x in (keys, values))
    query = q.view(batch, steps, groups, share, width).permute(0, 2, 1, 3, 4).reshape(batch * groups, steps * share, width)
    if deterministic():
        seen = view.seen[:, None, :, None].expand(-1, groups, -1, share).reshape(batch * groups, steps * share)
        o = attention_batch(query, key, value, seen, scale)
    else:
        score = torch.bmm(query.to(wide) * scale, key.to(wide).mT).view(batch, groups, steps, share, columns)
        p = torch.softmax(score.masked_fill_(view.hidden[:, None, :, None], -torch.inf), dim=-1)
        o = torch.bmm(p.view(batch * groups, steps * share, columns), value.to(wide))
    return o.to(q.dtype).view(batch, groups, steps, share, -1).permute(0, 2, 1, 3, 4).reshape(batch, steps, heads, -1)
