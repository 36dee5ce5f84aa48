"""An engine that replays graphs samples what one without them samples, to the bit in deterministic mode: through groups that come and go, a new version in the middle, drafts."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from driftline.kernels.mode import Numerics, using
from driftline.messages.types import Group, Sampling, Task, Trajectory
from driftline.models.causal_lm import CausalLM
from driftline.models.config import K3Config
from driftline.models.dense.config import DenseConfig
from driftline.models.random_weights import random_model
from driftline.services.rollout.engine import Engine, EngineMemory
from driftline.services.rollout.runner import GraphRunner, runner_for
from driftline.services.rollout.speculation import NgramDrafter, Speculator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MEMORY = EngineMemory(cache_bytes=256 * 2**20)


def k3() -> CausalLM:
    return random_model(K3Config.model_validate({
        "vocab_size": 264, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024, "q_lora_rank": 256, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 32, "num_experts_per_token": 4, "num_shared_experts": 1,
        "moe_intermediate_size": 256, "routed_expert_hidden_size": 512, "attn_res_block_size": 2, "max_position_embeddings": 1024,
        "linear_attn_config": {"num_heads": 4, "head_dim": 128, "full_attn_layers": (4,), "kda_layers": (1, 2, 3)},
    }), device="cuda").requires_grad_(False)


def dense() -> CausalLM:
    return random_model(DenseConfig.of({
        "model_type": "llama", "vocab_size": 264, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 9, "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 1024, "tie_word_embeddings": True, "hidden_act": "silu",
    }, "smollm2"), device="cuda").requires_grad_(False)


def group(index: int) -> Group:
    task = Task(id=f"t{index}", source="test", family="test", prompt="one and two " * (1 + 5 * index))
    return Group(run="r", group=f"g{index}", index=index, task=task, members=3, seed=7, sampling=Sampling(temperature=0.7, max_tokens=10 + 6 * index))


def sampled(model: CausalLM, *, graphs: bool, drafts: bool = False) -> tuple[Engine, list[Trajectory]]:
    """Four groups, the last two submitted later, and other weights in the middle. The weights are put back."""
    speculator = Speculator(NgramDrafter(), length=3) if drafts else None
    engine = Engine(model, version=0, max_batch=12, memory=MEMORY, record_routes=not isinstance(model.config, DenseConfig), speculator=speculator,
                    runner=partial(runner_for, cuda_graphs=graphs))
    before = model.lm_head.weight.clone()
    done: list[Trajectory] = []
    for step in range(200):
        if step in (0, 4):
            for index in range(step // 2, step // 2 + 2):
                engine.submit(group(index))
        if step == 8:
            engine.adopt(1, lambda: model.lm_head.weight.copy_(before.roll(1, 0)))
        done += engine.step()
        if step > 8 and engine.idle:
            break
    model.lm_head.weight.copy_(before)
    return engine, sorted(done, key=lambda t: (t.group, t.member))


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("make", [k3, dense])
def test_an_engine_with_graphs_samples_what_one_without_does(make, drafts: bool) -> None:  # type: ignore[no-untyped-def]
    model = make()
    with using(Numerics.DETERMINISTIC):
        _, eager = sampled(model, graphs=False)
        engine, replayed = sampled(model, graphs=True, drafts=drafts)
    assert isinstance(engine.runner, GraphRunner)
    assert engine.runner.refused == {}
    assert engine.runner.tally.replayed > 10
    assert len(eager) == len(replayed) == 12
    for one, other in zip(eager, replayed, strict=True):
        assert np.isfinite(other.logprobs).all()
        if drafts:  # a window crosses the version's change otherwise than steps do
            known = int((one.versions <= 0).sum()) if (one.versions == 1).any() else len(one.tokens)
            known = min(known, int((other.versions <= 0).sum()) if (other.versions == 1).any() else len(other.tokens))
            assert np.array_equal(one.tokens[:known], other.tokens[:known])
            assert np.array_equal(one.logprobs[:known], other.logprobs[:known])
            continue
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.logprobs, other.logprobs)
        assert np.array_equal(one.versions, other.versions)
        assert (one.routes is None) == (other.routes is None)
        assert one.routes is None or np.array_equal(one.routes, other.routes)
