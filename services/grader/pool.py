"""Rewards run in worker processes, one item at a time each, inside a sandbox.

Guarantees: `grade` always answers within the deadline plus a start-up; a reward that raises, hangs, crashes its process, takes
too much memory, prints without end or returns something that is no finite number fails that item with its cause and no other; a
worker in doubt (also one that leaves processes behind, or that answered what nobody asked) is killed with all that it started and
replaced before the next item. Nothing here imports or starts torch, and the event loop is never blocked.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from driftline.environments.python_source import folder_of
from driftline.environments.sandbox import kernel
from driftline.environments.sandbox.box import AUTO, Level, Limits, Sandbox, choose
from driftline.environments.source import PYTHON
from driftline.messages.errors import ConfigError, DriftlineError, MalformedMessage
from driftline.messages.types import Task
from driftline.services.grader.process import PRINTED_MOST, Gone, WorkerProcess
from driftline.services.grader.wire import Failure, Verdict, pack

__all__ = ["GraderPool", "WorkersFailing"]

START_DEADLINE_S = 60.0
_STARTS_IN_A_ROW = 3


class WorkersFailing(DriftlineError):
    """Workers do not start any more: the grader cannot go on and must be restarted."""


@dataclass
class _Slot:
    """A place for one worker; empty until somebody needs it."""

    worker: WorkerProcess | None = None


class GraderPool:
    """`async with GraderPool(("reasoning_gym",), workers=4) as pool: verdict = await pool.grade(task, completion)`.

    `sandbox` is "auto" or a level; `hidden` are files and folders that no reward may read.
    """

    def __init__(
        self,
        specs: Sequence[str],
        *,
        workers: int = 1,
        deadline_s: float = 5.0,
        memory_mb: int = 1024,
        start_deadline_s: float = START_DEADLINE_S,
        sandbox: str = AUTO,
        hidden: Sequence[str] = (),
    ) -> None:
        if workers < 1:
            raise ConfigError("a pool needs a worker", field="grader.workers", value=workers, remedy="at least 1")
        self.deadline_s = deadline_s
        self.replaced = 0
        self.sandbox = Sandbox(Level.OFF)
        self._wanted, self._hidden = sandbox, tuple(hidden)
        self._specs = list(specs)
        self._settings = {"specs": self._specs, "memory_mb": memory_mb, "deadline_s": deadline_s}
        self._start_deadline_s = start_deadline_s
        self._slots = [_Slot() for _ in range(workers)]
        self._idle: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        self._dying: list[WorkerProcess] = []

    async def __aenter__(self) -> Self:
        """Starts every worker, so that a source that does not load stops the service before it takes any work."""
        folders = [str(folder_of(spec)) for spec in self._specs if spec.startswith(PYTHON)]
        self.sandbox = await asyncio.to_thread(choose, self._wanted, limits=Limits(), readable=folders, hidden=self._hidden)
        if self.sandbox.level is not Level.OFF:
            kernel.close_to_tracing()  # the grader has the broker's credentials in its memory
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
        request = {"task": task.model_dump(mode="python"), "completion": completion, "token": secrets.token_bytes(16)}
        try:
            frame = pack(request)
        except (MalformedMessage, TypeError, ValueError, OverflowError) as error:
            return Verdict(None, failure=Failure.UNSENDABLE, cause=f"the task cannot be given to a worker: {error}")
        slot = await self._idle.get()
        try:
            return await self._grade_in(slot, frame, request["token"])
        finally:
            self._idle.put_nowait(slot)

    async def _grade_in(self, slot: _Slot, frame: bytes, token: object) -> Verdict:
        """In a used worker first; what another item left in its pipe costs this one nothing but a fresh worker."""
        while True:
            worker = slot.worker or await self._fill(slot)
            try:
                await worker.send(frame)
            except Gone:  # it died idle: the item was not touched, so it is not the item's fault
                await self._empty(slot)
                continue
            fresh, worker.used = not worker.used, True
            verdict = await self._answered(slot, worker, token, fresh)
            if verdict is not None:
                return verdict

    async def _answered(self, slot: _Slot, worker: WorkerProcess, token: object, fresh: bool) -> Verdict | None:
        """The verdict, or None where a used worker answered to something else."""
        started = time.perf_counter()

        def failed(failure: Failure, cause: str) -> Verdict:
            return Verdict(None, failure=failure, cause=cause, seconds=time.perf_counter() - started)

        try:
            async with asyncio.timeout(self.deadline_s):
                answer = await worker.receive()
        except TimeoutError:
            await self._empty(slot)
            return failed(Failure.DEADLINE, f"the reward did not return within {self.deadline_s:g} s (grader.deadline_s)")
        except Gone as error:
            how = await self._empty(slot)
            if worker.printed_too_much:
                return failed(Failure.OUTPUT, f"the reward printed more than {PRINTED_MOST // 2**20} MiB")
            return failed(Failure.CRASHED, str(error) or f"the reward ended its process: {how}")
        except BaseException:  # cancelled: the answer to this item must not be taken for the next one's
            worker.kill()
            slot.worker = None
            self._dying.append(worker)
            self.replaced += 1
            raise
        if answer.get("token") != token:
            await self._empty(slot)
            return failed(Failure.CRASHED, "the reward wrote into the pipe of answers") if fresh else None
        verdict = _verdict(answer)
        if verdict is None:
            await self._empty(slot)
            return failed(Failure.CRASHED, "the reward wrote into the pipe of answers")
        if verdict.failure is Failure.MEMORY or answer.get("left_behind"):
            await self._empty(slot)  # whatever held the memory may still hold it, and what runs on must not reach the next item
        return verdict

    async def _fill(self, slot: _Slot) -> WorkerProcess:
        await self._bury()
        for attempt in range(1, _STARTS_IN_A_ROW + 1):
            try:
                slot.worker = await WorkerProcess.start(self._settings, self.sandbox, self._start_deadline_s)
                return slot.worker
            except (Gone, TimeoutError, OSError) as error:
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

    async def _bury(self) -> None:
        """Reap what a cancellation left no time for."""
        while self._dying:
            await self._dying.pop().end()

    async def _stop_all(self) -> None:
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        for slot in self._slots:
            slot.worker = None
        for worker in workers:
            worker.kill()
        self._dying += workers
        await self._bury()


def _verdict(answer: dict[str, Any]) -> Verdict | None:
    """What an answer says; None when it is not one that our worker writes."""
    try:
        if "failure" in answer:
            return Verdict(None, failure=Failure(answer["failure"]), cause=str(answer["cause"]), seconds=float(answer["seconds"]))
        components = {str(name): float(value) for name, value in answer["components"].items()}
        return Verdict(float(answer["reward"]), components, seconds=float(answer["seconds"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
