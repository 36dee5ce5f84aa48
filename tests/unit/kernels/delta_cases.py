"""Spans of any bits, and others like them."""

from __future__ import annotations

import torch

from driftline.kernels import policy_delta

WIDTHS = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


def noise(elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits at all: NaNs of every payload, infinities, denormals and both zeros among them."""
    width = dtype.itemsize
    bits = torch.randint(0, 256, (elements * width,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype)


def nudged(base: torch.Tensor, share: float, seed: int = 1) -> torch.Tensor:
    """`base` with about that share of its elements replaced by any bits."""
    random = torch.Generator().manual_seed(seed)
    other = noise(base.numel(), base.dtype, seed)
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[base.element_size()]
    chosen = torch.rand(base.numel(), generator=random) < share
    return torch.where(chosen, other.view(kind), base.view(kind)).view(base.dtype)


def same(one: policy_delta.SpanChanges, other: policy_delta.SpanChanges) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
