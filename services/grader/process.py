"""One grading process, from outside: started in its sandbox, spoken to in frames, ended with everything below it.

Guarantees: `receive` returns a map or raises Gone, whatever the process wrote; what it prints reaches our stderr up to a bound for each
item and is read, so that it blocks nobody, up to another, beyond which the process is killed; `end` leaves none of its processes behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import msgpack

from driftline.environments.sandbox.box import Level, Sandbox, ended_by
from driftline.messages.errors import ConfigError, MalformedMessage
from driftline.services.grader.wire import HEADER, LONGEST_ANSWER, frame_length, pack, unpack

__all__ = ["PRINTED_MOST", "Gone", "WorkerProcess"]

STOP_DEADLINE_S = 5.0
PRINTED_SHOWN = 64 * 1024
PRINTED_MOST = 16 * 1024 * 1024
# Rewards are small: one thread each, so that `workers` means what it says, and a fixed hash seed, so that they repeat.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class Gone(Exception):
    """The process ended, or what it said was not an answer."""


class WorkerProcess:
    def __init__(self, process: asyncio.subprocess.Process, sandbox: Sandbox) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.used = False
        self.printed_too_much = False
        self._sandbox = sandbox
        self._in, self._out, self._err = process.stdin, process.stdout, process.stderr
        self._printed = 0
        self._last_words = b""
        self._listening = asyncio.create_task(self._listen(), name=f"output of {process.pid}")

    @classmethod
    async def start(cls, settings: Mapping[str, Any], sandbox: Sandbox, deadline_s: float) -> WorkerProcess:
        """A process whose sources have loaded. A session of its own, so that a signal to the terminal's group drains the grader
        first and a kill takes the reward's own children along."""
        program = [sys.executable, "-P", "-m", "driftline.services.grader.worker"]  # -P: a user's random.py must not shadow Python's
        process = await asyncio.create_subprocess_exec(
            *sandbox.command(program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=sandbox.environment(_ENVIRONMENT),
            start_new_session=True,
        )
        worker = cls(process, sandbox)
        try:
            async with asyncio.timeout(deadline_s):
                await worker.send(pack({**settings, "confined": sandbox.level is not Level.OFF}))
                answer = await worker.receive()
        except Gone:
            raise Gone(await worker.end()) from None
        except BaseException:
            worker.kill()
            await worker.end()
            raise
        if "failed" in answer:
            await worker.end()
            raise ConfigError(f"a task source did not load: {answer['failed']}", field="tasks.source", value=settings["specs"],
                              remedy=_unseen(sandbox.level))
        return worker

    async def send(self, frame: bytes) -> None:
        if self._out.at_eof() or self.process.returncode is not None:
            raise Gone
        self._printed = 0
        try:
            self._in.write(frame)
            await self._in.drain()
        except (ConnectionError, RuntimeError) as error:
            raise Gone from error

    async def receive(self) -> dict[str, Any]:
        try:
            header = await self._out.readexactly(HEADER.size)
            answer = unpack(await self._out.readexactly(frame_length(header, LONGEST_ANSWER)))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Gone from error
        except (MalformedMessage, ValueError, msgpack.UnpackException) as error:
            raise Gone(f"it wrote something that is not an answer: {error}") from error
        if not isinstance(answer, dict):
            raise Gone("it wrote something that is not an answer")
        return answer

    def kill(self) -> None:
        self._sandbox.kill(self.process.pid)

    async def end(self) -> str:
        """Kill and reap it; says how it ended and, where it was its own doing, what it printed last."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):  # it closed its pipe: let its own status arrive before ours
                if self._out.at_eof():
                    await self.process.wait()
        own = self.process.returncode is not None
        self.kill()
        status = await self._reap()
        self._in.close()
        await self._heard()
        if status is None:
            return "still running after SIGKILL"
        words = self._last_words.decode("utf-8", "replace").strip().rpartition("\n")[2][:200] if own and status else ""
        return ended_by(status, self._sandbox.level) + (f", having printed: {words}" if words else "")

    async def _reap(self) -> int | None:
        for _ in range(2):
            try:
                async with asyncio.timeout(STOP_DEADLINE_S):
                    return await self.process.wait()
            except TimeoutError:
                self._sandbox.kill_hard(self.process.pid)
        return None

    async def _heard(self) -> None:
        """Its last words are still in the pipe; a process that escaped an unconfined worker may hold it open for ever."""
        await asyncio.wait({self._listening}, timeout=0.5)
        self._listening.cancel()
        await asyncio.wait({self._listening})

    async def _listen(self) -> None:
        while text := await self._err.read(PRINTED_SHOWN):
            room = max(0, PRINTED_SHOWN - self._printed)
            self._printed += len(text)
            self._last_words = (self._last_words + text)[-1000:]
            if room:
                _show(text[:room] if len(text) <= room else text[:room] + b"\n[the rest of what this reward prints is not shown]\n")
            if self._printed > PRINTED_MOST and not self.printed_too_much:
                self.printed_too_much = True
                self.kill()


def _show(text: bytes) -> None:
    with contextlib.suppress(OSError):  # our own stderr is closed: then nobody wants to read it
        os.write(2, text)


def _unseen(level: Level) -> str:
    if level in (Level.BUBBLEWRAP, Level.NAMESPACE):
        return f"it loads inside the {level} sandbox, which hides home directories and has no network: put what it reads beside the file"
    return ""
