"""How much memory an engine gives to what it computes once: pages of tokens and slots of states, from a budget in bytes or from what is free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from driftline.messages.errors import ConfigError
from driftline.models.causal_lm import CausalLM
from driftline.models.paged import PAGE, Pool

__all__ = ["EngineMemory", "Plan", "plan"]

HOST_BYTES = 2**30
"""On a CPU, unless told, or what one sequence needs."""
HOST_PAGES = 64
"""And no more than 4,096 tokens of every row."""
FREE = 0.25
"""Of a device's free memory, unless told: other engines, an evaluator or a learner may share it."""
LEAST_PAGES = 4
"""In any pool."""
SNAPSHOTS = 3
"""States kept for each running row, where there is room."""


@dataclass(frozen=True)
class EngineMemory:
    """`cache_bytes`: for rows and states on the device, running and cached (0: what is useful, within what is free). `host_bytes`: for what leaves the device.
    `prefix_cache` False: nothing is kept that does not run."""

    cache_bytes: int = 0
    host_bytes: int = 0
    prefix_cache: bool = True


class Plan(NamedTuple):
    """Page 0 among them is nobody's. `longest`: tokens of the longest sequence that fits."""

    pages: int
    slots: int
    longest: int


def plan(model: CausalLM, memory: EngineMemory, *, max_batch: int, window: int = 1) -> Plan:
    """Every row that runs has a state. Unless told, a sequence of the model's length fits. ConfigError when `cache_bytes` holds no sequence at all."""
    sizes = Pool.sizes(model, window)
    device, positions = next(model.parameters()).device, model.config.max_position_embeddings
    longest = -(-(positions + window) // PAGE)
    useful = (1 + (SNAPSHOTS if memory.prefix_cache else 0)) * max_batch
    least_slots, slots = (max_batch, useful) if sizes.state_bytes else (0, 0)
    least = (1 + LEAST_PAGES) * sizes.page_bytes + least_slots * sizes.state_bytes
    each, budget = longest, memory.cache_bytes
    if budget and budget < least:
        raise ConfigError(f"{max_batch} states and {LEAST_PAGES} pages of {PAGE} tokens take {least} bytes", field="rollout.cache_mb", value=budget / 2**20,
                          remedy=f"give at least {-(-least // 2**20)}, or make max_batch smaller")
    if not budget:
        budget = max(least + longest * sizes.page_bytes, _free(device))
        each = longest if device.type == "cuda" else min(longest, HOST_PAGES)
    told = memory.cache_bytes > 0  # all of it is of use to somebody, then
    if sizes.state_bytes:
        most = budget // 2 // sizes.state_bytes
        slots = max(least_slots, most if told else min(slots, most))
    pages = (budget - slots * sizes.state_bytes) // sizes.page_bytes
    pages = pages if told else min(pages, 1 + max(useful * each, longest))
    return Plan(int(pages), int(slots), min(positions, int(pages - 1) * PAGE - window))


def _free(device: torch.device) -> int:
    if device.type != "cuda":
        return HOST_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(FREE * free)
