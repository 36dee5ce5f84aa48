"""Two hundred versions under an engine that never stops sampling: nothing is dropped, every token is of the version it is stamped with, and a policy that went
wrong on its way is loaded whole before anything is drawn from it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from loop_cases import WAIT_S, base_state, eventually, groups_of, queue, tiny

from driftline.messages.dead_letters import dead_letters
from driftline.messages.memory import MemoryBus
from driftline.messages.types import Metrics, Trajectory
from driftline.models.logprob import token_logprobs
from driftline.models.model import K3ForCausalLM
from driftline.models.state import load_state
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.tensor import State, state_digest
from driftline.policy_store.writer import PolicyWriter
from driftline.services.config import Config
from driftline.services.policy_model import build_model
from driftline.services.rollout import weights as weights_module
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.service import RolloutService
from driftline.services.rollout.weights import EngineWeights, Staged, parameters_of
from driftline.services.runtime import run_topology
from driftline.services.tensors import from_host, to_host

CONFIG = tiny("in-flight", run={"group_size": 2, "max_lag": 500}, rollout={"policy_update": "in_flight", "max_batch": 8})
MEMBERS, VERSIONS, FAILED = 2, 200, (7, 60, 61, 150)


def of_version(version: int) -> State:
    """Nearly the shipped weights, and another digest for every version; one element of every matrix differs, so that a half-written one is none."""
    tensors = {name: t.clone() for name, t in from_host(base_state()).items()}
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor.view(-1)[version % tensor.numel()] += 0.5
    tensors["model.norm.weight"] += 0.01 * (version % 50)
    return to_host(tensors)


class Publisher:
    def __init__(self, bus: MemoryBus, blobs: MemoryBlobs) -> None:
        self.blobs = blobs
        self._writer = PolicyWriter(bus, blobs, CONFIG.run.name, 1000)
        self.published: list[str] = []

    async def publish(self) -> int:
        version = len(self.published)
        state = of_version(version)
        self.published.append(state_digest(state))
        await self._writer.publish(state, version=version, learner_step=version, consumed=())
        return version


class Heard:
    """The bus, and what was reported over it."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self.metrics: list[dict[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, subject: str, message: Any, **more: Any) -> Any:
        if isinstance(message, Metrics):
            self.metrics.append(dict(message.values))
        return await self._bus.publish(subject, message, **more)


@asynccontextmanager
async def serving(bus: Any, blobs: MemoryBlobs) -> AsyncIterator[RolloutService]:
    """Whatever is waited for within has its own deadline."""
    service = RolloutService(bus, blobs, CONFIG)
    task = asyncio.create_task(service.run())
    try:
        await eventually(lambda: service._engine is not None)
        yield service
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(CONFIG))
    return memory_bus


@pytest.fixture
async def publisher(bus: MemoryBus) -> Publisher:
    made = Publisher(bus, MemoryBlobs())
    await made._writer.resume()
    await made.publish()
    return made


async def take(bus: MemoryBus, count: int) -> list[Trajectory]:
    consumer = next(c for c in run_topology(CONFIG).consumers if c.durable == "grader")
    found: list[Trajectory] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < count:
            for delivery in await bus.pull(consumer, batch=64, timeout_s=1.0):
                assert isinstance(delivery.message, Trajectory)
                found.append(delivery.message)
                await delivery.ack()
    return found


async def reaches(service: RolloutService, version: int) -> None:
    await eventually(lambda: service._engine is not None and service._engine.version == version and service._ready is None)


def held(service: RolloutService) -> str:
    """The digest of what the engine samples from."""
    assert service._engine is not None
    parameters = parameters_of(service._engine.model)
    return state_digest(to_host({name: parameters[name].to(t.dtype) for name, t in from_host(base_state()).items()}))


def recomputed(version: int, trajectory: Trajectory) -> np.ndarray:
    model = build_model(Config(), device="cpu", threads=1)
    assert isinstance(model, K3ForCausalLM)
    load_state(model, from_host(of_version(version)))
    tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))[None]
    with torch.no_grad():
        hidden = model(tokens[:, :-1]).hidden[0]
        logp, _ = token_logprobs(model.logits(hidden), tokens[0, 1:], trajectory.temperature)
    return logp.numpy()[trajectory.action_mask[1:]]


def stamps(trajectory: Trajectory) -> np.ndarray:
    return trajectory.versions[trajectory.action_mask]


def is_of_its_version(found: Sequence[Trajectory]) -> None:
    """The log-probabilities of trajectories of one version are that version's, and not those of the one before it."""
    apart = 0.0
    for one in found:
        version = int(stamps(one)[0])
        ours = one.logprobs[one.action_mask]
        np.testing.assert_allclose(ours, recomputed(version, one), atol=1e-4)
        apart = max(apart, float(np.abs(ours - recomputed(version - 1, one)).max()))
    assert apart > 1e-3, "versions must differ enough to be told apart"


async def test_two_hundred_versions_pass_under_running_rows_and_nothing_is_dropped(
    bus: MemoryBus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of them fail while they are applied, half of their shards written: they are loaded whole, and no token is drawn before."""
    real, calls = EngineWeights.apply, 0

    def apply(self: EngineWeights, staged: Staged) -> None:
        nonlocal calls
        calls += 1
        if calls in FAILED:
            for name, flat in list(self._flat.items())[::2]:
                if flat.is_floating_point() and "proj" in name:
                    flat.mul_(-1)
            raise RuntimeError("the device went away for a moment")
        real(self, staged)

    monkeypatch.setattr(EngineWeights, "apply", apply)
    heard = Heard(bus)
    async with serving(heard, publisher.blobs) as service:
        groups, found = groups_of(CONFIG, range(VERSIONS)), []
        for group in groups:
            await queue(bus, [group])
            await publisher.publish()
            await reaches(service, len(publisher.published) - 1)
            assert service.seconds.pause_s > 0
            if len(publisher.published) % 20 == 1:
                found += await take(bus, MEMBERS * 20)
        await eventually(lambda: service._engine.idle)
        assert held(service) == publisher.published[VERSIONS]
        await service._report(service._engine)
        counts, carried = service.counts, service.carried
    assert sorted((t.group, t.member) for t in found) == [(g.group, m) for g in groups for m in range(MEMBERS)]
    assert all((np.diff(stamps(t)) >= 0).all() for t in found)
    assert any(len(set(stamps(t))) > 1 for t in found), "some were under way while a version came"
    assert counts.updates == VERSIONS
    assert carried.reloads == len(FAILED)
    assert (counts.infrastructure_failures, counts.data_failures, counts.groups_condemned, counts.members_aborted) == (0, 0, 0, 0)
    assert not await dead_letters(bus, CONFIG.run.name)
    is_of_its_version([t for t in found if len(set(stamps(t))) == 1 and stamps(t)[0] > 0][:6])
    reported = heard.metrics[-1]
    assert reported["updates"] == VERSIONS
    assert reported["version"] == VERSIONS
    assert 0 < reported["pause_s"] <= reported["update_s"]


async def test_the_loop_goes_on_while_a_version_is_applied(bus: MemoryBus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups come in, and are not begun: nothing is drawn from a policy between two versions."""
    entered, go = threading.Event(), threading.Event()
    real = EngineWeights.apply

    def apply(self: EngineWeights, staged: Staged) -> None:
        entered.set()
        assert go.wait(WAIT_S)
        real(self, staged)

    async with serving(bus, publisher.blobs) as service:
        monkeypatch.setattr(EngineWeights, "apply", apply)
        await publisher.publish()
        assert await asyncio.to_thread(entered.wait, WAIT_S)
        drawn = service._engine.tokens_sampled
        await queue(bus, groups_of(CONFIG, range(3)))
        await eventually(lambda: len(service._hand) == 3)
        assert service._engine.tokens_sampled == drawn
        assert service._engine.active == 0
        go.set()
        found = await take(bus, 3 * MEMBERS)
    assert all(set(stamps(t)) == {1} for t in found)


@pytest.mark.parametrize("every", [1, 0])
async def test_a_torn_policy_is_found_and_never_served(bus: MemoryBus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """One weight that nobody meant to write. Where versions are compared with the mirror it is found with the next one; where they never are, it stays."""
    monkeypatch.setattr(weights_module, "VERIFY_EVERY", every)
    async with serving(bus, publisher.blobs) as service:
        await publisher.publish()
        await reaches(service, 1)
        with torch.no_grad():
            service._engine.model.get_parameter("model.layers.1.self_attn.o_proj.weight")[3, 5] += 1.0
        await publisher.publish()
        await reaches(service, 2)
        assert (held(service) == publisher.published[2]) == (every == 1)
        assert (service.carried.torn, service.carried.reloads) == ((1, 1) if every else (0, 0))
        await queue(bus, groups_of(CONFIG, range(2)))
        found = await take(bus, 2 * MEMBERS)
    if every:
        is_of_its_version(found)


async def test_where_loading_everything_fails_too_the_engine_ends_and_draws_nothing(bus: MemoryBus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no memory")

    service = RolloutService(bus, publisher.blobs, CONFIG)
    task = asyncio.create_task(service.run())
    await eventually(lambda: service._engine is not None)
    assert service._engine is not None
    engine, drawn = service._engine, service._engine.tokens_sampled
    monkeypatch.setattr(EngineWeights, "apply", broken)
    monkeypatch.setattr(Engine, "load", broken)
    await queue(bus, groups_of(CONFIG, range(2)))
    await take(bus, 2 * MEMBERS)
    drawn = engine.tokens_sampled
    await publisher.publish()
    with pytest.raises(BaseExceptionGroup) as ended:
        async with asyncio.timeout(WAIT_S):
            await task
    assert "no memory" in repr(ended.value)
    assert engine.tokens_sampled == drawn


async def test_a_prompt_that_comes_again_under_a_new_version_is_computed_again(bus: MemoryBus, publisher: Publisher) -> None:
    """W16: what a prompt begins with is kept for the groups after it, and belongs to the version that computed it: the first group of a version finds nothing."""
    again = 4
    task = groups_of(CONFIG, [0])[0].task
    task = task.model_copy(update={"prompt": "Take your time and spell backward, one letter after another, whatever stands behind the colon. " * 2 + task.prompt})
    found: list[Trajectory] = []
    async with serving(bus, publisher.blobs) as service:
        for version in range(3):
            if version:
                await publisher.publish()
                await reaches(service, version)
            engine = service._engine
            assert engine is not None
            hits = []
            for group in groups_of(CONFIG, range(version * again, (version + 1) * again)):
                before = engine.cache.stats.hit_tokens
                await queue(bus, [group.model_copy(update={"task": task})])
                found += await take(bus, MEMBERS)
                hits.append(engine.cache.stats.hit_tokens - before)
            assert hits[0] == 0
            assert hits[-1] > 64, "within a version there is something to find"
    assert [set(stamps(t)) for t in found] == [{v} for v in range(3) for _ in range(again * MEMBERS)]
    is_of_its_version(found[again * MEMBERS :: 3])
