"""What an engine records of its router: of every token that was fed, by the pass that fed it, whatever it shared, kept or was interrupted by."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from engine_cases import completion, finish_all, group, policy

from driftline.messages.types import Trajectory
from driftline.models.state import export_state
from driftline.services.rollout.engine import Engine, EngineMemory
from driftline.services.rollout.runner import DecodeBatch, PrefillBatch, Sampled


def engine(seed: int = 0, *, max_batch: int = 64, memory: EngineMemory | None = None) -> Engine:
    return Engine(policy(seed, dtype=torch.float64, stops=False), version=0, record_routes=True, max_batch=max_batch, memory=memory)


def routes_of(t: Trajectory) -> np.ndarray:
    assert t.routes is not None
    return t.routes


@pytest.fixture
def fed() -> list[tuple[int, np.ndarray]]:
    """(columns of the pass, routes [B, T, layers, k]) of every pass of the engine under test, in order."""
    return []


def watched(under_test: Engine, fed: list[tuple[int, np.ndarray]]) -> Engine:
    prefill, decode = under_test.runner.prefill, under_test.runner.decode

    def prefilled(batch: PrefillBatch) -> Sampled:
        out = prefill(batch)
        fed.append((batch.tokens.size, out.routes[None]))
        return out

    def decoded(batch: DecodeBatch) -> Sampled:
        out = decode(batch)
        fed.append((1, out.routes))
        return out

    under_test.runner.prefill, under_test.runner.decode = prefilled, decoded  # type: ignore[method-assign]
    return under_test


def test_a_shared_prefix_has_the_routes_of_one_computed_alone() -> None:
    """Members that hit the group's prefill record its routes, not none and not zeros; as they do when each computes its own."""
    shared = engine(max_batch=8)
    shared.submit(group(0, members=3))
    together = finish_all(shared)
    for member in range(3):
        alone = engine(max_batch=8)
        alone.submit(group(0, members=3), [member])
        (own,) = finish_all(alone).values()
        hit = together[own.group, member]
        assert completion(hit) == completion(own)
        assert np.array_equal(routes_of(hit), routes_of(own))
        for layer in range(routes_of(hit).shape[1]):
            assert len(np.unique(routes_of(hit)[:-1, layer])) > 1


def test_a_beginning_that_prompts_have_in_common_has_its_routes_in_each_of_them() -> None:
    """Computed once and hit by every later prompt; the table is that of prompts computed whole."""
    start = "the same long beginning of every prompt, as a template or solved examples make it: "
    asked = [group(i, members=2, prompt=start + end) for i, end in enumerate(("one", "another one", "two"))]
    tables = []
    for cached in (True, False):
        one = engine(max_batch=4, memory=EngineMemory(prefix_cache=cached))
        for item in asked:
            one.submit(item)
        done = finish_all(one)
        tables.append({key: routes_of(t) for key, t in done.items()})
        assert (one.cache.stats.hit_tokens > 0) == cached, "the beginning is shared, and without a cache it is not"
        assert all(len(routes_of(t)) == len(t.tokens) for t in done.values())
    hits, whole = tables
    assert all(np.array_equal(hits[key], whole[key]) for key in whole)


def test_prompts_of_other_lengths_beside_it_leave_nothing_in_a_members_routes() -> None:
    """Padding of a ragged prefill is not recorded as anybody's route."""
    alone, beside = engine(max_batch=8), engine(max_batch=8)
    short = group(0, members=2, prompt="short")
    alone.submit(short)
    for one in (group(1, members=2, prompt="a prompt that is a good deal longer than the other"), short):
        beside.submit(one)
    want, got = finish_all(alone), finish_all(beside)
    for key, t in want.items():
        assert np.array_equal(routes_of(t), routes_of(got[key]))


@pytest.mark.parametrize("update", [lambda e, w: e.load(1, w), lambda e, w: e.load(1, w, recompute=True)], ids=["in_flight", "interrupt"])
def test_a_member_of_two_versions_keeps_each_tokens_routes_by_the_version_that_fed_it(
    update: Callable[[Engine, dict[str, torch.Tensor]], None], fed: list[tuple[int, np.ndarray]]
) -> None:
    """Row i is of the pass that gave token i + 1 its logits and its version stamp; caches that are computed again record nothing."""
    one = watched(engine(), fed)
    one.submit(group(0, members=1, max_tokens=8))
    for _ in range(3):
        one.step()
    before = len(fed)
    update(one, export_state(policy(1, dtype=torch.float64, stops=False), torch.float64))
    again = len(fed) - before
    (t,) = finish_all(one).values()
    passes = [*fed[:before], *fed[before + again :]]
    want = np.concatenate([table[0] for _, table in passes])
    assert np.array_equal(routes_of(t)[:-1], want)
    start = t.prompt_tokens
    assert sorted(set(t.versions[start:].tolist())) == [0, 1]
    switched = int((t.versions[start:] == 0).sum())  # tokens of version 0, so row start - 1 + switched is the first that version 1 fed
    model = policy(0, dtype=torch.float64, stops=False)
    with torch.no_grad():
        old = model(torch.from_numpy(t.tokens.astype(np.int64))[None, :-1]).routes[0].numpy()
    until = start - 1 + switched
    assert np.array_equal(routes_of(t)[:until], old[:until])
    assert not np.array_equal(routes_of(t)[until:-1], old[until:]), "the new weights choose otherwise somewhere"


def test_the_last_token_has_no_route_however_a_member_ends() -> None:
    one = engine()
    one.submit(group(0, members=2, max_tokens=4))
    for t in finish_all(one).values():
        assert (routes_of(t)[-1] == -1).all()
        assert (routes_of(t)[:-1] >= 0).all()
