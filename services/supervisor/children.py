"""A service as a child process: its own process group, its own log file, and never without its parent.

Guarantees: a child is killed by the kernel when its parent dies (Linux); after a child ended, whatever it left in its
process group is killed; `stop` asks, waits, then kills, and returns only when the child is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Child", "ServiceSpec", "die_with", "guard", "log_tail"]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ServiceSpec:
    """What to start: `name` is unique in the run (rollout-0, rollout-1, ...)."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    stores: bool = True
    """Whether it reads or writes policies, and so gets the keys of an object store."""


def die_with(parent: int) -> Callable[[], None]:
    """For the forked child: ask the kernel for SIGKILL when `parent` dies, and leave if it already did."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def arrange() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return arrange


class Child:
    def __init__(self, spec: ServiceSpec, process: asyncio.subprocess.Process) -> None:
        self.spec, self._process = spec, process

    @classmethod
    async def start(cls, spec: ServiceSpec, log: Path) -> Child:
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *spec.argv, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                preexec_fn=die_with(os.getpid()), env={**_inherited(spec), **spec.environment},
            )
        return cls(spec, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """The exit code (negative: a signal). Its process group is empty afterwards."""
        code = await self._process.wait()
        self.signal(signal.SIGKILL)
        return code

    def signal(self, number: signal.Signals) -> None:
        """To the whole group, which outlives its leader when that left children behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def terminate(self) -> None:
        """Ask the service itself to drain; what it started is its own to stop."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()


async def guard(pid: int) -> asyncio.subprocess.Process:
    """A shell that terminates `pid` when this process ends in any way: the pipe to it closes.

    For a process that must survive the terminal's Ctrl-C and that we did not fork ourselves (the broker). Kill the guard
    after stopping `pid` in order.
    """
    return await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", f"read line; kill -TERM {pid}", stdin=asyncio.subprocess.PIPE, start_new_session=True
    )


def log_tail(path: Path, lines: int = 20, limit: int = 64 * 1024) -> str:
    """The end of a log, with the fields a person needs of our JSON lines."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            found = file.read().decode("utf-8", "replace").splitlines()[-lines:]
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(_readable(line) for line in found) or "(the log is empty)"


def _readable(line: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict) or "event" not in entry:
        return line
    known = ("event", "level", "timestamp", "service", "instance", "exception", "pid")
    rest = " ".join(f"{key}={value}" for key, value in entry.items() if key not in known)
    text = f"{entry.get('level', ''):<7} {entry['event']} {rest}".rstrip()
    return f"{text}\n{entry['exception']}" if entry.get("exception") else text


def _inherited(spec: ServiceSpec) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if spec.stores or not name.startswith("AWS_")}
