"""Members that an engine gave up pass through the grader with their tokens, without a reward, and without running one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from driftline.messages.bus import Bus
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects, topology
from driftline.messages.types import Finish, Graded, RunFinished, Task, Trajectory
from driftline.services.grader.service import GraderService, aborted, grader_consumer
from driftline.services.grader.wire import Verdict

TASK = Task(id="t", source="python", family="scripted", prompt="q", answer="a")


def member(run: str, number: int, finish: Finish, source: str = "python") -> Trajectory:
    return Trajectory(
        run=run, group="g0", member=number, members=4, index=0, task=TASK.model_copy(update={"source": source}), prompt_tokens=1, finish=finish, text="a", engine="rollout-3",
        tokens=np.array([256, 1, 2], np.int32), action_mask=np.array([False, True, True]),
        logprobs=np.array([0, -1, -2], np.float32), versions=np.array([-1, 4, 5], np.int32),
    )


async def graded_members(bus: Bus, run: str) -> list[Graded]:
    consumer = next(c for c in topology(run).consumers if c.durable == "learner")
    found = [d.message for d in await bus.pull(consumer, batch=100, timeout_s=0.2)]
    assert all(isinstance(m, Graded) for m in found)
    return sorted((m for m in found if isinstance(m, Graded)), key=lambda m: m.trajectory.member)


async def test_aborted_members_are_passed_on_ungraded_and_the_reward_never_sees_them(
    memory_bus: MemoryBus, fresh_run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L17, L19, N10: a member given up midway keeps its tokens and stamps, and gets no reward rather than a neutral one."""
    (tmp_path / "generous.py").write_text("def tasks(index, rng):\n    return 'q', 'a'\ndef reward(prompt, answer, completion):\n    return 1.0\n")
    spec = f"python:{tmp_path / 'generous.py'}"
    await memory_bus.declare(topology(fresh_run))
    sent = [member(fresh_run, i, f, spec) for i, f in enumerate((Finish.STOP, Finish.ABORT, Finish.ABORT))]
    for t in sent:
        await memory_bus.publish(Subjects(fresh_run).trajectory(t.group), t, id=f"{fresh_run}/trajectory/g0/{t.member}")
    end = RunFinished(run=fresh_run, version=6, reason="test")
    await memory_bus.publish(Subjects(fresh_run).finished, end, id="end")
    service = GraderService(memory_bus, fresh_run, [spec])
    seen: list[str] = []
    grade = service._pool.grade

    async def counted(task: Task, text: str) -> Verdict:
        seen.append(text)
        return await grade(task, text)

    monkeypatch.setattr(service._pool, "grade", counted)
    async with asyncio.timeout(60):
        await service.run()
    stopped, *given_up = await graded_members(memory_bus, fresh_run)
    assert stopped.reward == 1.0
    assert [m.reward for m in given_up] == [None, None]
    assert all(m.cause == "aborted: given up by rollout-3 after 2 tokens, the oldest of version 4" for m in given_up)
    assert all(np.array_equal(m.trajectory.versions, [-1, 4, 5]) for m in given_up)
    assert len(seen) == 1, "the reward ran for the member that stopped, and for no other"
    assert (service.counts.graded, service.counts.aborted, service.counts.failed.total()) == (1, 2, 0)
    assert tuple(await memory_bus.depth(grader_consumer(fresh_run)))[:2] == (0, 0)


def test_the_cause_of_an_aborted_member_always_says_so() -> None:
    nameless = member("r", 0, Finish.ABORT).model_copy(update={"engine": ""})
    assert aborted(nameless).cause.startswith("aborted: given up by its engine after 2 tokens")
