"""Checkpoints: a state as a directory that other tools load (`model.safetensors`), there whole or not at all.

A directory is written beside its place, synced and renamed (`whole_folder`); `LATEST` is replaced last, so it never names a directory
that is not complete. Tensors are streamed: no second copy of the weights.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.policy_store.blobs import sync_directory
from driftline.policy_store.tensor import State
from driftline.policy_store.tensor_file import write_tensors

__all__ = ["LATEST", "WEIGHTS", "checkpoints", "keep_newest", "latest", "whole_folder", "write_checkpoint", "write_file"]

WEIGHTS = "model.safetensors"
LATEST = "LATEST"
_PARTIAL = ".partial"
_REPLACED = ".replaced"
_PREFIX = "version-"


@contextmanager
def whole_folder(final: Path, *, replace: bool) -> Iterator[Path]:
    """A folder to write into, which becomes `final` when the block ends well and is removed when it does not.

    What an earlier attempt left is removed first. ConfigError when `final` is there and is not to be replaced, or cannot be made.
    With `replace` there is a moment between two renames in which neither is there; what was there lies in `<name>.replaced` then.
    """
    final = Path(os.path.abspath(final))  # "." and "x/.." have names too
    if not final.name:
        raise ConfigError("has no name", field="folder", value=str(final), remedy="name a folder in it")
    partial, replaced = (final.with_name(final.name + suffix) for suffix in (_PARTIAL, _REPLACED))
    if os.path.lexists(final) and not replace:
        raise ConfigError("is there already", field="folder", value=str(final), remedy="name another, or replace it with --force")
    if os.path.lexists(final) and (final.is_symlink() or not final.is_dir()):
        raise ConfigError("is not a folder", field="folder", value=str(final), remedy="name another")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"cannot be made: {error.strerror}", field="folder", value=str(partial), remedy="name another place") from error
    try:
        yield partial
        sync_directory(partial)
        shutil.rmtree(replaced, ignore_errors=True)
        if final.is_dir():
            os.replace(final, replaced)
        os.replace(partial, final)
        sync_directory(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def write_checkpoint(
    root: Path, version: int, state: State, metadata: Mapping[str, str], beside: Mapping[str, bytes] | None = None
) -> Path:
    """Write `<root>/version-NNNNNNNN/` with the weights and the files `beside` them (a model's config), and point LATEST at it."""
    final = root / f"{_PREFIX}{version:08d}"
    with whole_folder(final, replace=True) as partial:
        for name, content in (beside or {}).items():
            write_file(partial / name, content)
        write_tensors(partial / WEIGHTS, {name: tensor.layout for name, tensor in state.items()}, state.__getitem__, metadata)
    pointer = root / (LATEST + _PARTIAL)
    write_file(pointer, final.name.encode())
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
    found = (path for path in root.glob(f"{_PREFIX}*") if path.suffix not in (_PARTIAL, _REPLACED))
    return {int(path.name.removeprefix(_PREFIX)): path for path in sorted(found)}


def keep_newest(root: Path, count: int) -> list[int]:
    """Delete all but the newest `count` checkpoints; the versions deleted."""
    old = sorted(checkpoints(root).items())[: -max(1, count)]
    for _, path in old:
        shutil.rmtree(path)
    return [version for version, _ in old]


def write_file(path: Path, content: bytes) -> None:
    """The file with this content, synced."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
