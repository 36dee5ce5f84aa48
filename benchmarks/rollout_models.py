"""The models and engines of the rollout benchmarks: K3's layout and a dense one, at a size that a GPU or a CPU takes. Weights are random: what is timed is arithmetic."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from learner_step import DEVICE, ON_GPU, random_model, smollm2_config, tiny_dense_config

from driftline.models.architectures import AnyConfig
from driftline.models.causal_lm import CausalLM
from driftline.models.config import tiny
from driftline.models.quantisation import Quantisation
from driftline.models.sizes import like_k3
from driftline.services.rollout.engine import Engine, EngineMemory
from driftline.services.rollout.runner import GraphRunner, runner_for
from driftline.services.rollout.runner.buckets import page_bucket

__all__ = ["DEVICE", "ON_GPU", "dense_model", "engine_of", "k3_model", "released", "say_of", "warmed"]

CACHE_BYTES = 24 * 2**30 if ON_GPU else 400 * 2**20


def k3_model(positions: int) -> CausalLM:
    """K3's layout: 8 layers of 1024 on a GPU, 5 of 128 on a CPU."""
    config = like_k3(8, 1024, num_experts=64, kv_lora_rank=512) if ON_GPU else tiny()
    return _made(config, positions)


def dense_model(positions: int) -> CausalLM:
    """SmolLM2-135M's sizes on a GPU, 4 layers of 96 on a CPU."""
    return _made(smollm2_config() if ON_GPU else tiny_dense_config(), positions)


def _made(config: AnyConfig, positions: int) -> CausalLM:
    config = config.model_copy(update={"max_position_embeddings": positions})
    return random_model(config, Quantisation.NONE).eval().requires_grad_(False)


def say_of(model: CausalLM) -> str:
    config: Any = model.config
    count = sum(p.numel() for p in model.parameters())
    return f"{type(model).__name__}, {config.num_hidden_layers} layers of {config.hidden_size}, {count / 1e6:.0f}M parameters, {str(next(model.parameters()).dtype)[6:]}"


def engine_of(
    model: CausalLM, *, max_batch: int, prefix_cache: bool = True, cache_bytes: int = CACHE_BYTES, host_bytes: int = 0, prefill_tokens: int | None = None,
    routes: bool = False, graphs: bool = True, **more: Any,
) -> Engine:
    """`more`: the engine's own arguments."""
    runner = more.pop("runner", None) or partial(runner_for, cuda_graphs=graphs)
    return Engine(
        model, version=0, max_batch=max_batch, record_routes=routes, memory=EngineMemory(cache_bytes, host_bytes, prefix_cache),
        prefill_tokens=prefill_tokens or (8192 if ON_GPU else 512), runner=runner, **more,
    )


def warmed(engine: Engine, begin: int, end: int, *, windows: Sequence[int] = (1,)) -> None:
    """The graphs of rows of `begin` to `end` tokens are captured before anything is measured. Each window is what a step scores of a row."""
    if not isinstance(engine.runner, GraphRunner):
        return
    pages, last = page_bucket(begin // 64 + 1), page_bucket(end // 64 + 1)
    while pages <= last:
        for window in windows:
            engine.runner.warm(window=window, pages=pages)
        pages *= 2


def released() -> None:
    """Give a device's memory back between cases."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
