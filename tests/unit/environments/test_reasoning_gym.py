"""Every family of reasoning-gym: makes tasks, travels, scores its own answer, survives junk."""

from __future__ import annotations

import sys

import pytest

from driftline.environments.reasoning_gym import (
    NO_ORACLE,
    ReasoningGymMaker,
    ReasoningGymScorer,
    extract_answer,
    families,
)
from driftline.environments.reasoning_gym_guards import refuses
from driftline.environments.source import load_scorer, load_source
from driftline.environments.split import item_seed
from driftline.messages.codec import decode, encode
from driftline.messages.errors import ConfigError, IntegrityError
from driftline.messages.types import Group

SCORER = ReasoningGymScorer()
JUNK = ["", " ", "\x00", "no idea", "-1", "1/0", "[", "[[[[1", "{}", "None", "P ∧", "²", "é" * 50, "1e999", "nan", "(((", "F F F", "a,b,c"]


def test_all_the_families_are_there() -> None:
    assert len(families()) >= 105


@pytest.mark.parametrize("family", families())
def test_a_family_makes_a_task_that_travels_and_scores_its_own_answer(family: str) -> None:
    maker = ReasoningGymMaker.of(family, {})
    for number in range(2):
        task = maker.draw(number, item_seed(number, 1))
        group = decode(encode(Group(run="r", group="g0", index=0, task=task, members=2)))
        assert isinstance(group, Group)
        assert group.task == task
        assert maker.draw(number, item_seed(number, 1)) == task
        if family in NO_ORACLE:
            assert task.answer is None
            continue
        assert task.answer is not None
        assert SCORER.score(group.task, f" {task.answer}\n").reward > 0.9


@pytest.mark.parametrize("family", families())
def test_junk_is_worth_something_between_0_and_1_and_never_raises(family: str) -> None:
    task = ReasoningGymMaker.of(family, {}).draw(0, 12345)
    for junk in JUNK:
        score = SCORER.score(task, junk)
        assert 0.0 <= score.reward <= 1.0
        assert SCORER.score(task, junk) == score


def test_drawing_one_task_does_not_change_another() -> None:
    maker = ReasoningGymMaker.of("spell_backward", {})
    first = maker.draw(0, 1)
    maker.draw(1, 2)
    assert maker.draw(0, 1) == first


@pytest.mark.parametrize("family", ["binary_matrix", "number_sorting", "spiral_matrix", "string_insertion", "n_queens"])
def test_a_model_cannot_have_python_evaluated_by_a_list_scorer(family: str) -> None:
    task = ReasoningGymMaker.of(family, {}).draw(0, 7)
    SCORER.score(task, "setattr(__import__('sys'), 'driftline_pwned', 1)")
    assert not hasattr(sys, "driftline_pwned")


@pytest.mark.parametrize("family", ["countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"])
@pytest.mark.parametrize(
    "text",
    ["setattr(__import__('sys'),'driftline_pwned',1)", "S.__class__", "sympify(1)", "x.diff", "(1).real", "lambdify(x,x)", "1" * 5000, "[1]"],
)
def test_a_model_cannot_have_python_evaluated_by_sympy(family: str, text: str) -> None:
    task = ReasoningGymMaker.of(family, {}).draw(0, 7)
    assert refuses(family, text)
    assert SCORER.score(task, text).components["refused"] == 1.0
    assert not hasattr(sys, "driftline_pwned")


def test_a_scorer_that_raises_is_a_reward_of_zero_and_a_component(monkeypatch: pytest.MonkeyPatch) -> None:
    from driftline.environments import reasoning_gym

    class Broken:
        def score_answer(self, answer: str, entry: object) -> float:
            raise KeyError(answer)

    task = ReasoningGymMaker.of("chain_sum", {}).draw(0, 7)
    SCORER.score(task, "1")
    monkeypatch.setattr(reasoning_gym, "_dataset", lambda *_: Broken())
    assert SCORER.score(task, "1") == (0.0, {"exact": 0.0, "scorer_error": 1.0})


@pytest.mark.parametrize(("raw", "reward"), [(7.0, 1.0), (-3.0, 0.0), (float("nan"), 0.0), (float("inf"), 0.0)])
def test_a_reward_outside_0_to_1_is_brought_inside(monkeypatch: pytest.MonkeyPatch, raw: float, reward: float) -> None:
    from driftline.environments import reasoning_gym

    class Odd:
        def score_answer(self, answer: str, entry: object) -> float:
            return raw

    task = ReasoningGymMaker.of("chain_sum", {}).draw(0, 7)
    SCORER.score(task, "1")
    monkeypatch.setattr(reasoning_gym, "_dataset", lambda *_: Odd())
    assert SCORER.score(task, "1").reward == reward


def test_a_library_that_would_make_another_question_is_noticed() -> None:
    task = ReasoningGymMaker.of("chain_sum", {}).draw(0, 7)
    with pytest.raises(IntegrityError, match="another question"):
        SCORER.score(task.model_copy(update={"prompt": "What is 1 + 1?"}), "2")


def test_the_answer_is_the_last_tagged_text_or_the_whole_text_stripped() -> None:
    assert extract_answer("  42\n") == "42"
    assert extract_answer("so <answer>1</answer> no <answer> 2 </answer>.") == "2"
    assert extract_answer("<answer>open") == "<answer>open"


def test_an_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.family.*spell_backward"):
        load_source("reasoning_gym", "spel_backward")


def test_the_librarys_own_mixture_points_to_ours() -> None:
    with pytest.raises(ConfigError, match="mixture"):
        load_source("reasoning_gym", "composite")


@pytest.mark.parametrize(
    ("params", "field"),
    [({"max_wordlen": 3}, "params.max_wordlen"), ({"seed": 3}, "params.seed"), ({"min_word_len": 9, "max_word_len": 2}, "params")],
)
def test_a_wrong_parameter_is_named_with_what_is_valid(params: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        load_source("reasoning_gym", "spell_backward", params)


def test_exact_credit_gives_nothing_for_a_list_of_all_answers() -> None:
    """count_bits gives 1 / 7 to "3456789" whenever the answer is a digit of it, which is more than a guess earns: policies learn to write it."""
    scorer = load_scorer(["reasoning_gym"])
    partial, exact = (load_source("reasoning_gym", "count_bits", {"max_n": 1023, **credit}).task(0, 0) for credit in ({}, {"credit": "exact"}))
    assert (partial.id, partial.prompt, partial.answer) == (exact.id, exact.prompt, exact.answer)
    listed = "".join(str(i) for i in range(10))
    assert scorer.score(partial, listed).reward == pytest.approx(0.1)
    assert scorer.score(exact, listed).reward == 0.0
    for task in (partial, exact):
        assert scorer.score(task, f"{task.answer}\n") == (1.0, {"exact": 1.0})
    with pytest.raises(ConfigError, match=r"tasks\.params\.credit"):
        load_source("reasoning_gym", "count_bits", {"credit": "some"})


def test_an_unknown_source_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="reasoning_gym"):
        load_source("reasoning-gym", "chain_sum")


def test_a_task_cannot_name_the_code_that_grades_it() -> None:
    task = load_source("generators", "sort_digits").task(0, 0)
    with pytest.raises(ConfigError, match="no scorer"):
        load_scorer(["reasoning_gym"]).score(task, "1")
    assert load_scorer(["reasoning_gym", "generators"]).score(task, task.answer or "").reward == 1.0
