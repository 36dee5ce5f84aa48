"""Tensor files: the safetensors format, read without a copy, written without holding anything, and believed in nothing.

A file is eight bytes (the length of the header, little-endian), the header (JSON: per tensor its dtype, shape and place, and a map of
texts under `__metadata__`), and the bytes of the tensors end to end. A file that opens here is one that the safetensors library
opens too: places cover the body exactly, each as long as its dtype and shape say, no name twice. A header is checked before anything is
allocated from a number in it. The library itself is not used: without torch it has no bfloat16 and no float8.

Format: https://huggingface.co/docs/safetensors (the README of github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.policy_store.tensor import DTYPES, Bytes1D, HostTensor, Layout

__all__ = ["OnBytes", "Plan", "TensorFile", "plan_file", "silent", "write_tensors"]

HEADER_LIMIT: Final = 100_000_000
"""Bytes; the library's own."""

SLICE_BYTES: Final = 16 * 1024 * 1024
"""What is written between two reports of progress."""

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_DTYPES = {known.safetensors: name for name, known in DTYPES.items()}
_NAME_LIMIT = 1024
_DIMENSIONS_LIMIT = 32

OnBytes = Callable[[int], None]
"""Called with every count of bytes done; raising ends the work."""


def silent(_: int) -> None:
    """Nobody watches."""


class _Place(NamedTuple):
    layout: Layout
    start: int
    stop: int


@dataclass(frozen=True)
class TensorFile:
    """An open file: `layouts` and `metadata` of its header; `tensor` gives a view of the mapped bytes."""

    path: Path
    metadata: Mapping[str, str]
    layouts: Mapping[str, Layout]
    _places: Mapping[str, _Place]
    _bytes: Bytes1D
    _stamp: tuple[int, int]

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        """Raises ConfigError when it cannot be read, IntegrityError when it is not a whole file of this format."""
        try:
            with path.open("rb") as file:
                facts = os.fstat(file.fileno())
                head = file.read(_LENGTH.size)
                length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
                room = facts.st_size - _LENGTH.size
                if not 2 <= length <= min(HEADER_LIMIT, room):
                    raise _refused(path, "header length", length, f"the file has {facts.st_size} bytes; a header at most {HEADER_LIMIT}")
                metadata, places = parse_header(path, file.read(length), room - length)
                mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", field="file", value=str(path)) from error
        layouts = {name: place.layout for name, place in places.items()}
        return cls(path, metadata, layouts, places, mapped[_LENGTH.size + length :], (facts.st_size, facts.st_mtime_ns))

    def tensor(self, name: str) -> HostTensor:
        """The tensor over the file's own pages, read-only; a copy only where the file does not align its elements."""
        place = self._places[name]
        data = self._bytes[place.start : place.stop]
        if data.ctypes.data % place.layout.width:
            data = data.copy()
        return HostTensor(place.layout.dtype, place.layout.shape, data)

    def check_unchanged(self) -> None:
        """IntegrityError when somebody has written to the file since it was opened: what was read of it is then of no one state."""
        facts = self.path.stat()
        if (facts.st_size, facts.st_mtime_ns) != self._stamp:
            raise IntegrityError("changed while it was read", field="file", value=str(self.path), remedy="wait for its writer, then try again")


def parse_header(path: Path, text: bytes, body: int) -> tuple[dict[str, str], dict[str, _Place]]:
    """Metadata, and tensors by name. `body` is how many bytes follow the header. IntegrityError names `path` and what is wrong."""
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # also: not UTF-8, a number of a million digits, a name twice
        raise _refused(path, "header", text[:40], f"not a JSON object with each name once: {error}") from error
    if not isinstance(header, dict):
        raise _refused(path, "header", text[:40], "not a JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _refused(path, _METADATA, metadata, "not a map of texts")
    places = {name: _place(path, name, entry) for name, entry in header.items()}
    end = 0
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].stop)):
        if place.start != end:
            raise _refused(path, f"tensor {name}", place.start, f"{'overlaps the tensor before it, which ends' if place.start < end else 'leaves a gap'} at {end}")
        end = place.stop
    if end != body:
        raise _refused(path, "body", body, f"its tensors take {end} bytes")
    return metadata, places


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} is there twice")
        found[name] = value
    return found


def _place(path: Path, name: str, entry: Any) -> _Place:
    where = f"tensor {name[:80]}"
    if not 1 <= len(name) <= _NAME_LIMIT or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise _refused(path, "tensor name", name[:80], f"1 to {_NAME_LIMIT} characters, none of them half of one")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _refused(path, where, entry, "needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _refused(path, where, dtype, f"a dtype that is not one of {', '.join(_DTYPES)}")
    if not _counts(shape) or len(shape) > _DIMENSIONS_LIMIT:
        raise _refused(path, where, shape, f"a shape is at most {_DIMENSIONS_LIMIT} counts")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _refused(path, where, offsets, "data_offsets are where it starts and where it stops")
    layout = Layout(_DTYPES[dtype], tuple(shape))
    if layout.nbytes != offsets[1] - offsets[0]:
        raise _refused(path, where, offsets, f"{dtype}{shape} has {layout.nbytes} bytes")
    return _Place(layout, offsets[0], offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _refused(path: Path, field: str, value: object, problem: str) -> IntegrityError:
    return IntegrityError(f"{path}: {problem}", field=field, value=value, remedy="not a whole safetensors file: copy it again from its source")


@dataclass(frozen=True)
class Plan:
    """A file to be written: `head` is everything before the body; `starts` is where each tensor's bytes begin in the file."""

    head: bytes
    layouts: Mapping[str, Layout]
    starts: Mapping[str, int]
    nbytes: int


def plan_file(layouts: Mapping[str, Layout], metadata: Mapping[str, str]) -> Plan:
    """Where everything goes: widest elements first, so that every tensor is aligned in the file, then by name."""
    order = sorted(layouts, key=lambda name: (-layouts[name].width, name))
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    ends: list[int] = [0]
    for name in order:
        layout = layouts[name]
        ends.append(ends[-1] + math.prod(layout.shape) * layout.width)
        header[name] = {"dtype": DTYPES[layout.dtype].safetensors, "shape": list(layout.shape), "data_offsets": ends[-2:]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = _LENGTH.pack(len(text)) + text
    starts = {name: len(head) + start for name, start in zip(order, ends, strict=False)}
    return Plan(head, {name: layouts[name] for name in order}, starts, len(head) + ends[-1])


def write_tensors(
    path: Path, layouts: Mapping[str, Layout], tensor: Callable[[str], HostTensor], metadata: Mapping[str, str], on_bytes: OnBytes = silent
) -> int:
    """Write a file, one tensor asked for and written at a time, synced; its size. IntegrityError when one is not as declared."""
    plan = plan_file(layouts, metadata)
    with path.open("wb") as file:
        file.write(plan.head)
        for name, layout in plan.layouts.items():
            content = tensor(name)
            if content.layout != layout:
                raise IntegrityError(f"declared as {layout}", field=f"tensor {name}", value=content.layout)
            for start in range(0, content.data.size, SLICE_BYTES):
                part = content.data[start : start + SLICE_BYTES]
                file.write(part.data)
                on_bytes(part.size)
        file.flush()
        os.fsync(file.fileno())
    return plan.nbytes
