"""A checkpoint, and adapters beside it, as an engine that the gateway can ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from driftline.kernels.mode import Numerics, set_numerics
from driftline.messages.errors import ConfigError
from driftline.models.causal_lm import CausalLM
from driftline.models.families import open_model
from driftline.models.locate import located
from driftline.models.lora.bank import AdapterBank
from driftline.models.lora.peft import read_peft
from driftline.models.tokenizers.loading import load_tokenizer
from driftline.services.rollout.engine import Engine, EngineMemory
from driftline.services.rollout.local import LocalEngine
from driftline.services.rollout.runner import runner_for
from driftline.services.rollout.speculation.opening import speculator_for
from driftline.services.rollout_config import RolloutConfig, Speculation

__all__ = ["Served", "open_local"]

MIB = 2**20


@dataclass(frozen=True)
class Served:
    """`place` as `policy.init` says it; `name` what clients call it (empty: the last part of the place); `adapters`: PEFT directories by the names that clients call;
    `context`: the longest sequence served (0: the model's). `dtype` "auto": bfloat16 on a GPU, float32 on a CPU."""

    place: str
    name: str = ""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = "auto"
    numerics: Numerics = Numerics.FAST
    threads: int = 1
    context: int = 0
    max_batch: int = 64
    prefill_tokens: int = 2048
    cache_mb: int = 0
    host_cache_mb: int = 0
    prefix_cache: bool = True
    queue_mb: int = 256
    cuda_graphs: bool = True
    speculation: Speculation = Speculation.OFF
    drafter: str = ""
    draft_tokens: int = 3


def open_local(served: Served) -> LocalEngine:
    """The engine, not started. Sets the process's numerics and threads. ConfigError for what is not there, and for an adapter that is of another base."""
    torch.set_num_threads(served.threads)
    set_numerics(served.numerics)
    device = _device(served.device)
    dtype = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32, "bfloat16": torch.bfloat16, "float32": torch.float32}.get(served.dtype)
    if dtype is None:
        raise ConfigError("not a dtype", field="--dtype", value=served.dtype, remedy="auto, bfloat16 or float32")
    place = located(served.place)
    tokenizer = load_tokenizer(place)
    model = open_model(served.place, dtype=dtype, device=device)
    longest = int(model.config.max_position_embeddings)
    if not 0 <= served.context <= longest:
        raise ConfigError("longer than the model's", field="--context", value=served.context, remedy=f"at most {longest}")
    name = served.name or place.stem
    if name in served.adapters:
        raise ConfigError("the base is called so", field="--adapter", value=name, remedy="give it another name, or the base one with --name")
    slots, bank = _banked(model, served.adapters)
    drafting = RolloutConfig(speculation=served.speculation, drafter=served.drafter, draft_tokens=served.draft_tokens)
    engine = Engine(
        model, version=0, max_batch=served.max_batch, name=name, tokenizer=tokenizer, prefill_tokens=served.prefill_tokens, queue_bytes=served.queue_mb * MIB,
        memory=EngineMemory(served.cache_mb * MIB, served.host_cache_mb * MIB, served.prefix_cache), adapters=slots, bank=bank,
        runner=partial(runner_for, cuda_graphs=served.cuda_graphs), speculator=speculator_for(drafting, model),
    )
    return LocalEngine(engine, name=name, context=min(served.context or longest, engine.longest), queue_bytes=served.queue_mb * MIB, adapters=tuple(slots))


def _banked(model: CausalLM, places: Mapping[str, Path]) -> tuple[dict[str, int], AdapterBank | None]:
    """Slots by name, and the bank that holds the adapters."""
    if not places:
        return {}, None
    found = {name: read_peft(place) for name, place in places.items()}
    targets = tuple(sorted({module.rpartition(".")[0] if update.experts is not None else module for adapter in found.values() for module, update in adapter.updates.items()}))
    bank = AdapterBank(model, slots=len(found), rank=max(rank for adapter in found.values() for rank in adapter.ranks), targets=targets)
    for slot, adapter in enumerate(found.values()):
        bank.put(slot, adapter)
    return {name: slot for slot, name in enumerate(found)}, bank


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("not a device", field="--device", value=name, remedy="cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no such device here", field="--device", value=name, remedy="cpu, or a machine with a GPU")
    return device
