"""Our own generators, a user's Python file, and episodes of several turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline.environments.generators import FAMILIES, GeneratorScorer, character_credit
from driftline.environments.multi_turn import (
    CalculatorEpisode,
    Done,
    DoneReason,
    Observation,
    calculate,
    open_episode,
    stop_strings,
)
from driftline.environments.source import RewardError, load_scorer, load_source
from driftline.messages.errors import ConfigError

GOOD = "def tasks(index, rng):\n    a = rng.randint(0, 10**6)\n    return f'{a}?', str(a)\n"
REWARD = "def reward(prompt, answer, completion):\n    return float(completion == answer)\n"


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return f"python:{folder / name}"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_generator_repeats_itself_and_rewards_its_answer(family: str) -> None:
    source = load_source("generators", family)
    task = source.task(9, 4)
    assert source.task(9, 4) == task
    assert source.task(10, 4) != task
    assert GeneratorScorer().score(task, f" {task.answer} ") == (1.0, {"exact": 1.0})


@given(st.text("0123456789", min_size=1, max_size=8), st.text("0123456789x", max_size=12))
def test_character_credit_is_1_only_for_the_answer(answer: str, text: str) -> None:
    credit = character_credit(answer, text)
    assert 0.0 <= credit <= 1.0
    assert (credit == 1.0) == (answer == text)


def test_a_nearly_right_answer_earns_nearly_everything() -> None:
    assert character_credit("12345", "12344") == 0.8
    assert character_credit("12345", "123") == 0.6
    assert character_credit("123", "123456") == 0.5


def test_a_generator_parameter_out_of_range_is_named() -> None:
    with pytest.raises(ConfigError, match=r"params\.max_digits"):
        load_source("generators", "sort_digits", {"max_digits": 1000})
    with pytest.raises(ConfigError, match="digits"):
        load_source("generators", "sort_digits", {"digits": 3})
    with pytest.raises(ConfigError, match="min_digits = 5 is above"):
        load_source("generators", "sort_digits", {"min_digits": 5, "max_digits": 2})


def test_the_example_file_works_as_it_is() -> None:
    spec = f"python:{Path(__file__).parents[3] / 'examples' / 'my_tasks.py'}"
    task = load_source(spec).task(3, 1)
    scorer = load_scorer([spec])
    assert scorer.score(task, f"{task.answer}\n").reward == 1.0
    assert scorer.score(task, "x").reward == 0.0


def test_a_users_file_is_deterministic_and_split(tmp_path: Path) -> None:
    source = load_source(write(tmp_path, GOOD + REWARD))
    assert source.task(5, 2) == source.task(5, 2)
    assert source.task(5, 2) != source.task(5, 3)
    assert not {t.prompt for t in source.heldout(50)} & {source.task(i, 2).prompt for i in range(500)}


def test_a_list_of_prompts_indexed_by_the_draw_is_walked_whole(tmp_path: Path) -> None:
    text = "PROMPTS = [f'p{i}' for i in range(64)]\ndef tasks(index, rng):\n    return PROMPTS[index % 64], None\n" + REWARD
    source = load_source(write(tmp_path, text))
    assert len({source.task(i, 0).prompt for i in range(64)} | {t.prompt for t in source.heldout(64)}) == 64


def test_a_class_in_the_file_may_hold_the_functions_and_parameters_reach_tasks(tmp_path: Path) -> None:
    text = (
        "class Sums:\n    @staticmethod\n    def tasks(index, rng, top):\n        return f'{rng.randint(0, top)}', 'a'\n"
        "    @staticmethod\n    def reward(prompt, answer, completion):\n        return True\n"
    )
    spec = write(tmp_path, text) + ":Sums"
    task = load_source(spec, params={"top": 50}).task(0, 0)
    assert load_scorer([spec]).score(task, "").reward == 1.0


def test_what_lies_beside_the_file_can_be_imported(tmp_path: Path) -> None:
    write(tmp_path, "ANSWER = 'b'\n", "driftline_test_beside.py")
    text = "import driftline_test_beside\ndef tasks(index, rng):\n    return f'{rng.random()}', driftline_test_beside.ANSWER\n"
    assert load_source(write(tmp_path, text + REWARD)).task(0, 0).answer == "b"


@pytest.mark.parametrize(
    ("text", "suffix", "says"),
    [
        (GOOD, "", "no function 'reward'"),
        (REWARD, "", "no function 'tasks'"),
        (GOOD + REWARD, ":Nope", "no attribute 'Nope'"),
        ("1/0\n", "", r"ZeroDivisionError.*mine.py:1"),
        ("def tasks(:\n", "", "SyntaxError"),
        ("def tasks(index, rng):\n    raise OSError('x')\n" + REWARD, "", r"tasks\(0, rng\) raised OSError: x \(mine.py:2\)"),
        ("def tasks(index, rng):\n    return 'only a prompt'\n" + REWARD, "", r"must return \(prompt, answer\)"),
        ("def tasks(index, rng):\n    return 'p', 3\n" + REWARD, "", r"must return \(prompt, answer\)"),
        ("def tasks(index, rng):\n    return '', 'a'\n" + REWARD, "", r"must return \(prompt, answer\)"),
        ("def tasks(index):\n    return 'p', 'a'\n" + REWARD, "", "TypeError"),
    ],
)
def test_a_wrong_file_says_what_is_wrong_where(tmp_path: Path, text: str, suffix: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_source(write(tmp_path, text) + suffix)


@pytest.mark.parametrize(("spec", "says"), [("python:nowhere.py", "no file"), ("python:tasks.txt", "is not python:FILE.py"), ("python:a.py:b c", "is not python:FILE.py")])
def test_a_wrong_spec_says_what_is_expected(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_source(spec)


@pytest.mark.parametrize("returned", ["None", "'1'", "float('nan')", "float('inf')", "[1.0]", "object()"])
def test_a_reward_that_is_no_finite_number_is_an_error(tmp_path: Path, returned: str) -> None:
    spec = write(tmp_path, GOOD + f"def reward(prompt, answer, completion):\n    return {returned}\n")
    task = load_source(spec).task(0, 0)
    with pytest.raises(RewardError, match="finite number"):
        load_scorer([spec]).score(task, "")


def test_a_numpy_reward_is_a_number(tmp_path: Path) -> None:
    spec = write(tmp_path, GOOD + "import numpy\ndef reward(prompt, answer, completion):\n    return numpy.float32(0.5)\n")
    assert load_scorer([spec]).score(load_source(spec).task(0, 0), "").reward == 0.5


def test_a_scripted_model_uses_the_calculator_and_answers() -> None:
    task = load_source("generators", "multiply_with_calculator").task(0, 0)
    episode = open_episode(task)
    assert stop_strings(task) == ("</calc>",)
    text = episode.start()
    assert text == task.prompt
    expression = text.split("<calc>")[1].split("</calc>")[0]
    first = f"let me see <calc>{expression}</calc>"
    observed = episode.step(first)
    assert observed == Observation(f"<result>{task.answer}</result>")
    assert episode.step(f"{task.answer}") == Done(DoneReason.ANSWERED)
    assert isinstance(observed, Observation)
    completion = f"{first}{observed.text}{task.answer}"
    assert GeneratorScorer().score(task, completion).reward == 1.0


def test_a_single_turn_is_an_episode_of_one_segment() -> None:
    task = load_source("generators", "sort_digits").task(0, 0)
    episode = open_episode(task)
    assert episode.start() == task.prompt
    assert stop_strings(task) == ()
    assert episode.step("<calc>1</calc>") == Done(DoneReason.ANSWERED)


def test_a_model_that_calls_for_ever_is_stopped() -> None:
    episode = CalculatorEpisode("p", max_calls=2)
    steps = [episode.step("<calc>1+1</calc>") for _ in range(3)]
    assert steps == [Observation("<result>2</result>")] * 2 + [Done(DoneReason.TURN_LIMIT)]


def test_an_unfinished_or_answered_call_is_an_answer_and_not_a_call() -> None:
    assert CalculatorEpisode("p").step("<calc>1+1") == Done(DoneReason.ANSWERED)
    assert CalculatorEpisode("p").step("1+1</calc>") == Done(DoneReason.ANSWERED)
    assert CalculatorEpisode("p").step("<calc>1</calc> so 1") == Done(DoneReason.ANSWERED)


def test_an_unknown_tool_is_refused() -> None:
    task = load_source("generators", "sort_digits").task(0, 0).model_copy(update={"metadata": {"tool": "shell"}})
    with pytest.raises(ConfigError, match="tool"):
        open_episode(task)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1+2)*3", "9"),
        ("-7 // 2", "-4"),
        ("7 / 2", "3.5"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** -1", "0.5"),
        ("1 / 0", "error: division by zero"),
        ("9 ** 9 ** 9", "error: too large"),
        ("2 ** 4000 / 3", "error: too large"),
        ("__import__('os')", "error: not arithmetic"),
        ("", "error: not arithmetic"),
        ("1 +", "error: not arithmetic"),
        ("2 ** 0.5", "error: not arithmetic"),
        ("1" * 300, "error: too long"),
        ("(" * 200, "error: not arithmetic"),
    ],
)
def test_the_calculator_does_arithmetic_and_nothing_else(expression: str, value: str) -> None:
    assert calculate(expression) == value


@given(st.text("0123456789+-*/%(). ", max_size=60))
def test_the_calculator_always_answers(expression: str) -> None:
    assert calculate(expression)
