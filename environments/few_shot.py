"""Few-shot tasks: solved examples of the same family ahead of every question.

Guarantees: the examples are a function of the source alone, the same for every task of a run, for training and held-out ones and for every version; they are drawn
from a seed of their own on the training side, so none is a held-out question; a question is never among its own examples. They lie in the task's metadata: prompt,
id, split and score of the task are what they would be without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.messages.types import Task

if TYPE_CHECKING:
    from driftline.environments.source import TaskSource

__all__ = ["SHOT_SEED", "FewShotSource", "Shot", "shots_of"]

SHOT_SEED = 2_000_003
"""Beside the held-out side's 1,000,003; a run's own seed would draw its first questions twice."""

_KEY = "shots"
_PATIENCE = 32
"""Draws without another answer after which examples may have the same one, and without another question after which the source is taken to be exhausted."""


class Shot(NamedTuple):
    question: str
    answer: str


@dataclass(frozen=True)
class FewShotSource:
    """A TaskSource with `count` examples ahead of every task. `shots` holds one more, for the question that is itself an example."""

    source: TaskSource
    shots: tuple[Shot, ...]
    count: int

    @classmethod
    def of(cls, source: TaskSource, count: int) -> FewShotSource:
        """ConfigError when the source has no answers to show, or fewer than `count` + 1 questions."""
        return cls(source, tuple(_drawn(source, count + 1)), count)

    def task(self, index: int, seed: int) -> Task:
        return self._with_shots(self.source.task(index, seed))

    def heldout(self, count: int) -> list[Task]:
        return [self._with_shots(task) for task in self.source.heldout(count)]

    def _with_shots(self, task: Task) -> Task:
        others = [list(shot) for shot in self.shots if shot.question != task.prompt][: self.count]
        return task.model_copy(update={"metadata": {**task.metadata, _KEY: others}})


def shots_of(task: Task) -> tuple[Shot, ...]:
    """The examples of a task, none without any. IntegrityError when the metadata hold something else under that name."""
    found = task.metadata.get(_KEY, [])
    pairs = found if isinstance(found, list | tuple) else [found]
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair) for pair in pairs):
        raise IntegrityError("examples are pairs of question and answer", field=f"task {task.id}: metadata.{_KEY}", value=found,
                             remedy="leave the key to tasks.few_shot")
    return tuple(Shot(*pair) for pair in pairs)


def _drawn(source: TaskSource, count: int) -> list[Shot]:
    """Different questions, and different answers as long as the source offers them: two examples with one answer teach to give that answer."""
    found: dict[str, Shot] = {}
    answers: set[str] = set()
    index = unlucky = 0
    while len(found) < count:
        task = source.task(index, SHOT_SEED)
        if task.answer is None:
            raise ConfigError("has no stored answer to show", field="tasks.few_shot", value=task.family, remedy="use 0, or a family with one right answer")
        fresh = task.prompt not in found and (task.answer not in answers or unlucky >= _PATIENCE)
        index, unlucky = index + 1, 0 if fresh else unlucky + 1
        if fresh:
            found[task.prompt] = Shot(task.prompt, task.answer)
            answers.add(task.answer)
        elif unlucky > 2 * _PATIENCE:
            raise ConfigError(f"the source has {len(found)} questions to show, and one more than the examples is needed", field="tasks.few_shot", value=count - 1,
                              remedy="use fewer, or parameters whose questions vary more")
    return list(found.values())
