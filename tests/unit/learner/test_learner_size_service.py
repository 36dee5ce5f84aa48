"""The learner service at size: bf16 parameters, packs and layers that are run again make versions, and the same versions again after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import feed, learner, manifest
from loop_cases import base_state, beside, head_at, running, tiny

from driftline.messages.memory import MemoryBus
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import State, state_digest
from driftline.services.config import Compute, Config, Recompute
from driftline.services.policy_model import build_model
from driftline.services.runtime import run_topology
from driftline.services.tensors import from_host

SETTINGS: list[dict[str, Any]] = [{"micro_batch_tokens": 64}, {"micro_batch_tokens": 64, "recompute": Recompute.LAYERS}]


def sized(name: str, learner_settings: dict[str, Any], compute: Compute) -> Config:
    """The run's name is the same in all: it decides the tasks."""
    config = tiny(name)
    return config.model_copy(update={
        "learner": config.learner.model_copy(update=learner_settings), "policy": config.policy.model_copy(update={"compute": compute}),
    })


async def trained(config: Config, folder: Path, *, stop_between: bool = False) -> State:
    """Version 2 of a run that is fed two steps; with `stop_between` by two learners, one after the other."""
    async with MemoryBus() as bus:
        await bus.declare(run_topology(config))
        blobs = MemoryBlobs()
        for step in (0, 1):
            await feed(bus, step, config)
            if stop_between or step == 1:
                async with running(learner(bus, blobs, folder, config)) as task:
                    await beside(task, head_at(bus, blobs, config.run.name, step + 1))
        made = await manifest(bus, blobs, 2, config.run.name)
        assert made.version == 2
        return await PolicyReader(bus, blobs, config.run.name).materialise_manifest(made)


@pytest.mark.parametrize("settings", SETTINGS, ids=["packed", "packed, run again"])
async def test_a_second_learner_goes_on_bit_for_bit_in_bfloat16(settings: dict[str, Any], tmp_path: Path) -> None:
    config = sized("learning", settings, Compute.POLICY)
    assert build_model(config, device="cpu", threads=1).lm_head.weight.dtype is torch.bfloat16
    once = await trained(config, tmp_path / "a")
    twice = await trained(config, tmp_path / "b", stop_between=True)
    assert state_digest(once) == state_digest(twice)
    assert state_digest(once) != state_digest(base_state())


async def test_running_layers_again_makes_the_same_version_and_another_dtype_a_near_one(tmp_path: Path) -> None:
    kept, again = [await trained(sized("learning", each, Compute.POLICY), tmp_path / str(i)) for i, each in enumerate(SETTINGS)]
    assert state_digest(kept) == state_digest(again)
    wide = from_host(await trained(sized("learning", SETTINGS[0], Compute.FLOAT32), tmp_path / "w"))
    narrow, start = from_host(kept), from_host(base_state())
    moved = torch.cat([(wide[n].float() - start[n].float()).flatten() for n in start])
    other = torch.cat([(narrow[n].float() - start[n].float()).flatten() for n in start])
    assert 0.5 < float(torch.nn.functional.cosine_similarity(moved, other, dim=0)) < 0.9999
