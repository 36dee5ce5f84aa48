"""The convolution while decoding: each slot of a pool keeps the inputs that its next output needs.

`short_conv_decode` keeps the last three inputs. `short_conv_replay` keeps those of a draft window besides, so that the next call can begin behind as
many of them as were accepted: rolling back is reading further up.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.short_conv.reference import short_conv

__all__ = ["short_conv_decode", "short_conv_replay"]


def short_conv_decode(x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """One input a row: x [B, C], weight [C, W], tails [slots, W - 1, C] in x's dtype, moved on in place; slots int32 [B], no slot twice, or -1 for a
    padding row, which touches nothing and gives zeros. Returns silu(conv) [B, C], the bits of `short_conv`. Raises ValueError."""
    if x.dim() != 2:
        raise ValueError(f"x is {tuple(x.shape)}; give one input a row: [B, C]")
    _checked(x[:, None], weight, tails, slots)
    if tails.shape[1] != weight.shape[1] - 1:
        raise ValueError(f"tails hold {tails.shape[1]} inputs of a slot; a width of {weight.shape[1]} needs {weight.shape[1] - 1}")
    if _runs(x, weight, tails, slots):
        from driftline.kernels.short_conv import triton

        return triton.decode(x[:, None], weight, tails, slots)[:, 0]
    out = torch.zeros_like(x)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            one, tail = short_conv(x[row : row + 1, None], weight, tails[slot : slot + 1])
            out[row], tails[slot] = one[0, 0], tail[0]
    return out


def short_conv_replay(
    x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor
) -> torch.Tensor:
    """A window of T inputs a row: x [B, T, C] -> silu(conv) [B, T, C], the bits of `short_conv`.

    history [slots, W - 1 + capacity, C] in x's dtype, in place: the W - 1 inputs before the slot's last window, then that window. Row i continues behind
    the first accepted[i] of it (int32 [B], clamped to 0..capacity; 0 where the slot was just filled: its tail is in the first W - 1 rows). The counts are
    those that `replay_decode` takes. Raises ValueError.
    """
    _checked(x, weight, history, slots)
    before = weight.shape[1] - 1
    capacity = history.shape[1] - before
    if not 1 <= x.shape[1] <= capacity:
        raise ValueError(f"x has {x.shape[1]} inputs a row; the history has room for 1 to {capacity}: draft fewer or keep more rows")
    if accepted.dtype != torch.int32 or accepted.shape != slots.shape:
        raise ValueError(f"accepted is {accepted.dtype} {tuple(accepted.shape)}; give int32 {tuple(slots.shape)}, a count for each row")
    if _runs(x, weight, history, slots, accepted):
        from driftline.kernels.short_conv import triton

        return triton.replay(x, weight, history, slots, accepted)
    out = torch.zeros_like(x)
    for row, (slot, count) in enumerate(zip(slots.tolist(), accepted.tolist(), strict=True)):
        if slot >= 0:
            n = min(max(count, 0), capacity)
            tail = history[slot, n : n + before].clone()
            out[row] = short_conv(x[row : row + 1], weight, tail[None])[0][0]
            history[slot, :before] = tail
            history[slot, before : before + x.shape[1]] = x[row]
    return out


def _runs(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> bool:
    return runs_triton(x, weight, *others) and weight.shape[1] == 4 and x.dtype != torch.float64


def _checked(x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor, slots: torch.Tensor) -> None:
    if x.dim() != 3 or tuple(weight.shape[:1]) != (x.shape[-1],) or weight.dim() != 2:
        raise ValueError(f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; give [B, T, C] and [C, W]")
    if history.dim() != 3 or history.shape[2] != x.shape[2] or history.dtype != x.dtype or not history.is_contiguous():
        raise ValueError(f"the history is {history.dtype} {tuple(history.shape)}; give it contiguous, [slots, rows, {x.shape[2]}] in x's {x.dtype}")
    if slots.dtype != torch.int32 or tuple(slots.shape) != (x.shape[0],):
        raise ValueError(f"slots is {slots.dtype} {tuple(slots.shape)}; give int32 [{x.shape[0]}]")
