"""Tensors as bytes: a `State` is a policy's weights with nothing of any framework in it, and its digest names it exactly.

Two states have the same digest exactly when they have the same names, dtypes, shapes and bytes: a NaN's payload and the sign
of a zero count. The digest is a small tree (shard -> tensor -> state, xxh3-128 throughout): a reader which verified every
shard it wrote has verified the state, without reading the weights again. Shards are `SHARD_BYTES` of one tensor; the size
is part of the digest's definition and never a setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from driftline.messages.errors import IntegrityError

__all__ = [
    "DTYPES",
    "SHARD_BYTES",
    "Bytes1D",
    "HostTensor",
    "Layout",
    "Shard",
    "State",
    "shard_digest",
    "shard_digests",
    "shards_of",
    "state_digest",
    "state_digest_of",
    "tensor_digest",
    "tensor_digest_of",
    "total_bytes",
]

SHARD_BYTES = 2 * 1024 * 1024
"""Sparse coding is flat from 2 MiB up and 12 % worse at 128 KiB, and 2 MiB still fits a core's cache."""

DIGEST_BYTES = 16

Bytes1D: TypeAlias = npt.NDArray[np.uint8]


class DType(NamedTuple):
    """Bytes per element, the name safetensors uses, and the numpy type that holds it (same-width integers where none does).

    `exponent`: of a float, its lowest exponent bit and how many there are; a step changes small weights far more often than large
    ones, and the exponent tells them apart.
    """

    width: int
    safetensors: str
    numpy: str
    exponent: tuple[int, int] | None = None


DTYPES: dict[str, DType] = {
    "bool": DType(1, "BOOL", "bool"),
    "uint8": DType(1, "U8", "<u1"),
    "int8": DType(1, "I8", "<i1"),
    "float8_e4m3fn": DType(1, "F8_E4M3", "<u1", (3, 4)),
    "float8_e5m2": DType(1, "F8_E5M2", "<u1", (2, 5)),
    "float8_e8m0fnu": DType(1, "F8_E8M0", "<u1"),
    "uint16": DType(2, "U16", "<u2"),
    "int16": DType(2, "I16", "<i2"),
    "float16": DType(2, "F16", "<f2", (10, 5)),
    "bfloat16": DType(2, "BF16", "<u2", (7, 8)),
    "uint32": DType(4, "U32", "<u4"),
    "int32": DType(4, "I32", "<i4"),
    "float32": DType(4, "F32", "<f4", (23, 8)),
    "uint64": DType(8, "U64", "<u8"),
    "int64": DType(8, "I64", "<i8"),
    "float64": DType(8, "F64", "<f8", (52, 11)),
}


class Layout(NamedTuple):
    """What must agree between two versions of a tensor for a delta between them to mean anything."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        return DTYPES[self.dtype].width

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.width

    @property
    def shard_count(self) -> int:
        return -(-self.nbytes // SHARD_BYTES)


@dataclass(frozen=True, eq=False)
class HostTensor:
    """A tensor's bytes: little-endian, row-major, one-dimensional uint8 of exactly `prod(shape) * width`."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes1D = field(repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise IntegrityError("unknown dtype", field="dtype", value=self.dtype, remedy=f"one of {', '.join(DTYPES)}")
        if any(size < 0 for size in self.shape):
            raise IntegrityError("negative dimension", field="shape", value=self.shape)
        if self.data.dtype != np.uint8 or self.data.ndim != 1 or not self.data.flags.c_contiguous:
            raise IntegrityError("data must be contiguous 1-d uint8", field="data", value=(self.data.dtype, self.data.shape))
        if self.data.size != self.layout.nbytes:
            raise IntegrityError(f"{self.data.size} bytes for {self.dtype}{list(self.shape)}", field="data",
                                 value=self.data.size, remedy=f"needs {self.layout.nbytes}")

    @property
    def layout(self) -> Layout:
        return Layout(self.dtype, self.shape)

    @property
    def width(self) -> int:
        return DTYPES[self.dtype].width

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def copy(self) -> HostTensor:
        return HostTensor(self.dtype, self.shape, self.data.copy())

    def numpy(self) -> npt.NDArray[np.generic]:
        """A view in the numpy type of this dtype; bfloat16 and float8 come as the unsigned integers of their bits."""
        return self.data.view(DTYPES[self.dtype].numpy).reshape(self.shape)

    @classmethod
    def empty(cls, layout: Layout) -> HostTensor:
        return cls(layout.dtype, layout.shape, np.empty(layout.nbytes, np.uint8))

    @classmethod
    def from_numpy(cls, array: npt.NDArray[np.generic], dtype: str | None = None) -> HostTensor:
        """Copy an array; `dtype` names the bits when numpy cannot (a uint16 array as "bfloat16")."""
        contiguous = np.array(array, dtype=array.dtype.newbyteorder("<"), order="C", copy=True)
        flat = contiguous.reshape(-1).view(np.uint8)
        return cls(dtype or array.dtype.name, tuple(int(size) for size in array.shape), flat)


State: TypeAlias = dict[str, HostTensor]
"""Tensors by name. Everything that walks a state walks it in sorted order of the names."""


class Shard(NamedTuple):
    """One shard of a state: which tensor, and which of its bytes. Shards of a state are numbered in the order they come."""

    number: int
    name: str
    start: int
    stop: int


def shards_of(layouts: Iterable[tuple[str, Layout]]) -> Iterator[Shard]:
    """The shards of tensors given in sorted order; an empty tensor has none, no shard spans two tensors."""
    number = 0
    for name, layout in layouts:
        for start in range(0, layout.nbytes, SHARD_BYTES):
            yield Shard(number, name, start, min(start + SHARD_BYTES, layout.nbytes))
            number += 1


def shard_digest(data: Bytes1D) -> bytes:
    return xxhash.xxh3_128_digest(data.data)


def shard_digests(layouts: Mapping[str, Layout], digests: bytes) -> dict[tuple[str, int], bytes]:
    """Digests laid end to end in shard order, by tensor and first byte."""
    shards = shards_of((name, layouts[name]) for name in sorted(layouts))
    size = DIGEST_BYTES
    return {(shard.name, shard.start): digests[size * shard.number : size * (shard.number + 1)] for shard in shards}


def tensor_digest_of(name: str, layout: Layout, shard_digests: bytes) -> str:
    """A tensor's digest from those of its shards, laid end to end. The lengths keep (name, dtype) from running together."""
    shape = ",".join(str(size) for size in layout.shape)
    head = f"{len(name)}:{name}|{layout.dtype}|{shape}|".encode()
    return xxhash.xxh3_128_hexdigest(head + shard_digests)


def state_digest_of(tensor_digests: Iterable[str]) -> str:
    """A state's digest from those of its tensors, in sorted order of their names."""
    return xxhash.xxh3_128_hexdigest("".join(tensor_digests).encode())


def tensor_digest(name: str, tensor: HostTensor) -> str:
    shards = (tensor.data[start : start + SHARD_BYTES] for start in range(0, tensor.data.size, SHARD_BYTES))
    return tensor_digest_of(name, tensor.layout, b"".join(shard_digest(shard) for shard in shards))


def state_digest(state: State) -> str:
    """The name of these weights, the same wherever and however they were computed."""
    return state_digest_of(tensor_digest(name, state[name]) for name in sorted(state))


def total_bytes(state: State) -> int:
    return sum(tensor.data.size for tensor in state.values())
