"""Versions laid out as files that a server reads: a PEFT adapter, or a whole checkpoint under public names.

Guarantees: a version's directory appears whole, under its own name, and is never changed afterwards; of the old ones those that may still be read are kept. Dtypes are the
policy's.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.lora.adapter import Adapter, Scaling, Update
from driftline.models.lora.peft import write_peft
from driftline.models.shard_files import SHARD_BYTES, Shape, write_shards

__all__ = ["HandOver", "adapter_in"]

_VERSION = re.compile(r"^v(\d{8})$")


class HandOver:
    """`beside`: config.json and the tokenizer's files, for whole checkpoints. `alpha` makes it adapters alone."""

    def __init__(self, place: Path, *, beside: Mapping[str, bytes], alpha: float | None = None, scaling: Scaling = Scaling.RANK, base: str = "") -> None:
        if not str(place) or str(place) == ".":
            raise ConfigError("names no directory", field="rollout.engine_files", value=str(place), remedy="a directory that the server reads under the same path")
        self.place, self._beside, self._alpha, self._scaling, self._base = place.absolute(), dict(beside), alpha, scaling, base

    @property
    def adapters(self) -> bool:
        return self._alpha is not None

    def write(self, version: int, state: Mapping[str, torch.Tensor]) -> Path:
        """The version's directory. One that is there from an earlier life is written again. Raises ConfigError when it cannot be."""
        final = self.place / f"v{version:08d}"
        partial = self.place / f".v{version:08d}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            if self._alpha is not None:
                write_peft(adapter_in(state, self._alpha, self._scaling, self._base), partial)
            else:
                shapes = {name: Shape(tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
                write_shards(partial, shapes, lambda name: state[name], SHARD_BYTES, describe=lambda: self._describe(partial))
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", field="rollout.engine_files", value=str(final), remedy="name another place, or free space there") from error
        return final

    def keep(self, versions: Collection[int]) -> None:
        """Remove all others."""
        for path in self.place.iterdir():
            found = _VERSION.match(path.name)
            if found is not None and int(found[1]) not in versions:
                shutil.rmtree(path, ignore_errors=True)

    def _describe(self, directory: Path) -> None:
        for name, content in self._beside.items():
            (directory / name).write_bytes(content)


def adapter_in(state: Mapping[str, torch.Tensor], alpha: float, scaling: Scaling, base: str = "") -> Adapter:
    """The updates among a policy's tensors: `M.lora_A` and `M.lora_B`, of experts `P.experts.delta.w1.lora_A`. Raises IntegrityError when there are none."""
    updates = {}
    for name, a in state.items():
        module = name.removesuffix(".lora_A")
        if module == name:
            continue
        b = state.get(f"{module}.lora_B")
        if b is None:
            raise IntegrityError("only lora_A is there", field="state", value=module, remedy="an update is A and B")
        updates[module.replace(".experts.delta.", ".experts.")] = Update(a, b, alpha, scaling)
    if not updates:
        raise IntegrityError("holds no adapter", field="state", value=len(state), remedy="a run with learner.lora_rank = 0 hands over whole checkpoints")
    return Adapter(updates, base)
