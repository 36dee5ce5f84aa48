"""Sequences in a flat layout: N token values and, for each, the index of its sequence.

Guarantees: a padded [B, T] batch and a packed [N] one go through the same sums, so they cannot disagree; a sum over a sequence
is taken in one fixed order on every device; values off the mask are replaced before any arithmetic, so whatever padding or tool
tokens hold (infinities and NaN included) reaches neither a value nor a gradient. Half-precision log-probabilities are refused:
GSPO's clip range of 3e-4 cannot be represented in bfloat16, where every ratio near one is exactly one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from driftline.messages.errors import DriftlineError

__all__ = ["LossInputError", "Segments", "flatten", "masked", "require_precise"]

PRECISE = (torch.float32, torch.float64)


class LossInputError(DriftlineError, ValueError):
    """A tensor given to the loss has the wrong type or shape."""


@dataclass(frozen=True)
class Segments:
    """Which of `count` sequences each of N flat tokens belongs to; `mask` marks the action tokens."""

    ids: Tensor
    mask: Tensor
    count: int

    def sums(self, values: Tensor) -> Tensor:
        """[N] -> [count], differentiable.

        On CUDA index_add adds with atomics in any order; an accumulating index_put sorts first, so its order is fixed.
        """
        zeros = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        if values.is_cuda:
            return zeros.index_put((self.ids,), values, accumulate=True)
        return zeros.index_add(0, self.ids, values)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[count] -> [N]: each token gets its sequence's value."""
        return per_sequence[self.ids]

    def lengths(self) -> Tensor:
        """Action tokens of each sequence, int64 [count]."""
        return self.sums(self.mask.to(torch.int64))


def flatten(shape: tuple[int, ...] | torch.Size, mask: Tensor, seq_id: Tensor | None, count: int | None) -> Segments:
    """The segments of a [B, T] batch (rows are sequences) or of an [N] one (`seq_id` says which)."""
    if mask.dtype != torch.bool:
        raise LossInputError("not a boolean mask", field="mask", value=str(mask.dtype), remedy="pass mask.bool()")
    if tuple(mask.shape) != tuple(shape):
        raise LossInputError(f"expected shape {tuple(shape)}", field="mask.shape", value=tuple(mask.shape))
    if seq_id is None:
        if len(shape) != 2:
            raise LossInputError("a flat batch needs seq_id", field="logp_new.shape", value=tuple(shape),
                                 remedy="pass [B, T] tensors, or [N] tensors with seq_id")
        rows, width = shape
        if count is not None and count != rows:
            raise LossInputError(f"expected one entry per row, {rows}", field="advantages.shape", value=(count,))
        ids = torch.arange(rows, device=mask.device).repeat_interleave(width)
        return Segments(ids, mask.reshape(-1), rows)
    if len(shape) != 1 or tuple(seq_id.shape) != tuple(shape):
        raise LossInputError(f"expected shape {tuple(shape)} of one dimension", field="seq_id.shape",
                             value=tuple(seq_id.shape))
    if seq_id.dtype not in (torch.int64, torch.int32):
        raise LossInputError("expected integers", field="seq_id.dtype", value=str(seq_id.dtype))
    if count is None:
        count = int(seq_id.max()) + 1 if seq_id.numel() else 0
    return Segments(seq_id.to(torch.int64), mask, count)


def require_precise(**tensors: Tensor | None) -> None:
    """Refuse log-probabilities in half precision, and a mixture of precisions or shapes."""
    first: tuple[str, Tensor] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in PRECISE:
            raise LossInputError(
                "log-probabilities need float32 or float64", field=name, value=str(tensor.dtype),
                remedy="compute the log-softmax in float32; converting a half-precision result does not bring it back",
            )
        if first is None:
            first = name, tensor
        elif tensor.dtype != first[1].dtype or tensor.shape != first[1].shape:
            raise LossInputError(
                f"differs from {first[0]}, {first[1].dtype} {tuple(first[1].shape)}", field=name,
                value=f"{tensor.dtype} {tuple(tensor.shape)}",
            )


def masked(values: Tensor, keep: Tensor) -> Tensor:
    """`values` where `keep`, zero elsewhere; the gradient off `keep` is exactly zero, whatever `values` holds there."""
    return torch.where(keep, values, torch.zeros((), dtype=values.dtype, device=values.device))
