"""The rollout service with models of other kinds: what is asked of an engine follows from the checkpoint it starts from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from loop_cases import finish, groups_of, queue, running, tiny
from rollout_cases import stored

from driftline.messages.memory import MemoryBus
from driftline.models.config import tiny as tiny_k3
from driftline.models.dense.config import DenseConfig
from driftline.models.random_weights import make_checkpoint
from driftline.models.state import export_state
from driftline.models.tokenizer import ByteTokenizer
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.writer import PolicyWriter
from driftline.services.policy_model import build_model
from driftline.services.rollout.service import RolloutService
from driftline.services.runtime import run_topology
from driftline.services.tensors import to_host

torch.set_num_threads(1)
DENSE = DenseConfig.of({
    "model_type": "llama", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "bos_token_id": ByteTokenizer.bos, "eos_token_id": ByteTokenizer.eos, "pad_token_id": ByteTokenizer.pad,
}, "here")


@pytest.mark.parametrize("kind", ["dense", "k3"])
async def test_routes_are_recorded_where_the_model_has_any(kind: str, memory_bus: MemoryBus, tmp_path: Path) -> None:
    """`learner.router_replay` with a dense model: nothing to record, and nothing fails."""
    bus, blobs = memory_bus, MemoryBlobs()
    k3 = tiny_k3(num_hidden_layers=3, hidden_size=32, intermediate_size=48, num_experts=4, attn_res_block_size=2)
    make_checkpoint(DENSE if kind == "dense" else k3, tmp_path / "start")
    config = tiny("kinds", policy={"init": str(tmp_path / "start")}, learner={"router_replay": True})
    await bus.declare(run_topology(config))
    writer = PolicyWriter(bus, blobs, "kinds", 10)
    await writer.resume()
    model = build_model(config, device="cpu", threads=1)
    await writer.publish(to_host(export_state(model, torch.bfloat16)), version=0, learner_step=0, consumed=())
    async with running(RolloutService(bus, blobs, config)) as task:
        await queue(bus, groups_of(config, range(1)))
        found = await stored(bus, config.run.group_size, config)
        await finish(bus, "kinds", 0)
        await task
    for t in found:
        if kind == "dense":
            assert t.routes is None
        else:
            assert t.routes is not None
            assert t.routes.shape == (len(t.tokens), 2, 2)
            assert (t.routes[:-1] >= 0).all()
            assert (t.routes[-1] == -1).all()
        assert np.isfinite(t.logprobs).all()
