"""The engine: what a sampled token says about itself is true."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from driftline.messages.types import Finish, Group, Sampling, Task
from driftline.models.checkpoint import load_checkpoint
from driftline.models.config import tiny
from driftline.models.logprob import token_logprobs
from driftline.models.model import K3ForCausalLM
from driftline.models.state import export_state
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.randomness import member_key, uniforms
from driftline.services.rollout.sampler import sample

torch.set_num_threads(1)


def model(seed: int = 0) -> K3ForCausalLM:
    torch.manual_seed(seed)
    return K3ForCausalLM(tiny(num_hidden_layers=3, hidden_size=32, intermediate_size=48, num_experts=4))


def group(name: str, members: int = 3, prompt: str = "a question", max_tokens: int = 8, temperature: float = 1.0) -> Group:
    task = Task(id=name, source="test", family="none", prompt=prompt)
    return Group(run="r", group=name, index=0, task=task, members=members, seed=1,
                 sampling=Sampling(max_tokens=max_tokens, temperature=temperature))


def drain(engine: Engine) -> dict[tuple[str, int], object]:
    out = {}
    while not engine.idle:
        for t in engine.step():
            out[t.group, t.member] = t
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_reported_log_probabilities_are_those_of_a_fresh_forward(temperature: float) -> None:
    engine = Engine(model(), version=4)
    for i in range(3):
        engine.submit(group(f"g{i}", prompt="p" * (3 + 5 * i), temperature=temperature))
    for t in drain(engine).values():
        tokens = torch.from_numpy(t.tokens.astype(np.int64))[None]
        logits = engine.model.logits(engine.model(tokens[:, :-1]).hidden[0, t.prompt_tokens - 1 :])
        want, _ = token_logprobs(logits, tokens[0, t.prompt_tokens :], temperature)
        d = want.detach().double() - torch.from_numpy(t.logprobs[t.action_mask].copy()).double()
        assert (torch.expm1(d) - d).mean() < 1e-10
        assert set(t.versions[t.action_mask]) == {4}


def test_tokens_do_not_depend_on_company_order_or_batch_size() -> None:
    names = [f"g{i}" for i in range(5)]
    runs = []
    for order, max_batch in ((names, 64), (names[::-1], 64), (names, 4)):
        engine = Engine(model(), version=0, max_batch=max_batch)
        for name in order:
            engine.submit(group(name, prompt=name * 3))
        runs.append({key: t.tokens.tolist() for key, t in drain(engine).items()})
    assert runs[0] == runs[1] == runs[2]
    assert len({tuple(v) for v in runs[0].values()}) > 5


def test_members_of_a_group_share_one_prefill() -> None:
    engine = Engine(model(), version=0)
    engine.submit(group("g", members=6, prompt="twelve chars"))
    drain(engine)
    assert engine.prompt_tokens == 14


def test_a_version_that_arrives_in_the_middle_is_stamped_from_there_on() -> None:
    engine = Engine(model(), version=1)
    engine.submit(group("g", max_tokens=8))
    engine.step()
    engine.step()
    engine.load(2, export_state(model(7), torch.float32))
    stamped = [t for t in drain(engine).values() if len(t.tokens) - t.prompt_tokens > 2]
    assert stamped
    for t in stamped:
        versions = t.versions[t.action_mask].tolist()
        assert versions[:2] == [1, 1]
        assert set(versions[2:]) == {2}


def test_recomputed_caches_are_those_of_the_new_weights() -> None:
    engine = Engine(model(), version=1)
    engine.submit(group("g", max_tokens=8))
    engine.step()
    engine.step()
    engine.load(2, export_state(model(7), torch.float32), recompute=True)
    for t in drain(engine).values():
        tokens = torch.from_numpy(t.tokens.astype(np.int64))[None]
        logits = engine.model.logits(engine.model(tokens[:, :-1]).hidden[0, t.prompt_tokens - 1 :])
        want, _ = token_logprobs(logits, tokens[0, t.prompt_tokens :])
        assert np.allclose(want.detach().numpy()[2:], t.logprobs[t.action_mask][2:], atol=1e-5)


def test_length_and_stop_are_told_apart() -> None:
    engine = Engine(load_checkpoint("base"), version=0)
    engine.submit(group("short", members=1, prompt="Spell this word backward (example: sun -> nus): tide", max_tokens=2))
    engine.submit(group("long", members=1, prompt="Spell this word backward (example: sun -> nus): tide", max_tokens=16))
    done = drain(engine)
    assert done["short", 0].finish is Finish.LENGTH
    assert done["long", 0].finish is Finish.STOP
    assert done["long", 0].tokens[-1] == engine.tokenizer.eos


def test_a_cancelled_group_leaves_and_the_others_stay() -> None:
    engine = Engine(model(), version=0, max_batch=6)
    for name in ("a", "b", "c"):
        engine.submit(group(name, max_tokens=5))
    engine.step()
    assert engine.cancel("a") == 3
    assert engine.cancel("c") == 3
    assert engine.cancel("a") == 0
    assert {key[0] for key in drain(engine)} == {"b"}


def test_a_group_larger_than_the_batch_still_runs() -> None:
    engine = Engine(model(), version=0, max_batch=2)
    engine.submit(group("big", members=5))
    assert len(drain(engine)) == 5


def test_sampling_follows_the_distribution_and_never_picks_the_impossible() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, float("-inf"), 0.5]])
    n = 20_000
    draws = uniforms(np.full(n, member_key(0, "g", 0), dtype=np.uint64), np.arange(n))
    tokens, logp = sample(logits.expand(n, -1), 1.0, draws)
    p = torch.softmax(logits[0], 0).numpy()
    counts = np.bincount(tokens.numpy(), minlength=5)
    assert counts[3] == 0
    live = p > 0
    chi = (((counts - n * p)[live]) ** 2 / (n * p)[live]).sum()
    assert chi < 20  # 3 degrees of freedom: beyond 20 once in 6,000 seeds, and the seed is fixed
    assert torch.allclose(logp, torch.log_softmax(logits[0], 0)[tokens])


def test_draws_are_uniform_and_differ_by_member_and_position() -> None:
    keys = np.array([member_key(s, f"g{g}", m) for s in range(2) for g in range(5) for m in range(5)], dtype=np.uint64)
    grid = np.stack([uniforms(keys, np.full(len(keys), p)) for p in range(100)])
    assert ((grid >= 0) & (grid < 1)).all()
    assert len(np.unique(grid)) == grid.size
    assert abs(grid.mean() - 0.5) < 0.02
    assert np.array_equal(grid[3], uniforms(keys, np.full(len(keys), 3)))
