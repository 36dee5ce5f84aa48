"""A checkpoint that fits its configuration: every name is there, none is too many, and each has the dtype and shape of the model's. No tensor was read to know it.

What another model stores beside the text model under a prefix (a vision tower, a projector) is not looked at, and a shard with nothing else is not opened. A
directory of safetensors and a .gguf file are the same here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from driftline.messages.errors import IntegrityError
from driftline.models.architectures import AnyConfig, configuration, skeleton
from driftline.models.config import K3Config
from driftline.models.dense.config import DenseConfig
from driftline.models.gguf.shards import GgufShards
from driftline.models.locate import GGUF
from driftline.models.mlp import PackedExperts
from driftline.models.naming import Naming
from driftline.models.quantisation import Quantisation
from driftline.models.recoding import EXPERT
from driftline.models.shard_files import Shape
from driftline.models.shards import Layout, Shards
from driftline.models.state import policy_dtype, policy_tensors, public_tensors

__all__ = ["Source", "Stored", "held_form", "public_shapes", "skeleton"]

_LOADABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TOGETHER = "the checkpoint and its config.json must belong together"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
"""Stored by early releases of Llama checkpoints; follows from the configuration."""


class Source(Protocol):
    """Stored tensors by name: `files` says which file of `directory` has each; `Shards` of a directory, `GgufShards` of a file."""

    @property
    def directory(self) -> Path: ...

    @property
    def files(self) -> Mapping[str, str]: ...

    def layouts(self, names: Collection[str]) -> dict[str, Layout]: ...

    def read(self, name: str) -> torch.Tensor: ...

    def close(self) -> None: ...


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

    config: AnyConfig
    experts: Quantisation
    source: Source
    naming: Naming
    layouts: dict[str, Layout]

    @classmethod
    def open(cls, place: Path) -> Stored:
        """Of a directory or a .gguf file. Reads config.json, the index and headers; no tensor. Raises ConfigError and IntegrityError naming file, tensor, value and
        remedy."""
        config, experts, source = _opened(place)
        naming = Naming.of(source.files)
        wanted = public_shapes(skeleton(config, experts))
        owned = {stored for stored in source.files if naming.owns(stored) and not _COMPUTED.search(stored)}
        missing = [name for name in wanted if naming.stored(name) not in owned]
        extra = sorted(owned - {naming.stored(name) for name in wanted})
        twice = [naming.stored(_HEAD)] if config.tie_word_embeddings and extra == [naming.stored(_HEAD)] and isinstance(config, DenseConfig) else []
        if missing or extra != twice:
            raise IntegrityError(f"{len(missing)} tensors missing, {len(extra)} not in the model of its config.json", field=str(place),
                                 value=(missing[:3], extra[:3]), remedy=_remedy(missing, extra, experts))
        layouts = source.layouts([naming.stored(name) for name in wanted])
        made = cls(config, experts, source, naming, {name: layouts[naming.stored(name)] for name in wanted})
        for name, shape in wanted.items():
            _check(made.at(name), name, made.layouts[name], shape)
        return made

    @property
    def head_twice(self) -> bool:
        """Whether a head that the configuration ties to the embedding is stored beside it, as some tools do."""
        return self.config.tie_word_embeddings and self.naming.stored(_HEAD) in self.source.files

    def check_head(self) -> None:
        """Raise IntegrityError when the stored head is another than the embedding it is tied to: the model that the files were trained as is then in doubt."""
        if self.head_twice and not torch.equal(self.source.read(self.naming.stored(_HEAD)), self.source.read(self.naming.stored(_EMBEDDING))):
            raise IntegrityError("differs from the embedding, which tie_word_embeddings says it is", field=self.at(_HEAD), value=self.naming.stored(_HEAD),
                                 remedy="set tie_word_embeddings = false in config.json to use it, or remove it from the files")

    def read(self, name: str) -> torch.Tensor:
        """The tensor of one of our names, A_log without its padding. Raises IntegrityError when it holds what no model does."""
        stored = self.naming.stored(name)
        tensor = self.source.read(stored)
        at = self.at(name)
        if name.endswith(".weight_scale") and bool((tensor == 255).any()):
            raise IntegrityError("a scale of 255 is NaN, and so would be 32 weights", field=at, value=255, remedy="make the checkpoint again from its source")
        if name.endswith("A_log") and isinstance(self.config, K3Config):
            heads = self.config.linear_attn_config.num_heads
            tensor, padding = tensor[:heads], tensor[heads:]
            if bool((padding != 0).any()):
                raise IntegrityError("what is beyond the model's heads is not padding", field=at, value=padding[padding != 0][:3].tolist(),
                                     remedy=f"linear_attn_config.num_heads = {heads} and the file must belong together")
        return tensor

    def nbytes(self, name: str) -> int:
        """What one of our names takes in its file; 0 of a dtype that is not known here."""
        if isinstance(self.source, GgufShards):
            return self.source.nbytes(self.naming.stored(name))
        dtype, shape, _ = self.layouts[name]
        return math.prod(shape) * dtype.itemsize if dtype is not None else 0

    def file_of(self, name: str) -> str:
        return self.source.files[self.naming.stored(name)]

    def at(self, name: str) -> str:
        """The file of one of our names, and what it is called there: for an error."""
        return f"{self.source.directory / self.file_of(name)}: {self.naming.stored(name)}"


def _opened(place: Path) -> tuple[AnyConfig, Quantisation, Source]:
    if place.suffix == GGUF and place.is_file():
        source = GgufShards.open(place)
        return DenseConfig.of(source.config, str(place)), Quantisation.NONE, source
    config, experts = configuration(place)
    return config, experts, Shards.of(place)


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
