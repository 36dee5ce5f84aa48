"""A dense decoder's configuration, read from an ordinary Hugging Face `config.json`: what is read is computed, and what is not computed is refused by its field.

Llama 2 and 3 (SmolLM and SmolLM2 are Llamas), Qwen2 and 2.5, Qwen3, Mistral without its window, and SmolLM3. They differ in biases, in norms of queries and keys,
in which layers rotate and in what a field that is left out means; all of it is in this file, as data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from driftline.messages.errors import ConfigError
from driftline.models.dense.positions import Rope

__all__ = ["Architecture", "DenseConfig"]


class Architecture(StrEnum):
    """`model_type` of the files this decoder reads."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    MISTRAL = "mistral"
    SMOLLM3 = "smollm3"


@dataclass(frozen=True)
class _Family:
    """What a family fixes, and what its fields mean where a file leaves them out."""

    title: str
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: the file's attention_bias says so
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    key_value_heads: int | None = None  # None: as many as there are queries
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rope_theta: float = 10000.0
    tied: bool = False
    window_unless_said: bool = False


_FAMILIES = {
    Architecture.LLAMA: _Family("LlamaForCausalLM", mlp_bias=None),
    Architecture.QWEN2: _Family("Qwen2ForCausalLM", qkv_bias=True, output_bias=False, key_value_heads=32),
    Architecture.QWEN3: _Family("Qwen3ForCausalLM", qk_norm=True, key_value_heads=32, head_dim=128),
    Architecture.MISTRAL: _Family("MistralForCausalLM", qkv_bias=False, output_bias=False, key_value_heads=8, window_unless_said=True),
    Architecture.SMOLLM3: _Family("SmolLM3ForCausalLM", mlp_bias=None, key_value_heads=4, rope_theta=2_000_000.0, tied=True),
}
_OURS = "use a checkpoint whose config.json does not ask for it"


class DenseConfig(BaseModel):
    """Sizes and switches of a dense decoder. `rotating`: the 0-indexed layers that rotate queries and keys, None for all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_type: Architecture
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    rms_norm_eps: float = Field(default=1e-6, ge=0.0, allow_inf_nan=False)
    rope: Rope = Rope()
    rotating: tuple[int, ...] | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = Field(default=2048, ge=1)
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_key_value_heads = {self.num_key_value_heads} must divide num_attention_heads = {self.num_attention_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even: halves of a head are rotated against each other")
        return self

    def rotates(self, layer: int) -> bool:
        """Whether 0-indexed `layer` rotates its queries and keys by their positions."""
        return self.rotating is None or layer in self.rotating

    @classmethod
    def load(cls, directory: str | Path) -> DenseConfig:
        """Read `config.json` of a checkpoint directory. Raises ConfigError naming the file and field."""
        path = Path(directory) / "config.json"
        try:
            raw: Any = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError("no config.json here", field="policy.init", value=str(directory),
                              remedy="give a checkpoint directory with config.json and *.safetensors") from None
        except ValueError as error:
            raise ConfigError(f"not JSON: {error}", field=str(path), remedy="restore the file from its source") from error
        return cls.of(raw, str(path))

    @classmethod
    def of(cls, raw: object, at: str) -> DenseConfig:
        """From the object of a config.json, the text model's part of it where there is one. `at`: where it is from. Raises ConfigError naming the field."""
        if not isinstance(raw, Mapping) or not isinstance(raw.get("text_config", raw), Mapping):
            raise ConfigError("not an object of fields", field=at, value=raw, remedy="restore the file from its source")
        body: Mapping[str, Any] = raw.get("text_config", raw)
        kind = body.get("model_type")
        if not isinstance(kind, str) or kind not in _FAMILIES:
            raise ConfigError("no dense decoder of this model_type", field=f"{at}: model_type", value=kind, remedy=f"one of {', '.join(sorted(_FAMILIES))}")
        family = _FAMILIES[Architecture(kind)]
        _refuse_others(raw, body, family, at)
        try:
            return cls.model_validate(_fields(body, family, at))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"]) or "config"
            said = None if first["type"] == "missing" else first.get("input")
            raise ConfigError(first["msg"], field=f"{at}: {name}", value=said, remedy="restore the file from its source") from error

    def document(self) -> dict[str, Any]:
        """The `config.json` of this model: Hugging Face's fields, in the form that its releases before and after version 5 both read."""
        family = _FAMILIES[self.model_type]
        rope_theta, scaling = self.rope.document()
        body = {
            "architectures": [family.title], "model_type": str(self.model_type), "hidden_act": "silu", "attention_dropout": 0.0, "rope_theta": rope_theta,
            "rope_scaling": scaling, "use_cache": True, **self.model_dump(mode="json", exclude={"model_type", "rope", "rotating", "qk_norm", "qkv_bias", "output_bias",
                                                                                               "mlp_bias"}),
        }
        if family.qkv_bias is None:
            body["attention_bias"] = self.qkv_bias
        if family.mlp_bias is None:
            body["mlp_bias"] = self.mlp_bias
        if family.window_unless_said:
            body["sliding_window"] = None
        elif self.model_type is not Architecture.LLAMA:
            body |= {"use_sliding_window": False, "sliding_window": None}
        if self.model_type is Architecture.SMOLLM3:
            body["no_rope_layers"] = [int(self.rotates(layer)) for layer in range(self.num_hidden_layers)]
        return body

    def save(self, directory: str | Path) -> None:
        """Write `config.json`, whole or not at all."""
        partial = Path(directory) / ".config.json.partial"
        partial.write_text(json.dumps(self.document(), indent=2) + "\n", encoding="utf-8")
        os.replace(partial, Path(directory) / "config.json")


def _refuse_others(raw: Mapping[str, Any], body: Mapping[str, Any], family: _Family, at: str) -> None:
    """Raise ConfigError for a field that asks for another function than this decoder computes; ignored, it would load without a word and be wrong."""
    for name, only in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0), ("attention_dropout", 0.0), ("rope_interleaved", False), ("use_mrope", False)):
        if body.get(name) not in (None, only):
            raise ConfigError(f"this decoder computes {name} = {only!r} only", field=f"{at}: {name}", value=body[name], remedy=_OURS)
    for where in (raw, body):
        if where.get("quantization_config") is not None:
            raise ConfigError("quantised weights of a dense model are read from .gguf files only", field=f"{at}: quantization_config",
                              value=where["quantization_config"], remedy="use the checkpoint before it was quantised, or a .gguf file")
    windowed = body.get("use_sliding_window", False) or (family.window_unless_said and body.get("sliding_window", 4096) is not None)
    kinds = body.get("layer_types") or []
    layers = sorted({str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "full_attention"})
    if windowed or layers:
        name = "layer_types" if layers else "use_sliding_window" if body.get("use_sliding_window") else "sliding_window"
        raise ConfigError("every layer of this decoder attends to its whole context, and a model trained with a window is another one", field=f"{at}: {name}",
                          value=layers or body.get(name, "left out, which means 4096"),
                          remedy="use a checkpoint without a window (Mistral from 7B v0.2 on has sliding_window = null)")


def _fields(body: Mapping[str, Any], family: _Family, at: str) -> dict[str, Any]:
    """The fields of DenseConfig that the object says or means."""
    plain = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps", "max_position_embeddings",
             "bos_token_id", "eos_token_id", "pad_token_id")
    found = {name: body[name] for name in plain if body.get(name) is not None}
    heads, width = found.get("num_attention_heads"), found.get("hidden_size")
    found["num_key_value_heads"] = body["num_key_value_heads"] if body.get("num_key_value_heads") is not None else (
        family.key_value_heads if family.key_value_heads is not None and "num_key_value_heads" not in body else heads)
    said = body.get("head_dim") if body.get("head_dim") is not None else family.head_dim
    found["head_dim"] = said if said is not None or not (isinstance(heads, int) and isinstance(width, int) and heads > 0) else _quotient(width, heads, at)
    biased, mlp_biased = body.get("attention_bias") or False, body.get("mlp_bias") or False
    found["qk_norm"] = family.qk_norm
    found["qkv_bias"] = biased if family.qkv_bias is None else family.qkv_bias
    found["output_bias"] = biased if family.output_bias is None else family.output_bias
    found["mlp_bias"] = mlp_biased if family.mlp_bias is None else family.mlp_bias
    found["tie_word_embeddings"] = body["tie_word_embeddings"] if body.get("tie_word_embeddings") is not None else family.tied
    found["rope"] = Rope.of(body, family.rope_theta, at)
    if body.get("model_type") == Architecture.SMOLLM3:
        found["rotating"] = _rotating(body, at)
    return found


def _quotient(width: int, heads: int, at: str) -> int:
    if width % heads:
        raise ConfigError("num_attention_heads must divide hidden_size where head_dim is left out", field=f"{at}: num_attention_heads", value=heads,
                          remedy=f"hidden_size is {width}: set head_dim")
    return width // heads


def _rotating(body: Mapping[str, Any], at: str) -> tuple[int, ...]:
    """SmolLM3's: `no_rope_layers` has a 1 for a layer that does rotate; left out, every fourth layer does not."""
    layers = body.get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ConfigError("not a number of layers", field=f"{at}: num_hidden_layers", value=layers, remedy="restore the file from its source")
    said, every = body.get("no_rope_layers"), body.get("no_rope_layer_interval", 4)
    if said is None:
        if not isinstance(every, int) or every < 1:
            raise ConfigError("not a number of layers", field=f"{at}: no_rope_layer_interval", value=every, remedy="a whole number from 1, e.g. 4")
        said = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(said, list) or len(said) < layers or any(flag not in (0, 1) for flag in said):
        raise ConfigError(f"a 0 or a 1 for each of {layers} layers", field=f"{at}: no_rope_layers", value=said, remedy="restore the file from its source")
    return tuple(layer for layer in range(layers) if said[layer])
