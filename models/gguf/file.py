"""A GGUF file's header, checked as a whole: what it says of itself, and where in the file each tensor lies.

Guarantees: no length or count of the file is believed before the bytes for it are there, so a damaged file is an IntegrityError with the place and never an
allocation; every tensor lies in the file, aligned, and none overlaps another. Nothing but the header is read to know it. Versions 2 and 3, little-endian.
Source: the format's specification (ggml/docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.gguf.blocks import BLOCKS, Kind

__all__ = ["GgufFile", "StoredTensor", "Value"]

Value = str | int | float | bool | list[Any]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_AGAIN = "copy the file again from its source"

_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
"""numpy's name of each scalar type of the metadata."""

_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the file. `shape`: outermost axis first, as numpy and torch count; `start`: of its first byte in the file."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        block = BLOCKS[self.kind]
        return math.prod(self.shape) // block.weights * block.nbytes


@dataclass(frozen=True)
class GgufFile:
    """`metadata`: by the file's keys; arrays of strings or numbers are lists. `tensors`: by the file's names."""

    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the header. ConfigError when it is no GGUF file of a version read here, IntegrityError when it is damaged."""
        try:
            size = path.stat().st_size
            content = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", field="GGUF file", value=str(path), remedy="name a .gguf file") from error
        cursor = _Cursor(path, content.data)
        version = _version(path, cursor)
        tensor_count, value_count = cursor.count("<u8", 1), cursor.count("<u8", 1)
        metadata: dict[str, Value] = {}
        for _ in range(value_count):
            key = cursor.string()
            if key in metadata:
                raise cursor.broken("the key is there twice", key)
            metadata[key] = cursor.value(key)
        alignment = _alignment(cursor, metadata)
        places = [_tensor(cursor) for _ in range(tensor_count)]
        first = -(-cursor.at // alignment) * alignment
        return cls(path, version, metadata, _placed(cursor, places, first, alignment))

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, uint8 [nbytes]. KeyError when the file has no such tensor, IntegrityError when it became shorter."""
        tensor = self.tensors[name]
        found = np.fromfile(self.path, np.uint8, tensor.nbytes, offset=tensor.start)
        if found.size != tensor.nbytes:
            raise IntegrityError("the file is shorter than when it was opened", field=f"{self.path}: {name}", value=found.size, remedy=_AGAIN)
        return found


class _Cursor:
    """Reads on from `at`, never beyond the end."""

    def __init__(self, path: Path, content: memoryview) -> None:
        self._path, self._content, self.at = path, content, 0

    @property
    def size(self) -> int:
        return len(self._content)

    def broken(self, problem: str, value: object) -> IntegrityError:
        return IntegrityError(problem, field=f"{self._path} at byte {self.at}", value=value, remedy=_AGAIN)

    def take(self, length: int) -> memoryview:
        if length > self.size - self.at:
            raise self.broken(f"{length} bytes are announced and the file ends after {self.size - self.at}", length)
        self.at += length
        return self._content[self.at - length : self.at]

    def number(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def count(self, kind: str, least: int) -> int:
        """A number of things of at least `least` bytes each."""
        number = int(self.number(kind))
        if number * least > self.size - self.at:
            raise self.broken(f"{number} entries are announced and the file ends after {self.size - self.at} bytes", number)
        return number

    def string(self) -> str:
        raw = bytes(self.take(self.count("<u8", 1)))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken("a text is not UTF-8", raw[:32]) from error

    def value(self, key: str) -> Value:
        kind = int(self.number("<u4"))
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        return self._scalar(kind, key)

    def _scalar(self, kind: int, key: str) -> Value:
        if kind not in _SCALARS:
            raise self.broken(f"{key} has a type that is not of the format", kind)
        value: Value = self.number(_SCALARS[kind])
        return value

    def _array(self, key: str) -> list[Any]:
        kind = int(self.number("<u4"))
        if kind == _STRING:
            return [self.string() for _ in range(self.count("<u8", 8))]
        if kind not in _SCALARS:
            raise self.broken(f"{key} is an array of a type that is not read", kind)
        dtype = np.dtype(_SCALARS[kind])
        length = self.count("<u8", dtype.itemsize)
        numbers: list[Any] = np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()
        return numbers


def _version(path: Path, cursor: _Cursor) -> int:
    magic = bytes(cursor.take(4)) if cursor.size >= 8 else b""
    if magic != _MAGIC:
        raise ConfigError("not a GGUF file", field="GGUF file", value=str(path), remedy="name a .gguf file; its first four bytes are GGUF")
    raw = bytes(cursor.take(4))
    version = int(struct.unpack("<I", raw)[0])
    if version not in _VERSIONS:
        swapped = struct.unpack(">I", raw)[0] in _VERSIONS
        raise ConfigError("a big-endian file is not read" if swapped else "this version of the format is not read", field=f"{path}: version", value=version,
                          remedy=f"convert it again: {' and '.join(map(str, _VERSIONS))}, little-endian, are read")
    return version


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.broken("general.alignment is no power of two", alignment)
    return alignment


def _tensor(cursor: _Cursor) -> StoredTensor:
    """One entry; `start` still counts from the first tensor."""
    name = cursor.string()
    dimensions = int(cursor.number("<u4"))
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise cursor.broken(f"{name} has not 1 to {_MOST_DIMENSIONS} axes", dimensions)
    shape = tuple(int(cursor.number("<u8")) for _ in range(dimensions))[::-1]
    code = int(cursor.number("<u4"))
    start = int(cursor.number("<u8"))
    try:
        kind = Kind(code)
    except ValueError:
        raise ConfigError("a form of weights that is not read", field=f"{cursor._path}: {name}", value=f"type {code}",
                          remedy=f"quantise the model to one of {', '.join(k.name for k in Kind)}") from None
    if shape[-1] % BLOCKS[kind].weights:
        raise cursor.broken(f"a row of {name} is no whole number of {kind.name} blocks of {BLOCKS[kind].weights}", shape)
    return StoredTensor(name, kind, shape, start)


def _placed(cursor: _Cursor, entries: list[StoredTensor], first: int, alignment: int) -> dict[str, StoredTensor]:
    placed: dict[str, StoredTensor] = {}
    end = first
    for entry in sorted(entries, key=lambda entry: entry.start):
        tensor = StoredTensor(entry.name, entry.kind, entry.shape, first + entry.start)
        if entry.name in placed:
            raise cursor.broken("the tensor is there twice", entry.name)
        if entry.start % alignment or tensor.start < end:
            raise cursor.broken(f"{entry.name} lies at an odd place or over the tensor before it", entry.start)
        end = tensor.start + tensor.nbytes
        if end > cursor.size:
            raise cursor.broken(f"{entry.name} ends {end - cursor.size} bytes after the file", end)
        placed[entry.name] = tensor
    return {entry.name: placed[entry.name] for entry in entries}
