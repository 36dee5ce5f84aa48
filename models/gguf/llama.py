"""A GGUF file of a llama-like model as its Hugging Face twin: config.json's fields, tensors under the public names, in the public order of rows.

Guarantees: `GgufModel.open` reads the header only and has checked that every tensor of the model is there in its shape and none is left over; a field of the file
that would make it another model than the configuration says is refused by its name. The file stores the rows of q and k in pairs that rotate together; `read`
gives them back in halves, as the rotation of `transformers` has them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.gguf.blocks import dequantised
from driftline.models.gguf.file import GgufFile, Value
from driftline.models.gguf.vocabulary import end_ids, special_ids, tokenizer_files

__all__ = ["GgufModel"]

ARCHITECTURE = "llama"

_OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_INSIDE = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_RATES = "rope_freqs.weight"
"""Factors of Llama 3's rotation, which the file has worked out."""

_LLAMA3 = tuple({"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
                for factor in (8.0, 32.0))


@dataclass(frozen=True)
class GgufModel:
    """`config`: the fields of config.json. `shapes`, `kinds` (as ggml calls them) and `stored_bytes`: by public name, in the model's order."""

    file: GgufFile
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    stored: Mapping[str, str]

    @classmethod
    def open(cls, path: Path) -> GgufModel:
        """ConfigError when the file is of a model that is not read here, IntegrityError when it is damaged or incomplete."""
        file = GgufFile.open(path)
        config = _config(file)
        layers = int(config["num_hidden_layers"])
        if layers > len(file.tensors):
            raise IntegrityError(f"the file has {len(file.tensors)} tensors", field=f"{path}: {ARCHITECTURE}.block_count", value=layers,
                                 remedy="copy the file again from its source")
        shapes = _shapes(config)
        stored = {**{public: name for name, public in _OUTSIDE.items()},
                  **{f"model.layers.{i}.{public}.weight": f"blk.{i}.{name}.weight" for i in range(layers) for name, public in _INSIDE.items()}}
        stored = {public: stored[public] for public in shapes}
        missing = [name for name in stored.values() if name not in file.tensors]
        extra = sorted(file.tensors.keys() - set(stored.values()) - {_RATES})
        if missing or extra:
            raise IntegrityError(f"{len(missing)} tensors missing, {len(extra)} that a {ARCHITECTURE} of these sizes has not", field=str(path),
                                 value=(missing[:3], extra[:3]), remedy="the file must be whole and without biases or experts")
        for public, name in stored.items():
            if file.tensors[name].shape != shapes[public]:
                raise IntegrityError("shape differs from the model's", field=f"{path}: {name}", value=file.tensors[name].shape,
                                     remedy=f"expected {shapes[public]}")
        return cls(file, config, shapes, stored)

    @property
    def kinds(self) -> dict[str, str]:
        return {public: self.file.tensors[name].kind.name for public, name in self.stored.items()}

    @property
    def stored_bytes(self) -> dict[str, int]:
        return {public: self.file.tensors[name].nbytes for public, name in self.stored.items()}

    def read(self, public: str) -> np.ndarray:
        """The tensor of a public name, float32 in its shape. KeyError when the model has none of that name; IntegrityError when a value is not finite."""
        name = self.stored[public]
        tensor = self.file.tensors[name]
        values = dequantised(self.file.bytes_of(name), tensor.kind, tensor.shape)
        if not bool(np.isfinite(values).all()):
            raise IntegrityError("a weight is not finite", field=f"{self.file.path}: {name}", value=tensor.kind.name, remedy="copy the file again from its source")
        if public.endswith("q_proj.weight"):
            return _in_halves(values, int(self.config["num_attention_heads"]))
        if public.endswith("k_proj.weight"):
            return _in_halves(values, int(self.config["num_key_value_heads"]))
        return values

    def files(self) -> dict[str, bytes]:
        """What lies beside such a model in a Hugging Face directory: config.json, generation_config.json, the tokenizer's files."""
        special: dict[str, Any] = {key: self.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in self.config}
        if len(ends := end_ids(self.file)) > 1:
            special["eos_token_id"] = ends
        found = {"config.json": _text(self.config), **tokenizer_files(self.file)}
        return found | ({"generation_config.json": _text({"_from_model_config": True, **special})} if special else {})


def _in_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs that rotate together to first halves, then second ones."""
    return np.ascontiguousarray(values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2)).reshape(values.shape)


def _config(file: GgufFile) -> dict[str, Any]:
    fields = _Fields(file)
    found = file.metadata.get("general.architecture")
    if found != ARCHITECTURE:
        raise ConfigError("an architecture that is not read from GGUF", field=f"{file.path}: general.architecture", value=found,
                          remedy=f'"{ARCHITECTURE}" is; load another model from its Hugging Face directory')
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    kv_heads = fields.size("attention.head_count_kv", heads)
    width = fields.size("attention.key_length", hidden // heads)
    fields.must_be("attention.value_length", width, "keys and values of different widths are not computed")
    fields.must_be("rope.dimension_count", width, "rotating a part of each head is not computed")
    fields.must_be("expert_count", 0, "mixtures of experts are not read from GGUF")
    fields.must_be("attention.sliding_window", 0, "sliding windows are not computed")
    if heads % kv_heads or width % 2:
        raise ConfigError("heads that cannot be grouped or rotated", field=f"{file.path}: attention.head_count", value=(heads, kv_heads, width),
                          remedy="the count of heads is a multiple of the key heads', and their width even")
    embedding = file.tensors.get("token_embd.weight")
    config: dict[str, Any] = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": fields.size("vocab_size", embedding.shape[0] if embedding else 0),
        "hidden_size": hidden, "intermediate_size": fields.size("feed_forward_length"), "num_hidden_layers": fields.size("block_count"),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width, "hidden_act": "silu",
        "max_position_embeddings": fields.size("context_length"), "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.real("rope.freq_base", 10000.0), "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors, **special_ids(file),
    }
    scaling = _scaling(file, fields, config)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _scaling(file: GgufFile, fields: _Fields, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling` of config.json: linear by the file's word, Llama 3's by the factors it holds."""
    kind = file.metadata.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
    if _RATES in file.tensors:
        tensor = file.tensors[_RATES]
        found = dequantised(file.bytes_of(_RATES), tensor.kind, tensor.shape).reshape(-1)
        for scaling in _LLAMA3:
            wanted = _llama3_factors(scaling, float(config["rope_theta"]), int(config["head_dim"]))
            if found.shape == wanted.shape and np.allclose(found, wanted, rtol=1e-5, atol=0):
                return scaling
        raise ConfigError("the rotation's factors are of no scaling that is known", field=f"{file.path}: {_RATES}", value=found[-3:].tolist(),
                          remedy="Llama 3.1's (8) and 3.2's (32) are; load another model from its Hugging Face directory")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": fields.real("rope.scaling.factor")}
    raise ConfigError("a scaling of the rotation that is not read from GGUF", field=f"{file.path}: rope.scaling.type", value=kind,
                      remedy="none and linear are; load another model from its Hugging Face directory")


def _llama3_factors(scaling: Mapping[str, Any], theta: float, width: int) -> np.ndarray:
    """By how much each frequency is divided, float32 [width / 2]: 1 for the fast ones, `factor` for the slow ones, mixed between."""
    frequency = theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    made: np.ndarray = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return made


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    layer = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }
    inside = {f"model.layers.{i}.{name}.weight": shape for i in range(config["num_hidden_layers"]) for name, shape in layer.items()}
    table = (config["vocab_size"], hidden)
    return {"model.embed_tokens.weight": table, **inside, "model.norm.weight": (hidden,), **({} if config["tie_word_embeddings"] else {"lm_head.weight": table})}


class _Fields:
    """The numbers of the architecture's section of the metadata."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def _named(self, name: str, default: Value | None) -> tuple[str, Value]:
        key = f"{ARCHITECTURE}.{name}"
        value = self._file.metadata.get(key, default)
        if value is None:
            raise IntegrityError("the file does not say it", field=f"{self._file.path}: {key}", value=None, remedy="convert the model again")
        return f"{self._file.path}: {key}", value

    def size(self, name: str, default: int | None = None) -> int:
        field, value = self._named(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise IntegrityError("a size is a positive integer", field=field, value=value, remedy="convert the model again")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A positive number, as the shortest decimal that is this fp32: 1e-05, not 9.99999974e-06, as config.json of the model has it."""
        field, value = self._named(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise IntegrityError("not a positive number", field=field, value=value, remedy="convert the model again")
        return float(np.format_float_scientific(np.float32(value), unique=True))

    def must_be(self, name: str, wanted: int, problem: str) -> None:
        field, value = self._named(name, wanted)
        if value != wanted:
            raise ConfigError(problem, field=field, value=value, remedy=f"a model with {wanted}, or another form of this one")


def _text(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
