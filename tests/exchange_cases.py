"""Folders of weights as other tools write them, in every dtype there is, and hostile ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from driftline.policy_store.tensor import DTYPES, HostTensor, Layout, State

SHAPES: tuple[tuple[int, ...], ...] = ((3, 5), (), (0, 4), (7,))


def every_dtype(seed: int = 0) -> State:
    """Random bits (NaNs, infinities and all) in every dtype and a few shapes; names in no order of their layouts."""
    rng = np.random.default_rng(seed)
    state: State = {}
    for number, dtype in enumerate(DTYPES):
        for shape in SHAPES:
            layout = Layout(dtype, shape)
            bits = rng.integers(0, 2 if dtype == "bool" else 256, layout.nbytes, np.uint8)
            state[f"layer.{number % 3}.{dtype}.{len(shape)}d{'.empty' if 0 in shape else ''}"] = HostTensor(dtype, shape, bits)
    # MXFP4 as models store it: two four-bit numbers to a byte, and a scale of e8m0 for each 32 of them.
    state["experts.gate_up_proj_blocks"] = HostTensor("uint8", (2, 8, 3, 16), rng.integers(0, 256, 768, np.uint8))
    state["experts.gate_up_proj_scales"] = HostTensor("float8_e8m0fnu", (2, 8, 3), rng.integers(0, 256, 48, np.uint8))
    return state


def file_of(header: object, body: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with this header, whatever it says. `length`: what the first eight bytes claim."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype: str = "U8", shape: object = (4,), offsets: object = (0, 4), **more: object) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


HOSTILE: dict[str, bytes] = {
    "empty file": b"",
    "shorter than a length": b"\x10\x00\x00",
    "length beyond the file": file_of({}, length=10**6),
    "length beyond memory": file_of({}, length=2**63),
    "length of nothing": file_of({}, length=0),
    "not json": file_of(b"{'a': 1}"),
    "not utf-8": file_of(b'{"\xff": 1}'),
    "not an object": file_of([1, 2]),
    "nested deeply": file_of(b'{"a":' * 60_000 + b"1" + b"}" * 60_000),
    "a number of many digits": file_of(b'{"t":{"dtype":"U8","shape":[' + b"9" * 6000 + b'],"data_offsets":[0,4]}}', b"1234"),
    "name twice": file_of(b'{"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"t":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}', b"1234"),
    "key twice": file_of(b'{"t":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', b"1234"),
    "name of nothing": file_of({"": entry()}, b"1234"),
    "half a letter in a name": file_of(b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234"),
    "name too long": file_of({"n" * 5000: entry()}, b"1234"),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}, "t": entry()}, b"1234"),
    "metadata no map": file_of({"__metadata__": "pt", "t": entry()}, b"1234"),
    "no offsets": file_of({"t": {"dtype": "U8", "shape": [4]}}, b"1234"),
    "one key more": file_of({"t": entry(strides=[1])}, b"1234"),
    "entry no object": file_of({"t": 4}, b"1234"),
    "unknown dtype": file_of({"t": entry("F4")}, b"1234"),
    "dtype no text": file_of({"t": {"dtype": ["U8"], "shape": [4], "data_offsets": [0, 4]}}, b"1234"),
    "negative size": file_of({"t": entry(shape=(-4,))}, b"1234"),
    "size a fraction": file_of({"t": entry(shape=(4.0,))}, b"1234"),
    "size a truth": file_of({"t": entry(shape=(4, True))}, b"1234"),
    "size beyond 64 bits": file_of({"t": entry(shape=(2**64, 0), offsets=(0, 0))}),
    "sizes that overflow together": file_of({"t": entry(shape=(2**62, 4), offsets=(0, 0))}),
    "too many dimensions": file_of({"t": entry(shape=(1,) * 40, offsets=(0, 1))}, b"1"),
    "another size than its shape": file_of({"t": entry(shape=(3,))}, b"1234"),
    "backwards": file_of({"t": entry(offsets=(4, 0))}, b"1234"),
    "offset negative": file_of({"t": entry(offsets=(-4, 0))}, b"1234"),
    "three offsets": file_of({"t": entry(offsets=(0, 2, 4))}, b"1234"),
    "out of bounds": file_of({"t": entry(shape=(8,), offsets=(0, 8))}, b"1234"),
    "overlapping": file_of({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456"),
    "the same bytes": file_of({"a": entry(), "b": entry()}, b"1234"),
    "a gap": file_of({"a": entry(), "b": entry(offsets=(6, 10))}, b"1234567890"),
    "bytes of nobody": file_of({"a": entry()}, b"12345"),
    "cut off": file_of({"a": entry()}, b"123"),
}


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
