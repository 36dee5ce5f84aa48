"""The beginning that prompts share: computed once per version, and nothing but time depends on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_cases import completion, finish_all, group, policy, recomputed, weights

from driftline.kernels.mode import Numerics, using
from driftline.messages.types import Group, Trajectory
from driftline.models.model import K3ForCausalLM
from driftline.models.state import load_state
from driftline.services.rollout.engine import Engine, EngineMemory

HEAD = "all of these questions begin alike, for more than a page of tokens: "
PAGE = 64


def groups(count: int = 4, *, start: int = 0, members: int = 3) -> list[Group]:
    return [group(i, members=members, prompt=f"{HEAD}{'and so on, ' * (i % 2)}{i}") for i in range(start, start + count)]


def run(asked: list[Group], *, share: bool, dtype: torch.dtype = torch.float32, at_once: bool = True) -> tuple[dict[tuple[str, int], Trajectory], Engine]:
    engine = Engine(policy(dtype=dtype), version=0, max_batch=64 if at_once else 3, record_routes=True, memory=EngineMemory(prefix_cache=share))
    for one in asked:
        engine.submit(one)
    done = finish_all(engine)
    engine.cache.check()
    return done, engine


@pytest.mark.parametrize("at_once", [True, False])
def test_prompts_with_a_common_beginning_compute_it_once(at_once: bool) -> None:
    asked = groups()
    plain, whole = run(asked, share=False, at_once=at_once)
    shared, engine = run(asked, share=True, at_once=at_once)
    lengths = [t.prompt_tokens for (_, member), t in plain.items() if member == 0]
    assert whole.prompt_tokens == sum(lengths)
    # One at a time, the second prompt finds out what it shares with the first.
    assert engine.prompt_tokens == sum(lengths) - (len(lengths) - (1 if at_once else 2)) * PAGE
    for key, trajectory in plain.items():
        assert np.array_equal(trajectory.tokens[: trajectory.prompt_tokens], shared[key].tokens[: trajectory.prompt_tokens])


def test_what_is_sampled_is_the_same() -> None:
    asked = groups()
    for at_once in (True, False):
        plain, _ = run(asked, share=False, dtype=torch.float64)
        shared, _ = run(asked, share=True, dtype=torch.float64, at_once=at_once)
        for key, trajectory in plain.items():
            assert completion(trajectory) == completion(shared[key])
            np.testing.assert_allclose(trajectory.logprobs, shared[key].logprobs, atol=1e-6)
            assert np.array_equal(trajectory.routes, shared[key].routes), "the prefix's routes belong to every member"
            np.testing.assert_allclose(recomputed(policy(dtype=torch.float64), shared[key]), shared[key].logprobs[shared[key].action_mask], atol=1e-6)


def test_in_deterministic_mode_it_is_the_same_to_the_bit() -> None:
    asked = groups()
    with using(Numerics.DETERMINISTIC):
        plain, _ = run(asked, share=False)
        shared, _ = run(asked, share=True)
        singly, _ = run(asked, share=True, at_once=False)
    for key, trajectory in plain.items():
        for other in (shared, singly):
            assert np.array_equal(trajectory.tokens, other[key].tokens)
            assert np.array_equal(trajectory.logprobs, other[key].logprobs)


def test_a_beginning_is_of_one_version() -> None:
    """A prefix of older weights under a new version's prompts would be a policy that never was."""
    engine = Engine(policy(0, dtype=torch.float64), version=0)
    for one in groups(2):
        engine.submit(one)
    finish_all(engine)
    for change in ("load", "adopt"):
        seed = {"load": 1, "adopt": 2}[change]
        state = {name: tensor.double() for name, tensor in weights(seed).items()}
        fresh = Engine(policy(0, dtype=torch.float64), version=seed)
        fresh.load(seed, state)
        if change == "load":
            engine.load(seed, state)
        else:
            engine.adopt(seed, lambda state=state: _copy(engine, state))  # type: ignore[misc]
        for e in (engine, fresh):
            for one in groups(2, start=10 * seed):
                e.submit(one)
        got, want = finish_all(engine), finish_all(fresh)
        for key in want:
            assert completion(got[key]) == completion(want[key])
            np.testing.assert_allclose(got[key].logprobs, want[key].logprobs, atol=1e-6)


def _copy(engine: Engine, state: dict[str, torch.Tensor]) -> None:
    load_state(engine.model, state)


def test_rows_that_are_recomputed_share_it_too() -> None:
    asked = groups(3)
    engine = Engine(policy(0, dtype=torch.float64), version=0)
    for one in asked:
        engine.submit(one)
    engine.step()
    engine.step()
    before = engine.prompt_tokens
    engine.load(1, {name: tensor.double() for name, tensor in weights(1).items()}, recompute=True)
    lengths = [len(engine.tokenizer.encode_prompt(one.task.prompt)) for one in asked for _ in range(one.members)]
    assert engine.prompt_tokens - before < sum(lengths) - (len(lengths) - 2) * PAGE, "nine histories, one beginning"
    for trajectory in finish_all(engine).values():
        assert isinstance(engine.model, K3ForCausalLM)
        newer = trajectory.versions[trajectory.action_mask] == 1
        np.testing.assert_allclose(recomputed(engine.model, trajectory)[newer], trajectory.logprobs[trajectory.action_mask][newer], atol=1e-6)
        assert newer.any()


@pytest.mark.parametrize("tokens", [PAGE, 2 * PAGE, 2 * PAGE + 1])
def test_a_prompt_that_is_all_cached_computes_its_last_token(tokens: int) -> None:
    """What it shares with itself is everything but the token that the first draw goes behind, in whole pages."""
    same = [group(i, prompt="x" * (tokens - 2), members=2) for i in range(3)]
    engine = Engine(policy(dtype=torch.float64), version=0)
    for one in same:
        engine.submit(one)
    got = finish_all(engine)
    length = next(iter(got.values())).prompt_tokens
    assert length == tokens
    assert engine.prompt_tokens == 3 * length - 2 * ((length - 1) // PAGE * PAGE)
    for trajectory in got.values():
        np.testing.assert_allclose(recomputed(policy(dtype=torch.float64), trajectory), trajectory.logprobs[trajectory.action_mask], atol=1e-6)
