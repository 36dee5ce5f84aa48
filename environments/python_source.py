"""A user's own tasks and reward, from a Python file.

    # my_tasks.py
    def tasks(index, rng):                       # rng is a random.Random: the same index and seed give the same task
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        return f"{a}+{b}=", str(a + b)           # prompt, answer

    def reward(prompt, answer, completion):
        return float(completion.strip() == answer)

`source = "python:my_tasks.py"` uses the module's two functions, `"python:my_tasks.py:NAME"` those of an object in it (a class
with two static methods, say). Guarantees: a file that is missing, does not import, or returns the wrong thing is an error
that names the file, the line where there is one, and what was expected; parameters under `[tasks.params]` reach `tasks` by name.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import xxhash

from driftline.environments.source import PYTHON, RewardError, Score, task_id
from driftline.messages.errors import ConfigError
from driftline.messages.types import Task

__all__ = ["PythonTasks", "folder_of"]

_EXPECTED = "define tasks(index, rng) -> (prompt, answer) and reward(prompt, answer, completion) -> float"


@dataclass(frozen=True)
class PythonTasks:
    """Maker and scorer of one file."""

    spec: str
    family: str
    tasks: Callable[..., Any]
    reward: Callable[..., Any]
    params: Mapping[str, Any]

    @classmethod
    def load(cls, spec: str, params: Mapping[str, Any]) -> PythonTasks:
        """Import the file and check it by one draw, so that a mistake shows at start-up and not in the middle of a run."""
        file, name = _parse(spec)
        owner: Any = _import(spec, file)
        if name:
            if not hasattr(owner, name):
                raise ConfigError(f"{file.name} has no attribute {name!r}", field="tasks.source", value=spec, remedy=_EXPECTED)
            owner = getattr(owner, name)
        where = f"{name} in {file.name}" if name else file.name
        functions: dict[str, Any] = {}
        for function in ("tasks", "reward"):
            functions[function] = getattr(owner, function, None)
            if not callable(functions[function]):
                raise ConfigError(f"{where} has no function {function!r}", field="tasks.source", value=spec, remedy=_EXPECTED)
        made = cls(spec, name or file.stem, functions["tasks"], functions["reward"], dict(params))
        if params or not _needs_params(made.tasks):
            made.draw(0, 0)
        return made

    def draw(self, number: int, seed: int) -> Task:
        try:
            returned = self.tasks(number, Random(seed), **self.params)
        except Exception as error:  # the user's code: whatever it raised, say where
            raise ConfigError(
                f"tasks({number}, rng) raised {_where(error)}", field="tasks.source", value=self.spec, remedy=_EXPECTED
            ) from error
        match returned:
            case (str() as prompt, str() | None as answer) if prompt:
                pass
            case _:
                raise ConfigError(
                    f"tasks({number}, rng) must return (prompt, answer), two strings, and returned {returned!r:.200}",
                    field="tasks.source",
                    value=self.spec,
                    remedy=_EXPECTED,
                )
        return Task(
            id=task_id("python", self.family, prompt, answer),
            source=self.spec,
            family=self.family,
            prompt=prompt,
            answer=answer,
        )

    def score(self, task: Task, completion: str) -> Score:
        value = self.reward(task.prompt, task.answer, completion)
        if hasattr(value, "item"):  # a numpy scalar
            value = value.item()
        if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
            raise RewardError("a reward is a finite number", field="reward", value=value, remedy="return a float")
        return Score(float(value), {"exact": float(completion.strip() == task.answer)})


def folder_of(spec: str) -> Path:
    """Where the file of "python:FILE" lies, and what it may import from."""
    return _parse(spec)[0].resolve().parent


def _parse(spec: str) -> tuple[Path, str]:
    path, colon, name = spec.removeprefix(PYTHON).partition(".py:")
    file = Path(path + ".py" if colon else path)
    if file.suffix != ".py" or (colon and not name.isidentifier()):
        raise ConfigError("is not python:FILE.py or python:FILE.py:NAME", field="tasks.source", value=spec, remedy=_EXPECTED)
    if not file.is_file():
        raise ConfigError(
            f"no file {file.resolve()}", field="tasks.source", value=spec, remedy="paths are relative to the working directory"
        )
    return file, name


def _import(spec: str, file: Path) -> ModuleType:
    # Named by its path: two files called tasks.py are two modules, and the user's dataclasses can find theirs in sys.modules.
    name = f"driftline_tasks_{xxhash.xxh3_64_hexdigest(str(file.resolve()).encode())}"
    loader = importlib.util.spec_from_file_location(name, file)
    if loader is None or loader.loader is None:
        raise ConfigError("Python cannot import this file", field="tasks.source", value=spec)
    module = importlib.util.module_from_spec(loader)
    sys.modules[name] = module
    if (folder := str(file.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # last, so that what lies beside the file can be imported and shadows nothing
    try:
        loader.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(
            f"importing {file} raised {_where(error)}", field="tasks.source", value=spec, remedy="run it with python to see it all"
        ) from error
    return module


def _needs_params(function: Callable[..., Any]) -> bool:
    """Whether `tasks` wants parameters that only the dispatcher has: the grader loads the file without them."""
    wanted = list(inspect.signature(function).parameters.values())[2:]
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in wanted)


def _where(error: BaseException) -> str:
    """`ValueError: bad (my_tasks.py:12)`: the innermost line of the user's file or below."""
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{line}"
