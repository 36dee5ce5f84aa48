"""On a CUDA device, in deterministic mode: what is cached, what made room and what came back from the host samples the bits of an engine that keeps nothing."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from driftline.kernels.mode import Numerics, using
from driftline.messages.types import Sampling
from driftline.models.causal_lm import CausalLM
from driftline.models.config import K3Config
from driftline.models.random_weights import random_model
from driftline.services.rollout.engine import Completion, Engine, EngineMemory, Request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SESSIONS, TURNS, ANSWER = 6, 3, 24


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return random_model(K3Config.model_validate({
        "vocab_size": 264, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024, "q_lora_rank": 256, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 32, "num_experts_per_token": 4, "num_shared_experts": 1,
        "moe_intermediate_size": 256, "routed_expert_hidden_size": 512, "attn_res_block_size": 2, "max_position_embeddings": 1024,
        "linear_attn_config": {"num_heads": 4, "head_dim": 128, "full_attn_layers": (4,), "kda_layers": (1, 2, 3)},
    }), device="cuda").requires_grad_(False)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with using(Numerics.DETERMINISTIC):
        yield


def turns(engine: Engine) -> list[Completion]:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, 70 + 11 * i).tolist() for i in range(SESSIONS)]
    done: list[Completion] = []
    for turn in range(TURNS):
        for i, tokens in enumerate(texts):
            engine.submit_request(Request(f"{i}/{turn}", array("i", tokens), Sampling(max_tokens=ANSWER), i, first_draw=turn * ANSWER, session=str(i), stop_ids=()))
        now: dict[str, Completion] = {}
        for _ in range(1000):
            if engine.idle:
                break
            engine.step()
            now |= {c.id: c for c in engine.take_completions()}
        for i in range(SESSIONS):
            texts[i] = texts[i] + now[f"{i}/{turn}"].tokens.tolist() + rng.integers(0, 256, 20).tolist()
        done += [now[f"{i}/{turn}"] for i in range(SESSIONS)]
    engine.cache.check()
    return done


def same(a: list[Completion], b: list[Completion]) -> bool:
    return all(np.array_equal(x.tokens, y.tokens) and np.array_equal(x.logprobs, y.logprobs) for x, y in zip(a, b, strict=True))


def test_hits_and_what_the_host_kept_are_what_a_fresh_engine_computes(model: CausalLM) -> None:
    whole = EngineMemory(cache_bytes=256 * 2**20)
    plain = turns(Engine(model, version=0, max_batch=SESSIONS, memory=EngineMemory(whole.cache_bytes, prefix_cache=False)))
    cached = Engine(model, version=0, max_batch=SESSIONS, memory=whole)
    assert same(turns(cached), plain)
    assert cached.cache.stats.hit_rate > 0.5
    pool = cached.pool
    tight = Engine(model, version=0, max_batch=3, memory=EngineMemory(4 * pool.state_bytes * 2 + 14 * pool.page_bytes, host_bytes=2**28))
    assert same(turns(tight), plain)
    assert tight.cache.stats.moves.restored_states > 0
    broken = Engine(model, version=0, max_batch=SESSIONS, memory=whole)
    with torch.no_grad():
        turns(broken)
        for tensor in broken.pool._paged():
            tensor.mul_(1.5)
    assert not same(turns(broken), plain), "the comparison must be able to fail"
