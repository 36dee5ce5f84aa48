"""A checkpoint with an adapter folded into it, written tensor by tensor: beside one tensor nothing is held, so a model of any size is merged on any machine.

What no update touches is copied as it is stored, to the bit. W + scale B A is summed in fp32 and rounded once to the stored dtype; packed experts are unpacked, added
to and packed again by the rule of the released checkpoints, groups in which nothing changed keeping their codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.architectures import skeleton
from driftline.models.checkpoint import write_checkpoint
from driftline.models.locate import located
from driftline.models.lora.adapter import Adapter, Update
from driftline.models.lora.experts import repacked
from driftline.models.lora.linear import added
from driftline.models.lora.names import apart
from driftline.models.recoding import EXPERT, Recoded, packed_names
from driftline.models.shard_files import SHARD_BYTES, Shape
from driftline.models.stored import Stored, public_shapes

__all__ = ["check_fits", "merge_checkpoint"]


def merge_checkpoint(base: str, adapter: Adapter, out: str | Path, *, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write the checkpoint `base` (`located`'s words) with the adapter in its weights to `out`; returns the files of tensors.

    Raises, before anything is written, ConfigError and IntegrityError as loading the base does, and IntegrityError when an update is of no weight of it.
    """
    place = located(base)
    if place.resolve() == Path(out).resolve():
        raise ConfigError("would replace the base by the merged model", field="out", value=str(out), remedy="name another directory")
    stored = Stored.open(place)
    stored.check_head()
    shapes = {name: Shape(_kept(stored, name, shape.dtype), shape.shape) for name, shape in public_shapes(skeleton(stored.config, stored.experts)).items()}
    updates = apart(adapter.updates)
    _check(updates, shapes, place)
    merged = _Merged(stored, updates, shapes)
    files = write_checkpoint(Path(out), stored.config, stored.experts, shapes, Recoded(merged.read, stored.experts, stored.experts, torch.bfloat16), shard_bytes)
    stored.source.close()
    return files


def check_fits(base: str, adapter: Adapter) -> None:
    """Raise IntegrityError when an update is of no weight of the checkpoint. Only headers are read."""
    place = located(base)
    stored = Stored.open(place)
    shapes = public_shapes(skeleton(stored.config, stored.experts))
    stored.source.close()
    _check(apart(adapter.updates), shapes, place)


class _Merged:
    """`read(name)` of the merged checkpoint. One expert's pair is kept, whose halves are asked for one after the other."""

    def __init__(self, stored: Stored, updates: Mapping[str, Update], shapes: Mapping[str, Shape]) -> None:
        self._stored, self._updates, self._shapes = stored, updates, shapes
        self._matrix, self._pair = "", (torch.empty(0), torch.empty(0))

    def read(self, name: str) -> torch.Tensor:
        expert = EXPERT.match(name)
        if expert is not None and expert["part"]:
            return self._packed(name, expert["matrix"])
        tensor = self._stored.read(name).to(self._shapes[name].dtype)
        update = self._updates.get(name.removesuffix(".weight"))
        return tensor if update is None or not name.endswith(".weight") else added(tensor, update)

    def _packed(self, name: str, matrix: str) -> torch.Tensor:
        update = self._updates.get(matrix)
        if update is None:
            return self._stored.read(name)
        if matrix != self._matrix:
            packed, scale = (self._stored.read(part) for part in packed_names(matrix))
            self._matrix, self._pair = matrix, repacked(packed, scale, update)
        return self._pair[packed_names(matrix).index(name)]


def _kept(stored: Stored, name: str, policy: torch.dtype) -> torch.dtype:
    """The stored dtype, or the policy's where a file has one that only it has."""
    found = stored.layouts[name].dtype
    return found if found is not None and (found is torch.uint8 or found.is_floating_point) and stored.source.directory.is_dir() else policy


def _check(updates: Mapping[str, Update], shapes: Mapping[str, Shape], place: Path) -> None:
    for name, update in updates.items():
        packed, _ = packed_names(name)
        shape = shapes.get(f"{name}.weight") or shapes.get(packed)
        wanted = None if shape is None else (shape.shape[0], shape.shape[1] * 2) if packed in shapes else shape.shape
        if wanted is None or len(wanted) != 2 or update.shape != tuple(wanted):
            raise IntegrityError("the base has no such weight" if wanted is None else f"the base's weight is {tuple(wanted)}", field=name, value=update.shape,
                                 remedy=f"the adapter is of another base than {place}")
