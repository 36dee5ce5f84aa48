"""Rewards that fail in every way fail alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from driftline.environments.source import load_source
from driftline.messages.errors import ConfigError
from driftline.messages.types import Task
from driftline.services.grader.pool import GraderPool
from driftline.services.grader.wire import LONGEST_FRAME, Failure, frame_length
from driftline.services.grader.worker import grade

# The completion chooses what the reward does.
SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
HERE = Path(__file__).parent

def tasks(index, rng):
    return f"q{rng.random()}", "ok"

def reward(prompt, answer, completion):
    kind, _, rest = completion.partition(":")
    if kind == "ok": return 1.0
    if kind == "raise": raise ZeroDivisionError("on purpose")
    if kind == "exit": sys.exit(3)
    if kind == "_exit": os._exit(7)
    if kind == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "hang":
        while True: pass
    if kind == "nan": return float("nan")
    if kind == "inf": return float("inf")
    if kind == "none": return None
    if kind == "text": return "1.0"
    if kind == "allocate": return float(len(bytearray(8 * 2**30)) > 0)
    if kind == "print":
        print("x" * 100_000, flush=True)
        os.write(1, b"raw")
        input_closed = sys.stdin.read() == ""
        return float(input_closed)
    if kind == "torch": return float("torch" in sys.modules)
    if kind == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (HERE / "child").write_text(str(child.pid))
        time.sleep(600)
    if kind == "overlap":
        name = HERE / f"running-{rest}"
        name.touch()
        count = len(list(HERE.glob("running-*")))
        time.sleep(0.05)
        count = max(count, len(list(HERE.glob("running-*"))))
        name.unlink()
        return count
    raise AssertionError(completion)
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "scripted.py").write_text(SCRIPT)
    return f"python:{tmp_path / 'scripted.py'}"


def task_of(spec: str) -> Task:
    return load_source(spec).task(0, 0)


BAD = {
    "raise": (Failure.RAISED, "ZeroDivisionError: on purpose at scripted.py"),
    "exit": (Failure.RAISED, "SystemExit"),
    "_exit": (Failure.CRASHED, "exit status 7"),
    "segfault": (Failure.CRASHED, "SIGSEGV"),
    "hang": (Failure.DEADLINE, "grader.deadline_s"),
    "nan": (Failure.NOT_A_NUMBER, "finite number"),
    "inf": (Failure.NOT_A_NUMBER, "finite number"),
    "none": (Failure.NOT_A_NUMBER, "finite number"),
    "text": (Failure.NOT_A_NUMBER, "finite number"),
    "allocate": (Failure.MEMORY, "grader.memory_mb"),
}


async def test_every_way_to_fail_fails_one_member_and_the_pool_recovers(spec: str) -> None:
    """H34, L14 (docs/field_failures.md)."""
    task = task_of(spec)
    completions = [text for bad in BAD for text in (bad, "ok:")]
    async with GraderPool([spec], workers=2, deadline_s=2.0, memory_mb=256) as pool:
        verdicts = await asyncio.gather(*(pool.grade(task, text) for text in completions))
        assert pool.replaced == 4  # _exit, segfault, hang, allocate
        assert (await pool.grade(task, "ok:")).reward == 1.0
    for text, verdict in zip(completions, verdicts, strict=True):
        if text == "ok:":
            assert (verdict.reward, verdict.failure) == (1.0, None)
        else:
            failure, cause = BAD[text]
            assert verdict.reward is None
            assert verdict.failure is failure, text
            assert cause in verdict.cause


async def test_rewards_that_sleep_run_at_once_in_every_worker_and_never_in_more(spec: str) -> None:
    """R2: slow rewards one after the other made a step wait for their sum."""
    task = task_of(spec)
    async with GraderPool([spec], workers=4, deadline_s=60.0, sandbox="rlimit") as pool:  # they meet in a folder: it must be writable
        verdicts = await asyncio.gather(*(pool.grade(task, f"overlap:{number}") for number in range(64)))
    overlap = [verdict.reward for verdict in verdicts]
    assert None not in overlap
    assert max(reward or 0 for reward in overlap) == 4


async def test_the_event_loop_goes_on_while_a_reward_hangs(spec: str) -> None:
    """H11, H24: R3: a reward that blocks must not block the loop that awaits it."""
    task = task_of(spec)
    async with GraderPool([spec], workers=1, deadline_s=1.0) as pool:
        hanging = asyncio.create_task(pool.grade(task, "hang"))
        turns = 0
        while not hanging.done():
            await asyncio.sleep(0.01)
            turns += 1
    assert turns > 10
    assert (await hanging).failure is Failure.DEADLINE


async def test_a_reward_that_prints_or_reads_input_does_not_break_the_answers(spec: str) -> None:
    async with GraderPool([spec], workers=1) as pool:
        assert (await pool.grade(task_of(spec), "print")).reward == 1.0


async def test_a_worker_starts_without_torch(spec: str) -> None:
    async with GraderPool([spec, "reasoning_gym", "generators"], workers=1) as pool:
        assert (await pool.grade(task_of(spec), "torch")).reward == 0.0


async def test_the_children_of_a_hung_reward_die_with_it(spec: str, tmp_path: Path) -> None:
    async with GraderPool([spec], workers=1, deadline_s=2.0, sandbox="rlimit") as pool:
        assert (await pool.grade(task_of(spec), "child")).failure is Failure.DEADLINE
    child = int((tmp_path / "child").read_text())
    async with asyncio.timeout(10):
        while _running(child):  # noqa: ASYNC110 - not our child: there is nothing to wait on
            await asyncio.sleep(0.01)


async def test_a_worker_killed_while_idle_costs_no_member(spec: str) -> None:
    task = task_of(spec)
    async with GraderPool([spec], workers=1) as pool:
        await pool.grade(task, "ok:")
        worker = pool._slots[0].worker
        assert worker is not None
        os.kill(worker.process.pid, signal.SIGKILL)
        await worker.process.wait()
        assert (await pool.grade(task, "ok:")).reward == 1.0
        assert pool.replaced == 1


async def test_a_cancelled_grading_does_not_answer_the_next_item(spec: str) -> None:
    """H24 (docs/field_failures.md)."""
    task = task_of(spec)
    async with GraderPool([spec], workers=1, deadline_s=60.0) as pool:
        cancelled = asyncio.create_task(pool.grade(task, "hang"))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await pool.grade(task, "ok:")).reward == 1.0


async def test_a_source_that_does_not_load_stops_the_pool_before_any_work(tmp_path: Path) -> None:
    """H3 (docs/field_failures.md)."""
    (tmp_path / "broken.py").write_text("1/0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        async with GraderPool([f"python:{tmp_path / 'broken.py'}"], workers=2):
            pass


async def test_no_process_is_left_after_the_pool(spec: str) -> None:
    async with GraderPool([spec], workers=3) as pool:
        pids = [slot.worker.process.pid for slot in pool._slots if slot.worker is not None]
    assert len(pids) == 3
    assert not any(_running(pid) for pid in pids)


async def test_a_task_that_cannot_travel_is_a_failed_member() -> None:
    task = Task(id="x", source="generators", family="sort_digits", prompt="p", answer="1", metadata={"n": 2**70})
    async with GraderPool(["generators"], workers=1) as pool:
        assert (await pool.grade(task, "1")).failure is Failure.UNSENDABLE
        assert (await pool.grade(task.model_copy(update={"metadata": {}}), "1")).reward == 1.0


async def test_odd_text_reaches_the_scorer() -> None:
    task = load_source("generators", "sort_digits").task(0, 0)
    async with GraderPool(["generators"], workers=1) as pool:
        for text in ("", "\x00", "\ud800", "é", "9" * 300_000):
            assert (await pool.grade(task, text)).failure is None


async def test_reasoning_gym_is_graded_in_the_pool() -> None:
    task = load_source("reasoning_gym", "spell_backward").task(0, 0)
    async with GraderPool(["reasoning_gym"], workers=1) as pool:
        verdict = await pool.grade(task, f"{task.answer}\n")
        assert (verdict.reward, verdict.components["exact"]) == (1.0, 1.0)
        assert (await pool.grade(task, "?")).reward == 0.0


def test_a_component_that_is_not_finite_is_a_failure() -> None:
    class Odd:
        def score(self, task: Task, completion: str) -> tuple[float, dict[str, float]]:
            return 1.0, {"length": float("inf")}

    task = load_source("generators", "sort_digits").task(0, 0)
    answer = grade(Odd(), {"task": task.model_dump(), "completion": ""})  # type: ignore[arg-type]
    assert answer["failure"] == Failure.NOT_A_NUMBER
    assert "length" in answer["cause"]


def test_a_frame_longer_than_any_is_refused_before_it_is_read() -> None:
    from driftline.messages.errors import MalformedMessage

    with pytest.raises(MalformedMessage):
        frame_length((LONGEST_FRAME + 1).to_bytes(4, "little"))


def test_a_worker_whose_grader_is_gone_ends() -> None:
    done = subprocess.run([sys.executable, "-m", "driftline.services.grader.worker"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"")


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
