"""Small checkpoints in K3's layout whose experts can be packed, written the way others write them, and what was read of them."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import random_model, small
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from driftline.models import shards
from driftline.models.checkpoint import save_checkpoint
from driftline.models.config import K3Config
from driftline.models.model import K3ForCausalLM
from driftline.models.quantisation import Quantisation
from driftline.models.shards import INDEX
from driftline.models.state import round_to_policy_

EXPERTS = "model.layers.1.block_sparse_moe.experts"


def packable(**changes: Any) -> K3Config:
    return small(**{"moe_intermediate_size": 32, "routed_expert_hidden_size": 64, **changes})


def rounded_model(config: K3Config | None = None, *, seed: int = 0) -> K3ForCausalLM:
    """A random fp32 model that a bfloat16 checkpoint holds exactly."""
    model = random_model(config or packable(), seed=seed, dtype=torch.float32)
    round_to_policy_(model)
    return model


def packed_checkpoint(directory: Path, *, seed: int = 0, shard_bytes: int = 10**9) -> Path:
    save_checkpoint(rounded_model(seed=seed), directory, experts=Quantisation.MXFP4, shard_bytes=shard_bytes)
    return directory


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the directory, by the public reader."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def changed(directory: Path, change: Mapping[str, torch.Tensor | None]) -> Path:
    """The one-file checkpoint with tensors replaced, or for None removed."""
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor.contiguous()
    save_file(tensors, directory / "model.safetensors")
    return directory


def reshard(directory: Path, files: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Replace the one file by these, with an index, as other tools write them."""
    (directory / "model.safetensors").unlink()
    for file, tensors in files.items():
        save_file(dict(tensors), directory / file)
    places = {name: file for file, tensors in files.items() for name in tensors}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def config_of(directory: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return body


def same_state(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


class Reads:
    """What went through safe_open: names read, files opened, and the most bytes that were held at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.opened: list[str] = []
        self.nbytes = self.held = self.most = 0
        reads = self

        class Handle:
            def __init__(self, path: Path, framework: str) -> None:
                reads.opened.append(Path(path).name)
                self._inner = safe_open(path, framework=framework)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

            def get_tensor(self, name: str) -> torch.Tensor:
                tensor: torch.Tensor = self._inner.get_tensor(name)
                reads.add(name, tensor)
                return tensor

        monkeypatch.setattr(shards, "safe_open", Handle)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.names.append(name)
        self.nbytes += tensor.nbytes
        self.held += tensor.nbytes
        self.most = max(self.most, self.held)
        weakref.finalize(tensor, self._gone, tensor.nbytes)

    def _gone(self, nbytes: int) -> None:
        self.held -= nbytes
