"""Levels of confinement, strongest first, and the command line that runs a program at one of them.

Guarantees: a `Sandbox` names the level that is really in force: it exists only after a program started there had no network. At every
level but `off`: no socket, no new privileges, an environment cleared but for what Python needs, bounded memory, processes, files and
file sizes, and an end together with every process left behind. `bubblewrap` and `namespace` add a read-only tree without the
home directory, what is named private, and other processes. `rlimit` shares files with its user: docs/tasks.md says what that leaves open.
Standard library and our errors only.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

from driftline.environments.sandbox import view
from driftline.messages.errors import ConfigError

__all__ = ["AUTO", "LEVELS", "Level", "Limits", "Sandbox", "choose", "ended_by", "fault"]

AUTO = "auto"
MIB = 1024 * 1024
PROBE_S = 20.0


class Level(StrEnum):
    BUBBLEWRAP = "bubblewrap"
    NAMESPACE = "namespace"
    RLIMIT = "rlimit"
    OFF = "off"


LEVELS = (Level.BUBBLEWRAP, Level.NAMESPACE, Level.RLIMIT)
_REMEDIES = {
    Level.BUBBLEWRAP: "apt install bubblewrap; unprivileged user namespaces must be allowed "
    "(sysctl kernel.unprivileged_userns_clone=1, or kernel.apparmor_restrict_unprivileged_userns=0)",
    Level.NAMESPACE: "Linux 5.12 with unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, or "
    "kernel.apparmor_restrict_unprivileged_userns=0); in a container, --security-opt seccomp=unconfined",
    Level.RLIMIT: "Linux with seccomp on x86_64 or aarch64; elsewhere use grader.sandbox = 'off' and trust the rewards",
}
_KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Limits:
    """What a program may take. `memory_mb` and `cpu_s` None: it sets them itself, or another bound holds.

    Linux does not count the processes of root: there the end of the sandbox is what ends a fork bomb.
    """

    memory_mb: int | None = None
    cpu_s: int | None = None
    processes: int = 128
    open_files: int = 256
    file_mb: int = 64
    scratch_mb: int = 256

    def numbers(self) -> dict[str, int]:
        """By the names of module `resource`."""
        found = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": self.open_files, "RLIMIT_FSIZE": self.file_mb * MIB}
        if self.memory_mb is not None:
            found["RLIMIT_AS"] = self.memory_mb * MIB
        if self.cpu_s is not None:
            found["RLIMIT_CPU"] = self.cpu_s
        return found


@dataclass(frozen=True)
class Sandbox:
    """`process = Popen(sandbox.command([python, "-c", code]), env=sandbox.environment(), start_new_session=True)`, and
    `sandbox.kill(process.pid)` to end it. `readable` are the files and folders that must be seen even below a hidden one."""

    level: Level
    limits: Limits = field(default_factory=Limits)
    readable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    def command(self, program: Sequence[str]) -> list[str]:
        """`program` at this level, started from this process and this working directory."""
        if self.level is Level.OFF:
            return list(program)
        folder = os.getcwd()
        steps = view.steps(self.readable, self.hidden)
        spec = {"level": self.level.value, "parent": os.getpid(), "limits": self._numbers(), "steps": steps,
                "scratch_mb": self.limits.scratch_mb, "folder": folder}
        confined = [sys.executable, "-P", "-m", "driftline.environments.sandbox.confine", json.dumps(spec), *program]
        if self.level is Level.BUBBLEWRAP:
            return [*_bubblewrap(steps, self.limits.scratch_mb * MIB, folder), *confined]
        return confined

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        if self.level is Level.OFF:
            return {**os.environ, **(more or {})}
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        return {**kept, "HOME": "/tmp", "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", **(more or {})}

    def kill(self, pid: int) -> None:
        """End it and everything below. `pid` was started with a session of its own."""
        try:
            if self.level is Level.RLIMIT:
                os.kill(pid, signal.SIGTERM)  # to the keeper, which kills what it keeps; killed itself, it could not
            else:
                os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def kill_hard(self, pid: int) -> None:
        """When it did not end in time."""
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def _numbers(self) -> dict[str, int]:
        """With the limit of processes, which counts the user's: what runs already comes on top where it is in the same namespace."""
        numbers = self.limits.numbers()
        if os.geteuid() != 0:
            running = view.processes_of(os.geteuid()) if self.level is Level.RLIMIT else 0
            numbers["RLIMIT_NPROC"] = running + self.limits.processes
        return numbers


def ended_by(status: int, level: Level) -> str:
    """How a process ended, from its return code."""
    number = -status if status < 0 else status - 128 if level is not Level.OFF and status > 128 else 0
    try:
        return f"killed by {signal.Signals(number).name}" if number else f"exit status {status}"
    except ValueError:
        return f"exit status {status}"


def choose(wanted: str = AUTO, *, limits: Limits | None = None, readable: Iterable[str] = (), hidden: Iterable[str] = ()) -> Sandbox:
    """The sandbox of the level named, or the strongest that works here. Raises ConfigError when it does not."""
    if wanted == AUTO:
        level = next((level for level in LEVELS if not fault(level)), Level.OFF)
        if level is Level.OFF:
            raise ConfigError(f"nothing confines a program here: {fault(Level.RLIMIT)}", field="grader.sandbox", value=wanted,
                              remedy=_REMEDIES[Level.RLIMIT])
    else:
        level = Level(wanted)
        if level is not Level.OFF and (problem := fault(level)):
            raise ConfigError(f"this sandbox does not work here: {problem}", field="grader.sandbox", value=wanted,
                              remedy=_REMEDIES[level])
    return Sandbox(level, limits or Limits(), tuple(readable), tuple(hidden))


_PROBE = "import socket\ntry:\n    socket.socket()\nexcept OSError:\n    print('confined')\n"


@cache
def fault(level: Level) -> str:
    """Why this level does not work here; empty when it does. Tried once, by running a program there. Takes a tenth of a second."""
    sandbox = replace(Sandbox(level), limits=Limits(memory_mb=512, cpu_s=10))
    try:
        done = subprocess.run(
            sandbox.command([sys.executable, "-I", "-S", "-c", _PROBE]), env=sandbox.environment(), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PROBE_S, check=False, start_new_session=True,
        )
    except FileNotFoundError:
        return "bwrap is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.stdout.strip() == "confined":
        return ""
    lines = (done.stderr.strip() or f"{ended_by(done.returncode, level)} and no answer").splitlines()
    return lines[-1][:300]


def _bubblewrap(steps: Sequence[tuple[str, str]], scratch: int, folder: str) -> list[str]:
    size, small = ("--size", str(scratch)), ("--size", str(256 * 1024))
    built = ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
             *size, "--tmpfs", "/dev/shm", *size, "--perms", "1777", "--tmpfs", "/tmp"]
    empty = []
    for verb, path in steps:
        if verb == "show":
            built += ["--ro-bind", path, path]
        elif os.path.isdir(path):
            built += [*small, "--tmpfs", path]
            empty.append(path)
        elif os.path.lexists(path):
            built += ["--ro-bind", "/dev/null", path]
    if view.below(folder, [*empty, "/tmp"]):
        built += ["--dir", folder]
    for path in ("/dev", *empty):
        built += ["--remount-ro", path]
    return [*built, "--chdir", folder, "--"]


def memory_taken() -> int:
    """Bytes of address space this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
