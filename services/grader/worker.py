"""One grading process: `python -m driftline.services.grader.worker`. Reads a task and a completion, answers with a reward.

Guarantees: what the reward prints goes to stderr and never into the answer; memory beyond the limit raises here and nowhere else;
a reward that raises is an answer with its cause; a worker whose grader has died ends by itself, even inside a reward that hangs.
The first frame in names the sources, the first frame out says that they loaded.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, BinaryIO

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
    try:
        scorer = load_scorer(settings["specs"])
    except Exception as error:
        _write(answers, {"failed": f"{type(error).__name__}: {error}"})
        return 1
    _limit_memory(int(settings["memory_mb"]))
    _write(answers, {"ready": os.getpid()})
    while (request := _read(requests)) is not None:
        signal.alarm(math.ceil(settings["deadline_s"]) + _ORPHAN_GRACE_S)
        _write(answers, grade(scorer, request))
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
    return f"{type(error).__name__}: {error}"[:500] + line


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
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + megabytes * MIB, resource.RLIM_INFINITY))
    except (OSError, ValueError):
        print("grader worker: this system does not limit a process's memory", file=sys.stderr)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a reward that crashes is a cause, not a gigabyte on disk


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
