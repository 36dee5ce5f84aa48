"""Gradients of a batch, summed in float32 over its micro-batches whatever the parameters are held in.

Each parameter's gradient is added to its master's as soon as autograd has made it and is then dropped, so that beside the sums there is never a second set. The
order is that of the micro-batches. With float32 parameters the sums are those autograd itself would have kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

__all__ = ["summed_into"]


@contextmanager
def summed_into(masters: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within, backward passes add the gradient of each parameter to `.grad` of the master at its place, a float32 tensor of its shape. Starts from nothing.

    A parameter that no pass reaches leaves its master without a gradient.
    """
    for master, parameter in zip(masters, parameters, strict=True):
        master.grad = parameter.grad = None
    hooks = [p.register_post_accumulate_grad_hook(partial(_add, m)) for m, p in zip(masters, parameters, strict=True)]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _add(master: torch.Tensor, parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None
    parameter.grad = None
    if master.grad is None:
        master.grad = gradient.detach().to(master.dtype)
    else:
        master.grad += gradient
