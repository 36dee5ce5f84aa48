"""What a checkpoint holds, from its headers alone: an inspected checkpoint is one that loads, but for values no header shows."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from driftline.models.config import K3Config
from driftline.models.quantisation import Quantisation
from driftline.models.recoding import EXPERT
from driftline.models.shards import Layout
from driftline.models.stored import Stored

__all__ = ["Attention", "FeedForward", "File", "Inspection", "Part", "inspect_checkpoint"]

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_EMBEDDING = "model.embed_tokens.weight"
MXFP4 = "MXFP4"
"""Beside the files' names of dtypes: packed values and their scales together."""


class Attention(Enum):
    KDA = "KDA"
    MLA = "MLA"


class FeedForward(Enum):
    DENSE = "dense"
    MOE = "MoE"


@dataclass(frozen=True)
class Part:
    """A decoder layer (0-indexed `layer`), or what lies around the layers (None for all three).

    parameters: of weights, not of their scales; active: those that take part in one token, of an embedding none; nbytes: by dtype as stored, packed experts as
    MXFP4.
    """

    layer: int | None
    attention: Attention | None
    feed_forward: FeedForward | None
    parameters: int
    active: int
    nbytes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes.values())


@dataclass(frozen=True)
class File:
    """A file with tensors of the text model: its name, its size, and how many of them it holds."""

    name: str
    nbytes: int
    tensors: int


@dataclass(frozen=True)
class Inspection:
    """parts: what lies around the layers, then the layers. `prefix`: what stands before the names of the text model's body, `model.` where nothing does."""

    directory: Path
    config: K3Config
    experts: Quantisation
    prefix: str
    files: tuple[File, ...]
    parts: tuple[Part, ...]
    tensors: int

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def active(self) -> int:
        return sum(part.active for part in self.parts)

    @property
    def nbytes(self) -> Mapping[str, int]:
        return sum((Counter(part.nbytes) for part in self.parts), Counter[str]())

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes.values())


def inspect_checkpoint(directory: Path) -> Inspection:
    """Reads config.json, the index and headers. Raises ConfigError and IntegrityError for what `load_checkpoint` would refuse by name, dtype or shape."""
    stored = Stored.open(directory)
    config = stored.config
    by_layer: dict[int | None, dict[str, Layout]] = {None: {}, **{i: {} for i in range(config.num_hidden_layers)}}
    for name, layout in stored.layouts.items():
        found = _LAYER.match(name)
        by_layer[int(found[1]) if found else None][name] = layout
    counts = Counter(stored.file_of(name) for name in stored.layouts)
    files = tuple(File(name, (directory / name).stat().st_size, count) for name, count in sorted(counts.items()))
    parts = tuple(_part(config, layer, layouts) for layer, layouts in by_layer.items())
    stored.shards.close()
    return Inspection(directory, config, stored.experts, stored.naming.body, files, parts, len(stored.layouts))


def _part(config: K3Config, layer: int | None, layouts: Mapping[str, Layout]) -> Part:
    parameters = routed = 0
    nbytes: Counter[str] = Counter()
    for name, (dtype, shape, dtype_name) in layouts.items():
        expert = EXPERT.match(name)
        packing = (expert["part"] if expert else None) or ""
        size = math.prod(shape)
        nbytes[MXFP4 if packing else dtype_name] += size * (dtype.itemsize if dtype is not None else 0)
        weights = {"": size, "_packed": 2 * size, "_scale": 0}[packing]
        parameters += weights
        routed += weights if expert else 0
    idle = routed - routed * config.num_experts_per_token // config.num_experts
    if layer is None:
        looked_up = _EMBEDDING in layouts and not config.tie_word_embeddings
        return Part(None, None, None, parameters, parameters - (math.prod(layouts[_EMBEDDING].shape) if looked_up else 0), dict(nbytes))
    attention = Attention.KDA if config.is_kda(layer) else Attention.MLA
    feed_forward = FeedForward.MOE if config.is_moe(layer) else FeedForward.DENSE
    return Part(layer, attention, feed_forward, parameters, parameters - idle, dict(nbytes))
