"""What an engine holds is bounded: ahead of itself in members, ahead of the broker in bytes, and 12 bytes for a token it has sampled."""

from __future__ import annotations

import asyncio
import tracemalloc
from array import array
from typing import Any

import pytest
from engine_cases import group as case
from engine_cases import policy
from loop_cases import WAIT_S, eventually, groups_of, queue, running, sampled, tiny
from rollout_cases import RUN, Tapped, depth, is_idle, names, stored

from driftline.messages.memory import MemoryBus
from driftline.messages.types import Trajectory
from driftline.policy_store.blobs import MemoryBlobs
from driftline.services.rollout import service as rollout_service
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.engine.row import Row
from driftline.services.rollout.service import RolloutService, _bytes
from driftline.services.runtime import run_topology

CONFIG = tiny(RUN, rollout={"engines": 1, "max_batch": 8})
AHEAD = 8 + 4  # max_batch and one group


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(CONFIG))
    return memory_bus


class Watched(RolloutService):
    """Notes, for every slice, what it brought and what was in hand."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.slices: list[list[Trajectory]] = []
        self.most_waiting = self.most_unstored = 0

    def _slice(self, engine: Engine) -> tuple[list[Trajectory], Exception | None]:
        self.most_waiting = max(self.most_waiting, engine.active + engine.waiting)
        self.most_unstored = max(self.most_unstored, self._hand.unstored)
        done, error = super()._slice(engine)
        if done:
            self.slices.append(done)
        return done, error


async def test_a_stalled_broker_stops_the_engine_after_one_more_slice_and_then_loses_nothing(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """M1, H29, L9: forty groups wait, the broker takes no member; what is taken and what is finished stay within the bound."""
    groups = groups_of(CONFIG, range(40))
    tapped = Tapped(bus)
    go, begun = asyncio.Event(), asyncio.Event()

    async def stall(subject: str) -> None:
        if ".trajectories." in subject:
            begun.set()
            await go.wait()

    tapped.before_publish = stall
    await queue(bus, groups)
    service = Watched(tapped, blobs, CONFIG)
    async with running(service):
        await begun.wait()
        for _ in range(100):  # long enough for a third, if there could be one
            await asyncio.sleep(0.005)
            assert 1 <= len(service.slices) <= 2  # one, where nothing new had arrived by its end
            assert service._hand.unstored <= 2 * AHEAD
        taken = (await depth(bus, CONFIG)).ack_pending
        assert taken * 4 <= 2 * AHEAD, "the rest is left for other engines"
        assert taken < len(groups)
        go.set()
        found = await stored(bus, 160)
        await eventually(lambda: is_idle(bus))
    assert names(found) == [(g.group, m) for g in groups for m in range(4)]
    assert service.most_waiting <= AHEAD
    assert service.most_unstored <= 2 * AHEAD


async def test_results_ahead_of_the_broker_are_bounded_in_bytes(bus: MemoryBus, blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """M1: a slice ends with the step that fills its share, however much time it has."""
    monkeypatch.setattr(rollout_service, "SLICE_S", WAIT_S)
    monkeypatch.setattr(rollout_service, "AHEAD_BYTES", 1)
    steps: list[list[Trajectory]] = []
    real = Engine.step

    def step(engine: Engine) -> list[Trajectory]:
        done = real(engine)
        steps.append(done)
        return done

    monkeypatch.setattr(Engine, "step", step)
    groups = groups_of(CONFIG, range(6))
    await queue(bus, groups)
    service = Watched(bus, blobs, CONFIG)
    async with running(service):
        found = await stored(bus, 24)
    assert [[t.id for t in s] for s in service.slices] == [[t.id for t in s] for s in steps if s]
    assert len(service.slices) > 3
    assert names(found) == names(sampled(groups))
    assert all(_bytes(t) == 13 * len(t.tokens) for t in found)


def test_a_sampled_token_costs_twelve_bytes_and_the_prompt_is_shared() -> None:
    """M1: 57 k tokens a member; boxed integers and floats would be about a hundred bytes a token."""
    tokens, members = 57_000, 8
    prompt = array("i", range(1000))
    tracemalloc.start()
    try:
        rows = [Row(case(0, members), m, 0, prompt, 0.0) for m in range(members)]
        for row in rows:
            for i in range(tokens):
                row.tokens.append(100_000 + i)
                row.logprobs.append(-0.5 - i)
                row.versions.append(i // 1000)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.3 * 12 * tokens * members
    assert sum(row.prompt is prompt for row in rows) == members


def test_members_share_their_prompt_and_its_routes_and_a_turn_ships_one_token() -> None:
    """M1: no step copies or recomputes a prefix: the tokens that go through the model are the prompts once and then one a member."""
    engine = Engine(policy(), version=0, record_routes=True)
    fed: list[int] = []
    embedding = engine.model.get_submodule("model.embed_tokens")
    embedding.register_forward_pre_hook(lambda _module, given: fed.append(given[0].numel()))
    engine.submit(case(0, members=6, max_tokens=30))
    engine.step()
    assert len({id(row.prompt) for row in engine._rows}) == 1
    assert len({id(row.prompt_routes) for row in engine._rows}) == 1
    prompt = len(engine._rows[0].prompt)
    for _ in range(4):
        engine.step()
    assert fed[0] == prompt
    assert all(n <= 6 for n in fed[1:])
    for row in engine._rows:
        assert row.prompt_routes is not None
        assert row.prompt_routes.base is None, "a view would hold the padded table of every prompt"
        assert len(row.routes) == (len(row.tokens) - 1) * 2 * row.prompt_routes[0].size
