"""Stale work is cancelled at a version change, before it costs more, and never a version too early."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from engine_cases import completion, policy
from engine_cases import group as case
from hypothesis import given
from hypothesis import strategies as st
from loop_cases import eventually, finish, groups_of, publish_version, queue, running, tiny
from rollout_cases import RUN, Gate, is_idle, lies_ready, names, stored, versions

from driftline.messages.codec import decode, encode
from driftline.messages.memory import MemoryBus
from driftline.messages.types import Finish, Group
from driftline.models.state import export_state
from driftline.policy_store.blobs import MemoryBlobs
from driftline.services.config import PolicyUpdate, StalePolicy
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.engine.row import Row
from driftline.services.rollout.service import RolloutService
from driftline.services.runtime import run_topology

ENGINE = Engine(policy(), version=0)


@pytest.fixture
def never_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members run to max_tokens, so that they are surely running when a version comes."""
    monkeypatch.setattr(Row, "finish", property(lambda row: Finish.LENGTH if len(row.tokens) >= row.max_tokens else None))


async def begun(bus: MemoryBus) -> MemoryBlobs:
    await bus.declare(run_topology(tiny(RUN)))
    blobs = MemoryBlobs()
    await publish_version(bus, blobs, RUN, 0)
    return blobs


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=12), st.integers(0, 40), st.integers(0, 5))
def test_a_group_is_overdue_exactly_when_no_later_head_can_be_trained_from(rows: list[tuple[int, int]], head: int, max_lag: int) -> None:
    """S1, S10: judged by the oldest token, strictly. A batch formed at head h takes a token of version o when h - o <= max_lag, and h only grows."""
    groups = [case(i) for i in range(6)]
    ENGINE._rows = [
        Row(groups[g], m, 0, array("i", [256]), 0.0, versions=array("i", range(oldest, oldest + 3))) for m, (g, oldest) in enumerate(rows)
    ]
    trainable = {g: all(any(h - o <= max_lag for h in range(head, head + 80)) for gg, o in rows if gg == g) for g, _ in rows}
    assert set(ENGINE.overdue(head - max_lag)) == {groups[g].group for g, possible in trainable.items() if not possible}
    ENGINE.forget()


def test_a_group_given_up_is_returned_as_it_is_and_the_others_go_on() -> None:
    """L17, L19, S12: tokens so far, each with its stamp, valid on the wire; what has no token is nothing."""
    engine = Engine(policy(0, stops=False), version=3, max_batch=3, record_routes=True)
    engine.submit(case(0), [0])
    engine.step()
    engine.load(4, export_state(policy(1, stops=False), torch.float32))
    engine.submit(case(0), [1])
    engine.submit(case(1), [2])
    engine.submit(case(0), [2])
    engine.step()
    engine.step()
    assert engine.waiting == 1
    assert engine.overdue(3) == []
    assert engine.overdue(4) == ["g00000000"], "one member is old, and it takes its group with it"
    first, second = engine.give_up("g00000000")
    assert (first.member, second.member) == (0, 1)
    assert first.finish is second.finish is Finish.ABORT
    assert first.versions[first.action_mask].tolist() == [3, 4, 4]
    assert second.versions[second.action_mask].tolist() == [4, 4]
    assert first.routes is not None
    assert (first.routes[-1] == -1).all()
    assert (first.routes[:-1] >= 0).all()
    back = decode(encode(first))
    assert np.array_equal(back.tokens, first.tokens)  # type: ignore[attr-defined]
    assert (engine.active, engine.waiting) == (1, 0)
    assert engine.give_up("g00000000") == []
    assert engine.tokenizer.decode(completion(first)) == first.text


def test_a_member_of_one_token_can_be_given_up() -> None:
    engine = Engine(policy(), version=0, record_routes=True)
    engine.submit(case(0, members=1))
    with torch.inference_mode():
        engine._fill(64)
    (aborted,) = engine.give_up("g00000000")
    assert len(completion(aborted)) == 1
    assert engine.idle


@pytest.mark.usefixtures("never_stops")
@pytest.mark.parametrize("how", list(PolicyUpdate))
async def test_a_version_beyond_the_bound_ends_running_groups_with_what_there_is(memory_bus: MemoryBus, gate: Gate, how: PolicyUpdate) -> None:
    """S1, S8, H21: whatever an update does to running rows, rows that no step can train on are stored as aborted and their group is acknowledged."""
    config = tiny(RUN, rollout={"policy_update": how}, sampling={"max_tokens": 400})
    blobs = await begun(memory_bus)
    groups = groups_of(config, range(2))
    service = RolloutService(memory_bus, blobs, config)
    await queue(memory_bus, groups)
    gate.close()
    async with running(service) as task:
        await gate.entered()
        for version in (1, 2):
            await publish_version(memory_bus, blobs, RUN, version)
        await eventually(lambda: service._policy.head is not None and service._policy.head.version == 2)
        gate.open()
        found = await stored(memory_bus, 8)
        await eventually(lambda: is_idle(memory_bus))
        await finish(memory_bus, RUN, 2)
        await task
    assert names(found) == [(g.group, m) for g in groups for m in range(4)]
    assert {t.finish for t in found} == {Finish.ABORT}
    assert all(versions(t) == {0} for t in found), "not one token was spent after the version was known"
    whole = Engine(service._engine.model, version=0)  # type: ignore[union-attr]
    for g in groups:
        whole.submit(g)
    for _ in range(len(completion(found[0]))):
        whole.step()
    full = {(row.group.group, row.member): row.tokens.tolist() for row in whole._rows}
    assert all(completion(t) == full[t.group, t.member] for t in found)
    assert (service.counts.groups_given_up, service.counts.members_aborted) == (2, 8)


@pytest.mark.usefixtures("never_stops")
async def test_at_the_bound_a_group_goes_on_and_only_older_ones_end(memory_bus: MemoryBus, gate: Gate) -> None:
    """S20 (docs/field_failures.md)."""
    config = tiny(RUN, sampling={"max_tokens": 60})
    blobs = await begun(memory_bus)
    old, new = groups_of(config, range(2))
    service = RolloutService(memory_bus, blobs, config)
    await queue(memory_bus, [old])
    gate.close()
    async with running(service):
        await gate.entered()
        await publish_version(memory_bus, blobs, RUN, 1)
        await eventually(lambda: lies_ready(service, 1))
        await queue(memory_bus, [new])
        await eventually(lambda: new.group in service._hand)
        gate.step()  # to the next one, which is the first with the new group in it
        await gate.entered()
        await publish_version(memory_bus, blobs, RUN, 2)
        await eventually(lambda: lies_ready(service, 2))
        gate.open()
        found = await stored(memory_bus, 8)
        await eventually(lambda: is_idle(memory_bus))
    by_group = {name: [t for t in found if t.group == name] for name in (old.group, new.group)}
    assert all(t.finish is Finish.ABORT and versions(t) <= {0, 1} and 0 in versions(t) for t in by_group[old.group])
    assert all(t.finish is Finish.LENGTH and versions(t) == {1, 2} for t in by_group[new.group]), "lag 1 is within the bound"
    assert service.counts.groups_given_up == 1


async def orderly(bus: MemoryBus, blobs: MemoryBlobs, groups: list[Group], steps: int) -> int:
    """A learner under `wait`: a step is taken when no open group would be stale after it. Returns how many members were aborted."""
    aborted = 0
    for version in range(1, steps + 1):
        await queue(bus, groups[2 * version - 2 : 2 * version])
        found = await stored(bus, 8)
        aborted += sum(t.finish is Finish.ABORT for t in found)
        await publish_version(bus, blobs, RUN, version)
    return aborted


async def test_under_wait_an_orderly_run_gives_nothing_up_and_under_drop_the_same_engine_does(memory_bus: MemoryBus, gate: Gate) -> None:
    """S15: nothing is thrown away for being slow while the learner waits; an engine needs no setting to tell the two."""
    config = tiny(RUN, run={"steps": 8, "groups_per_step": 2, "group_size": 4, "max_lag": 1, "stale_policy": StalePolicy.WAIT})
    blobs = await begun(memory_bus)
    groups = groups_of(config, range(20))
    service = RolloutService(memory_bus, blobs, config)
    async with running(service):
        assert await orderly(memory_bus, blobs, groups, 4) == 0
        assert service.counts.groups_given_up == 0
        gate.close()
        await queue(memory_bus, groups[10:11])
        await gate.entered()
        for version in range(5, 8):  # a learner under `drop` does not wait for it
            await publish_version(memory_bus, blobs, RUN, version)
        await eventually(lambda: service._policy.head is not None and service._policy.head.version == 7)
        gate.open()
        found = await stored(memory_bus, 4)
        await eventually(lambda: is_idle(memory_bus))
        assert service.counts.groups_given_up == 1
        assert Finish.ABORT in {t.finish for t in found}
        assert all(t.finish is Finish.ABORT or versions(t) == {4} for t in found)
