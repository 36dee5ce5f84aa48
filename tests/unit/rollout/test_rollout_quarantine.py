"""A group that makes the engine fail costs no other group anything; a machine that fails costs no group anything."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import completion
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_cases import eventually, groups_of, publish_version, queue, running, sampled, tiny
from rollout_cases import (
    CONFIG,
    RUN,
    Gate,
    Tapped,
    dead,
    is_idle,
    killed,
    lies_ready,
    names,
    rollout_consumer,
    stored,
    topology_with,
)

from driftline.messages.errors import PayloadTooLarge
from driftline.messages.memory import MemoryBus
from driftline.messages.types import Group, Sampling
from driftline.policy_store.blobs import MemoryBlobs
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.quarantine import Quarantine, is_infrastructure
from driftline.services.rollout.service import RolloutService
from driftline.services.runtime import run_topology

INFRASTRUCTURE = [
    torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), OSError(28, "No space left on device"),
    RuntimeError("CUDA error: device-side assert triggered"), torch.AcceleratorError("CUDA error: unspecified launch failure"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
]
DATA = [ValueError("bad prompt"), IndexError("index out of range in self"), RuntimeError("The size of tensor a (3) must match"), AssertionError()]


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(CONFIG))
    return memory_bus


class Poison:
    """Makes a step raise: `when` is asked, after each step, with the groups in the engine and their longest completion."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, when: Callable[[dict[str, int]], Exception | None]) -> None:
        self.alone: Counter[str] = Counter()
        self.failures = 0
        real = Engine._collect

        def collect(engine: Engine) -> Any:
            lengths: dict[str, int] = {}
            for row in engine._rows:
                lengths[row.group.group] = max(lengths.get(row.group.group, 0), len(row.tokens))
            error = when(lengths)
            if error is not None:
                self.failures += 1
                if len(lengths) == 1:
                    self.alone.update(lengths.keys())
                raise error
            return real(engine)

        monkeypatch.setattr(Engine, "_collect", collect)


@pytest.mark.parametrize("error", INFRASTRUCTURE, ids=lambda e: type(e).__name__)
def test_what_the_machine_did_is_not_blamed_on_data(error: Exception) -> None:
    assert is_infrastructure(error)


@pytest.mark.parametrize("error", DATA, ids=lambda e: type(e).__name__)
def test_what_data_did_is_not_blamed_on_the_machine(error: Exception) -> None:
    assert not is_infrastructure(error)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 12)), min_size=1, max_size=8), st.integers(1, 4),
)
def test_exactly_the_culprits_are_condemned_each_after_its_tries_and_all_others_end(groups: list[tuple[bool, int]], tries: int) -> None:
    """An engine in which any step with a culprit in it fails; whoever is not one must come through, whenever it arrives."""
    culprits = {f"g{i}" for i, (culprit, _) in enumerate(groups) if culprit}
    late = {f"g{i}": at for i, (_, at) in enumerate(groups)}
    quarantine, ready, inside, ended = Quarantine(tries), list[str](), list[str](), list[str]()
    alone, condemned = Counter[str](), list[str]()
    for tick in range(200):
        ready += [name for name, at in late.items() if at == tick]
        admitted = quarantine.admit(ready, engine_idle=not inside)
        assert not ready or inside or admitted, "an idle engine is kept waiting"
        inside += admitted
        ready = [name for name in ready if name not in admitted]
        if set(inside) & culprits:
            if len(inside) == 1:
                alone[inside[0]] += 1
            blamed = quarantine.failed(inside)
            ready += [name for name in inside if name != blamed]
            condemned += [blamed] if blamed else []
            inside = []
        elif inside:
            ended.append(inside.pop(0))
    assert sorted(condemned) == sorted(culprits)
    assert sorted(ended) == sorted(late.keys() - culprits)
    assert alone == dict.fromkeys(culprits, tries)
    quarantine.admit([], engine_idle=True)
    assert not quarantine.active


async def test_a_step_that_fails_once_loses_nothing_and_blames_nobody(
    bus: MemoryBus, blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H34, H16: one failed generation does not kill the worker, and does not go unseen."""
    first = [ValueError("a hiccup")]
    poison = Poison(monkeypatch, lambda lengths: first.pop() if len(lengths) == 3 and max(lengths.values()) == 2 and first else None)
    groups = groups_of(CONFIG, range(3))
    await queue(bus, groups)
    service = RolloutService(bus, blobs, CONFIG)
    async with running(service):
        found = await stored(bus, 12)
        await eventually(lambda: is_idle(bus))
    assert poison.failures == 1
    want = sampled(groups)
    assert names(found) == names(want)
    assert [completion(t) for t in found] == [completion(t) for t in want], "the same randomness"
    assert (service.counts.data_failures, service.counts.groups_condemned) == (1, 0)
    assert await dead(bus) == []


@pytest.mark.parametrize("tries", [1, 3])
async def test_the_group_that_fails_is_dead_lettered_after_its_tries_and_no_other_is_lost(
    bus: MemoryBus, blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    """H34, L14, H4: two culprits among five groups, one at its prompt and one midway."""
    config = tiny(RUN, rollout={"max_batch": 32, "data_failures": tries})
    groups = groups_of(config, range(5))
    early, midway = groups[1].group, groups[3].group

    def when(lengths: dict[str, int]) -> Exception | None:
        if lengths.get(early):
            return ValueError("a prompt the model cannot take")
        return IndexError("midway") if lengths.get(midway, 0) >= 3 else None

    poison = Poison(monkeypatch, when)
    await queue(bus, groups)
    service = RolloutService(bus, blobs, config)
    async with running(service):
        found = await stored(bus, 12)
        await eventually(lambda: is_idle(bus))
        await eventually(lambda: bool(len(service._hand) == 0))
    innocent = [g for g in groups if g.group not in (early, midway)]
    assert names(found) == names(sampled(innocent))
    assert [completion(t) for t in found] == [completion(t) for t in sampled(innocent)]
    letters = {letter.reason for letter in await dead(bus)}
    assert letters == {
        f"data failure, tried {tries} times: ValueError: a prompt the model cannot take", f"data failure, tried {tries} times: IndexError: midway"
    }
    assert poison.alone == {early: tries, midway: tries}
    assert service.counts.groups_condemned == 2
    assert service.counts.data_failures == poison.failures
    assert service.counts.infrastructure_failures == 0


async def test_members_that_finished_before_a_failing_step_are_kept(bus: MemoryBus, blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is condemned, and what of it was finished is stored: its members' ids end once."""
    group, want = next((g, t) for i in range(20) for g in [groups_of(CONFIG, [i])] for t in [sampled(g)] if len({len(m.tokens) for m in t}) > 1)
    shortest = min(len(completion(t)) for t in want)
    early = [t for t in want if len(completion(t)) == shortest]
    Poison(monkeypatch, lambda lengths: ValueError("later") if max(lengths.values(), default=0) > shortest else None)
    await queue(bus, group)
    async with running(RolloutService(bus, blobs, CONFIG)):
        found = await stored(bus, len(early))
        await eventually(lambda: is_idle(bus))
    assert names(found) == names(early)
    assert len(await dead(bus)) == 1


async def test_a_prompt_that_cannot_fit_the_model_is_refused_before_it_enters(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    good, bad = groups_of(CONFIG, range(2))
    bad = bad.model_copy(update={"sampling": Sampling(max_tokens=2**20)})
    await queue(bus, [bad, good])
    service = RolloutService(bus, blobs, CONFIG)
    async with running(service):
        found = await stored(bus, 4)
        await eventually(lambda: is_idle(bus))
    assert names(found) == names(sampled([good]))
    (letter,) = await dead(bus)
    assert letter.reason.startswith(f"data failure, tried 2 times: DriftlineError: task {bad.task.id} = ")
    assert "sampling.max_tokens = 1048576" in letter.reason
    assert service.counts.data_failures == 2


async def test_a_member_too_large_to_store_ends_its_group_alone(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    groups = groups_of(CONFIG, range(2))
    tapped = Tapped(bus)

    async def refuse(subject: str) -> None:
        if subject.endswith(f"trajectories.{groups[0].group}"):
            raise PayloadTooLarge("too large", field=subject, value=1)

    tapped.before_publish = refuse
    await queue(bus, groups)
    async with running(RolloutService(tapped, blobs, CONFIG)):
        found = await stored(bus, 4)
        await eventually(lambda: is_idle(bus))
    assert names(found) == names(sampled(groups[1:]))
    assert {letter.reason.split(",")[0] for letter in await dead(bus)} == {"data failure"}


def leaves(error: BaseException) -> list[BaseException]:
    return [leaf for e in error.exceptions for leaf in leaves(e)] if isinstance(error, BaseExceptionGroup) else [error]


@pytest.mark.parametrize("error", INFRASTRUCTURE[:4], ids=lambda e: type(e).__name__)
async def test_a_failing_machine_ends_the_service_with_its_cause_and_gives_the_groups_back(
    bus: MemoryBus, blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """H3, H16, H20: the process ends with the cause; another takes the groups at once; no group is blamed."""
    groups = groups_of(CONFIG, range(2))
    await queue(bus, groups)
    tapped = Tapped(bus)
    with monkeypatch.context() as broken:
        Poison(broken, lambda lengths: error if lengths else None)
        service = RolloutService(tapped, blobs, CONFIG)
        async with running(service) as task:
            with pytest.raises(BaseExceptionGroup) as raised:
                await task
    assert error in leaves(raised.value)
    assert tapped.metrics[-1]["infrastructure_failures"] == 1
    assert tapped.metrics[-1]["data_failures"] == 0
    assert tapped.metrics[-1]["groups_condemned"] == 0
    async with running(RolloutService(bus, blobs, CONFIG, "1")):
        found = await stored(bus, 8)
        await eventually(lambda: is_idle(bus))
    assert names(found) == names(sampled(groups))
    assert await dead(bus) == []


async def test_a_cache_that_cannot_be_rebuilt_at_an_update_is_a_data_failure(
    bus: MemoryBus, blobs: MemoryBlobs, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(RUN, rollout={"policy_update": "interrupt", "max_batch": 16})
    failing = [ValueError("histories")]

    def recompute(engine: Engine) -> None:
        if engine._rows and failing:
            raise failing.pop()

    monkeypatch.setattr(Engine, "recompute", recompute)
    groups = groups_of(config, range(2))
    service = RolloutService(bus, blobs, config)
    gate.close()
    async with running(service):
        await queue(bus, groups)
        await gate.entered()
        await publish_version(bus, blobs, RUN, 1)
        await eventually(lambda: lies_ready(service, 1))
        gate.open()
        found = await stored(bus, 8)
        await eventually(lambda: is_idle(bus))
    assert names(found) == names(sampled(groups))
    assert service.counts.data_failures == 1
    assert await dead(bus) == []


async def hold_and_kill(bus: MemoryBus, blobs: MemoryBlobs, config: Any, consumer: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.close()
    service = RolloutService(bus, blobs, config, consumer=consumer)
    task = asyncio.create_task(service.run())
    await gate.entered()
    await killed(service, task, monkeypatch)
    gate.open()


@pytest.mark.parametrize(("max_deliver", "kills", "ends"), [(3, 3, "dead"), (20, 5, "stored")])
async def test_a_group_that_is_held_by_every_process_that_dies_is_dead_lettered_at_last(
    memory_bus: MemoryBus, gate: Gate, monkeypatch: pytest.MonkeyPatch, max_deliver: int, kills: int, ends: str
) -> None:
    """Poison by crash: nothing tells an innocent group from one that kills, so the budget of deliveries is what bounds it, and five kills are within 20."""
    consumer = rollout_consumer(ack_wait_s=0.2, max_deliver=max_deliver)
    await memory_bus.declare(topology_with(consumer))
    blobs = MemoryBlobs()
    await publish_version(memory_bus, blobs, RUN, 0)
    group: list[Group] = groups_of(CONFIG, [0])
    await queue(memory_bus, group)
    for _ in range(kills):
        await hold_and_kill(memory_bus, blobs, CONFIG, consumer, gate, monkeypatch)
    async with running(RolloutService(memory_bus, blobs, CONFIG, consumer=consumer)):
        if ends == "stored":
            assert names(await stored(memory_bus, 4)) == names(sampled(group))
        await eventually(lambda: is_idle(memory_bus))
    letters = await dead(memory_bus)
    assert [letter.reason for letter in letters] == ([f"delivered {max_deliver} times without an acknowledgement"] if ends == "dead" else [])
