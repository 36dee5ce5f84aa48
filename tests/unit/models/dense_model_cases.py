"""Small dense models of every family, random in every tensor, ours and transformers' from the same files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.utils import logging

from driftline.models.dense.config import DenseConfig
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.families import open_model

torch.set_num_threads(1)
logging.disable_progress_bar()  # type: ignore[no-untyped-call]

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
THEIRS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama one head of keys": LlamaConfig(**{**SIZES, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "llama as many keys": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama linear": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "llama yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama yarn mscale": LlamaConfig(**SIZES, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False}),
    "qwen2": Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
    "qwen2 yarn": Qwen2Config(**SIZES, rope_parameters={**YARN, "attention_factor": 1.3}),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen3 biases": Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=24),
    "smollm3": SmolLM3Config(**{**SIZES, "num_hidden_layers": 5}),
    "smollm3 layers": SmolLM3Config(**SIZES, no_rope_layers=[0, 1, 1]),
}


@cache
def saved(name: str, dtype: torch.dtype = torch.float32) -> Path:
    """A directory that transformers wrote, in several files."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(THEIRS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) if parameter.dim() == 1 else 0.08 * torch.randn_like(parameter))
    directory = Path(mkdtemp(prefix="dense-"))
    model.to(dtype).save_pretrained(directory, max_shard_size="60KB")
    return directory


def theirs(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(saved(name), dtype=dtype, attn_implementation="eager").eval()
    return model


def ours(name: str, dtype: torch.dtype = torch.float32) -> DenseForCausalLM:
    model = open_model(str(saved(name)), dtype=dtype)
    assert isinstance(model, DenseForCausalLM)
    return model


def tokens_of(batch: int, steps: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (batch, steps), generator=torch.Generator().manual_seed(seed))


def written(directory: Path, body: dict[str, Any]) -> Path:
    """A directory with this config.json."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(body))
    return directory


def small_dense(**changes: Any) -> DenseConfig:
    """A Qwen3, which has most parts: norms of queries and keys, heads wider than their share, a tied head."""
    body = {**SIZES, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}
    return DenseConfig.of({**body, **changes}, "test")


def random_dense(config: DenseConfig | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> DenseForCausalLM:
    """Random in every tensor."""
    torch.manual_seed(seed)
    model = DenseForCausalLM(config or small_dense()).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) if parameter.dim() == 1 else 0.1 * torch.randn_like(parameter))
    return model
