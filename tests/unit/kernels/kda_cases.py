"""Inputs for the KDA kernels, and an interpreter that rounds and multiplies bfloat16 as a device does.

Triton's own interpreter multiplies the bits of bfloat16 as integers, cuts where a device rounds to nearest, and leaves sums to the host's BLAS, whose
order depends on an element's place. Here a product adds one term after the other in fp32, so that an element knows nothing of its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from triton.language import bfloat16, float32
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["GATES", "KEYS", "Raw", "as_the_device", "raw", "relative"]

KEYS = ("random", "identical", "near_identical", "correlated")
GATES = ("fast", "mixed", "slow", "fastest")


class Raw(NamedTuple):
    """Raw inputs of `kda`, in the order of its arguments."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    z: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor

    def double(self) -> Raw:
        return Raw(*(x.double() for x in self))

    def tokens(self, start: int, stop: int) -> Raw:
        return Raw(*(x[:, start:stop] for x in self[:5]), *self[5:])


def raw(batch: int, steps: int, heads: int, *, keys: str = "random", gate: str = "slow", seed: int = 0, device: str = "cpu") -> Raw:
    """bf16 inputs with keys and gates of a kind; slow gates are those of K3's initialisation, 0.005 to 0.5 nats a token."""
    rng = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device=device)

    q, k, v, z = (normal(batch, steps, heads, 128) for _ in range(4))
    beta, a_log, dt_bias = normal(batch, steps, heads), 0.2 * normal(heads), normal(heads * 128)
    match keys:
        case "identical":
            k, beta = k[:, :1].expand_as(k), beta * 0 + 2.2
        case "near_identical":
            k, beta = k[:, :1] + 0.02 * k, beta * 0 + 2.2
        case "correlated":
            k, beta = k[:, :1] + 0.33 * k, beta * 0 + 5.0
    match gate:
        case "slow":
            z, dt_bias = 0.2 * z, dt_bias.clamp(-1.5, 1.5) - 4.0
        case "fast":
            dt_bias = dt_bias * 0.1
        case "fastest":
            z, dt_bias = z * 0 + 8.0, dt_bias * 0 + 8.0
    return Raw(*(x.to(torch.bfloat16) for x in (q, k, v, z, beta)), a_log, dt_bias)


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean squared error over that of the exact values."""
    return float((value.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-300))


def _values(handle: Any) -> np.ndarray:
    if handle.dtype.scalar == bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right, total = _values(a), _values(b), d.data.copy()
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[None, k, :]
    return TensorHandle(total, d.dtype.scalar)


@contextmanager
def as_the_device() -> Iterator[None]:
    """Inside, the interpreter's products of bfloat16 are products, and narrowing to it rounds to nearest, ties to even."""
    cut = InterpreterBuilder.cast_impl

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == float32 and dst_type.scalar == bfloat16:
            bits = src.data.view(np.uint32)
            rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            return TensorHandle(np.where(np.isnan(src.data), np.uint16(0x7FFF), rounded), bfloat16)
        return cut(self, src, dst_type)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", _dot)
        patch.setattr(InterpreterBuilder, "cast_impl", cast)
        yield
