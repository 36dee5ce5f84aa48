"""Kinds of failures met in other systems whose test belongs to no single service. docs/field_failures.md has the table of all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_cases import (
    admit,
    alternating,
    base_state,
    beside,
    finish,
    grade,
    groups_of,
    head_at,
    publish_version,
    running,
    sampled,
    tiny,
)

from driftline.environments.split import is_heldout, training_task
from driftline.messages import Finish, Group, MemoryBus, Outcome, OutcomeEvent, Task, Trajectory, topology
from driftline.messages.types import Admitted
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.reader import MANIFESTS_KEPT, PolicyReader
from driftline.policy_store.tensor import HostTensor
from driftline.policy_store.writer import PolicyWriter
from driftline.services.dispatcher.admission import AdmissionState, capacity, fold, group_id
from driftline.services.evaluator.service import EvaluatorService
from driftline.services.learner.service import LearnerService
from driftline.services.runtime import run_topology

CONFIG = tiny("kinds")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_three_prompts_are_enough_for_any_number_of_steps() -> None:
    """H5: a data loader that was iterated once ended the collector at the end of its epoch. An index has no end."""
    prompts = [text for text in (f"question {i}" for i in range(100)) if not is_heldout(text)][:3]
    tasks = [Task(id=str(i), source="test", family="f", prompt=prompt) for i, prompt in enumerate(prompts)]
    drawn = [training_task(lambda number, seed: tasks[number % 3], index, 0).prompt for index in range(5 * 2)]
    assert drawn == [prompts[index % 3] for index in range(10)]


def admitted(index: int) -> Admitted:
    task = Task(id="t", source="test", family="f", prompt="p")
    return Admitted(run="r", group=Group(run="r", group=group_id(index), index=index, task=task, members=2), at=0.0)


def test_early_failures_are_replaced_at_staleness_zero() -> None:
    """H30, H35, H17: the first 4 of 8 groups fail before the batch is complete; 4 more are admitted, so that it can be."""
    state = fold(AdmissionState(), [admitted(index) for index in range(8)])
    assert capacity(state, 0, 8) == 0
    state = fold(state, [OutcomeEvent(run="r", group=group_id(i), outcome=Outcome.FAILED, reason="early") for i in range(4)])
    assert capacity(state, 0, 8) == 4
    state = fold(state, [admitted(index) for index in range(8, 12)])
    assert (capacity(state, 0, 8), state.cursor) == (0, 12)


def test_a_producer_ten_times_as_fast_is_at_most_the_bound_ahead() -> None:
    """S18, S17: a window that controlled only the seed let preparation run 40 steps ahead. 100 steps, tried ten times a step."""
    state, batch, lag = AdmissionState(), 4, 2
    for step in range(100):
        for _ in range(10):
            room = capacity(state, lag, batch)
            state = fold(state, [admitted(index) for index in range(state.cursor, state.cursor + max(room, 0))])
        assert state.cursor - step * batch == (lag + 1) * batch
        trained = [OutcomeEvent(run="r", group=group_id(step * batch + i), outcome=Outcome.TRAINED, version=step + 1) for i in range(batch)]
        state = fold(state, trained)


def test_prompt_tokens_have_no_version_and_do_not_count() -> None:
    """S5, S10: a placeholder of -1 on prompt tokens made every head version -1; the oldest sampled token is what counts."""
    versions = np.array([-1, -1, 4, 2, -1, 6], np.int32)
    made = Trajectory(
        run="r", group="g", member=0, members=1, index=0, task=Task(id="t", source="s", family="f", prompt="p"), prompt_tokens=2,
        tokens=np.arange(6, dtype=np.int32), action_mask=versions >= 0, logprobs=np.zeros(6, np.float32), versions=versions,
        finish=Finish.STOP,
    )  # fmt: skip
    assert made.oldest_version == 2


async def test_readers_of_one_name_each_follow_the_head() -> None:
    """S6: two pools with the same role name, of which one stayed at version 0. A reader's name routes nothing."""
    async with MemoryBus() as bus:
        await bus.declare(run_topology(CONFIG))
        blobs = MemoryBlobs()
        await publish_version(bus, blobs, CONFIG.run.name, 0)
        readers = [PolicyReader(bus, blobs, CONFIG.run.name) for _ in range(2)]
        watches = [reader.watch() for reader in readers]
        assert [(await anext(watch)).version for watch in watches] == [0, 0]
        waiting = [asyncio.ensure_future(anext(watch)) for watch in watches]
        await publish_version(bus, blobs, CONFIG.run.name, 1)
        async with asyncio.timeout(30):
            assert [head.version for head in await asyncio.gather(*waiting)] == [1, 1]
        for watch in watches:
            await watch.aclose()  # type: ignore[attr-defined]


async def small_chain(bus: MemoryBus, blobs: MemoryBlobs, count: int) -> PolicyWriter:
    writer = PolicyWriter(bus, blobs, "r", 10)
    await writer.resume()
    for version in range(count):
        state = {"w": HostTensor.from_numpy(np.full(256, version, np.float32))}
        await writer.publish(state, version=version, learner_step=version, consumed=())
    return writer


async def test_versions_published_back_to_back_are_reached_by_one_who_is_behind() -> None:
    """H13: a consumer at 585 waited for 587 while the trainer waited for somebody to take 586. Nobody waits for a reader."""
    async with MemoryBus() as bus:
        await bus.declare(topology("r"))
        blobs = MemoryBlobs()
        await small_chain(bus, blobs, 3)
        reader = PolicyReader(bus, blobs, "r")
        behind = await reader.materialise(0)
        now = await reader.advance(behind, 0, 2)
        assert now["w"].numpy()[0] == 2
        skipped = await reader.advance(await reader.materialise(1), 1, 2)
        assert skipped["w"].numpy()[0] == 2


async def test_a_hundred_versions_do_not_add_up_in_a_reader() -> None:
    """M5: adapter versions that were never unloaded. A reader holds one state and a bounded number of manifests."""
    async with MemoryBus() as bus:
        await bus.declare(topology("r"))
        blobs = MemoryBlobs()
        await small_chain(bus, blobs, 100)
        reader = PolicyReader(bus, blobs, "r")
        state = await reader.materialise(0)
        for version in range(1, 100):
            state = await reader.advance(state, version - 1, version)
        assert state["w"].numpy()[0] == 99
        assert len(reader._manifests) <= MANIFESTS_KEPT < 100


async def test_an_evaluator_that_fails_says_so_and_the_learner_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H14, H7: an exception in a validation hook killed the master while the workers waited. Evaluation is nobody's to wait for, and no
    version waits for anybody to take it: no rollout is there at all."""

    async def failing(self: EvaluatorService, *args: Any) -> None:
        raise RuntimeError("in the hook")

    monkeypatch.setattr(EvaluatorService, "_measure", failing)
    async with MemoryBus() as bus:
        await bus.declare(run_topology(CONFIG))
        blobs = MemoryBlobs()
        learner = LearnerService(bus, blobs, CONFIG, tmp_path)
        async with running(learner) as training, running(EvaluatorService(bus, blobs, CONFIG)) as evaluating:
            await beside(training, head_at(bus, blobs, CONFIG.run.name, 0))
            with pytest.raises(BaseExceptionGroup) as caught:
                await evaluating
            assert caught.group_contains(RuntimeError, match="in the hook")
            for step in range(CONFIG.run.steps):
                groups = groups_of(CONFIG, (2 * step, 2 * step + 1))
                await admit(bus, groups)
                await grade(bus, alternating(sampled(groups, version=step)))
                await beside(training, head_at(bus, blobs, CONFIG.run.name, step + 1))
            await training


async def test_the_last_evaluation_is_made_when_the_run_ends_before_it_was_begun() -> None:
    """H10, H8: `is_idle` looked at the queue only, so that the last evaluation was dropped."""
    config = tiny("kinds", evaluator={"every": 100, "samples": 1}, tasks={"heldout": 2})
    async with MemoryBus() as bus:
        await bus.declare(run_topology(config))
        blobs = MemoryBlobs()
        await publish_version(bus, blobs, config.run.name, 0)
        await publish_version(bus, blobs, config.run.name, 1)
        await finish(bus, config.run.name, 1)
        service = EvaluatorService(bus, blobs, config)
        async with running(service) as task:
            await task
        assert service.measured == [0, 1]
        assert base_state().keys() == (await PolicyReader(bus, blobs, config.run.name).materialise(1)).keys()
