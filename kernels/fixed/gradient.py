"""A forward whose bits are one function's and a backward that is another's: the same function in exact arithmetic, so the gradient is right to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.mode import Numerics, using

__all__ = ["exactly"]

Form = Callable[..., Any]
"""Tensors to a tensor, or to a tuple of tensors."""


class _Exactly(torch.autograd.Function):
    """Saves the tensors and nothing else; the backward computes `gradient` again, in FAST, and differentiates it."""

    @staticmethod
    def forward(ctx: Any, form: Form, gradient: Form, *tensors: torch.Tensor | None) -> Any:
        ctx.gradient = gradient
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return form(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[2:]
        inputs = [t if t is None else t.detach().requires_grad_(want) for t, want in zip(ctx.saved_tensors, wanted, strict=True)]
        with torch.enable_grad(), using(Numerics.FAST):
            found = ctx.gradient(*inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        asked = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None and out.requires_grad]
        leaves = [t for t, want in zip(inputs, wanted, strict=True) if want and t is not None]
        if not asked or not leaves:
            return None, None, *(None for _ in inputs)
        sums = iter(torch.autograd.grad([out for out, _ in asked], leaves, [grad for _, grad in asked], allow_unused=True))
        return None, None, *(next(sums) if want and t is not None else None for t, want in zip(inputs, wanted, strict=True))


def exactly(form: Form, gradient: Form, *tensors: torch.Tensor | None) -> Any:
    """`form(*tensors)`, differentiable through `gradient(*tensors)`, which gives outputs of the same shapes. Neither may close over a tensor that wants a
    gradient: such a tensor is given in `tensors`. Where no gradient is wanted `form` is called as it is."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _Exactly.apply(form, gradient, *tensors)  # type: ignore[no-untyped-call]
    return form(*tensors)
