"""Rewards run in worker processes, one item at a time each.

Guarantees: `grade` always answers within the deadline plus a start-up; a reward that raises, hangs, crashes its process, takes
too much memory or returns something that is no finite number fails that item with its cause and no other; a worker in doubt is
killed with its children and replaced before the next item needs it. Nothing here imports or starts torch, and the
event loop is never blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from driftline.messages.errors import ConfigError, DriftlineError, MalformedMessage
from driftline.messages.types import Task
from driftline.services.grader.wire import HEADER, Failure, Verdict, frame_length, pack, unpack

__all__ = ["GraderPool", "WorkersFailing"]

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 5.0
# Rewards are small: one thread each, so that `workers` means what it says, and a fixed hash seed, so that they repeat.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_STARTS_IN_A_ROW = 3


class WorkersFailing(DriftlineError):
    """Workers do not start any more: the grader cannot go on and must be restarted."""


class _Gone(Exception):
    """The worker's pipe closed."""


@dataclass
class _Slot:
    """A place for one worker; empty until somebody needs it."""

    worker: _Worker | None = None


class GraderPool:
    """`async with GraderPool(("reasoning_gym",), workers=4) as pool: verdict = await pool.grade(task, completion)`."""

    def __init__(
        self,
        specs: Sequence[str],
        *,
        workers: int = 1,
        deadline_s: float = 5.0,
        memory_mb: int = 1024,
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        if workers < 1:
            raise ConfigError("a pool needs a worker", field="grader.workers", value=workers, remedy="at least 1")
        self.deadline_s = deadline_s
        self.replaced = 0
        self._settings = {"specs": list(specs), "memory_mb": memory_mb, "deadline_s": deadline_s}
        self._start_deadline_s = start_deadline_s
        self._slots = [_Slot() for _ in range(workers)]
        self._idle: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()

    async def __aenter__(self) -> Self:
        """Starts every worker, so that a source that does not load stops the service before it takes any work."""
        try:
            async with asyncio.TaskGroup() as starting:
                for slot in self._slots:
                    starting.create_task(self._fill(slot))
        except BaseExceptionGroup as group:
            await self._stop_all()
            raise group.exceptions[0] from None
        except BaseException:
            await self._stop_all()
            raise
        for slot in self._slots:
            self._idle.put_nowait(slot)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_all()

    async def grade(self, task: Task, completion: str) -> Verdict:
        """The verdict on one completion. Never raises for the reward's sake; WorkersFailing when no worker starts."""
        try:
            frame = pack({"task": task.model_dump(mode="python"), "completion": completion})
        except (MalformedMessage, TypeError, ValueError, OverflowError) as error:
            return Verdict(None, failure=Failure.UNSENDABLE, cause=f"the task cannot be given to a worker: {error}")
        slot = await self._idle.get()
        try:
            return await self._grade_in(slot, frame)
        finally:
            self._idle.put_nowait(slot)

    async def _grade_in(self, slot: _Slot, frame: bytes) -> Verdict:
        while True:
            worker = slot.worker or await self._fill(slot)
            try:
                await worker.send(frame)
            except _Gone:  # it died idle: the item was not touched, so it is not the item's fault
                await self._empty(slot)
                continue
            break
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.deadline_s):
                answer = await worker.receive()
        except TimeoutError:
            await self._empty(slot)
            cause = f"the reward did not return within {self.deadline_s:g} s (grader.deadline_s)"
            return Verdict(None, failure=Failure.DEADLINE, cause=cause, seconds=time.perf_counter() - started)
        except _Gone:
            how = await self._empty(slot)
            cause = f"the reward ended its process: {how}"
            return Verdict(None, failure=Failure.CRASHED, cause=cause, seconds=time.perf_counter() - started)
        except BaseException:  # cancelled: the answer to this item must not be taken for the next one's
            worker.kill()
            slot.worker = None
            self.replaced += 1
            raise
        return await self._verdict(slot, answer)

    async def _verdict(self, slot: _Slot, answer: dict[str, Any]) -> Verdict:
        if "failure" not in answer:
            return Verdict(answer["reward"], answer["components"], seconds=answer["seconds"])
        failure = Failure(answer["failure"])
        if failure is Failure.MEMORY:
            await self._empty(slot)  # whatever held the memory may still hold it
        return Verdict(None, failure=failure, cause=answer["cause"], seconds=answer["seconds"])

    async def _fill(self, slot: _Slot) -> _Worker:
        for attempt in range(1, _STARTS_IN_A_ROW + 1):
            try:
                slot.worker = await _Worker.start(self._settings, self._start_deadline_s)
                return slot.worker
            except (_Gone, TimeoutError, OSError) as error:
                if attempt == _STARTS_IN_A_ROW:
                    raise WorkersFailing(
                        f"{attempt} grading processes in a row did not start: {type(error).__name__} {error}",
                        field="grader.workers",
                        value=len(self._slots),
                        remedy="look at the lines above for what the process printed; check memory and process limits",
                    ) from error
        raise AssertionError("unreachable")

    async def _empty(self, slot: _Slot) -> str:
        """Kill the slot's worker; says how it ended."""
        worker, slot.worker = slot.worker, None
        self.replaced += 1
        return await worker.end() if worker is not None else "gone"

    async def _stop_all(self) -> None:
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        for slot in self._slots:
            slot.worker = None
        for worker in workers:
            worker.kill()
        for worker in workers:
            await worker.end()


class _Worker:
    """One process and its two pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._in, self._out = process, process.stdin, process.stdout

    @classmethod
    async def start(cls, settings: dict[str, Any], deadline_s: float) -> _Worker:
        """A process whose sources have loaded. A new session, so that a signal to the terminal's group drains the grader first
        and a kill takes the reward's own children along."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # not the working directory: a user's random.py must not shadow Python's
            "-m",
            "driftline.services.grader.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(deadline_s):
                await worker.send(pack(settings))
                answer = await worker.receive()
        except BaseException:
            worker.kill()
            await worker.end()
            raise
        if "failed" in answer:
            await worker.end()
            raise ConfigError(f"a task source did not load: {answer['failed']}", field="tasks.source", value=settings["specs"])
        return worker

    async def send(self, frame: bytes) -> None:
        if self._out.at_eof() or self._process.returncode is not None:
            raise _Gone
        try:
            self._in.write(frame)
            await self._in.drain()
        except (ConnectionError, RuntimeError) as error:
            raise _Gone from error

    async def receive(self) -> dict[str, Any]:
        try:
            header = await self._out.readexactly(HEADER.size)
            answer: dict[str, Any] = unpack(await self._out.readexactly(frame_length(header)))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise _Gone from error
        return answer

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> str:
        """Reap it; the signal that ended it, or its exit status."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):  # it closed its pipe: let its own status arrive before ours
                if self._out.at_eof():
                    await self._process.wait()
        self.kill()
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                status = await self._process.wait()
        except TimeoutError:
            return "still running after SIGKILL"
        self._in.close()
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
