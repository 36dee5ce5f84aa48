"""Solved examples ahead of a question: never held-out, never the question itself, the same for a whole run, and no part of what is scored."""

from __future__ import annotations

import pytest

from driftline.environments.few_shot import SHOT_SEED, FewShotSource, shots_of
from driftline.environments.source import HELDOUT_SEED, MixturePart, TaskSource, load_scorer, load_source
from driftline.environments.split import is_heldout
from driftline.messages.errors import ConfigError, IntegrityError
from driftline.messages.types import Task

PARAMS = {"max_n": 255}


class Listed:
    """A source of the questions it was given, in turn."""

    def __init__(self, *pairs: tuple[str, str | None]) -> None:
        self.pairs = pairs

    def task(self, index: int, seed: int) -> Task:
        question, answer = self.pairs[index % len(self.pairs)]
        return Task(id=question, source="test", family="test", prompt=question, answer=answer, metadata={"kept": 1})

    def heldout(self, count: int) -> list[Task]:
        return [self.task(i, 0) for i in range(count)]


def test_examples_are_solved_training_questions_of_the_same_family() -> None:
    source = load_source("reasoning_gym", "count_bits", PARAMS, few_shot=3)
    scorer = load_scorer(["reasoning_gym"])
    shots = shots_of(source.task(0, 0))
    assert len(shots) == 3
    for shot in shots:
        assert not is_heldout(shot.question)
        number = int(shot.question.split("number ")[1].rstrip("?"))
        assert shot.answer == str(number.bit_count())
    for task in (source.task(5, 1), *source.heldout(8)):
        assert scorer.score(task, str(task.answer)).reward == 1.0, "the scorer makes the question again: examples must not be in it"


def test_a_task_is_what_it_is_without_examples() -> None:
    plain, shown = (load_source("reasoning_gym", "count_bits", PARAMS, few_shot=n) for n in (0, 2))
    for a, b in zip([plain.task(3, 7), *plain.heldout(9)], [shown.task(3, 7), *shown.heldout(9)], strict=True):
        assert (a.id, a.prompt, a.answer) == (b.id, b.prompt, b.answer)
        assert shots_of(a) == ()
        assert {k: v for k, v in b.metadata.items() if k != "shots"} == a.metadata


def test_a_runs_examples_are_always_the_same() -> None:
    tasks = [task for seed in (0, 1) for make in range(2) for task in _some(load_source("generators", "reverse_digits", few_shot=2), seed)]
    assert len({shots_of(task) for task in tasks}) == 1
    assert SHOT_SEED != HELDOUT_SEED


def _some(source: TaskSource, seed: int) -> list[Task]:
    return [*(source.task(i, seed) for i in range(4)), *source.heldout(4)]


def test_a_question_is_not_among_its_own_examples() -> None:
    """It would be answered by copying."""
    source = FewShotSource.of(Listed(("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")), 2)
    for index, name in enumerate("abcd"):
        shots = shots_of(source.task(index, 0))
        assert len(shots) == 2
        assert name not in [shot.question for shot in shots]


def test_examples_have_different_answers_while_there_are_any() -> None:
    many = [(f"q{i}", "2") for i in range(9)]
    assert {s.answer for s in FewShotSource.of(Listed(*many, ("odd", "3")), 1).shots} == {"2", "3"}
    assert [s.answer for s in FewShotSource.of(Listed(*many), 2).shots] == ["2", "2", "2"], "one answer for all is no reason to refuse"


def test_a_mixture_shows_each_part_its_own() -> None:
    parts = (MixturePart("reverse_digits", source="generators"), MixturePart("count_bits", PARAMS))
    source = load_source("reasoning_gym", mixture=parts, few_shot=2)
    seen = set()
    for index in range(12):
        task = source.task(index, 0)
        seen.add(task.family)
        assert all(("1 bits" in shot.question) == (task.family == "count_bits") for shot in shots_of(task))
    assert seen == {"reverse_digits", "count_bits"}


def test_a_source_without_answers_or_questions_is_refused() -> None:
    with pytest.raises(ConfigError, match="no stored answer"):
        FewShotSource.of(Listed(("a", None)), 1)
    with pytest.raises(ConfigError, match="the source has 2 questions to show"):
        FewShotSource.of(Listed(("a", "1"), ("b", "2")), 2)


@pytest.mark.parametrize("junk", ["text", [["a"]], [["a", 1]], [3], {"a": "b"}])
def test_examples_off_the_wire_that_are_none_are_refused(junk: object) -> None:
    task = Task(id="t", source="s", family="f", prompt="p", metadata={"shots": junk})
    with pytest.raises(IntegrityError, match=r"metadata\.shots"):
        shots_of(task)
