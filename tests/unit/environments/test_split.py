"""The content split: what may be trained on, whatever drew it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline.environments.mixture import MixtureSource, shares
from driftline.environments.source import MixturePart, load_source
from driftline.environments.split import ATTEMPTS, STRIDE, heldout_tasks, is_heldout, item_seed, training_task
from driftline.messages.errors import ConfigError
from driftline.messages.types import Task

FAMILIES = ["spell_backward", "chain_sum", "letter_counting", "count_bits", "caesar_cipher"]


def task_of(prompt: str) -> Task:
    return Task(id="x", source="test", family="test", prompt=prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_heldout_share_no_question_over_5000_draws(family: str) -> None:
    source = load_source("reasoning_gym", family)
    heldout = {task.prompt for task in source.heldout(128)}
    assert len(heldout) > 100
    assert all(is_heldout(prompt) for prompt in heldout)
    for index in range(5000):
        prompt = source.task(index, seed=3).prompt
        assert prompt not in heldout
        assert not is_heldout(prompt)


@given(st.text(min_size=1))
def test_spacing_and_case_do_not_move_a_question_across_the_split(question: str) -> None:
    spaced = "  " + "\n".join(question.split(" ")) + "\t"
    assert is_heldout(question) == is_heldout(spaced)
    if question.isascii():
        assert is_heldout(question) == is_heldout(question.upper())


def test_one_question_in_eight_is_held_out() -> None:
    share = sum(is_heldout(f"question {number}") for number in range(20_000)) / 20_000
    assert 0.11 < share < 0.14


@given(st.integers(0, STRIDE - 1), st.integers(0, STRIDE - 1), st.integers(0, ATTEMPTS - 1), st.integers(0, ATTEMPTS - 1), st.integers(0, 2**31))
def test_two_draws_of_a_run_never_share_a_seed(a: int, b: int, i: int, j: int, seed: int) -> None:
    first, second = a + i * STRIDE, b + j * STRIDE
    assert (first == second) == ((a, i) == (b, j))
    assert (item_seed(first, seed) == item_seed(second, seed)) == (first == second)
    assert 0 <= item_seed(first, seed) < 2**32


def test_a_source_that_never_leaves_the_heldout_side_is_refused_and_does_not_spin() -> None:
    question = next(f"q{n}" for n in range(1000) if is_heldout(f"q{n}"))
    with pytest.raises(ConfigError, match="questions vary more"):
        training_task(lambda number, seed: task_of(question), 0, 0)


def test_a_source_without_heldout_questions_is_refused_and_does_not_spin() -> None:
    question = next(f"q{n}" for n in range(1000) if not is_heldout(f"q{n}"))
    with pytest.raises(ConfigError, match="held-out question"):
        heldout_tasks(lambda number, seed: task_of(question), 4, 0)


def test_a_small_source_gives_the_heldout_tasks_it_has_each_once() -> None:
    tasks = heldout_tasks(lambda number, seed: task_of(f"q{seed % 100}"), 1000, 0)
    prompts = [task.prompt for task in tasks]
    assert sorted(prompts) == sorted(f"q{n}" for n in range(100) if is_heldout(f"q{n}"))


@pytest.mark.parametrize("index", [-1, STRIDE])
def test_an_index_outside_the_range_that_keeps_seeds_apart_is_refused(index: int) -> None:
    with pytest.raises(ConfigError, match="index"):
        training_task(lambda number, seed: task_of("q"), index, 0)


_PRINT = """
import sys, hashlib
from driftline.environments.source import load_source
for family in sys.argv[1:]:
    source = load_source("reasoning_gym", family)
    tasks = [source.task(i, 11) for i in (0, 5, 4096)] + source.heldout(3)
    print(family, hashlib.sha256(repr([t.model_dump() for t in tasks]).encode()).hexdigest())
"""


def test_another_process_with_another_hash_seed_makes_the_same_tasks() -> None:
    # The last five drew from sets of strings or from global random state before the library was patched.
    families = [*FAMILIES, "isomorphic_strings", "ransom_note", "polynomial_multiplication", "word_ladder", "list_functions"]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", _PRINT, *families], env={"PYTHONHASHSEED": hash_seed}, check=True, capture_output=True
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_a_mixture_draws_by_weight_and_keeps_the_split() -> None:
    parts = [MixturePart("spell_backward", weight=3.0), MixturePart("sort_digits", {"max_digits": 9}, 1.0, "generators")]
    source = load_source("reasoning_gym", mixture=parts)
    tasks = [source.task(index, 5) for index in range(800)]
    share = sum(task.family == "spell_backward" for task in tasks) / 800
    assert 0.68 < share < 0.82
    assert not any(is_heldout(task.prompt) for task in tasks)
    assert [source.task(index, 5) for index in range(20)] == tasks[:20]
    heldout = source.heldout(40)
    assert [sum(task.source == name for task in heldout) for name in ("reasoning_gym", "generators")] == [30, 10]


@given(st.integers(1, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_shares_of_a_mixture_add_up_and_nobody_gets_nothing(count: int, weights: list[float]) -> None:
    parts = shares(count, weights)
    assert min(parts) >= 1
    assert sum(parts) == count or (sum(parts) > count and 1 in parts)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_mixture_weight_that_is_no_weight_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"mixture\[0\]\.weight"):
        MixtureSource.of([(load_source("generators", "sort_digits"), weight)])
