"""Two engines on a device, with graphs, give what one gives to the bit in deterministic mode; a hand-over as bytes is what was exported."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from driftline.kernels.mode import Numerics, using
from driftline.messages.types import Sampling
from driftline.models.config import K3Config
from driftline.models.random_weights import random_model
from driftline.services.rollout.engine import Completion, Engine, EngineMemory, Request
from driftline.services.rollout.handover import Decoder, Handover, Pair, Prefiller, from_bytes, to_bytes
from driftline.services.rollout.runner import runner_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MEMORY = EngineMemory(cache_bytes=256 * 2**20)
CONFIG = {
    "vocab_size": 264, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024, "q_lora_rank": 256, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 32, "num_experts_per_token": 4, "num_shared_experts": 1,
    "moe_intermediate_size": 256, "routed_expert_hidden_size": 512, "attn_res_block_size": 2, "max_position_embeddings": 1024,
    "linear_attn_config": {"num_heads": 4, "head_dim": 128, "full_attn_layers": (4,), "kda_layers": (1, 2, 3)},
}


def engine() -> Engine:
    model = random_model(K3Config.model_validate(CONFIG), device="cuda").requires_grad_(False)
    return Engine(model, version=0, max_batch=8, memory=MEMORY, record_routes=True, runner=partial(runner_for, cuda_graphs=True))


def requests() -> list[Request]:
    rng = np.random.default_rng(0)
    return [Request(f"r{n}", rng.integers(0, 250, n).tolist(), Sampling(max_tokens=12), key=n, stop_ids=()) for n in (1, 63, 64, 200, 500)]


def finished(of: Engine | Pair) -> dict[str, Completion]:
    for request in requests():
        of.submit_request(request)
    done: dict[str, Completion] = {}
    while not of.idle:
        of.step()
        done |= {c.id: c for c in of.take_completions()}
    return done


class Carried(Prefiller):
    """Whose hand-overs go through bytes."""

    def take(self, wait_s: float = 0.0) -> list[Handover | Completion]:
        return [from_bytes(to_bytes(answer)) if isinstance(answer, Handover) else answer for answer in super().take(wait_s)]


def test_two_engines_on_a_device_give_what_one_gives_bit_for_bit() -> None:
    with using(Numerics.DETERMINISTIC):
        alone = finished(engine())
        pair = Pair(Carried(engine()), Decoder(engine()))
        together = finished(pair)
    assert pair.handed == 5
    assert together.keys() == alone.keys()
    for name, one in alone.items():
        other = together[name]
        for a, b in ((one.tokens, other.tokens), (one.logprobs, other.logprobs), (one.routes, other.routes)):
            assert np.array_equal(a, b), name
