"""The bank: block sums of one batch of tokens, next to one another in one tensor [N, capacity, D], and one buffer for the gradients of them all.

What holds: a row is written once and never again; an aggregation sees the rows that were there when it was called; in the backward pass every
aggregation that saw a row has added its part to that row's gradient before the gradient leaves the bank. The last is by a token, a tensor without
elements that each write takes and returns and each aggregation takes: for autograd, whoever wrote a row depends on all who read it.

A `Bank` is a value: `write` returns another that has one row more. Nothing of a row is saved for the backward pass but the row itself, where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["Bank", "Storage"]


@dataclass
class Storage:
    """The tensors that all Banks of one batch share. `gradients` appears with the first aggregation's backward pass; its first `kept` rows hold sums, the
    others are yet to be written. `written`: rows of `values`."""

    values: torch.Tensor
    gradient_dtype: torch.dtype
    written: int = 0
    gradients: torch.Tensor | None = None
    kept: int = 0

    def buffer(self) -> torch.Tensor:
        """[N, capacity, D] of the gradients' dtype, laid out as the values."""
        if self.gradients is None:
            self.gradients = torch.empty(self.values.shape, dtype=self.gradient_dtype, device=self.values.device)
            self.kept = 0
        return self.gradients

    def taken(self, row: int) -> torch.Tensor | None:
        """The gradient of a row whose readers are all done, a view [N, D]; None if nobody's backward pass has reached it. Its place is then free."""
        if self.gradients is None or self.kept <= row:
            return None
        gradient, self.kept = self.gradients[:, row], row
        if row == 0:
            self.gradients = None
        return gradient


@dataclass(frozen=True)
class Bank:
    """The first `rows` rows of a storage, and the token that orders their backward passes."""

    storage: Storage = field(repr=False)
    rows: int
    token: torch.Tensor = field(repr=False)

    @classmethod
    def empty(cls, tokens: int, capacity: int, width: int, *, dtype: torch.dtype, device: torch.device | str, gradient_dtype: torch.dtype | None = None) -> Bank:
        """A bank without rows. K3 writes at most 8. gradient_dtype: of the sums over aggregations (default: the values'; fp32 loses nothing of up to 186 sums
        and costs a second bank). Raises ValueError."""
        values = torch.empty(tokens, capacity, width, dtype=dtype, device=device)
        return cls(Storage(values, _gradient_dtype(dtype, gradient_dtype)), 0, values.new_empty(0))

    @classmethod
    def of(cls, values: torch.Tensor, *, gradient_dtype: torch.dtype | None = None) -> Bank:
        """A bank of rows that are there already: values [N, rows, D], contiguous in D. They are not copied, and their gradient is the bank's buffer itself. Raises
        ValueError."""
        if values.dim() != 3 or values.stride(2) != 1 or values.stride(1) != values.shape[2]:
            raise ValueError(f"values of shape {tuple(values.shape)} and strides {values.stride()} are not [N, rows, D] with rows next to one another: "
                             "pass values.contiguous()")
        storage = Storage(values.detach(), _gradient_dtype(values.dtype, gradient_dtype), values.shape[1])
        return cls(storage, values.shape[1], _Adopt.apply(values, storage))  # type: ignore[no-untyped-call]

    @property
    def values(self) -> torch.Tensor:
        """[N, rows, D], outside of autograd."""
        return self.storage.values[:, : self.rows]

    def write(self, prefix: torch.Tensor) -> Bank:
        """The bank with `prefix` ([N, D] or any shape of N rows of D) copied in as the next row. Raises ValueError when there is no room, when the shape is another,
        or when a later row has been written through another Bank."""
        tokens, capacity, width = self.storage.values.shape
        if self.rows == capacity:
            raise ValueError(f"a bank of {capacity} rows is full: make it with as many rows as there will be writes")
        if self.storage.written != self.rows:
            raise ValueError(f"row {self.rows} has been written already: go on with the Bank that write returned")
        if prefix.shape[-1] != width or prefix.numel() != tokens * width or prefix.dtype != self.storage.values.dtype:
            raise ValueError(f"prefix {tuple(prefix.shape)} of {prefix.dtype} does not fit a bank of {tokens} tokens of {width} in {self.storage.values.dtype}")
        token = _Write.apply(self.token, prefix, self.storage, self.rows)  # type: ignore[no-untyped-call]
        return Bank(self.storage, self.rows + 1, token)


def _gradient_dtype(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    if asked is not None and asked not in (dtype, torch.float32):
        raise ValueError(f"gradient_dtype {asked} is neither the values' {dtype} nor torch.float32: pass one of these")
    return asked or dtype


class _Write(torch.autograd.Function):
    """(token, prefix) -> token. Copies; its backward pass hands out the row's gradient."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, prefix: torch.Tensor, storage: Storage, row: int) -> torch.Tensor:
        storage.values[:, row].copy_(prefix.reshape(storage.values.shape[0], -1))
        storage.written = row + 1
        ctx.storage, ctx.row, ctx.shape, ctx.dtype = storage, row, prefix.shape, prefix.dtype
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = ctx.storage.taken(ctx.row)
        if gradient is not None:
            gradient = gradient.to(ctx.dtype).reshape(ctx.shape)
        return None, gradient, None, None


class _Adopt(torch.autograd.Function):
    """values -> token. Its backward pass gives the buffer away, so that the values' gradient needs no copy."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, storage: Storage) -> torch.Tensor:
        ctx.storage, ctx.dtype = storage, values.dtype
        return values.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        storage: Storage = ctx.storage
        gradient, kept, storage.gradients, storage.kept = storage.gradients, storage.kept, None, 0
        if gradient is None or kept == 0:
            return None, None
        gradient[:, kept:] = 0
        return gradient.to(ctx.dtype), None
