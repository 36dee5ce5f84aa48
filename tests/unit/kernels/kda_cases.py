"""Inputs for the KDA kernels, and copies of the kernels in which something is wrong, to show that a check can fail."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

__all__ = ["DOUBLED", "GATES", "KEYS", "LATE", "LATE_ANCHOR", "Raw", "altered", "edited", "raw", "relative"]

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


LATE_ANCHOR = "gl.exp2(_end(inside) - inside).to(gl.bfloat16).to(gl.float32) * gl.exp2(_end(inside) * -1.0)"
"""For `grow`, with LATE: the same function, rounded relative to the end of the row's group of eight tokens, so to tokens after it."""

LATE = """

@gluon.jit
def _end(inside):
    token = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, _ROWS))))[None, None, :, None]
    return _element(inside, token, 7, 2)[:, :, None, :]
"""

DOUBLED = """

@gluon.jit
def _product(a, b):
    left = gl.convert_layout(a.to(gl.float16), gl.DotOperandLayout(0, _OF_BLOCKS, 2))
    return mma_v2(left, gl.convert_layout(b.to(gl.float16), gl.DotOperandLayout(1, _OF_BLOCKS, 2)), gl.zeros([4, 16, 16], gl.float32, _OF_BLOCKS))


@gluon.jit
def _doubled(a):
    a = gl.convert_layout(a, _OF_BLOCKS)
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, _OF_BLOCKS)))[None, :, None]
    col = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, _OF_BLOCKS)))[None, None, :]
    t = gl.where(row == col, 1.0, 0.0) - a
    power = a
    for _ in gl.static_range(3):
        power = _product(power, power)
        t += _product(t, power)
    return gl.convert_layout(t, _SOLVED)
"""
"""For `solved`, as `_doubled(diagonal)`: the inverses of diagonal blocks by Neumann doubling in fp16."""


def altered(kernels: ModuleType, folder: Path, more: str = "", **lines: str) -> ModuleType:
    """A copy of a module of kernels, with more code at its end, in which each named assignment computes something else: to show that a check can fail."""
    source = Path(str(kernels.__file__)).read_text() + more
    for name, value in lines.items():
        source, count = re.subn(rf"^( +{name} = ).*$", rf"\g<1>{value}", source, flags=re.MULTILINE)
        assert count == 1, f"{name} is assigned {count} times"
    path = folder / f"altered_{kernels.__name__.rsplit('.', 1)[-1]}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
