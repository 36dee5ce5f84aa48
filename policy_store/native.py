"""Native kernels, where they were built: the same bytes as the numpy code beside them, several times as fast, without the interpreter lock.

`native` is None when there is no library (no compiler at install time, a big-endian machine, or DRIFTLINE_NATIVE=0); the callers then take
numpy. The library trusts nothing in a payload and keeps within the arrays it is given; what is checked here is that these are of
the length the functions are told.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import sys
import threading
from collections.abc import Sequence
from ctypes import c_int, c_long, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from driftline.messages.errors import IntegrityError
from driftline.policy_store.forms import Changes
from driftline.policy_store.ranked import ROOM
from driftline.policy_store.tensor import Bytes1D

__all__ = ["Native", "native", "open_native"]

_INTERFACE = 1
"""Of `dl_interface`: arguments would be misread by a library that was built from other sources."""

_FIT, _NO_MEMORY = -1, -2
_SLACK = 2
"""`dl_changed` writes as many beyond what it found; `dl_ranked_encode` wants one past the end."""
_END = np.iinfo(np.int32).max


class Native:
    """One loaded library; safe to call from any number of threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))

        def bind(name: str, result: type | None, *arguments: type) -> Any:
            function = self._library[name]
            function.restype, function.argtypes = result, list(arguments)
            return function

        if bind("dl_interface", c_int)() != _INTERFACE:
            raise OSError(f"{path} was built from other sources")
        pointer = c_void_p
        self._level = bind("dl_level", c_int, c_int)
        self._changed = bind("dl_changed", c_size_t, pointer, pointer, c_size_t, c_int, pointer, pointer)
        self._split = bind("dl_split", None, pointer, pointer, c_size_t, c_int, pointer)
        self._merge = bind("dl_merge", None, pointer, c_size_t, c_int, c_int, pointer)
        self._sparse_pack = bind("dl_sparse_pack", c_size_t, pointer, pointer, c_size_t, c_int, pointer, pointer)
        self._sparse_apply = bind("dl_sparse_apply", c_int, pointer, c_size_t, pointer, c_size_t, pointer, c_size_t, c_int, pointer, pointer)
        self._ranked_encode = bind("dl_ranked_encode", c_long, pointer, pointer, pointer, c_size_t, c_size_t, c_int, c_uint, c_uint,
                                   pointer, c_size_t, pointer, c_size_t)
        self._ranked_apply = bind("dl_ranked_apply", c_long, pointer, c_size_t, pointer, c_size_t, c_int, pointer, c_size_t, pointer, pointer)
        self._scratch = _Scratch()

    def level(self, at_most: int = 2) -> int:
        """The instructions in use (0 portable, 1 AVX2, 2 AVX-512), held to `at_most` in this process from now on."""
        return int(self._level(at_most))

    def changes(self, base: Bytes1D, new: Bytes1D, width: int) -> Changes:
        """The elements that differ."""
        elements = _elements(base, width)
        _elements(new, width, elements)
        at, xor = np.empty(elements + _SLACK, np.int32), np.empty(elements + _SLACK, f"<u{width}")
        count = self._changed(_address(base), _address(new), elements, width, _address(at), _address(xor))
        at[count] = _END
        return Changes(at[:count], xor[:count])

    def split(self, data: Bytes1D, width: int, *, xor: Bytes1D | None = None) -> list[Bytes1D]:
        """Byte planes, lowest first, of `data`, or of `data` XOR `xor`."""
        elements = _elements(data, width)
        if xor is not None:
            _elements(xor, width, elements)
        planes = np.empty((width, elements), np.uint8)
        self._split(_address(data), None if xor is None else _address(xor), elements, width, _address(planes))
        return list(planes)

    def merge(self, planes: Sequence[Bytes1D], out: Bytes1D, *, xor: bool) -> None:
        """Planes back into `out`, or XORed into it."""
        elements = _elements(out, len(planes))
        self._merge(_pointers(planes, elements), elements, len(planes), xor, _address(out))

    def sparse_pack(self, changes: Changes, elements: int) -> list[Bytes1D]:
        """Gap bytes and value planes of changes to a shard of so many elements."""
        count, width = changes.at.size, changes.xor.itemsize
        gaps, planes = np.empty(count + elements // 255 + 1, np.uint8), np.empty((width, count), np.uint8)
        written = self._sparse_pack(_address(changes.at), _address(changes.xor), count, width, _address(gaps), _address(planes))
        return [gaps[:written], *planes]

    def sparse_apply(self, gaps: Bytes1D, planes: Sequence[Bytes1D], out: Bytes1D) -> None:
        self._sparse(gaps, planes, out, None, None)

    def sparse_changes(self, gaps: Bytes1D, planes: Sequence[Bytes1D], base: Bytes1D) -> Changes:
        count = planes[0].size
        found = Changes(np.empty(count, np.int32), np.empty(count, f"<u{len(planes)}"))
        self._sparse(gaps, planes, base, found.at, found.xor)
        return found

    def ranked_encode(self, base: Bytes1D, changes: Changes, exponent: tuple[int, int]) -> bytes | None:
        """The payload, or None when it would be larger than the shard and `ROOM`."""
        count, width = changes.at.size, changes.xor.itemsize
        elements = _elements(base, width)
        ended = _ended(changes.at)
        out = np.empty(base.size + ROOM, np.uint8)
        scratch = self._scratch.of(45 * count + 3 * out.size + 2048)
        size = self._ranked_encode(_address(base), _address(ended), _address(changes.xor), count, elements, width, *exponent,
                                   _address(scratch), scratch.size, _address(out), out.size)
        if size == _NO_MEMORY:
            raise MemoryError
        return None if size == _FIT else out[:size].tobytes()

    def ranked_apply(self, payload: bytes | memoryview, out: Bytes1D, width: int) -> None:
        self._ranked(payload, out, width, None, None)

    def ranked_changes(self, payload: bytes | memoryview, base: Bytes1D, width: int) -> Changes:
        elements = _elements(base, width)
        found = Changes(np.empty(elements, np.int32), np.empty(elements, f"<u{width}"))
        count = self._ranked(payload, base, width, found.at, found.xor)
        return Changes(found.at[:count].copy(), found.xor[:count].copy())

    def _sparse(self, gaps: Bytes1D, planes: Sequence[Bytes1D], shard: Bytes1D, at: npt.NDArray[Any] | None,
                xor: npt.NDArray[Any] | None) -> None:
        elements = _elements(shard, len(planes))
        count = planes[0].size
        if self._sparse_apply(_address(gaps), gaps.size, _pointers(planes, count), count, _address(shard), elements, len(planes),
                              None if at is None else _address(at), None if xor is None else _address(xor)):
            raise IntegrityError(f"{count} positions do not fit in {elements} elements", field="gaps", value=count)

    def _ranked(self, payload: bytes | memoryview, shard: Bytes1D, width: int, at: npt.NDArray[Any] | None,
                xor: npt.NDArray[Any] | None) -> int:
        elements = _elements(shard, width)
        data = np.frombuffer(payload, np.uint8)
        scratch = self._scratch.of(21 * min(elements, 8 * data.size) + data.size + 2048)
        count = self._ranked_apply(_address(data), data.size, _address(shard), elements, width, _address(scratch), scratch.size,
                                   None if at is None else _address(at), None if xor is None else _address(xor))
        if count == _NO_MEMORY:
            raise MemoryError
        if count < 0:
            raise IntegrityError(f"not a ranked payload for {elements} elements", field="payload", value=data.size)
        return int(count)


class _Scratch(threading.local):
    """Memory of a thread that it uses again and again: fresh pages would cost more than the work done in them."""

    KEPT = 16 * 1024 * 1024
    """More is only needed where most elements of a shard change, and is then given back at once."""

    def __init__(self) -> None:
        self.kept: Bytes1D = np.empty(0, np.uint8)

    def of(self, size: int) -> Bytes1D:
        if size > self.KEPT:
            return np.empty(size, np.uint8)
        if size > self.kept.size:
            self.kept = np.empty(min(2 * size, self.KEPT), np.uint8)
        return self.kept


def _address(array: npt.NDArray[Any]) -> int:
    if not array.flags.c_contiguous:
        raise IntegrityError("an array with gaps", field="shard", value=array.strides)
    address: int = array.__array_interface__["data"][0]
    return address


def _elements(shard: Bytes1D, width: int, expected: int | None = None) -> int:
    count, rest = divmod(shard.nbytes, width)
    if width not in (1, 2, 4, 8) or rest or (expected is not None and count != expected):
        raise IntegrityError(f"{shard.nbytes} bytes of width {width}", field="shard", value=expected)
    return count


def _pointers(planes: Sequence[Bytes1D], elements: int) -> Any:
    if any(plane.size != elements for plane in planes):
        raise IntegrityError("planes of different length", field="payload", value=[plane.size for plane in planes])
    return (c_void_p * len(planes))(*(_address(plane) for plane in planes))


def _ended(at: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Positions with the sentinel after them, as `changed` leaves them."""
    whole = at.base
    if isinstance(whole, np.ndarray) and whole.dtype == np.int32 and whole.ndim == 1 and whole.size > at.size \
            and _address(whole) == _address(at) and whole[at.size] == _END:
        return whole
    return np.append(at, np.int32(_END))


def open_native() -> Native | None:
    """The library beside this file, when it is there and wanted."""
    if os.environ.get("DRIFTLINE_NATIVE") == "0" or sys.byteorder != "little":
        return None
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_native" + suffix)
        if path.exists():
            try:
                return Native(path)
            except (OSError, AttributeError):  # built for another machine, or from older sources: pip install again
                return None
    return None


native: Native | None = open_native()
