"""Inputs for the KDA kernels, and an interpreter that rounds and multiplies bfloat16 as a device does.

Triton's own interpreter multiplies the bits of bfloat16 as integers, cuts where a device rounds to nearest, and leaves sums to the host's BLAS, whose
order depends on an element's place. Here a product adds one term after the other in fp32, so that an element knows nothing of its place.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from triton.language import bfloat16, float32
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["DOUBLED", "GATES", "KEYS", "LATE_ANCHOR", "Raw", "altered", "as_the_device", "edited", "raw", "relative"]

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
        at = slice(start, stop)
        return Raw(self.q[:, at], self.k[:, at], self.v[:, at], self.z[:, at], self.beta[:, at], self.a_log, self.dt_bias)


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
    half = torch.bfloat16
    return Raw(q.to(half), k.to(half), v.to(half), z.to(half), beta.to(half), a_log, dt_bias)


def edited(x: Raw, token: int) -> Raw:
    """Everything from this token on is something else."""
    other = raw(x.q.shape[0], x.q.shape[1], x.q.shape[2], seed=77, gate="fast", device=x.q.device.type)

    def joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([a[:, :token], b[:, token:]], 1)

    return Raw(joined(x.q, other.q), joined(x.k, other.k), joined(x.v, other.v), joined(x.z, other.z), joined(x.beta, other.beta), x.a_log, x.dt_bias)


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean squared error over that of the exact values."""
    return float((value.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-300))


LATE_ANCHOR = "tl.exp2(inside - total[None, :, None, :]).to(tl.bfloat16).to(tl.float32) * tl.exp2(total)[None, :, None, :]"
"""For `grow`: the same function, rounded relative to the end of the row's block, so to tokens after it."""

DOUBLED = """

@triton.jit
def _doubled(a, i, j):
    t = tl.where(i == j, 1.0, 0.0) - a
    power = a
    for _ in tl.static_range(5):
        power = _half_dot(power, power)
        t += _half_dot(t, power)
    return t
"""
"""For `solved`, as `_doubled(a, i, j)`: the inverse by Neumann doubling in fp16."""


def altered(kernels: ModuleType, folder: Path, more: str = "", **lines: str) -> ModuleType:
    """A copy of a module of kernels, with more code at its end, in which each named assignment computes something else: to show that a check can fail."""
    source = Path(str(kernels.__file__)).read_text() + more
    for name, value in lines.items():
        source, count = re.subn(rf"^(    {name} = ).*$", rf"\g<1>{value}", source, flags=re.MULTILINE)
        assert count == 1, f"{name} is assigned {count} times"
    path = folder / f"altered_{kernels.__name__.rsplit('.', 1)[-1]}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _values(handle: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    data: np.ndarray[Any, Any] = handle.data
    return (data.astype(np.uint32) << 16).view(np.float32) if handle.dtype.scalar == bfloat16 else data.astype(np.float32)


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
