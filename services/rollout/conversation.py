"""A task as the conversation a model is asked to go on with: its solved examples, each a question and its answer, then the question."""

from __future__ import annotations

from driftline.environments.few_shot import shots_of
from driftline.messages.types import Task
from driftline.models.tokenizer import Role, Turn

__all__ = ["conversation"]


def conversation(task: Task) -> tuple[Turn, ...]:
    """Raises IntegrityError when the task's examples are none."""
    solved = (turn for shot in shots_of(task) for turn in (Turn(Role.USER, shot.question), Turn(Role.ASSISTANT, shot.answer)))
    return (*solved, Turn(Role.USER, task.prompt))
