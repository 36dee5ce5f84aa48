"""Block attention residuals: a learned softmax over earlier block outputs replaces the plain residual stream. See docs/kernels/attention_residual.md.

    bank = Bank.empty(tokens, 8, width, dtype=torch.bfloat16, device="cuda")
    mixed, prefix = aggregate(bank, prefix, query, norm_weight, eps, delta=sublayer_output, output_norm=OutputNorm(weight, eps))
    bank = bank.write(prefix)

Saves its inputs for the backward pass and nothing else. On a CUDA device with Triton these are kernels, elsewhere plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from driftline.kernels.attention_residual import exact, reference
from driftline.kernels.attention_residual.autograd import (
    MOST_SOURCES,
    Aggregate,
    Call,
    Separate,
    kernels_take,
)
from driftline.kernels.attention_residual.bank import Bank
from driftline.kernels.mode import deterministic
from driftline.kernels.rmsnorm import rmsnorm

__all__ = ["MOST_SOURCES", "Aggregated", "Bank", "OutputNorm", "aggregate", "attention_residual"]

class OutputNorm(NamedTuple):
    """The RMSNorm that follows an aggregation. weight [D]; K3 rounds what is normalised to the dtype before it multiplies by the weight."""

    weight: torch.Tensor
    eps: float


class Aggregated(NamedTuple):
    """`mixed`: of the sources, normalised where that was asked for. `prefix`: the one that was mixed, after the delta. Both of the prefix's shape and dtype."""

    mixed: torch.Tensor
    prefix: torch.Tensor


def aggregate(
    bank: Bank, prefix: torch.Tensor, query: torch.Tensor, norm_weight: torch.Tensor, eps: float, *, delta: torch.Tensor | None = None,
    output_norm: OutputNorm | None = None,
) -> Aggregated:
    """Mix the rows of `bank` and the moving `prefix` (arXiv:2603.15031). prefix [..., D] with the bank's tokens in the same order; query, norm_weight [D].

    delta [..., D]: a sublayer's output, added to the prefix first, in its dtype. The bank's gradients are summed in the bank; query's, norm_weight's and the
    output weight's are summed over tokens in an order that the number of tokens settles. Raises ValueError.
    """
    tokens, _, width = bank.storage.values.shape
    _checked(prefix, query, norm_weight, output_norm, eps)
    if prefix.shape[-1] != width or prefix.numel() != tokens * width or prefix.dtype != bank.storage.values.dtype:
        raise ValueError(f"prefix {tuple(prefix.shape)} of {prefix.dtype} does not fit a bank of {tokens} tokens of {width} in {bank.storage.values.dtype}")
    if delta is not None and (delta.shape != prefix.shape or delta.dtype != prefix.dtype):
        raise ValueError(f"delta {tuple(delta.shape)} of {delta.dtype} is not like the prefix, {tuple(prefix.shape)} of {prefix.dtype}: cast or reshape it")
    if bank.rows == 0 and output_norm is None and delta is None:
        return Aggregated(prefix, prefix)
    weight, output_eps = output_norm or (None, 0.0)
    moving, added = _flat(prefix, width), None if delta is None else _flat(delta, width)
    out = Aggregate.apply(bank.token, moving, added, query, norm_weight, weight, Call(bank.storage, bank.rows, eps, output_eps))  # type: ignore[no-untyped-call]
    mixed, moved = out if delta is not None else (out, prefix)
    return Aggregated(mixed.view(prefix.shape), moved.view(prefix.shape) if delta is not None else prefix)


def attention_residual(
    sources: Sequence[torch.Tensor], query: torch.Tensor, norm_weight: torch.Tensor, eps: float, *, output_norm: OutputNorm | None = None
) -> torch.Tensor:
    """Mix `sources` (each [..., D], oldest first, tensors of their own) by content. query [D], norm_weight [D]; returns [..., D] in the sources' dtype.

    One source is returned unchanged: a softmax over one entry is 1. With an output norm its RMSNorm follows. More than nine sources, or of another dtype than
    bf16, fp16 and fp32, are mixed by the reference on every device. Raises ValueError.
    """
    if not sources:
        raise ValueError("sources is empty: pass at least the prefix")
    first = sources[0]
    _checked(first, query, norm_weight, output_norm, eps)
    for source in sources:
        if source.shape != first.shape or source.dtype != first.dtype:
            raise ValueError(f"sources differ: {tuple(source.shape)} of {source.dtype} beside {tuple(first.shape)} of {first.dtype}")
    if len(sources) == 1 and output_norm is None:
        return first
    if len(sources) <= MOST_SOURCES and kernels_take(first, *sources[1:], query, norm_weight):
        weight, output_eps = output_norm or (None, 0.0)
        flat = [_flat(s, first.shape[-1]) for s in sources]
        out: torch.Tensor = Separate.apply(query, norm_weight, weight, eps, output_eps, *flat)  # type: ignore[no-untyped-call]
        return out.view(first.shape)
    mixed = (exact if deterministic() else reference).attention_residual(sources, query, norm_weight, eps)
    return mixed if output_norm is None else rmsnorm(mixed, *output_norm)


def _flat(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """[N, D] with the columns next to one another; a copy only where there is no such view."""
    flat = tensor.reshape(-1, width)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _checked(prefix: torch.Tensor, query: torch.Tensor, norm_weight: torch.Tensor, output_norm: OutputNorm | None, eps: float) -> None:
    vectors = {"query": query, "norm_weight": norm_weight} | ({} if output_norm is None else {"output_norm.weight": output_norm.weight})
    for name, vector in vectors.items():
        if vector.shape != prefix.shape[-1:] or not vector.is_contiguous():
            raise ValueError(f"{name} has shape {tuple(vector.shape)} and strides {vector.stride()}: pass a contiguous [{prefix.shape[-1]}], as wide as the sources")
    if not eps > 0:
        raise ValueError(f"eps is {eps}: pass what the model's norm uses, a positive number")
