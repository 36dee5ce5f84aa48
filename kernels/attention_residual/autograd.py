"""The attention residual for autograd: saves its inputs and nothing else, and adds to a bank's gradients in place.

Which implementation runs is settled by the device of the tensors: on CUDA with Triton the kernels, elsewhere the reference, whose gradient here is the
closed form too, so that a bank is kept in the same way everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels import dispatch
from driftline.kernels.attention_residual import exact, reference
from driftline.kernels.attention_residual.bank import Storage
from driftline.kernels.mode import deterministic

__all__ = ["MOST_SOURCES", "Aggregate", "Call", "Separate", "kernels_take"]

Tensors = tuple[torch.Tensor | None, ...]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


MOST_SOURCES = 9
"""Of the kernels: the eight rows of K3's bank and the prefix. More than these are mixed by the reference."""


def kernels_take(prefix: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether these go to the kernels: on a CUDA device, with Triton, and of a dtype that fp32 holds."""
    return prefix.dtype in DTYPES and dispatch.runs_triton(prefix, *others)


@dataclass(frozen=True)
class Call:
    """What of a call is no tensor of autograd's: the bank's storage and how many of its rows are seen, and the epsilons."""

    storage: Storage
    rows: int
    eps: float
    output_eps: float


class Aggregate(torch.autograd.Function):
    """(token, prefix [N, D], delta [N, D] or None, query, norm, output weight or None, call) -> mixed [N, D], or (mixed, moved) with a delta."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, prefix: torch.Tensor, delta: torch.Tensor | None, query: torch.Tensor, norm: torch.Tensor,
                output: torch.Tensor | None, call: Call) -> Any:
        bank = call.storage.values[:, : call.rows]
        if call.rows < MOST_SOURCES and kernels_take(prefix, delta, bank, query, norm, output):
            from driftline.kernels.attention_residual import device

            mixed, moved = device.forward(bank, prefix, delta, query, norm, call.eps, output, call.output_eps)
        else:
            form = exact if deterministic() else reference
            mixed, moved = form.aggregate(list(bank.unbind(1)), prefix, delta, query, norm, call.eps, output, call.output_eps)
            mixed = mixed.clone() if mixed is moved else mixed
        ctx.call, ctx.added = call, delta is not None
        ctx.save_for_backward(moved, query, norm, output)
        ctx.set_materialize_grads(False)
        return (mixed, moved) if ctx.added else mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmixed: torch.Tensor | None, dmoved: torch.Tensor | None = None) -> Tensors:
        if dmixed is None:
            return None, dmoved, dmoved if ctx.added else None, None, None, None, None
        moved, query, norm, output = ctx.saved_tensors
        call: Call = ctx.call
        storage = call.storage
        bank = storage.values[:, : call.rows]
        into = storage.buffer()[:, : call.rows] if ctx.needs_input_grad[0] and call.rows else None
        kept = 0 if into is None else min(storage.kept, call.rows)
        dmixed = _rows_of(dmixed)
        dmoved = None if dmoved is None else _rows_of(dmoved)
        if call.rows < MOST_SOURCES and kernels_take(moved, dmixed, bank, query, norm, output):
            from driftline.kernels.attention_residual import device

            sums = device.backward(bank, into, kept, moved, dmixed, dmoved, query, norm, call.eps, output, call.output_eps)
            dprefix, dquery, dnorm, dweight = sums.dprefix, sums.dquery, sums.dnorm, sums.dweight
        else:
            wide = reference.aggregate_backward(list(bank.unbind(1)), moved, dmixed, dmoved, query, norm, call.eps, output, call.output_eps)
            if into is not None:
                into[:, :kept] += wide.sources[:, :kept].to(into.dtype)
                into[:, kept:] = wide.sources[:, kept:-1].to(into.dtype)
            dprefix, dquery, dnorm = wide.sources[:, -1].to(moved.dtype), wide.query.to(query.dtype), wide.norm.to(norm.dtype)
            dweight = None if output is None or wide.output is None else wide.output.to(output.dtype)
        if into is not None:
            storage.kept = max(storage.kept, call.rows)
        return None, dprefix, dprefix if ctx.added else None, dquery, dnorm, dweight, None


class Separate(torch.autograd.Function):
    """(query, norm, output weight or None, eps, output eps, *sources [N, D], the last the prefix) -> mixed [N, D], by the kernels."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, norm: torch.Tensor, output: torch.Tensor | None, eps: float, output_eps: float, *sources: torch.Tensor) -> torch.Tensor:
        from driftline.kernels.attention_residual import device

        ctx.save_for_backward(query, norm, output, *sources)
        ctx.eps, ctx.output_eps = eps, output_eps
        return device.forward(sources[:-1], sources[-1], None, query, norm, eps, output, output_eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Tensors:
        from driftline.kernels.attention_residual import device

        query, norm, output, *sources = ctx.saved_tensors
        into = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in sources[:-1]]
        sums = device.backward(sources[:-1], into, 0, sources[-1], _rows_of(gradient), None, query, norm, ctx.eps, output, ctx.output_eps)
        return sums.dquery, sums.dnorm, sums.dweight, None, None, *into, sums.dprefix


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """[N, D] whose columns lie next to one another, copied only if they do not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
