"""The evaluator: which versions it measures, on what, and that it goes on after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_cases import base_state, beside, finish, publish_version, running, tiny

from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import EvalResult, Task
from driftline.models.model import K3ForCausalLM
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.manifest import Manifest, manifest_subject
from driftline.policy_store.pins import pins
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.writer import PolicyWriter
from driftline.services.evaluator.service import EvaluatorService, heldout_tasks, next_version
from driftline.services.grader.pool import GraderPool
from driftline.services.runtime import run_topology
from driftline.services.wiring import task_source

CONFIG = tiny("measuring", tasks={"heldout": 4})
RUN = CONFIG.run.name


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(CONFIG))
    return memory_bus


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


async def publish(bus: MemoryBus, blobs: MemoryBlobs, versions: range) -> None:
    for version in versions:
        await publish_version(bus, blobs, RUN, version)


async def results(bus: MemoryBus, count: int) -> list[EvalResult]:
    subjects = Subjects(RUN)
    found: list[EvalResult] = []
    async with aclosing(bus.follow(subjects.stream("EVAL"), f"{subjects.root}.eval.>")) as events:  # type: ignore[type-var]
        async for stored in events:
            assert isinstance(stored.message, EvalResult)
            found.append(stored.message)
            if len(found) >= count:
                break
    return found


def stored(bus: MemoryBus) -> int:
    return bus.broker.stream(Subjects(RUN).stream("EVAL")).last_seq


@pytest.mark.parametrize(
    ("done", "head", "every", "want"),
    [(-1, 0, 5, 0), (-1, 7, 5, 0), (-1, 7, 0, 0), (0, 4, 5, None), (0, 5, 5, 5), (0, 19, 5, 15), (5, 9, 5, None), (7, 10, 5, 10), (0, 9, 0, None)],
)
def test_the_first_version_comes_first_and_then_the_newest_multiple(done: int, head: int, every: int, want: int | None) -> None:
    assert next_version(done, head, every) == want


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 50))
def test_the_next_version_exists_is_a_multiple_and_was_not_measured(done: int, head: int, every: int) -> None:
    version = next_version(done, head, every)
    if version is None:
        assert head < (done // every + 1) * every
    else:
        assert done < version <= head
        assert version % every == 0
        assert head - version < every


def test_heldout_tasks_are_fixed_and_share_no_question_with_training() -> None:
    config = tiny("measuring")
    tasks = heldout_tasks(config)
    assert len(tasks) == config.tasks.heldout
    assert tasks == heldout_tasks(config.model_copy(update={"run": config.run.model_copy(update={"seed": 7})}))
    source = task_source(config)
    trained = {source.task(index, seed).prompt for seed in (0, 7) for index in range(300)}
    assert not trained & {task.prompt for task in tasks}


async def test_the_first_the_multiples_and_the_last_are_measured(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """H10 (docs/field_failures.md)."""
    await publish(bus, blobs, range(1))
    async with running(EvaluatorService(bus, blobs, CONFIG)) as task:
        await beside(task, results(bus, 1))
        await publish(bus, blobs, range(1, 3))
        await beside(task, results(bus, 2))
        await publish(bus, blobs, range(3, 4))
        await finish(bus, RUN, 3)
        await task
    found = await results(bus, 3)
    assert [r.version for r in found] == [0, 2, 3]
    assert stored(bus) == 3
    # The weights are the same in each, and so is everything random: the results must be too.
    assert len({(r.tasks, r.samples, r.reward_sampled, r.reward_greedy, r.exact_sampled, r.exact_greedy) for r in found}) == 1
    assert found[0].tasks == 4
    assert 0.0 < found[0].reward_greedy <= 1.0


async def test_a_run_that_ended_before_anything_was_measured_has_its_first_and_last_measured(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """H10, H8 (docs/field_failures.md)."""
    await publish(bus, blobs, range(4))
    await finish(bus, RUN, 3)
    async with running(EvaluatorService(bus, blobs, CONFIG)) as task:
        await task
    assert [r.version for r in await results(bus, 2)] == [0, 3]


async def test_a_restarted_evaluator_goes_on_after_what_was_measured(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """H10 (docs/field_failures.md)."""
    await publish(bus, blobs, range(1))
    async with running(EvaluatorService(bus, blobs, CONFIG)) as task:
        await beside(task, results(bus, 1))
    await publish(bus, blobs, range(1, 4))
    second = EvaluatorService(bus, blobs, CONFIG)
    async with running(second) as task:
        await beside(task, results(bus, 2))
        await finish(bus, RUN, 3)
        await task
    third = EvaluatorService(bus, blobs, CONFIG)
    async with asyncio.timeout(60), running(third) as task:
        await task
    assert [second.measured, third.measured] == [[2, 3], []]
    assert [r.version for r in await results(bus, 3)] == [0, 2, 3]


async def test_a_version_is_held_until_its_result_is_stored_and_one_that_is_gone_is_passed_over(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    seen: list[tuple[int, set[tuple[int, str]], int]] = []

    class Watched(EvaluatorService):
        async def _measure(self, model: K3ForCausalLM, tasks: Sequence[Task], pool: GraderPool, manifest: Manifest) -> None:
            await super()._measure(model, tasks, pool, manifest)
            seen.append((manifest.version, {(held.link.version, held.owner) for held in await pins(bus, RUN)}, stored(bus)))

    writer = PolicyWriter(bus, blobs, RUN, full_every=1)
    await writer.resume()
    for version in range(4):
        await writer.publish(base_state(), version=version, learner_step=version)
    reader = PolicyReader(bus, blobs, RUN)
    gone = (await reader.manifest(0)).link
    await bus.purge(Subjects(RUN).stream("POLICY"), manifest_subject(RUN, gone))
    await finish(bus, RUN, 3)
    async with running(Watched(bus, blobs, CONFIG)) as task:
        await task
    assert seen == [(3, {(3, "evaluator")}, 1)]
    assert await pins(bus, RUN) == ()
