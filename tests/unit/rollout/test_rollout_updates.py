"""What an engine serves from: exactly the version its tokens are stamped with, whatever happens while it is fetched."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import recomputed
from loop_cases import WAIT_S, base_model, eventually, groups_of, queue, running, tiny
from rollout_cases import (
    CONFIG,
    RUN,
    Gate,
    Tapped,
    Wrapped,
    lies_ready,
    publish_shifted,
    rollout_consumer,
    shifted,
    stored,
    topology_with,
    versions,
)

from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerUnavailable, IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.models.model import K3ForCausalLM
from driftline.models.state import export_state, load_state
from driftline.policy_store.blobs import BlobStore, MemoryBlobs
from driftline.policy_store.manifest import PolicyHead
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import State, state_digest
from driftline.services.config import Config
from driftline.services.policy_model import build_model
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.service import RolloutService
from driftline.services.rollout.updates import Updates
from driftline.services.runtime import run_topology
from driftline.services.tensors import from_host, to_host


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(CONFIG))
    return memory_bus


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


def model_of(version: int) -> K3ForCausalLM:
    model = build_model(Config(), device="cpu", threads=1)
    load_state(model, from_host(shifted(version)))
    return model.eval()


async def test_an_update_during_generation_stamps_each_token_with_the_version_that_made_it(
    bus: MemoryBus, blobs: MemoryBlobs, gate: Gate
) -> None:
    """S4: a head announced while a step runs changes no stamp of that step. The log-probabilities say which weights made a token: with rebuilt
    caches those stamped 1 are exactly version 1's, those stamped 0 exactly version 0's."""
    config = tiny(RUN, run={"steps": 3, "groups_per_step": 2, "group_size": 4, "max_lag": 4}, rollout={"policy_update": "interrupt", "max_batch": 16})
    await publish_shifted(bus, blobs, RUN, 0)
    groups = groups_of(config, range(3))
    service = RolloutService(bus, blobs, config)
    gate.close()
    async with running(service):
        await queue(bus, groups)
        await gate.entered()
        await publish_shifted(bus, blobs, RUN, 1)
        await eventually(lambda: lies_ready(service, 1))
        gate.open()
        found = await stored(bus, 12)
    mixed = [t for t in found if versions(t) == {0, 1}]
    assert mixed
    models = {v: model_of(v) for v in (0, 1)}
    for t in mixed:
        stamps, ours = t.versions[t.action_mask], t.logprobs[t.action_mask]
        assert (np.diff(stamps) >= 0).all()
        theirs = {v: recomputed(models[v], t) for v in (0, 1)}
        for v in (0, 1):
            np.testing.assert_allclose(ours[stamps == v], theirs[v][stamps == v], atol=1e-4)
    apart = max(np.abs(recomputed(models[0], t) - recomputed(models[1], t)).max() for t in mixed)
    assert apart > 1e-3, "the two versions must differ enough to be told apart"


class Slow(PolicyReader):
    """Holds what is asked of it until it is let go, or for ever; `held` tells that someone waits."""

    def __init__(self, bus: Bus, blobs: BlobStore, *, advance: bool = False, whole: bool = False) -> None:
        super().__init__(bus, blobs, RUN)
        self.hold_advance, self.hold_whole = advance, whole
        self.held, self.go = asyncio.Event(), asyncio.Event()

    async def advance(self, *args: Any, **more: Any) -> State:
        if self.hold_advance:
            self.held.set()
            await self.go.wait()
        return await super().advance(*args, **more)

    async def materialise_manifest(self, target: Any) -> State:
        if self.hold_whole:
            self.held.set()
            await self.go.wait()
        return await super().materialise_manifest(target)


async def test_a_group_that_comes_between_announcement_and_application_is_sampled_by_the_new_version(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """S7: nothing is begun while an update is under way."""
    await publish_shifted(bus, blobs, RUN, 0)
    reader = Slow(bus, blobs, advance=True)
    service = RolloutService(bus, blobs, CONFIG, reader=reader)
    async with running(service):
        await eventually(lambda: service._engine is not None)
        await publish_shifted(bus, blobs, RUN, 1)
        await reader.held.wait()
        await queue(bus, groups_of(CONFIG, range(2)))
        await eventually(lambda: len(service._hand) == 2)
        assert service._engine is not None
        assert service._engine.tokens_sampled == 0
        reader.go.set()
        found = await stored(bus, 8)
    assert all(versions(t) == {1} for t in found)


async def test_a_restarted_engine_serves_nothing_until_it_has_the_heads_weights(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """S13, H27, S19: work is waiting when it starts, its model holds the starting weights; not a token is made before they are replaced, and what
    it serves from has the manifest's digest."""
    for version in range(4):
        await publish_shifted(bus, blobs, RUN, version)
    groups = groups_of(CONFIG, range(2))
    await queue(bus, groups)
    reader = Slow(bus, blobs, whole=True)
    service = RolloutService(bus, blobs, CONFIG, reader=reader)
    async with running(service):
        await reader.held.wait()
        assert (service._engine, len(service._hand)) == (None, 0), "no group is even taken"
        reader.go.set()
        found = await stored(bus, 8)
        assert service._engine is not None
        state = to_host(export_state(service._engine.model, torch.bfloat16))
    assert all(versions(t) == {3} for t in found)
    assert state_digest(state) == state_digest(shifted(3)) != state_digest(to_host(export_state(base_model(), torch.bfloat16)))
    three = model_of(3)
    for t in found:
        np.testing.assert_allclose(t.logprobs[t.action_mask], recomputed(three, t), atol=1e-4)


class Damaged:
    """A store read over a bad line: while `broken`, every blob is something else here."""

    def __init__(self, blobs: MemoryBlobs) -> None:
        self._blobs, self.broken = blobs, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blobs, name)

    async def get(self, ref: Any) -> bytes:
        data = await self._blobs.get(ref)
        return bytes(len(data)) if self.broken else bytes(data)


async def test_weights_that_are_not_the_manifests_are_never_served(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """S13, W1, W2: an update of damaged bytes, with no other way to the version, ends the service; what was queued is left for another."""
    await publish_shifted(bus, blobs, RUN, 0)
    line = Damaged(blobs)
    service = RolloutService(bus, line, CONFIG)
    async with running(service) as task:
        await eventually(lambda: service._engine is not None)
        line.broken = True
        await publish_shifted(bus, blobs, RUN, 1)
        with pytest.raises(BaseExceptionGroup) as raised:
            await task
        await queue(bus, groups_of(CONFIG, [0]))
    assert raised.group_contains(IntegrityError)
    assert bus.broker.stream(f"DL-{RUN}-TRAJECTORIES").last_seq == 0
    async with running(RolloutService(bus, blobs, CONFIG, "1")):
        assert all(versions(t) == {1} for t in await stored(bus, 4))


class Lying(PolicyReader):
    """Returns another version's weights and says nothing of it."""

    async def materialise_manifest(self, target: Any) -> State:
        return shifted(7)


async def test_a_state_with_another_digest_is_refused_whoever_read_it(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """S13, W9, S19: compared once more where it is used."""
    await publish_shifted(bus, blobs, RUN, 0)
    with pytest.raises(IntegrityError, match="digest of version 0"):
        await Updates(Lying(bus, blobs, RUN), outage_s=1.0, newer=lambda: None).first()


async def test_an_update_that_hangs_is_given_up_and_the_version_is_read_afresh(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """H12, H13: the service goes on, by the newest version there is by then."""
    await publish_shifted(bus, blobs, RUN, 0)
    reader = Slow(bus, blobs, advance=True)
    service = RolloutService(bus, blobs, CONFIG, reader=reader)
    service._policy._advance_s = 0.05
    async with running(service):
        await eventually(lambda: service._engine is not None)
        for version in (1, 2):
            await publish_shifted(bus, blobs, RUN, version)
        await queue(bus, groups_of(CONFIG, [0]))
        found = await stored(bus, 4)
        assert service._policy.given_up >= 1
        assert state_digest(service._policy.state) == state_digest(shifted(2))
    assert all(max(versions(t)) == 2 for t in found)


async def test_an_update_that_hangs_either_way_ends_the_service_with_the_cause_and_its_groups_are_free(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """H12, H6, H7: never paused for ever."""
    await publish_shifted(bus, blobs, RUN, 0)
    reader = Slow(bus, blobs)
    service = RolloutService(bus, blobs, CONFIG, reader=reader)
    service._policy._advance_s = 0.05
    async with running(service) as task:
        await eventually(lambda: service._engine is not None)
        service._policy._read_s = 0.05
        reader.hold_advance = reader.hold_whole = True
        await publish_shifted(bus, blobs, RUN, 1)
        await queue(bus, groups_of(CONFIG, [0]))
        with pytest.raises(BaseExceptionGroup) as raised:
            await task
    assert raised.group_contains(BrokerUnavailable, match=r"version = 1: the policy was not read within 0.05 s")
    async with running(RolloutService(bus, blobs, CONFIG, "1")):
        assert all(versions(t) == {1} for t in await stored(bus, 4))


async def test_an_engine_that_never_gets_its_first_weights_says_so(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """H12, H23."""
    await publish_shifted(bus, blobs, RUN, 0)
    updates = Updates(Slow(bus, blobs, whole=True), outage_s=1.0, newer=lambda: None, read_s=0.05)
    with pytest.raises(BrokerUnavailable, match="version = 0"):
        await updates.first()


async def test_leases_and_heartbeats_go_on_while_weights_are_loaded(memory_bus: MemoryBus, blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """H32, H11: an application that takes many leases' time, in the thread that computes, loses no lease and silences no report."""
    short = rollout_consumer(ack_wait_s=0.3)
    await memory_bus.declare(topology_with(short))
    await publish_shifted(memory_bus, blobs, RUN, 0)
    monkeypatch.setattr("driftline.services.rollout.service.REPORT_S", 0.05)
    loading, go, calls = threading.Event(), threading.Event(), Counter[str]()
    real = Engine.adopt

    def adopt(engine: Engine, version: int, write: Callable[[], None]) -> None:
        loading.set()
        assert go.wait(WAIT_S)
        real(engine, version, write)

    monkeypatch.setattr(Engine, "adopt", adopt)
    tapped = Tapped(memory_bus)
    tapped.wrap_delivery = lambda delivery: Wrapped(delivery, calls)
    service = RolloutService(tapped, blobs, CONFIG, consumer=short)
    try:
        async with running(service):
            await eventually(lambda: service._engine is not None)
            await publish_shifted(memory_bus, blobs, RUN, 1)
            assert await asyncio.to_thread(loading.wait, WAIT_S)
            await queue(memory_bus, groups_of(CONFIG, [0]))
            reports = len(tapped.metrics)
            await eventually(lambda: calls["renew"] >= 9)  # three leases long
            assert len(tapped.metrics) > reports
            assert [d.deliveries for d in service._hand.deliveries] == [1]
            go.set()
            assert all(versions(t) == {1} for t in await stored(memory_bus, 4))
            assert service.counts.leases_lost == 0
    finally:
        go.set()


async def test_a_head_that_cannot_be_read_for_a_moment_is_asked_for_again(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    class Deaf(PolicyReader):
        silent = 3

        async def head(self) -> PolicyHead | None:
            if self.silent:
                self.silent -= 1
                raise BrokerUnavailable("no answer")
            return await super().head()

    await publish_shifted(bus, blobs, RUN, 0)
    reader = Deaf(bus, blobs, RUN)
    updates = Updates(reader, outage_s=WAIT_S, newer=lambda: None)
    await updates.look()
    assert updates.behind(-1)
    reader.silent = 10**9
    patient = Updates(reader, outage_s=0.0, newer=lambda: None)
    with pytest.raises(BrokerUnavailable):
        await patient.look()
