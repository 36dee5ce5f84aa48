"""K3's configuration under its public field names (`text_config` of the release), plus the sizes we ship.

`K3Config.load(dir)` reads a public `config.json` (the text part of a multimodal one too). Unknown fields are kept out; contradictory ones are refused, and so
is a known field whose value asks for another model than this one computes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from driftline.messages.errors import ConfigError
from driftline.models.quantisation import Quantisation

__all__ = ["K3Config", "LinearAttention", "tiny"]

# What the decoder is built for. Another value ignored would load without a word and compute something else.
_BUILT_FOR: dict[str, Any] = {
    "hidden_act": "situ", "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc", "num_expert_group": 1,
    "topk_group": 1, "moe_layer_freq": 1, "attention_bias": False,
}

# Where a file leaves these out, the release's own code takes another function than K3's (no bound on the gate or on SiTU's second factor, no residual mixing).
_STATED = ("attn_res_block_size", "mla_use_output_gate", "latent_moe_use_norm", "activation_situ_beta", "activation_situ_linear_beta",
           "linear_attn_config.gate_lower_bound", "linear_attn_config.use_full_rank_gate")


class LinearAttention(BaseModel):
    """`linear_attn_config` of the release. Layer lists are 1-indexed, as published."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    short_conv_kernel_size: int = Field(default=4, ge=2)
    gate_lower_bound: float = Field(default=-5.0, ge=-5.0, lt=0.0)
    use_full_rank_gate: bool = True
    full_attn_layers: tuple[int, ...] = ()
    kda_layers: tuple[int, ...] = ()


class K3Config(BaseModel):
    """Sizes of a K3 decoder. Defaults are K3's own where a size does not scale with the model."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: str = "kimi_linear"
    vocab_size: int = Field(ge=4)
    hidden_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    first_k_dense_replace: int = Field(default=1, ge=0)
    q_lora_rank: int = Field(ge=1)
    kv_lora_rank: int = Field(ge=1)
    qk_nope_head_dim: int = Field(ge=1)
    qk_rope_head_dim: int = Field(ge=0)
    v_head_dim: int = Field(ge=1)
    mla_use_output_gate: bool = True
    linear_attn_config: LinearAttention
    num_experts: int = Field(ge=1)
    num_experts_per_token: int = Field(ge=1)
    num_shared_experts: int = Field(default=2, ge=0)
    moe_intermediate_size: int = Field(ge=1)
    routed_expert_hidden_size: int = Field(ge=1)
    latent_moe_use_norm: bool = True
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    attn_res_block_size: int = Field(default=12, ge=1)
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1048576
    bos_token_id: int = 256
    eos_token_id: int = 257
    pad_token_id: int = 258

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        full, kda = set(self.linear_attn_config.full_attn_layers), set(self.linear_attn_config.kda_layers)
        layers = set(range(1, self.num_hidden_layers + 1))
        if full & kda or full | kda != layers:
            raise ValueError(
                f"linear_attn_config.full_attn_layers and kda_layers must split layers 1..{self.num_hidden_layers} (1-indexed); "
                f"missing {sorted(layers - full - kda)}, in both {sorted(full & kda)}, beyond {sorted((full | kda) - layers)}"
            )
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(f"num_experts_per_token = {self.num_experts_per_token} exceeds num_experts = {self.num_experts}")
        if not self.moe_renormalize:
            raise ValueError("moe_renormalize = false is not part of K3 and not implemented: set it to true")
        return self

    def is_kda(self, layer: int) -> bool:
        """Whether 0-indexed `layer` is a KDA layer."""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether 0-indexed `layer` has routed experts; the first `first_k_dense_replace` layers are dense."""
        return layer >= self.first_k_dense_replace

    @property
    def moe_layers(self) -> int:
        return max(0, self.num_hidden_layers - self.first_k_dense_replace)

    @classmethod
    def load(cls, directory: str | Path) -> K3Config:
        """Read `config.json` of a checkpoint directory. Raises ConfigError naming the file and field."""
        return cls.load_with_form(directory)[0]

    @classmethod
    def load_with_form(cls, directory: str | Path) -> tuple[K3Config, Quantisation]:
        """`load`, and the form in which the file says the routed experts are stored."""
        path = Path(directory) / "config.json"
        try:
            raw: Any = json.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError("no config.json here", field="policy.init", value=str(directory),
                              remedy="give a checkpoint directory with config.json and *.safetensors, or \"base\"") from None
        except ValueError as error:
            raise ConfigError(f"not JSON: {error}", field=str(path), remedy="restore the file from its source") from error
        body = raw.get("text_config", raw) if isinstance(raw, dict) else raw
        if not isinstance(body, dict):
            raise ConfigError("not an object of fields", field=str(path), value=body, remedy="restore the file from its source")
        return cls._read(body, path), Quantisation.of(raw, str(path))

    @classmethod
    def _read(cls, body: dict[str, Any], path: Path) -> K3Config:
        for name, only in _BUILT_FOR.items():
            if body.get(name, only) != only:
                raise ConfigError(f"this decoder computes {name} = {only!r} only", field=f"{path}: {name}", value=body[name],
                                  remedy="use a checkpoint of K3's architecture")
        try:
            config = cls.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(p) for p in first["loc"]) or "config"
            raise ConfigError(first["msg"], field=f"{path}: {name}", value=first.get("input"), remedy="use K3's field names") from error
        for name in _STATED:
            outer, _, inner = name.rpartition(".")
            if inner not in (body[outer] if outer else body):
                raise ConfigError("left out, which asks for another model than K3", field=f"{path}: {name}", remedy="state it as K3's config.json does")
        heads = body.get("num_key_value_heads")
        if heads not in (None, config.num_attention_heads):
            raise ConfigError(f"this decoder gives each of its {config.num_attention_heads} heads keys and values of its own",
                              field=f"{path}: num_key_value_heads", value=heads, remedy="use a checkpoint of K3's architecture")
        return config

    def save(self, directory: str | Path, quantisation: Quantisation = Quantisation.NONE) -> None:
        """Write `config.json`, whole or not at all, of a checkpoint whose routed experts are stored as `quantisation` says."""
        built_for = {**_BUILT_FOR, "num_key_value_heads": self.num_attention_heads, "num_nextn_predict_layers": 0}
        body = {"architectures": ["KimiLinearForCausalLM"], **self.model_dump(mode="json"), **built_for}
        scheme = quantisation.document()
        if scheme is not None:
            body["quantization_config"] = scheme
        partial = Path(directory) / ".config.json.partial"
        partial.write_text(json.dumps(body, indent=2) + "\n")
        os.replace(partial, Path(directory) / "config.json")


def tiny(**changes: Any) -> K3Config:
    """The demo's and tests' size: every part of K3 at about two million parameters, byte-level vocabulary."""
    layers = int(changes.get("num_hidden_layers", 5))
    full = tuple(i for i in range(1, layers + 1) if i % 4 == 0 or i == layers)
    body: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 384,
        "q_lora_rank": 64,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 32,
            "full_attn_layers": full,
            "kda_layers": tuple(i for i in range(1, layers + 1) if i not in full),
        },
        "num_experts": 16,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 64,
        "attn_res_block_size": 2,
    }
    return K3Config.model_validate({**body, **changes})
