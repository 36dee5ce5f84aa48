"""What a checkpoint holds, from its headers alone: an inspected checkpoint is one that loads, but for values no header shows."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from driftline.models.architectures import AnyConfig
from driftline.models.config import K3Config
from driftline.models.quantisation import Quantisation
from driftline.models.recoding import EXPERT
from driftline.models.stored import Stored

__all__ = ["Attention", "FeedForward", "File", "Inspection", "Part", "inspect_checkpoint"]

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_EMBEDDING = "model.embed_tokens.weight"
MXFP4 = "MXFP4"
"""Beside the files' names of dtypes: packed values and their scales together."""


class Attention(Enum):
    KDA = "KDA"
    MLA = "MLA"
    GQA = "GQA"


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
    """place: the directory or .gguf file; parts: what lies around the layers, then the layers. `prefix`: what stands before the names of the text model's body,
    `model.` where nothing does."""

    place: Path
    config: AnyConfig
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


def inspect_checkpoint(place: Path) -> Inspection:
    """Of a directory or a .gguf file. Reads config.json, the index and headers. Raises ConfigError and IntegrityError for what `load_checkpoint` would refuse by
    name, dtype or shape."""
    stored = Stored.open(place)
    by_layer: dict[int | None, list[str]] = {None: [], **{i: [] for i in range(stored.config.num_hidden_layers)}}
    for name in stored.layouts:
        found = _LAYER.match(name)
        by_layer[int(found[1]) if found else None].append(name)
    counts = Counter(stored.file_of(name) for name in stored.layouts)
    files = tuple(File(name, (stored.source.directory / name).stat().st_size, count) for name, count in sorted(counts.items()))
    parts = tuple(_part(stored, layer, names) for layer, names in by_layer.items())
    stored.source.close()
    return Inspection(place, stored.config, stored.experts, stored.naming.body, files, parts, len(stored.layouts))


def _part(stored: Stored, layer: int | None, names: Iterable[str]) -> Part:
    config = stored.config
    parameters = routed = looked_up = 0
    nbytes: Counter[str] = Counter()
    for name in names:
        expert = EXPERT.match(name)
        packing = (expert["part"] if expert else None) or ""
        size = math.prod(stored.layouts[name].shape)
        nbytes[MXFP4 if packing else stored.layouts[name].dtype_name] += stored.nbytes(name)
        weights = {"": size, "_packed": 2 * size, "_scale": 0}[packing]
        parameters += weights
        routed += weights if expert else 0
        looked_up += size if name == _EMBEDDING and not config.tie_word_embeddings else 0
    if layer is None:
        return Part(None, None, None, parameters, parameters - looked_up, dict(nbytes))
    if not isinstance(config, K3Config):
        return Part(layer, Attention.GQA, FeedForward.DENSE, parameters, parameters, dict(nbytes))
    idle = routed - routed * config.num_experts_per_token // config.num_experts
    attention = Attention.KDA if config.is_kda(layer) else Attention.MLA
    feed_forward = FeedForward.MOE if config.is_moe(layer) else FeedForward.DENSE
    return Part(layer, attention, feed_forward, parameters, parameters - idle, dict(nbytes))
