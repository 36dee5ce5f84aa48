"""The stored tensors of a checkpoint directory: a tensor is read when it is asked for, from the one file that holds it, and nothing else is.

With a `model.safetensors.index.json` its map says which file that is, and files without a tensor that is asked for are never opened; without one every
`*.safetensors` file is part of the checkpoint. A file that is missing, cut short or at odds with the index is refused with its name.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from driftline.messages.errors import ConfigError, IntegrityError

__all__ = ["DTYPES", "INDEX", "SINGLE", "Layout", "Shards", "numbered"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}
"""By their names in the files."""

_NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")
_OPEN = 2
"""Files held open: a packed matrix and its scales may lie at the end of one and at the start of the next."""

_FIELD = "policy.init"
_AGAIN = "copy the file again from its source"


class Layout(NamedTuple):
    """dtype: of DTYPES, None for one that torch does not have; shape; dtype_name: as the file writes it."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    dtype_name: str


def numbered(stem: str, number: int, count: int) -> str:
    """The file name of shard `number` of `count`, from 1."""
    return f"{stem}-{number:05d}-of-{count:05d}.safetensors"


class Shards:
    """`files`: the file of every stored tensor, by name."""

    def __init__(self, directory: Path, files: Mapping[str, str]) -> None:
        self.directory, self.files = directory, files
        self._open: OrderedDict[str, Any] = OrderedDict()

    @classmethod
    def of(cls, directory: Path) -> Shards:
        """The checkpoint in `directory`; only the index, or where there is none the headers, are read. Raises ConfigError and IntegrityError."""
        if (directory / INDEX).is_file():
            return cls(directory, _indexed(directory))
        names = sorted(path.name for path in directory.glob("*.safetensors") if not path.name.startswith("."))
        if not names:
            raise ConfigError("no *.safetensors file here", field=_FIELD, value=str(directory),
                              remedy="a checkpoint is config.json plus one or more safetensors files")
        _all_numbers(directory, names)
        shards = cls(directory, {})
        files: dict[str, str] = {}
        for file in names:
            for name in shards._handle(file).keys():  # noqa: SIM118, a handle of safetensors is no mapping
                if name in files:
                    raise IntegrityError(f"also in {files[name]}", field=f"{file}: {name}", value=str(directory),
                                         remedy="one of the two files belongs to another checkpoint: remove it")
                files[name] = file
        return cls(directory, files)

    def layouts(self, names: Collection[str]) -> dict[str, Layout]:
        """Dtype and shape of each, from the headers of their files. Raises IntegrityError when an index and a file disagree."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        listed: dict[str, set[str]] = {}
        for name, file in self.files.items():
            listed.setdefault(file, set()).add(name)
        found = {}
        for file, wanted in by_file.items():
            handle = self._handle(file)
            there = set(handle.keys())
            if there != listed[file]:
                raise IntegrityError(f"the file lacks {len(listed[file] - there)} tensors that {INDEX} places in it and has {len(there - listed[file])} others",
                                     field=str(self.directory / file), value=sorted(listed[file] ^ there)[:3], remedy=_AGAIN)
            for name in wanted:
                part = handle.get_slice(name)
                kind = str(part.get_dtype())
                found[name] = Layout(DTYPES.get(kind), tuple(int(size) for size in part.get_shape()), kind)
        return found

    def read(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, on the CPU."""
        tensor: torch.Tensor = self._handle(self.files[name]).get_tensor(name)
        return tensor

    def close(self) -> None:
        """Let go of the files; what was read stays."""
        self._open.clear()

    def _handle(self, file: str) -> Any:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        path = self.directory / file
        try:
            handle = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise ConfigError(f"a shard that {INDEX} names is not here", field=_FIELD, value=str(path), remedy=_AGAIN) from None
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"not a readable safetensors file: {error}", field=_FIELD, value=str(path), remedy=_AGAIN) from error
        while len(self._open) >= _OPEN:
            self._open.popitem(last=False)
        self._open[file] = handle
        return handle


def _indexed(directory: Path) -> dict[str, str]:
    path = directory / INDEX
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
        files = raw["weight_map"]
        plain = all(Path(file).name == file and file.endswith(".safetensors") and not file.startswith(".") for file in files.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"not an index of shards: {error!r}", field=_FIELD, value=str(path), remedy=_AGAIN) from error
    if not plain or not files:
        raise ConfigError("an index names safetensors files of its own directory", field=_FIELD, value=str(path), remedy=_AGAIN)
    if SINGLE not in files.values() and (directory / SINGLE).exists():
        raise ConfigError(f"two checkpoints here: {SINGLE} and the shards of {INDEX}", field=_FIELD, value=str(directory), remedy="remove one of them")
    missing = sorted(file for file in set(files.values()) if not (directory / file).is_file())
    if missing:
        raise ConfigError(f"{len(missing)} shards that {INDEX} names are not here: {', '.join(missing[:3])}", field=_FIELD, value=str(directory), remedy=_AGAIN)
    return dict(files)


def _all_numbers(directory: Path, names: list[str]) -> None:
    """Without an index the names alone say how many there are."""
    for name in names:
        found = _NUMBERED.match(name)
        if found:
            every = {numbered(found["stem"], number, int(found["count"])) for number in range(1, int(found["count"]) + 1)}
            if every - set(names):
                raise ConfigError(f"{name} is one of several, and these are not here: {', '.join(sorted(every - set(names))[:3])}", field=_FIELD,
                                  value=str(directory), remedy=_AGAIN)
