"""Bytes to messages and back. Nothing is allocated on the word of the sender: every size is checked first.

A frame is a 16-byte head, a msgpack map `{"s": schema, "v": version, "b": body}` and, behind it, the arrays as raw little-endian
buffers. Arrays decode as read-only numpy views of the one received buffer: no copy, no boxing, aligned to 16 bytes.

    head    "DL" | format u8 = 1 | flags u8 (1: the rest is one zstd frame) | map length u32 | body length u64   (little-endian)
    body    map | zeros to 16 | array 0 | zeros to 16 | array 1 | ...
    array   in the map as msgpack extension 1: dtype code u8 | dimensions u8 | 6 zeros | offset u64 | shape u64 each

Encoding is deterministic (fields in declaration order), so equal messages have equal bytes under one zstd version.
No pickle, no object arrays, no dtype outside the table; what does not fit raises MalformedMessage, whatever the bytes are.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterator
from enum import Enum
from typing import Any, Final

import msgpack
import numpy as np
import zstandard
from pydantic import BaseModel, ValidationError

from driftline.messages.errors import MalformedMessage, PayloadTooLarge
from driftline.messages.map_limits import WALK_ABOVE, check_map
from driftline.messages.registry import schema
from driftline.messages.types import Message

__all__ = ["MAX_DECODED_BYTES", "decode", "decoded_bytes", "encode"]

KIB, MIB = 1024, 1024 * 1024

MAX_DECODED_BYTES: Final = 256 * MIB
"""A decoded message, arrays included. Weights do not travel as messages, so this is generous."""
MAX_MAP_BYTES: Final = 32 * MIB
MAX_DEPTH: Final = 24
MAX_DIMENSIONS: Final = 8
MAX_WINDOW_BYTES: Final = 8 * MIB
"""What the decompressor may keep for a frame that is cut off (a whole one is decompressed in place)."""
SHOWN_ERRORS: Final = 100
COMPRESS_ABOVE: Final = 4 * KIB
COMPRESS_LEVEL: Final = 1  # level 3 is no smaller on token ids and log-probabilities, and slower

_MAGIC, _FORMAT, _ZSTD = b"DL", 1, 1
_HEAD: Final = struct.Struct("<2sBBIQ")
_ARRAY: Final = struct.Struct("<BB6xQ")
_ARRAY_EXT: Final = 1
_ALIGN: Final = 16

_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    code: np.dtype(name)
    for code, name in enumerate(
        ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"), start=1
    )
}
_CODES: Final = {dtype: code for code, dtype in _DTYPES.items()}


class _Zstd(threading.local):
    """A compressor is not safe to share between threads, and costs more to make than to use on a small message."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=COMPRESS_LEVEL, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)


_zstd = _Zstd()


def encode(message: Message) -> bytes:
    """The frame of a message. Raises MalformedMessage if a value has no place on the wire, PayloadTooLarge past the limits."""
    arrays = _Arrays()
    body = {name: arrays.wire(getattr(message, name)) for name in type(message).model_fields}
    try:
        head = msgpack.packb({"s": message.schema_name, "v": message.schema_version, "b": body}, use_bin_type=True)
    except (OverflowError, TypeError, ValueError) as error:
        raise MalformedMessage(str(error), field=message.schema_name or type(message).__name__) from error
    if len(head) > MAX_MAP_BYTES:
        raise PayloadTooLarge(f"the limit is {MAX_MAP_BYTES} bytes", field=message.schema_name, value=len(head),
                              remedy="put bulk data in arrays or blobs")  # fmt: skip
    _refuse_to_send_too_much(message, head)
    raw = b"".join(arrays.body(head))
    if len(raw) > MAX_DECODED_BYTES:
        raise PayloadTooLarge(f"the limit is {MAX_DECODED_BYTES} bytes", field=message.schema_name, value=len(raw),
                              remedy="split it, or store it as a blob")  # fmt: skip
    if len(raw) > COMPRESS_ABOVE:
        packed = _zstd.compressor.compress(raw)
        if len(packed) < len(raw) * 15 // 16:
            return _HEAD.pack(_MAGIC, _FORMAT, _ZSTD, len(head), len(raw)) + packed
    return _HEAD.pack(_MAGIC, _FORMAT, 0, len(head), len(raw)) + raw


def _refuse_to_send_too_much(message: Message, head: bytes) -> None:
    try:
        if len(head) > WALK_ABOVE:
            check_map(head)
    except MalformedMessage as error:
        raise PayloadTooLarge(error.problem, field=message.schema_name, value=len(head), remedy=error.remedy) from error


def decoded_bytes(data: bytes) -> int:
    """What a frame says it is when decompressed: how much work decoding it is. Not yet checked against anything."""
    return int(_HEAD.unpack_from(data)[4]) if len(data) >= _HEAD.size else 0


def decode(data: bytes, *, max_bytes: int = MAX_DECODED_BYTES) -> Message:
    """The message in a frame. Raises UnknownSchema or MalformedMessage, and nothing else."""
    name, version, body = _unpack(data, max_bytes)
    cls = schema(name, version)
    try:
        return cls.model_validate(body)
    except ValidationError as error:
        if error.error_count() > SHOWN_ERRORS:  # to list a million takes longer than to decode them
            raise MalformedMessage(f"{name}: {error.error_count()} values are wrong") from None
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join([name, *(str(part) for part in first["loc"])])
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise MalformedMessage(f"{where}: {first['msg']}{more}") from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        # A validator of a registered class that raises something pydantic does not collect: still the sender's bytes.
        raise MalformedMessage(f"{name}: {type(error).__name__}: {error}") from error


class _Arrays:
    """The arrays of one message while it is encoded: each is laid out at a multiple of 16 behind the map."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def wire(self, value: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH - 3:
            raise MalformedMessage("nested too deeply", field="depth", value=depth, remedy=f"at most {MAX_DEPTH}")
        match value:
            case Enum():  # before str: a StrEnum is a str
                return value.value
            case None | bool() | int() | float() | str() | bytes():
                return value
            case np.ndarray():
                return self._lay(value)
            case np.generic():
                return value.item()
            case BaseModel():
                return {name: self.wire(getattr(value, name), depth + 1) for name in type(value).model_fields}
            case dict():
                return {_key(key): self.wire(item, depth + 1) for key, item in value.items()}
            case list() | tuple() | set() | frozenset():
                return [self.wire(item, depth + 1) for item in value]
            case _:
                raise MalformedMessage("this type has no place on the wire", field="type", value=type(value).__name__)

    def _lay(self, array: np.ndarray) -> msgpack.ExtType:
        dtype = array.dtype.newbyteorder("<")
        code = _CODES.get(dtype)
        if code is None:
            raise MalformedMessage("this dtype has no place on the wire", field="dtype", value=str(array.dtype))
        if array.ndim > MAX_DIMENSIONS:
            raise MalformedMessage(f"at most {MAX_DIMENSIONS} dimensions", field="shape", value=array.shape)
        shape = array.shape
        raw = np.ascontiguousarray(array, dtype=dtype).tobytes()
        head = _ARRAY.pack(code, len(shape), self._size) + struct.pack(f"<{len(shape)}Q", *shape)
        padding = -len(raw) % _ALIGN
        self._parts += [raw, bytes(padding)]
        self._size += len(raw) + padding
        return msgpack.ExtType(_ARRAY_EXT, head)

    def body(self, head: bytes) -> Iterator[bytes]:
        yield head
        if self._size:
            yield bytes(-len(head) % _ALIGN)
            yield from self._parts


def _key(key: object) -> str:
    match key:
        case Enum():
            return str(key.value)
        case str():
            return key
        case int():  # pydantic turns it back into the field's key type
            return str(key)
        case _:
            raise MalformedMessage("a map key is a string or an integer", field="key", value=key)


def _unpack(data: bytes, max_bytes: int) -> tuple[str, int, dict[str, Any]]:
    """Schema name, version and body, with arrays as views."""
    raw, map_length = _body(data, max_bytes)
    view = memoryview(raw)
    arrays = _Views(view[map_length + -map_length % _ALIGN :])
    if map_length > WALK_ABOVE:
        check_map(view[:map_length])
    try:
        top = msgpack.unpackb(
            view[:map_length],
            raw=False,
            strict_map_key=True,
            use_list=True,
            object_pairs_hook=_mapping,
            ext_hook=arrays.array,
        )
    except MalformedMessage:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise MalformedMessage(f"not a msgpack map: {type(error).__name__}: {error}") from error
    match top:
        case {"s": str(name), "v": int(version), "b": dict(body)} if not isinstance(version, bool):
            _check_depth(body)
            return name, version, body
        case _:
            raise MalformedMessage('the envelope is not a map of "s", "v" and "b"')


def _body(data: bytes, max_bytes: int) -> tuple[bytes | memoryview, int]:
    """The frame's body, decompressed, and the length of its map."""
    if len(data) < _HEAD.size:
        raise MalformedMessage("shorter than a frame's head", field="length", value=len(data))
    magic, form, flags, map_length, body_length = _HEAD.unpack_from(data)
    if magic != _MAGIC or form != _FORMAT or flags & ~_ZSTD:
        raise MalformedMessage("not a driftline frame", field="head", value=bytes(data[: _HEAD.size]))
    if body_length > max_bytes:
        raise MalformedMessage(f"beyond the limit of {max_bytes} bytes", field="body length", value=body_length)
    if map_length > min(body_length, MAX_MAP_BYTES):
        raise MalformedMessage("beyond the body or the limit", field="map length", value=map_length)
    payload = memoryview(data)[_HEAD.size :]
    if not flags:
        if len(payload) != body_length:
            raise MalformedMessage(f"the head promises {body_length}", field="body length", value=len(payload))
        return payload.toreadonly(), map_length
    try:
        promised = zstandard.get_frame_parameters(payload).content_size
        if promised != body_length:
            # Also an unknown size: a bomb is refused on what it says, before it is opened.
            raise MalformedMessage(f"the head promises {body_length}", field="zstd content size", value=promised)
        raw = _zstd.decompressor.decompress(payload, max_output_size=body_length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedMessage(f"not a zstd frame: {error}") from error
    if len(raw) != body_length:
        raise MalformedMessage(f"the head promises {body_length}", field="decompressed length", value=len(raw))
    return raw, map_length


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """A map of texts, each once: two readers must not disagree on which of two values counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedMessage("a key is there twice", field="map", value=len(pairs))
    if not all(type(key) is str for key in found):
        raise MalformedMessage("a map key is text", field="map", value=next(k for k in found if type(k) is not str))
    return found


class _Views:
    """Turns array descriptors into views of `buffer`."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer

    def array(self, code: int, data: bytes) -> np.ndarray:
        if code != _ARRAY_EXT:
            raise MalformedMessage("unknown msgpack extension", field="extension", value=code)
        if len(data) < _ARRAY.size:
            raise MalformedMessage("shorter than its head", field="array", value=len(data))
        dtype_code, dimensions, offset = _ARRAY.unpack_from(data)
        dtype = _DTYPES.get(dtype_code)
        if dtype is None:
            raise MalformedMessage("unknown dtype code", field="array", value=dtype_code)
        if dimensions > MAX_DIMENSIONS or len(data) != _ARRAY.size + 8 * dimensions:
            raise MalformedMessage("its dimensions disagree with its length", field="array", value=dimensions)
        shape = struct.unpack_from(f"<{dimensions}Q", data, _ARRAY.size)
        size = math.prod(shape) * dtype.itemsize  # Python integers: no overflow to hide behind
        if offset % _ALIGN or offset + size > len(self._buffer) or any(n > MAX_DECODED_BYTES for n in shape):
            raise MalformedMessage(f"{size} bytes at {offset} do not fit {len(self._buffer)}", field="array", value=shape)
        raw = self._buffer[offset : offset + size]
        if dtype.kind == "b" and size and np.frombuffer(raw, np.uint8).max() > 1:
            raise MalformedMessage("a boolean is 0 or 1", field="array", value=shape)
        array = np.frombuffer(raw, dtype) if size else np.empty(0, dtype)
        array = array.reshape(shape)
        array.flags.writeable = False
        return array


def _check_depth(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            for item in container.values() if isinstance(container, dict) else container:
                if isinstance(item, (dict, list)):
                    inner.append(item)
                elif isinstance(item, msgpack.Timestamp):  # the one extension that msgpack decodes without asking
                    raise MalformedMessage("unknown msgpack extension", field="extension", value=-1)
        if not inner:
            return
        level = inner
    raise MalformedMessage("nested too deeply", field="depth", remedy=f"at most {MAX_DEPTH}")
