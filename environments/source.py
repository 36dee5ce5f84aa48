"""Tasks and their rewards: what every environment promises, and how a run file's words become one.

Guarantees: a `TaskSource` is a pure function of (index, seed), so a restarted dispatcher makes the same tasks; its training and
held-out sides share no question. A `Scorer` is a pure function of (task, completion). An unknown source, family or parameter
is a ConfigError that says what would have been valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import xxhash

from driftline.environments.few_shot import FewShotSource
from driftline.environments.split import heldout_tasks, training_task
from driftline.messages.errors import ConfigError, DriftlineError
from driftline.messages.types import Task

__all__ = [
    "HELDOUT_SEED",
    "MixturePart",
    "RewardError",
    "Score",
    "Scorer",
    "TaskMaker",
    "TaskSource",
    "load_scorer",
    "load_source",
    "task_id",
]

HELDOUT_SEED = 1_000_003

REASONING_GYM = "reasoning_gym"
GENERATORS = "generators"
PYTHON = "python:"


class RewardError(DriftlineError):
    """A reward that is not a finite number."""


class Score(NamedTuple):
    """A reward, and named parts of it worth plotting. `components["exact"]` is 1.0 where the answer was fully right."""

    reward: float
    components: dict[str, float]


@runtime_checkable
class TaskSource(Protocol):
    def task(self, index: int, seed: int) -> Task:
        """The training task at `index` of the run seeded `seed`; never a held-out question, never a seed twice."""
        ...

    def heldout(self, count: int) -> list[Task]:
        """The same held-out tasks on every call: distinct questions, fewer than `count` if the source has no more."""
        ...


@runtime_checkable
class Scorer(Protocol):
    def score(self, task: Task, completion: str) -> Score:
        """The reward of a completion. May raise: the grader makes that a failed member with its cause."""
        ...


class TaskMaker(Protocol):
    """What an adapter implements: one draw. `SplitSource` makes a TaskSource of it."""

    def draw(self, number: int, seed: int) -> Task: ...


@dataclass(frozen=True)
class MixturePart:
    """One family of a mixture. `source` empty means the mixture's own."""

    family: str
    params: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    source: str = ""


@dataclass(frozen=True)
class SplitSource:
    """A TaskMaker with the content split applied."""

    maker: TaskMaker
    heldout_seed: int = HELDOUT_SEED

    def task(self, index: int, seed: int) -> Task:
        return training_task(self.maker.draw, index, seed)

    def heldout(self, count: int) -> list[Task]:
        return heldout_tasks(self.maker.draw, count, self.heldout_seed)


def task_id(source: str, family: str, prompt: str, answer: str | None) -> str:
    """By content: the same task has the same id wherever and however it was drawn."""
    digest = xxhash.xxh3_128_hexdigest(f"{prompt}\x00{answer}".encode("utf-8", "surrogatepass"))
    return f"{source[:64]}/{family[:64]}/{digest}"


def load_source(
    spec: str,
    family: str = "",
    params: Mapping[str, Any] | None = None,
    *,
    mixture: Sequence[MixturePart] = (),
    heldout_seed: int = HELDOUT_SEED,
    few_shot: int = 0,
) -> TaskSource:
    """The source a run file names: "reasoning_gym" or "generators" with a family, "python:FILE[:NAME]", or a mixture. Every task has `few_shot` solved examples
    of its own family ahead of its question."""
    from driftline.environments.mixture import MixtureSource

    if mixture:
        parts = [(load_source(p.source or spec, p.family, p.params, heldout_seed=heldout_seed, few_shot=few_shot), p.weight) for p in mixture]
        return MixtureSource.of(parts)
    source = SplitSource(_maker(spec, family, dict(params or {})), heldout_seed)
    return FewShotSource.of(source, few_shot) if few_shot else source


def load_scorer(specs: Iterable[str]) -> Scorer:
    """One scorer for the tasks of these sources. A task from any other source is refused: a message never names code to load."""
    return RoutingScorer({spec: _scorer(spec) for spec in specs})


@dataclass(frozen=True)
class RoutingScorer:
    scorers: Mapping[str, Scorer]

    def score(self, task: Task, completion: str) -> Score:
        scorer = self.scorers.get(task.source)
        if scorer is None:
            raise ConfigError(
                "this grader has no scorer for the task's source",
                field="task.source",
                value=task.source,
                remedy=f"it was started for {sorted(self.scorers)}",
            )
        return scorer.score(task, completion)


# The adapters are imported where they are chosen: reasoning-gym alone takes most of a second that a user's own file need not pay.
def _maker(spec: str, family: str, params: dict[str, Any]) -> TaskMaker:
    if spec == REASONING_GYM:
        from driftline.environments.reasoning_gym import ReasoningGymMaker

        return ReasoningGymMaker.of(family, params)
    if spec == GENERATORS:
        from driftline.environments.generators import GeneratorMaker

        return GeneratorMaker.of(family, params)
    if spec.startswith(PYTHON):
        from driftline.environments.python_source import PythonTasks

        return PythonTasks.load(spec, params)
    raise _unknown(spec)


def _scorer(spec: str) -> Scorer:
    if spec == REASONING_GYM:
        from driftline.environments.reasoning_gym import ReasoningGymScorer

        return ReasoningGymScorer()
    if spec == GENERATORS:
        from driftline.environments.generators import GeneratorScorer

        return GeneratorScorer()
    if spec.startswith(PYTHON):
        from driftline.environments.python_source import PythonTasks

        return PythonTasks.load(spec, {})
    raise _unknown(spec)


def _unknown(spec: str) -> ConfigError:
    return ConfigError(
        "no such task source",
        field="tasks.source",
        value=spec,
        remedy=f'use "{REASONING_GYM}", "{GENERATORS}" or "{PYTHON}path/to/file.py"',
    )
