"""`python -m driftline.environments.sandbox.confine SPEC COMMAND...`: goes into the sandbox, then becomes or keeps the command.

Guarantees: the command starts only when every limit of its level is in force, otherwise this exits with 125 and the reason on stderr; it
ends with its parent; when it has ended, or this is told to end (SIGTERM), every process that it left behind is killed, also one that
forked twice and took a session of its own. Exit status: the command's, or 128 + the signal that ended it. Standard library only.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from driftline.environments.sandbox import calls, kernel, mounts

__all__ = ["FAILED", "main"]

FAILED = 125


def main(arguments: list[str]) -> int:
    spec, command = json.loads(arguments[0]), arguments[1:]
    try:
        match spec["level"]:
            case "bubblewrap":  # bwrap has made the namespaces and is the one that keeps us
                _become(spec, command, ())
            case "namespace":
                return _keep_namespaces(spec, command)
            case "rlimit":
                return _keep_tree(spec, command)
            case level:
                raise OSError(f"no such level: {level}")
    except OSError as error:
        print(f"sandbox {spec['level']}: {error}", file=sys.stderr, flush=True)
        return FAILED


def _become(spec: dict[str, Any], command: list[str], protected: tuple[int, ...]) -> NoReturn:
    """Take the limits and turn into the command."""
    for name, value in spec["limits"].items():
        _limit(getattr(resource, name), value)
    kernel.no_new_privileges()
    kernel.drop_capabilities()
    kernel.die_with_parent(signal.SIGKILL)
    kernel.seccomp(calls.program(protected))
    os.execvp(command[0], command)


def _limit(kind: int, value: int) -> None:
    """Never above what is allowed already: nobody but root may raise it."""
    _, most = resource.getrlimit(kind)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (value, value))


def _keep_namespaces(spec: dict[str, Any], command: list[str]) -> int:
    user, group = os.getuid(), os.getgid()
    kernel.unshare(kernel.NAMESPACES)
    kernel.die_with_parent(signal.SIGKILL)  # after unshare, which forgets it
    _gone_already(spec)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    null = _null()  # before the fork: the child changes the root of both
    first = os.fork()
    if first == 0:
        _leave_with(lambda: _first_process(spec, command, null))
    _let_go_of_pipes(null)
    return _status(os.waitpid(first, 0)[1])


def _first_process(spec: dict[str, Any], command: list[str], null: int) -> int:
    """Process 1 of the namespace: when it ends, the kernel kills all the others. It stays beside the command because the kernel keeps
    signals from a first process, and a reward that crashes must be seen to."""
    kernel.die_with_parent(signal.SIGKILL)
    mounts.enter([(verb, path) for verb, path in spec["steps"]], scratch_mb=spec["scratch_mb"], folder=spec["folder"])
    second = os.fork()
    if second == 0:
        _leave_with(lambda: _become(spec, command, ()))
    _let_go_of_pipes(null)
    kernel.drop_capabilities()
    while True:
        ended, status = os.wait()
        if ended == second:
            return _status(status)


def _keep_tree(spec: dict[str, Any], command: list[str]) -> int:
    kernel.become_subreaper()
    kernel.die_with_parent(signal.SIGTERM)
    _gone_already(spec)
    awaited = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    keeper, parent = os.getpid(), spec["parent"]
    protected = (parent, keeper, -os.getpgrp(), -os.getpgid(parent))
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        os.setsid()
        _leave_with(lambda: _become(spec, command, protected))
    _let_go_of_pipes(_null())
    status = _until_ended(child, awaited)
    while _kill_children():
        pass
    return status


def _until_ended(child: int, awaited: set[signal.Signals]) -> int:
    """The exit status of `child`, which is killed when somebody wants an end; reaps its orphans meanwhile."""
    while True:
        if signal.sigwait(awaited) in (signal.SIGTERM, signal.SIGINT):
            os.kill(child, signal.SIGKILL)
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child:
                return _status(status)
            if ended == 0:
                break


def _kill_children() -> bool:
    """Kill and reap what is left below; the orphans of one round are the children of the next. Whether there was any."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent(entry) == os.getpid():
            try:
                os.kill(int(entry.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        return False
    return True


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


def _gone_already(spec: dict[str, Any]) -> None:
    if os.getppid() != spec["parent"]:
        raise OSError("the process that asked for this has ended")


def _null() -> int:
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _let_go_of_pipes(null: int) -> None:
    """So that whoever reads the command's output sees its end when the command ends, and not this process's. All pipes: one that was
    handed on for the command counts too."""
    for number in (0, 1):
        os.dup2(null, number)
    os.closerange(3, null)
    os.closerange(null + 1, 1024)


def _leave_with(body: Any) -> NoReturn:
    """A forked child's end: never back into the parent's code."""
    try:
        os._exit(body())
    except OSError as error:
        os.write(2, f"sandbox: {error}\n".encode())
        os._exit(FAILED)


def _status(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
