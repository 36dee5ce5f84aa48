"""Our own small generators, with credit for every right character.

Guarantees: a draw depends only on its seed and parameters; a completion's reward is the fraction of positions that agree with
the answer, so a policy that is almost right learns, and only the exact answer is worth 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from driftline.environments.source import GENERATORS, Score, task_id
from driftline.messages.errors import ConfigError
from driftline.messages.types import Task

__all__ = ["FAMILIES", "GeneratorMaker", "GeneratorScorer", "character_credit"]


class Digits(BaseModel):
    """Parameters: how many digits a question has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_digits: int = Field(default=3, ge=1, le=64)
    max_digits: int = Field(default=5, ge=1, le=64)

    @model_validator(mode="after")
    def _ordered(self) -> Digits:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits = {self.min_digits} is above max_digits = {self.max_digits}")
        return self

    def sample(self, rng: Random) -> str:
        return "".join(rng.choice("0123456789") for _ in range(rng.randint(self.min_digits, self.max_digits)))


@dataclass(frozen=True)
class Question:
    prompt: str
    answer: str
    tool: str = ""


def reverse_digits(params: Digits, rng: Random) -> Question:
    digits = params.sample(rng)
    return Question(f"Reverse: {digits}", digits[::-1])


def sort_digits(params: Digits, rng: Random) -> Question:
    digits = params.sample(rng)
    return Question(f"Sort: {digits}", "".join(sorted(digits)))


def multiply_with_calculator(params: Digits, rng: Random) -> Question:
    """For the calculator environment: too large to do in the head, one tool call away."""
    a, b = (params.sample(rng).lstrip("0") or "0" for _ in range(2))
    return Question(f"What is {a} * {b}? Write <calc>{a} * {b}</calc>, then the result.", str(int(a) * int(b)), "calculator")


FAMILIES: Mapping[str, Callable[[Digits, Random], Question]] = {
    "reverse_digits": reverse_digits,
    "sort_digits": sort_digits,
    "multiply_with_calculator": multiply_with_calculator,
}


@dataclass(frozen=True)
class GeneratorMaker:
    family: str
    params: Digits

    @classmethod
    def of(cls, family: str, params: Mapping[str, Any]) -> GeneratorMaker:
        if family not in FAMILIES:
            raise ConfigError("no such generator", field="tasks.family", value=family, remedy=f"one of {', '.join(FAMILIES)}")
        try:
            return cls(family, Digits.model_validate(dict(params)))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in ("tasks.params", *first["loc"]))
            raise ConfigError(
                first["msg"], field=field, value=first["input"], remedy=f"known: {', '.join(Digits.model_fields)}"
            ) from error

    def draw(self, number: int, seed: int) -> Task:
        question = FAMILIES[self.family](self.params, Random(seed))
        return Task(
            id=task_id(GENERATORS, self.family, question.prompt, question.answer),
            source=GENERATORS,
            family=self.family,
            prompt=question.prompt,
            answer=question.answer,
            metadata={"tool": question.tool} if question.tool else {},
        )


@dataclass(frozen=True)
class GeneratorScorer:
    def score(self, task: Task, completion: str) -> Score:
        answer = task.answer or ""
        # In a tool episode only what the model wrote after the last observation is its answer.
        text = completion.rpartition("</result>")[2].strip()
        return Score(character_credit(answer, text), {"exact": float(text == answer)})


def character_credit(answer: str, text: str) -> float:
    """Agreeing positions over the longer length: 1 only when equal, and padding the answer costs."""
    if not answer or not text:
        return float(answer == text)
    return sum(a == b for a, b in zip(answer, text, strict=False)) / max(len(answer), len(text))
