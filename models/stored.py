"""A checkpoint that fits its config.json: every name is there, none is too many, and each has the dtype and shape of the model's. No tensor was read to know it.

What another model stores beside the text model under a prefix (a vision tower, a projector) is not looked at, and a shard with nothing else is not opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from driftline.messages.errors import IntegrityError
from driftline.models.config import K3Config
from driftline.models.mlp import LatentMoe, PackedExperts
from driftline.models.model import K3ForCausalLM
from driftline.models.naming import Naming
from driftline.models.quantisation import Quantisation
from driftline.models.recoding import EXPERT
from driftline.models.shard_files import Shape
from driftline.models.shards import Layout, Shards
from driftline.models.state import policy_dtype, policy_tensors, public_tensors

__all__ = ["Stored", "held_form", "public_shapes", "skeleton"]

_LOADABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TOGETHER = "the checkpoint and its config.json must belong together"


def skeleton(config: K3Config, experts: Quantisation) -> K3ForCausalLM:
    """The model on the meta device, its routed experts in form `experts`: names and shapes without memory."""
    with torch.device("meta"):
        model = K3ForCausalLM(config)
        if experts is Quantisation.MXFP4:
            for module in model.modules():
                if isinstance(module, LatentMoe):
                    module.experts = PackedExperts(config)
    return model


def held_form(model: nn.Module) -> Quantisation:
    """The form in which a model holds its routed experts."""
    return Quantisation.MXFP4 if any(isinstance(module, PackedExperts) for module in model.modules()) else Quantisation.NONE


def public_shapes(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, Shape]:
    """What a checkpoint of the model in policy dtype `dtype` holds, by public name and in the model's order."""
    named = ((public, tensor) for name, held in policy_tensors(model) for public, tensor in public_tensors(name, held))
    return {public: Shape(policy_dtype(public, dtype), tuple(tensor.shape)) for public, tensor in named}


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose names, dtypes and shapes are those of its config. `layouts`: of every tensor of the text model, by our name."""

    config: K3Config
    experts: Quantisation
    shards: Shards
    naming: Naming
    layouts: dict[str, Layout]

    @classmethod
    def open(cls, directory: Path) -> Stored:
        """Reads config.json, the index and headers; no tensor. Raises ConfigError and IntegrityError naming file, tensor, value and remedy."""
        config, experts = K3Config.load_with_form(directory)
        shards = Shards.of(directory)
        naming = Naming.of(shards.files)
        wanted = public_shapes(skeleton(config, experts))
        owned = {stored for stored in shards.files if naming.owns(stored)}
        missing = [name for name in wanted if naming.stored(name) not in owned]
        extra = sorted(owned - {naming.stored(name) for name in wanted})
        if missing or extra:
            raise IntegrityError(f"{len(missing)} tensors missing, {len(extra)} not in the model of its config.json", field=str(directory),
                                 value=(missing[:3], extra[:3]), remedy=_remedy(missing, extra, experts))
        layouts = shards.layouts([naming.stored(name) for name in wanted])
        by_name = {name: layouts[naming.stored(name)] for name in wanted}
        made = cls(config, experts, shards, naming, by_name)
        for name, shape in wanted.items():
            _check(made.at(name), name, by_name[name], shape)
        return made

    def read(self, name: str) -> torch.Tensor:
        """The tensor of one of our names, A_log without its padding. Raises IntegrityError when it holds what no model does."""
        stored = self.naming.stored(name)
        tensor = self.shards.read(stored)
        at = self.at(name)
        if name.endswith(".weight_scale") and bool((tensor == 255).any()):
            raise IntegrityError("a scale of 255 is NaN, and so would be 32 weights", field=at, value=255, remedy="make the checkpoint again from its source")
        if name.endswith("A_log"):
            heads = self.config.linear_attn_config.num_heads
            tensor, padding = tensor[:heads], tensor[heads:]
            if bool((padding != 0).any()):
                raise IntegrityError("what is beyond the model's heads is not padding", field=at, value=padding[padding != 0][:3].tolist(),
                                     remedy=f"linear_attn_config.num_heads = {heads} and the file must belong together")
        return tensor

    def file_of(self, name: str) -> str:
        return self.shards.files[self.naming.stored(name)]

    def at(self, name: str) -> str:
        """The file of one of our names, and what it is called there: for an error."""
        return f"{self.shards.directory / self.file_of(name)}: {self.naming.stored(name)}"


def _remedy(missing: list[str], extra: list[str], experts: Quantisation) -> str:
    form = {bool(found["part"]) for name in extra if (found := EXPERT.match(name[name.find("model.layers.") :])) is not None}
    if form == {True} and experts is Quantisation.NONE:
        return "the routed experts are packed: config.json needs the quantization_config they were made with"
    if form == {False} and experts is Quantisation.MXFP4:
        return "the routed experts are not packed: config.json must not have a quantization_config"
    return _TOGETHER if extra or not missing else f"{_TOGETHER}; if a download was cut short, finish it"


def _check(at: str, name: str, found: Layout, wanted: Shape) -> None:
    """Dtype and shape of one tensor."""
    fits = found.dtype is torch.uint8 if wanted.dtype is torch.uint8 else found.dtype in _LOADABLE
    if not fits:
        raise IntegrityError("another dtype than the model's", field=at, value=found.dtype_name,
                             remedy="expected U8" if wanted.dtype is torch.uint8 else "expected BF16, F16, F32 or F64; quantised tensors other than routed experts in "
                             "MXFP4 are not read")
    padded = name.endswith("A_log") and len(found.shape) == 1 and found.shape[0] >= wanted.shape[0]  # the release pads A_log to 128 heads
    if found.shape != wanted.shape and not padded:
        raise IntegrityError("shape differs from the model's", field=at, value=found.shape, remedy=f"expected {wanted.shape}: {_TOGETHER}")
