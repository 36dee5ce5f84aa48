"""A prefiller in a process of its own, on its own device, behind a pipe.

Guarantees: what a request is answered with comes once, or `take` raises with the cause the other process gave; the pipe is the bound of what is under way: a
full one stops the prefiller, never the caller, because the other side reads its commands in a thread of its own; a version is loaded between what was asked
before and after it.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import torch

from driftline.messages.errors import DriftlineError
from driftline.services.rollout.engine import Completion, Engine, Request
from driftline.services.rollout.handover.frame import from_bytes, to_bytes
from driftline.services.rollout.handover.halves import Answer, Prefiller

__all__ = ["RemotePrefiller", "serve"]

ENDING_S = 20.0


@dataclass(frozen=True)
class _Cancel:
    name: str


@dataclass(frozen=True)
class _Load:
    version: int
    state: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Ready:
    """The engine is there."""


@dataclass(frozen=True)
class _Failed:
    cause: str


class RemotePrefiller:
    """`make` builds the engine there and must be importable by name; waits until it is built. Use as a context manager, or `close`."""

    def __init__(self, make: Callable[[], Engine], *, start_s: float = 300.0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()
        self._asked: set[str] = set()
        if not self._pipe.poll(start_s) or not isinstance(self._received(), _Ready):
            self.close()
            raise DriftlineError("the process that computes prompts did not start", field="seconds", value=start_s, remedy="see its output")

    @property
    def idle(self) -> bool:
        return not self._asked

    def submit_request(self, request: Request) -> None:
        """What the other engine refuses, `take` raises."""
        self._send(request)
        self._asked.add(request.id)

    def take(self, wait_s: float = 0.0) -> list[Answer]:
        """What has come; waits for the first at most `wait_s`."""
        answers: list[Answer] = []
        while self._asked and self._pipe.poll(0.0 if answers else wait_s):
            answer = self._received()
            assert isinstance(answer, (bytes, Completion))
            whole = from_bytes(answer) if isinstance(answer, bytes) else answer
            name = whole.id if isinstance(whole, Completion) else whole.request.id
            if name in self._asked:  # else it was cancelled while it was computed
                self._asked.discard(name)
                answers.append(whole)
        return answers

    def cancel(self, name: str) -> int:
        if name not in self._asked:
            return 0
        self._asked.discard(name)
        self._send(_Cancel(name))
        return 1

    def load(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        self._send(_Load(version, {name: tensor.detach().cpu() for name, tensor in state.items()}))

    def close(self) -> None:
        if self._process.is_alive():
            with suppress(OSError):  # it is ending already
                self._pipe.send(None)
            self._process.join(ENDING_S)
            if self._process.is_alive():
                self._process.terminate()
                self._process.join()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _send(self, command: object) -> None:
        try:
            self._pipe.send(command)
        except OSError as error:
            raise self._gone() from error

    def _received(self) -> object:
        try:
            answer = self._pipe.recv()
        except EOFError as error:
            raise self._gone() from error
        if isinstance(answer, _Failed):
            raise DriftlineError(answer.cause, field="the process that computes prompts", remedy="start both halves again")
        return answer

    def _gone(self) -> DriftlineError:
        return DriftlineError("it ended", field="the process that computes prompts", value=self._process.exitcode, remedy="see its output; start both halves again")


def serve(pipe: Connection, make: Callable[[], Engine]) -> None:
    """The other process: commands in, answers out, until None comes or the pipe is closed."""
    commands: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, commands), daemon=True).start()
    try:
        prefiller = Prefiller(make())
        pipe.send(_Ready())
        while True:
            for command in _given(commands, wait=prefiller.idle):
                match command:
                    case Request():
                        prefiller.submit_request(command)
                    case _Cancel(name):
                        prefiller.cancel(name)
                    case _Load(version, state):
                        prefiller.load(version, state)
                    case _:
                        return
            for answer in prefiller.take():
                pipe.send(answer if isinstance(answer, Completion) else to_bytes(answer))
    except Exception as error:  # whatever it was, the other side must not wait for answers that never come
        pipe.send(_Failed(f"{type(error).__name__}: {error}"))
        raise


def _read(pipe: Connection, commands: queue.SimpleQueue[object]) -> None:
    try:
        while True:
            commands.put(pipe.recv())
    except (EOFError, OSError):
        commands.put(None)


def _given(commands: queue.SimpleQueue[object], *, wait: bool) -> list[object]:
    given = [commands.get()] if wait else []
    while not commands.empty():
        given.append(commands.get())
    return given
