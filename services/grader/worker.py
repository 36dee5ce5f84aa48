"""One grading process: `python -m driftline.services.grader.worker`. Reads a task and a completion, answers with a reward.

Guarantees: what the reward prints goes to stderr and never into the answer; memory beyond the limit raises here and nowhere else;
a reward that raises is an answer with its cause; a worker whose grader has died ends by itself, even inside a reward that hangs; what a
reward leaves running is reported with its answer, however it was started. The first frame in names the sources, the first frame
out says that they loaded. The sandbox around it was entered before Python came here.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from driftline.environments.sandbox import kernel
from driftline.environments.sandbox.box import memory_taken
from driftline.environments.source import RewardError, Score, Scorer, load_scorer
from driftline.messages.types import Task
from driftline.services.grader.wire import HEADER, Failure, frame_length, pack, unpack

__all__ = ["grade", "main"]

MIB = 1024 * 1024
# The grader kills at the deadline; this ends a worker that hangs after its grader has died.
_ORPHAN_GRACE_S = 30


def main() -> int:
    requests, answers = _private_pipes()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the grader's to handle: it drains
    settings = _read(requests)
    if settings is None:
        return 0
    confined = bool(settings["confined"])
    if confined:
        kernel.close_to_tracing()
        kernel.become_subreaper()  # so that what forks twice and goes on alone is still found below
    try:
        scorer = load_scorer(settings["specs"])
    except Exception as error:
        _write(answers, {"failed": f"{type(error).__name__}: {error}"})
        return 1
    _limit_memory(int(settings["memory_mb"]))
    loaded = _running_children() if confined else set()
    _write(answers, {"ready": os.getpid()})
    while (request := _read(requests)) is not None:
        token = request.pop("token")
        _limit_time(settings["deadline_s"])
        answer = grade(scorer, request)
        left_behind = bool(confined and _running_children() - loaded)
        _write(answers, {**answer, "token": token, "left_behind": left_behind})
        signal.alarm(0)
    return 0


def grade(scorer: Scorer, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request: {reward, components} or {failure, cause}."""
    started = time.perf_counter()
    answer = _grade(scorer, request)
    return {**answer, "seconds": time.perf_counter() - started}


def _grade(scorer: Scorer, request: dict[str, Any]) -> dict[str, Any]:
    try:
        score = scorer.score(Task.model_validate(request["task"]), request["completion"])
    except MemoryError:
        return {"failure": Failure.MEMORY.value, "cause": "the reward asked for more memory than grader.memory_mb allows"}
    except RewardError as error:
        return {"failure": Failure.NOT_A_NUMBER.value, "cause": str(error)}
    except (Exception, SystemExit) as error:
        return {"failure": Failure.RAISED.value, "cause": _cause(error)}
    return _checked(score)


def _checked(score: Score) -> dict[str, Any]:
    reward, components = score
    numbers = {"reward": reward, **components}
    for name, value in numbers.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return {"failure": Failure.NOT_A_NUMBER.value, "cause": f"{name} = {value!r:.100}: not a finite number"}
    return {"reward": float(reward), "components": {name: float(value) for name, value in components.items()}}


def _cause(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    line = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}"[:500] + line + _hint(error)


def _hint(error: BaseException) -> str:
    """A reward that wants the network meets an error that does not say why."""
    unreachable = isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.ENETDOWN)
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    if unreachable or isinstance(error, socket.gaierror) or (isinstance(error, PermissionError) and {"socket", "create_connection"} & {*names}):
        return " (the sandbox has no network: grader.sandbox)"
    return ""


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes, moved off 0 and 1, so that a reward that prints or reads input cannot break the frames."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, answers


def _limit_memory(megabytes: int) -> None:
    """Address space: what the imports took, plus `megabytes` for rewards. Not enforceable on every system (macOS)."""
    try:
        most = memory_taken() + megabytes * MIB
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (OSError, ValueError):
        print("grader worker: this system does not limit a process's memory", file=sys.stderr)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a reward that crashes is a cause, not a gigabyte on disk


def _limit_time(deadline_s: float) -> None:
    """For one item, of the wall's time and the processor's, in case that nobody is there to kill."""
    grace = math.ceil(deadline_s) + _ORPHAN_GRACE_S
    signal.alarm(grace)
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = math.ceil(used.ru_utime + used.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (spent + grace * (os.cpu_count() or 1), resource.RLIM_INFINITY))


def _running_children() -> set[int]:
    """Direct children that run; orphans below count, since this process adopts them."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        try:
            found |= {int(number) for number in (thread / "children").read_text().split()}
        except OSError:  # the thread ended
            continue
    return {number for number in found if _runs(number)}


def _runs(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _read(pipe: BinaryIO) -> Any:
    header = pipe.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return unpack(pipe.read(frame_length(header)))


def _write(pipe: BinaryIO, value: Any) -> None:
    pipe.write(pack(value))
    pipe.flush()


if __name__ == "__main__":
    sys.exit(main())
