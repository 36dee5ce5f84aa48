"""A GGUF file in the shape of a checkpoint directory's tensors: by public name, read one at a time, as torch tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from driftline.messages.errors import IntegrityError
from driftline.models.gguf.llama import GgufModel
from driftline.models.shards import Layout

__all__ = ["GgufShards"]


class GgufShards:
    """As `driftline.models.shards.Shards`; every tensor is float32 once read. `config`: the fields of a config.json."""

    def __init__(self, model: GgufModel) -> None:
        self.model = model
        self.directory: Path = model.file.path.parent
        self.files: Mapping[str, str] = dict.fromkeys(model.shapes, model.file.path.name)
        self.config: Mapping[str, Any] = model.config

    @classmethod
    def open(cls, path: Path) -> GgufShards:
        """Reads the header. ConfigError when the file is of a model that is not read, IntegrityError when it is damaged or incomplete."""
        return cls(GgufModel.open(path))

    def layouts(self, names: Collection[str]) -> dict[str, Layout]:
        """float32 and the shape, with the form in the file ("Q4_1") as the dtype's name. IntegrityError for a name the file has not."""
        kinds = self.model.kinds
        if odd := sorted(set(names) - kinds.keys()):
            raise IntegrityError(f"{len(odd)} tensors are not in the file", field=str(self.model.file.path), value=odd[:3],
                                 remedy="the file and the configuration must belong together")
        return {name: Layout(torch.float32, self.model.shapes[name], kinds[name]) for name in names}

    def nbytes(self, name: str) -> int:
        """What the tensor takes in the file."""
        return self.model.stored_bytes[name]

    def read(self, name: str) -> torch.Tensor:
        """float32, in its shape."""
        return torch.from_numpy(self.model.read(name))

    def close(self) -> None:
        """Nothing stays open."""
