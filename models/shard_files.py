"""Writing a checkpoint's tensors: a file appears whole or not at all, the index after all of them, and at no time do files of two checkpoints pass for one.

Every shard is written beside its place first. Then what an earlier checkpoint left goes, index first; then the new files take their places; then the index.
Stopped anywhere in between, what is there is the old checkpoint, the new one, or refused by whoever loads it. Memory: one tensor.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from driftline.messages.errors import ConfigError
from driftline.models.shards import DTYPES, INDEX, SINGLE, numbered

__all__ = ["SHARD_BYTES", "Shape", "write_shards"]

SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in a file, as usual for published checkpoints."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OWN = re.compile(r"^model(-\d{5}-of-\d{5})?\.safetensors$")


class Shape(NamedTuple):
    """dtype and shape of a tensor that is to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(
    directory: Path, shapes: Mapping[str, Shape], read: Callable[[str], torch.Tensor], limit: int = SHARD_BYTES, *,
    describe: Callable[[], None] | None = None, same_model: bool = False,
) -> list[Path]:
    """Write `read(name)` for every name, once each, in files of at most `limit` bytes of tensors (a larger tensor has its own). Returns the files.

    `describe` writes what says how to read them (config.json), once every shard is whole and before the first takes its place.
    With `same_model`, which says that this changes nothing, a `model.safetensors` that is there stays until its successor is.

    Up to `limit` bytes in all are `model.safetensors` alone, more are numbered shards and an index. Raises ConfigError when `limit` is not positive, ValueError
    when a tensor that was read has another dtype or shape; then and on any other error nothing in the directory has changed.
    """
    if limit < 1:
        raise ConfigError("a shard holds at least one byte", field="shard size", value=limit, remedy="e.g. 5GB")
    groups = _divided(shapes, limit)
    files = [SINGLE] if len(groups) == 1 else [numbered("model", i + 1, len(groups)) for i in range(len(groups))]
    partial = [directory / f".{file}.partial" for file in files]
    index = directory / f".{INDEX}.partial"
    try:
        for path, group in zip(partial, groups, strict=True):
            _write(path, {name: shapes[name] for name in group}, read)
        if len(groups) > 1:
            places = {name: file for file, group in zip(files, groups, strict=True) for name in group}
            body = {"metadata": {"total_size": sum(shape.nbytes for shape in shapes.values())}, "weight_map": dict(sorted(places.items()))}
            index.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
        _clear(directory, keep=SINGLE if same_model and len(groups) == 1 else "")
        if describe is not None:
            describe()
        for path, file in zip(partial, files, strict=True):
            os.replace(path, directory / file)
        if len(groups) > 1:
            os.replace(index, directory / INDEX)
    finally:
        for path in (*partial, index):
            path.unlink(missing_ok=True)
    return [directory / file for file in files]


def _divided(shapes: Mapping[str, Shape], limit: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        if groups[-1] and filled + shape.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += shape.nbytes
    return groups


def _clear(directory: Path, *, keep: str) -> None:
    (directory / INDEX).unlink(missing_ok=True)
    for path in sorted(directory.iterdir()):
        if _OWN.match(path.name) and path.name != keep:
            path.unlink()


def _write(path: Path, shapes: Mapping[str, Shape], read: Callable[[str], torch.Tensor]) -> None:
    """One safetensors file: length and JSON header, then the tensors without gaps, the widest dtype first so that each is aligned to its own."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    order = sorted(shapes, key=lambda name: -shapes[name].dtype.itemsize)
    end = 0
    for name in order:
        start, end = end, end + shapes[name].nbytes
        header[name] = {"dtype": _NAMES[shapes[name].dtype], "shape": list(shapes[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            _append(file, read(name).detach(), name, shapes[name])


def _append(file: BinaryIO, tensor: torch.Tensor, name: str, shape: Shape) -> None:
    if (tensor.dtype, tuple(tensor.shape)) != tuple(shape):
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it was announced as {shape.dtype} {shape.shape}")
    if tensor.numel():
        file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
