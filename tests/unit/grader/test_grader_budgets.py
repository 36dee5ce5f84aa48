"""What rewards cost and what the machinery costs are counted apart, and neither takes a member with it that it should not."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from driftline.environments.source import load_source
from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerUnavailable
from driftline.messages.memory import MemoryBus
from driftline.messages.nats_bus import NatsBus
from driftline.messages.subjects import Subjects, topology
from driftline.messages.types import Graded, Outcome, OutcomeEvent, RunFinished, Task, Trajectory
from driftline.services.grader.budget import Budget, InfrastructureFailing
from driftline.services.grader.ended import EndedGroups, GroupEnded
from driftline.services.grader.pool import WorkersFailing
from driftline.services.grader.private import private_paths
from driftline.services.grader.process import Gone, WorkerProcess
from driftline.services.grader.service import GraderService, grader_consumer
from driftline.services.grader.wire import Failure, Verdict

SCRIPT = """
import ctypes, os, time
def tasks(index, rng):
    return f"q{rng.random()}", "ok"
def reward(prompt, answer, completion):
    if completion == "raise": raise KeyError("on purpose")
    if completion == "segfault": ctypes.string_at(0)
    if completion == "memory": bytearray(2**40)
    if completion.startswith("sleep"): time.sleep(float(completion[5:]))
    return float(completion == answer)
"""
OK, BAD = Verdict(1.0), Verdict(None, failure=Failure.RAISED, cause="KeyError")


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "scripted.py").write_text(SCRIPT)
    return f"python:{tmp_path / 'scripted.py'}"


def member(run: str, task: Task, text: str, number: int, group: str = "g0") -> Trajectory:
    document = {"tokens": [256, 1], "action_mask": [False, True], "logprobs": [0, -1], "versions": [-1, 0]}
    return Trajectory.model_validate(
        {"run": run, "group": group, "member": number, "members": 64, "index": 0, "task": task, "prompt_tokens": 1, "finish": "stop", "text": text, **document}
    )


async def queue(bus: Bus, run: str, spec: str, texts: list[str], group: str = "g0") -> None:
    task = load_source(spec).task(0, 0)
    for number, text in enumerate(texts):
        item = member(run, task, text, number, group)
        await bus.publish(Subjects(run).trajectory(group), item, id=f"{run}/trajectory/{group}/{number}")


async def end_group(bus: Bus, run: str, group: str) -> None:
    event = OutcomeEvent(run=run, group=group, outcome=Outcome.CANCELLED, reason="test")
    await bus.publish(Subjects(run).outcome(group), event, id=f"{run}/outcome/{group}", expect_last=0)


async def finish(bus: Bus, run: str) -> None:
    await bus.publish(Subjects(run).finished, RunFinished(run=run, version=1, reason="test"), id=f"{run}/finished")


async def graded_of(bus: Bus, run: str) -> dict[tuple[str, int], Graded]:
    consumer = next(c for c in topology(run).consumers if c.durable == "learner")
    found: dict[tuple[str, int], Graded] = {}
    while deliveries := await bus.pull(consumer, batch=100, timeout_s=0.2):
        for delivery in deliveries:
            assert isinstance(delivery.message, Graded)
            key = (delivery.message.trajectory.group, delivery.message.trajectory.member)
            assert key not in found
            found[key] = delivery.message
            await delivery.ack()
    return found


@asynccontextmanager
async def running(service: GraderService) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.timeout(90):
        task = asyncio.create_task(service.run())
        try:
            yield task
            await task
        finally:
            task.cancel()
            await asyncio.wait({task})


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - many different conditions
            await asyncio.sleep(0.01)


@given(st.lists(st.booleans(), max_size=400), st.integers(1, 50), st.integers(1, 50))
def test_the_alarm_is_raised_once_for_each_crossing(failed: list[bool], window: int, least: int) -> None:
    budget = Budget(infrastructure_in_a_row=1, window=window, least=least)
    armed = True
    for number, bad in enumerate(failed, 1):
        alarm = budget.data(BAD if bad else OK)
        recent = failed[max(0, number - window) : number]
        rate = sum(recent) / len(recent)
        assert budget.data_failure_rate == rate
        if alarm is not None:
            assert armed
            assert (alarm.rate, alarm.of, alarm.kind) == (rate, len(recent), Failure.RAISED)
            assert rate >= 0.5
            armed = False
        elif armed:
            assert rate < 0.5 or len(recent) < least
        elif rate < 0.25:
            armed = True


@given(st.lists(st.sampled_from(["failed", "worked"])), st.integers(1, 5))
def test_only_failures_in_a_row_end_the_service(events: list[str], bound: int) -> None:
    budget, in_a_row = Budget(infrastructure_in_a_row=bound), 0
    for event in events:
        if event == "worked":
            budget.worked()
            in_a_row = 0
            continue
        in_a_row += 1
        if in_a_row > bound:
            with pytest.raises(InfrastructureFailing, match="in a row"):
                budget.infrastructure("x")
        else:
            budget.infrastructure("x")


async def test_rewards_that_all_fail_raise_an_alarm_and_never_end_the_service(memory_bus: MemoryBus, fresh_run: str, spec: str) -> None:
    await memory_bus.declare(topology(fresh_run))
    await queue(memory_bus, fresh_run, spec, ["raise"] * 40)
    await finish(memory_bus, fresh_run)
    with capture_logs() as logs:
        service = GraderService(memory_bus, fresh_run, [spec])
        async with running(service):
            pass
    assert service.counts.failed == {Failure.RAISED: 40}
    assert not service.counts.infrastructure
    alarms = [entry for entry in logs if entry["event"] == "many rewards fail"]
    assert len(alarms) == 1
    assert (alarms[0]["rate"], alarms[0]["of"], alarms[0]["kind"]) == (1.0, 32, "raised")
    assert "on purpose" in alarms[0]["cause"]
    assert service._values()["data_alarm"] == 1.0


@pytest.mark.parametrize(("text", "kind"), [("segfault", Failure.CRASHED), ("memory", Failure.MEMORY)])
async def test_a_poison_member_fails_at_once_and_is_never_delivered_again(nats_bus: NatsBus, fresh_run: str, spec: str, text: str, kind: Failure) -> None:
    await nats_bus.declare(topology(fresh_run))
    await queue(nats_bus, fresh_run, spec, ["ok", text, "ok"])
    await finish(nats_bus, fresh_run)
    service = GraderService(nats_bus, fresh_run, [spec])
    async with running(service):
        pass
    graded = await graded_of(nats_bus, fresh_run)
    assert [graded["g0", n].reward for n in range(3)] == [1.0, None, 1.0]
    assert graded["g0", 1].cause.startswith(f"{kind.value}:")
    assert service.counts.failed == {kind: 1}
    assert not service.counts.infrastructure
    assert tuple(await nats_bus.depth(grader_consumer(fresh_run))) == (0, 0, 0)


async def test_a_member_whose_worker_cannot_start_is_given_back_and_the_service_ends_with_the_cause(
    memory_bus: MemoryBus, fresh_run: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await memory_bus.declare(topology(fresh_run))
    await queue(memory_bus, fresh_run, spec, ["segfault", "ok"])
    service = GraderService(memory_bus, fresh_run, [spec], max_in_flight=1)
    start = WorkerProcess.start
    starts = 0

    async def fails_later(*arguments: Any) -> WorkerProcess:
        nonlocal starts
        starts += 1
        if starts > 1:
            raise Gone("exit status 125")
        return await start(*arguments)

    monkeypatch.setattr(WorkerProcess, "start", fails_later)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with running(service):
            pass
    assert caught.group_contains(WorkersFailing, match="3 grading processes in a row did not start: Gone exit status 125")
    assert service.counts.infrastructure == {"workers_failing": 1}
    graded = await graded_of(memory_bus, fresh_run)
    assert list(graded) == [("g0", 0)]  # the poison one is failed; the other one was not touched by it
    assert sum((await memory_bus.depth(grader_consumer(fresh_run)))[:2]) == 1
    monkeypatch.setattr(WorkerProcess, "start", start)
    await finish(memory_bus, fresh_run)
    async with running(GraderService(memory_bus, fresh_run, [spec])):
        pass
    assert (await graded_of(memory_bus, fresh_run))["g0", 1].reward == 1.0


class Unavailable:
    """A bus that cannot publish what is graded."""

    def __init__(self, bus: Bus, error: Exception) -> None:
        self._bus, self._error = bus, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, subject: str, message: Any, **more: Any) -> Any:
        if ".graded." in subject:
            raise self._error
        return await self._bus.publish(subject, message, **more)


async def test_a_machinery_that_fails_again_and_again_ends_the_service_and_fails_no_member(memory_bus: MemoryBus, fresh_run: str, spec: str) -> None:
    await memory_bus.declare(topology(fresh_run))
    await queue(memory_bus, fresh_run, spec, ["ok"] * 4)
    broken: Any = Unavailable(memory_bus, BrokerUnavailable("no answer"))
    service = GraderService(broken, fresh_run, [spec], budget=Budget(infrastructure_in_a_row=3))
    with pytest.raises(BaseExceptionGroup) as caught:
        async with running(service):
            pass
    assert caught.group_contains(InfrastructureFailing, match="4 failures of the machinery in a row, the last: no answer")
    assert service.counts.failed.total() == 0
    assert not await graded_of(memory_bus, fresh_run)
    assert sum((await memory_bus.depth(grader_consumer(fresh_run)))[:2]) == 4


async def test_an_exception_in_the_graders_own_code_ends_it_with_its_cause(memory_bus: MemoryBus, fresh_run: str, spec: str) -> None:
    """H14, H20: a fault in a callback must end the service with its cause, not leave a consumer that waits for ever."""
    await memory_bus.declare(topology(fresh_run))
    await queue(memory_bus, fresh_run, spec, ["ok", "sleep600"])
    broken: Any = Unavailable(memory_bus, ZeroDivisionError("a bug of ours"))
    service = GraderService(broken, fresh_run, [spec], workers=2, deadline_s=3600.0)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with running(service):
            pass
    assert caught.group_contains(ZeroDivisionError)
    assert all(slot.worker is None for slot in service._pool._slots)


async def test_a_group_that_ends_gives_up_its_gradings_whatever_their_rewards_do(nats_bus: NatsBus, fresh_run: str, spec: str) -> None:
    """H24: cancelling a group waited for its slow judge. Here the reward sleeps 600 s and its deadline is an hour."""
    await nats_bus.declare(topology(fresh_run))
    await queue(nats_bus, fresh_run, spec, ["sleep600"] * 2, "slow")
    service = GraderService(nats_bus, fresh_run, [spec], deadline_s=3600.0)
    async with running(service):
        await until(lambda: len(service._in_flight) == 2)
        await end_group(nats_bus, fresh_run, "slow")
        async with asyncio.timeout(30):  # less than the reward's sleep by far; how soon is measured elsewhere
            await until(lambda: service.counts.ended == 2)
        await queue(nats_bus, fresh_run, spec, ["ok"], "other")
        await finish(nats_bus, fresh_run)
    assert list(await graded_of(nats_bus, fresh_run)) == [("other", 0)]
    assert tuple(await nats_bus.depth(grader_consumer(fresh_run)))[:2] == (0, 0)
    assert service.counts.failed.total() == 0


async def test_a_member_of_an_ended_group_is_acknowledged_without_grading(memory_bus: MemoryBus, fresh_run: str, spec: str) -> None:
    await memory_bus.declare(topology(fresh_run))
    await end_group(memory_bus, fresh_run, "gone")
    service = GraderService(memory_bus, fresh_run, [spec])
    async with running(service):
        await until(lambda: "gone" in service._ended)
        await queue(memory_bus, fresh_run, spec, ["ok", "ok"], "gone")
        await until(lambda: service.counts.ended == 2)
        await finish(memory_bus, fresh_run)
    assert not await graded_of(memory_bus, fresh_run)
    assert service._pool.replaced == 0


async def test_the_end_of_a_group_and_of_the_service_are_told_apart() -> None:
    groups = EndedGroups()
    grading = asyncio.create_task(groups.unless_ended("a", asyncio.sleep(600)))
    stopped = asyncio.create_task(groups.unless_ended("b", asyncio.sleep(600)))
    await asyncio.sleep(0)
    groups.add("a")
    stopped.cancel()
    with pytest.raises(GroupEnded):
        await grading
    with pytest.raises(asyncio.CancelledError):
        await stopped
    with pytest.raises(GroupEnded):
        await groups.unless_ended("a", asyncio.sleep(600))
    assert await groups.unless_ended("c", asyncio.sleep(0, 7)) == 7
    assert not groups._running


GRADER = """
import asyncio, sys
from driftline.messages.nats_bus import NatsBus
from driftline.services.grader.service import GraderService
async def main():
    async with await NatsBus.connect({url!r}, name="killed") as bus:
        service = GraderService(bus, {run!r}, [{spec!r}], deadline_s=600.0)
        async def tell():
            while service._pool._slots[0].worker is None or not service._pool._slots[0].worker.used: await asyncio.sleep(0.01)
            print("grading", flush=True)
        telling = asyncio.create_task(tell())
        await service.run()
asyncio.run(main())
"""


async def test_a_grader_killed_in_the_middle_of_grading_costs_no_member(nats_bus: NatsBus, nats_url: str, fresh_run: str, spec: str) -> None:
    await nats_bus.declare(topology(fresh_run))
    await queue(nats_bus, fresh_run, spec, ["sleep600", "ok", "raise", "ok"], "slow")
    code = GRADER.format(url=nats_url, run=fresh_run, spec=spec)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while await process.stdout.readline() != b"grading\n":
            assert process.returncode is None
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    service = GraderService(nats_bus, fresh_run, [spec], workers=2, deadline_s=1.0)
    async with running(service):
        await until(lambda: service.counts.graded + service.counts.failed.total() == 4)
        await finish(nats_bus, fresh_run)
    graded = await graded_of(nats_bus, fresh_run)
    assert [graded["slow", n].reward for n in range(4)] == [None, 1.0, None, 1.0]
    assert service.counts.infrastructure["redelivered"] > 0


def test_run_folders_credentials_and_stores_are_hidden_from_rewards(tmp_path: Path) -> None:
    from driftline.services.config import Config

    config = Config.model_validate({"run": {"name": "r", "dir": str(tmp_path / "runs")}, "broker": {"url": "nats://h:1", "credentials": str(tmp_path / "keys" / "grader.creds")}})
    hidden = private_paths(config, tmp_path / "elsewhere")
    assert {str(tmp_path / name) for name in ("runs", "elsewhere", "keys", "keys/grader.creds")} == set(hidden)
