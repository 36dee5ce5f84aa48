"""Drafts through an engine: the tokens of plain decoding, whoever drafts, also while a drafter learns, and across a version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import completion, finish_all, group, policy, weights

from driftline.kernels.mode import Numerics, using
from driftline.messages.types import Trajectory
from driftline.models.drafter import Drafter, DrafterConfig, save_drafter
from driftline.models.drafter.training import Schedule
from driftline.services.config import Config
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.runner import EagerRunner
from driftline.services.rollout.speculation import NgramDrafter, Speculator
from driftline.services.rollout.speculation import speculator as speculator_module
from driftline.services.rollout.speculation.learned import TrainedDrafter
from driftline.services.rollout.speculation.refresh import Refresher
from driftline.services.rollout.starting_engine import engine_of
from driftline.services.rollout_config import SpeculationRule


def network(model: Any) -> Drafter:
    torch.manual_seed(5)
    return Drafter(DrafterConfig.of(model.config)).eval()


def run(make: Any, *, midway: bool = False, rule: SpeculationRule = SpeculationRule.MATCH) -> tuple[Engine, dict[tuple[str, int], Trajectory]]:
    model = policy(stops=False)
    speculator = make(model, rule) if make is not None else None
    engine = Engine(model, version=0, record_routes=True, max_batch=7, speculator=speculator)
    for i in range(4):
        engine.submit(group(i, members=3, max_tokens=24, temperature=0.4))
    if midway:
        for _ in range(3):
            engine.step()
        engine.load(1, weights(0))
    done = finish_all(engine)
    engine.cache.check()
    return engine, done


def ngrams(_model: Any, rule: SpeculationRule) -> Speculator:
    return Speculator(NgramDrafter(), length=3, rule=rule)


def trained(model: Any, rule: SpeculationRule) -> Speculator:
    return Speculator(TrainedDrafter(network(model), model), length=3, rule=rule)


def learning(model: Any, rule: SpeculationRule) -> Speculator:
    drafter = TrainedDrafter(network(model), model)
    refresher = Refresher(drafter.network, model, recent=6, judged=2, every=3, schedule=Schedule(steps=2, texts=2, lr=1e-3, warmup=1))
    return Speculator(drafter, length=3, rule=rule, refresher=refresher)


@pytest.mark.parametrize("make", [ngrams, trained, learning])
def test_whoever_drafts_the_tokens_are_those_of_plain_decoding_to_the_bit(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator_module, "MONITORED", 16)
    with using(Numerics.DETERMINISTIC):
        _, plain = run(None)
        engine, drafted = run(make)
    assert engine._drafting is not None
    speculator = engine._drafting.speculator
    assert speculator.acceptance.rows > 0, "something was drafted"
    assert (len(speculator.refreshes) > 0) == (make is learning)
    for key, t in plain.items():
        assert completion(t) == completion(drafted[key])
        assert np.array_equal(t.logprobs, drafted[key].logprobs)
        assert np.array_equal(t.routes, drafted[key].routes)  # type: ignore[arg-type]
    assert engine.numbers()["acceptance_length"] >= 1


def test_a_window_is_folded_by_the_weights_that_scored_it() -> None:
    """Members of two versions, with and without drafts: where a version came at the same token, both have the same tokens."""
    with using(Numerics.DETERMINISTIC):
        _, drafted = run(ngrams, midway=True)
        for t in drafted.values():
            versions = t.versions[t.action_mask].tolist()
            assert versions == sorted(versions)
        assert any({0, 1} == set(t.versions[t.action_mask].tolist()) for t in drafted.values())


def test_drafts_that_were_judged_by_rejection_are_sequences_of_the_right_length() -> None:
    engine, done = run(ngrams, rule=SpeculationRule.REJECTION)
    assert isinstance(engine.runner, EagerRunner)
    assert engine.runner.rule is not None
    assert len(done) == 12
    assert all(len(completion(t)) == 24 for t in done.values())
    assert engine.tokens_sampled == 12 * 24


def test_an_engine_is_what_its_run_says(tmp_path: Path) -> None:
    model = policy()
    save_drafter(network(model), tmp_path)
    body: dict[str, Any] = {"run": {"name": "r"}, "rollout": {
        "max_batch": 5, "cache_mb": 8, "host_cache_mb": 2, "prefill_tokens": 128, "speculation": "drafter", "drafter": str(tmp_path), "draft_tokens": 2,
        "policy_update": "in_flight", "queue_mb": 3,
    }}
    engine = engine_of(Config.model_validate(body), model, version=3, name="n", tokenizer=None)
    assert (engine.version, engine.max_batch, engine.name, engine.prefill_tokens, engine.resume_stale) == (3, 5, "n", 128, True)
    assert engine.pool.window == 3
    assert engine.pool.pages * engine.pool.page_bytes + engine.pool.slots * engine.pool.state_bytes <= 8 * 2**20
    assert engine.cache.stock.host is not None
    assert engine.cache.stock.host.budget == 2 * 2**20
    body["rollout"] |= {"speculation": "off", "drafter": "", "policy_update": "interrupt", "prefix_cache": False}
    plain = engine_of(Config.model_validate(body), model, version=3, name="n", tokenizer=None)
    assert (plain.pool.window, plain.resume_stale, plain.cache.enabled) == (1, False, False)
