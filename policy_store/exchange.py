"""Exchange: between a version's weights and a folder of the layout that transformers, vLLM and PEFT read and write.

    config.json  generation_config.json  tokenizer...      beside the weights
    model.safetensors                                      or, above a size,
    model-00001-of-00003.safetensors ...  model.safetensors.index.json
    adapter_model.safetensors  adapter_config.json         an adapter

Tensors keep their names, dtypes and bits both ways: what is taken in and given out again is bit-equal, whatever the dtypes mean.
Reading maps the files and gives a tensor at a time. Writing maps files of their final size, into which a reader decodes
(`OutFiles.allocate`): a version goes from the store to the folder without ever being a second copy in memory.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.policy_store.checkpoint import WEIGHTS, write_file
from driftline.policy_store.model_files import ADAPTER_CONFIG, check_json, files_in
from driftline.policy_store.tensor import Bytes1D, HostTensor, Layout, State
from driftline.policy_store.tensor_file import OnBytes, TensorFile, plan_file, silent, write_tensors

__all__ = ["ADAPTER_WEIGHTS", "INDEX", "METADATA", "ModelFolder", "OutFiles", "split", "write_model"]

INDEX: Final = "model.safetensors.index.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
METADATA: Final = {"format": "pt"}
"""transformers refuses a file without it."""

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class ModelFolder:
    """A folder of weights, open. `layouts` of all its tensors; `beside`: the files next to them; `adapter`: they are PEFT's."""

    path: Path
    layouts: Mapping[str, Layout]
    beside: Mapping[str, bytes]
    adapter: bool
    _file_of: Mapping[str, TensorFile] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> ModelFolder:
        """ConfigError when it holds no such files or they contradict each other; IntegrityError when one is not whole."""
        if not path.is_dir():
            raise ConfigError("no such folder", field="folder", value=str(path), remedy="name a folder with safetensors files")
        beside = files_in(path)
        adapter = (path / ADAPTER_WEIGHTS).is_file() and ADAPTER_CONFIG in beside
        file_of: dict[str, TensorFile] = {}
        for file, expected in _weights(path, adapter).items():
            opened = TensorFile.open(path / file)
            if expected is not None and expected != opened.layouts.keys():
                odd = sorted(expected ^ opened.layouts.keys())
                raise ConfigError(f"it and {INDEX} disagree about {len(odd)} tensors, e.g. {odd[0]}", field="file", value=str(path / file),
                                  remedy="the index is of other files: copy the folder again from its source")
            for name in opened.layouts:
                if name in file_of:
                    raise ConfigError(f"{file_of[name].path.name} has it too", field=f"tensor {name}", value=file,
                                      remedy=f"two models in one folder: leave one, or an {INDEX} that says which files count")
                file_of[name] = opened
        if not file_of:
            raise ConfigError("its files hold no tensor", field="folder", value=str(path))
        return cls(path, {name: file_of[name].layouts[name] for name in sorted(file_of)}, beside, adapter, file_of)

    def tensor(self, name: str) -> HostTensor:
        """Over the mapped file, read-only."""
        return self._file_of[name].tensor(name)

    def check_unchanged(self) -> None:
        """IntegrityError when a file was written to since the folder was opened."""
        for file in {id(file): file for file in self._file_of.values()}.values():
            file.check_unchanged()

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts.values())


def _weights(folder: Path, adapter: bool) -> dict[str, set[str] | None]:
    """The files that count, and the tensors each must have, where an index says so."""
    if (folder / INDEX).is_file():
        return dict(_indexed(folder))
    for name in (WEIGHTS, *((ADAPTER_WEIGHTS,) if adapter else ())):
        if (folder / name).is_file():
            return {name: None}
    found = sorted(path.name for path in folder.glob("*.safetensors") if path.is_file())
    if not found:
        pickled = any(next(folder.glob(pattern), None) for pattern in _PICKLED)
        raise ConfigError(
            "no *.safetensors file here", field="folder", value=str(folder),
            remedy="pickled weights are code and are not read: save them with safe_serialization=True first" if pickled
            else "name a folder that save_pretrained, `driftline policy export` or a run wrote",
        )
    return dict.fromkeys(found)


def _indexed(folder: Path) -> dict[str, set[str]]:
    path = folder / INDEX
    content = path.read_bytes()
    check_json(path, content)
    index = json.loads(content)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise ConfigError("has no weight_map", field="file", value=str(path), remedy="copy it again from its source")
    files: dict[str, set[str]] = {}
    for name, file in places.items():
        # A file name off somebody's disk: it must not lead out of the folder.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError("not the name of a safetensors file of this folder", field=f"weight_map of {name[:80]}", value=file,
                              remedy="an index names files beside it")
        files.setdefault(file, set()).add(name)
    for file in files:
        if not (folder / file).is_file():
            raise ConfigError(f"{INDEX} names it, and it is not there", field="file", value=str(folder / file), remedy="copy the missing file")
    return files


def split(layouts: Mapping[str, Layout], file_bytes: int) -> dict[str, list[str]]:
    """Which tensors go into which file: in order of their names, a file at most `file_bytes` of weights or one tensor."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in sorted(layouts):
        if groups[-1] and size + layouts[name].nbytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += layouts[name].nbytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": names for number, names in enumerate(groups, 1)}


def write_model(
    folder: Path, layouts: Mapping[str, Layout], tensor: Callable[[str], HostTensor], *, file_bytes: int,
    metadata: Mapping[str, str] = METADATA, on_bytes: OnBytes = silent,
) -> list[str]:
    """Write weights that are made a tensor at a time, with their index; the names of the files."""
    files = split(layouts, file_bytes)
    for file, names in files.items():
        write_tensors(folder / file, {name: layouts[name] for name in names}, tensor, metadata, on_bytes)
    return [*files, *_write_index(folder, files, layouts)]


def _write_index(folder: Path, files: Mapping[str, Iterable[str]], layouts: Mapping[str, Layout]) -> list[str]:
    if len(files) == 1:
        return []
    total = sum(layout.nbytes for layout in layouts.values())
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": {n: file for file, names in files.items() for n in names}}
    write_file(folder / INDEX, json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")
    return [INDEX]


class OutFiles:
    """The files of a model at their final size, mapped: weights are decoded straight into them.

    `allocate` is where a reader puts its state. `settle` takes the finished state, copies what a version in between kept elsewhere
    (a tensor that had another shape then), and makes the files durable.
    """

    def __init__(self, folder: Path, layouts: Mapping[str, Layout], *, file_bytes: int, metadata: Mapping[str, str] = METADATA) -> None:
        self._folder, self._layouts = folder, dict(layouts)
        self._files = split(layouts, file_bytes)
        self._maps: dict[str, mmap.mmap] = {}
        self._state: State = {}
        for file, names in self._files.items():
            plan = plan_file({name: layouts[name] for name in names}, metadata)
            mapped = _mapped(folder / file, plan.head, plan.nbytes)
            self._maps[file] = mapped
            body: Bytes1D = np.frombuffer(mapped, np.uint8)
            for name, layout in plan.layouts.items():
                start = plan.starts[name]
                self._state[name] = HostTensor(layout.dtype, layout.shape, body[start : start + layout.nbytes])

    def allocate(self, layouts: Mapping[str, Layout]) -> State:
        """Room for a state, in the files wherever a tensor is as it will be in the end."""
        return {
            name: self._state[name] if self._layouts.get(name) == layout else HostTensor.empty(layout) for name, layout in layouts.items()
        }

    def settle(self, state: State, on_bytes: OnBytes = silent) -> list[str]:
        """Make the files hold `state`, synced; their names. IntegrityError when it has other tensors than were announced."""
        found = {name: tensor.layout for name, tensor in state.items()}
        if found != self._layouts:
            odd = sorted(name for name in found.keys() | self._layouts.keys() if found.get(name) != self._layouts.get(name))
            raise IntegrityError(f"was announced as {self._layouts.get(odd[0])}", field=f"tensor {odd[0]}", value=found.get(odd[0]))
        for file, names in self._files.items():
            for name in names:
                room = self._state[name].data
                if room.size and state[name].data.ctypes.data != room.ctypes.data:
                    np.copyto(room, state[name].data)
                on_bytes(room.size)
            self._maps[file].flush()
            _sync(self._folder / file)
        return [*self._files, *_write_index(self._folder, self._files, self._layouts)]


def _mapped(path: Path, head: bytes, size: int) -> mmap.mmap:
    """A new file of `size` bytes that begins with `head`, its blocks taken: a full disk is an error now and not a signal later."""
    with path.open("w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise ConfigError(f"no room for {size} bytes: {error.strerror}", field="file", value=str(path),
                              remedy="free space there, or name another folder") from error
        file.write(head)
        file.flush()
        return mmap.mmap(file.fileno(), size)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
