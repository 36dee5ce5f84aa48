"""A small policy that speaks bytes and sometimes stops, groups for it, and the model's own opinion of what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from driftline.messages.types import Group, Sampling, Task, Trajectory
from driftline.models.attention import KdaAttention
from driftline.models.cache import Cache, KdaState, LayerState, MlaRows
from driftline.models.config import K3Config, tiny
from driftline.models.logprob import token_logprobs
from driftline.models.model import K3ForCausalLM
from driftline.models.state import export_state
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.engine.row import Row

torch.set_num_threads(1)


def config(**changes: Any) -> K3Config:
    body: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48, "q_lora_rank": 16,
        "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_experts": 6,
        "moe_intermediate_size": 16, "routed_expert_hidden_size": 16,
        "linear_attn_config": {"num_heads": 2, "head_dim": 8, "full_attn_layers": (3,), "kda_layers": (1, 2)},
    }
    return tiny(**{**body, **changes})


def policy(seed: int = 0, *, dtype: torch.dtype = torch.float32, stops: bool = True) -> K3ForCausalLM:
    """`stops` makes the end token likely at some positions, so that completions have different lengths; else it is rare."""
    torch.manual_seed(seed)
    model = K3ForCausalLM(config()).to(dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        for name, parameter in model.named_parameters():
            if name.endswith(("res.proj.weight", "e_score_correction_bias")):
                parameter.normal_(std=0.3)
        model.lm_head.weight.mul_(2)
        model.lm_head.weight[257] *= 2 if stops else 0
    return model


def weights(seed: int) -> dict[str, torch.Tensor]:
    return export_state(policy(seed), torch.float32)


def group(index: int, members: int = 3, *, prompt: str | None = None, max_tokens: int = 12, temperature: float = 1.0, seed: int = 7) -> Group:
    text = f"question {index}{' and more' * (index % 3)}" if prompt is None else prompt
    task = Task(id=f"t{index}", source="test", family="test", prompt=text)
    return Group(run="r", group=f"g{index:08d}", index=index, task=task, members=members, seed=seed,
                 sampling=Sampling(temperature=temperature, max_tokens=max_tokens))


def finish_all(engine: Engine) -> dict[tuple[str, int], Trajectory]:
    done: list[Trajectory] = []
    for _ in range(1000):
        if engine.idle:
            break
        done += engine.step()
    assert engine.idle
    keyed = {(t.group, t.member): t for t in done}
    assert len(keyed) == len(done), "a member finished twice"
    return keyed


def sampled(groups: Sequence[Group], *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> dict[tuple[str, int], Trajectory]:
    engine = Engine(policy(seed, dtype=dtype), version=0, **settings)
    for one in groups:
        engine.submit(one)
    return finish_all(engine)


@torch.no_grad()
def recomputed(model: K3ForCausalLM, trajectory: Trajectory) -> np.ndarray:
    """Log-probabilities of the sampled tokens from one full forward over the whole sequence."""
    tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))[None]
    at = trajectory.prompt_tokens - 1
    logits = model.logits(model(tokens[:, :-1]).hidden[0, at:])
    logp, _ = token_logprobs(logits, tokens[0, at + 1 :], trajectory.temperature)
    return logp.numpy()


def held_by(engine: Engine, row: Row) -> Cache:
    """What a running row holds of the pool, as a model's own cache of one row."""
    assert row.lease is not None
    assert isinstance(engine.model, K3ForCausalLM)
    pages, states = iter(engine.pool.export_pages(row.lease.pages)), iter(engine.pool.export_states([row.lease.slot]))
    layers: list[LayerState] = []
    for layer in engine.model.decoder_layers():
        if isinstance(layer.self_attn, KdaAttention):
            state, tail = next(states), next(states)
            layers.append(KdaState(tail, state))
        else:
            layers.append(MlaRows(next(pages).flatten(0, 1)[None, : row.length]))
    return Cache(tuple(layers), torch.ones(1, row.length, dtype=torch.bool), torch.tensor([row.length]))


def completion(trajectory: Trajectory) -> list[int]:
    return trajectory.tokens[trajectory.prompt_tokens :].tolist()
