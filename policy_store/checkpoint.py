"""Checkpoints: a state as a directory that other tools load (`model.safetensors`), there whole or not at all.

A checkpoint is written beside its place, synced and renamed; `LATEST` is replaced last, so it never names a directory that is not
complete. Tensors are streamed: no second copy of the weights.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

from driftline.messages.errors import IntegrityError
from driftline.policy_store.blobs import sync_directory
from driftline.policy_store.tensor import DTYPES, State

__all__ = ["LATEST", "WEIGHTS", "checkpoints", "keep_newest", "latest", "write_checkpoint"]

WEIGHTS = "model.safetensors"
LATEST = "LATEST"
_PARTIAL = ".partial"
_PREFIX = "version-"


def write_checkpoint(
    root: Path, version: int, state: State, metadata: Mapping[str, str], beside: Mapping[str, bytes] | None = None
) -> Path:
    """Write `<root>/version-NNNNNNNN/` with the weights and the files `beside` them (a model's config), and point LATEST at it."""
    final = root / f"{_PREFIX}{version:08d}"
    partial = final.with_name(final.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, content in (beside or {}).items():
        _write(partial / name, content)
    _write_safetensors(partial / WEIGHTS, state, metadata)
    sync_directory(partial)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    pointer = root / (LATEST + _PARTIAL)
    _write(pointer, final.name.encode())
    os.replace(pointer, root / LATEST)
    sync_directory(root)
    return final


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    try:
        name = (root / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    if not (root / name / WEIGHTS).is_file():
        raise IntegrityError("it names no checkpoint", field=str(root / LATEST), value=name)
    return root / name


def checkpoints(root: Path) -> dict[int, Path]:
    """Complete checkpoints by version."""
    found = (path for path in root.glob(f"{_PREFIX}*") if not path.name.endswith(_PARTIAL))
    return {int(path.name.removeprefix(_PREFIX)): path for path in sorted(found)}


def keep_newest(root: Path, count: int) -> list[int]:
    """Delete all but the newest `count` checkpoints; the versions deleted."""
    old = sorted(checkpoints(root).items())[: -max(1, count)]
    for _, path in old:
        shutil.rmtree(path)
    return [version for version, _ in old]


def _write_safetensors(path: Path, state: State, metadata: Mapping[str, str]) -> None:
    # The library's own writer wants every tensor as one more bytes object, and has no bfloat16 without torch.
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    # Widest elements first, so that every tensor is aligned in the file.
    order = sorted(state, key=lambda name: (-state[name].width, name))
    offset = 0
    for name in order:
        tensor = state[name]
        header[name] = {"dtype": DTYPES[tensor.dtype].safetensors, "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + tensor.data.size]}
        offset += tensor.data.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(state[name].data.data)
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
