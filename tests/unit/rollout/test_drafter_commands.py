"""`driftline drafter`: a directory that a run can use, and what it is worth, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from driftline.commands.drafter import register
from driftline.messages.errors import ConfigError
from driftline.models.drafter import load_drafter
from driftline.models.families import model_config

RUN = """
[policy]
init = "base"
[tasks]
source = "reasoning_gym"
family = "spell_backward"
params = { min_word_len = 3, max_word_len = 4 }
[sampling]
max_tokens = 8
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def _said(*arguments: str) -> str:
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, ["drafter", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_a_drafter_is_trained_measured_and_trained_further(run_file: Path, tmp_path: Path) -> None:
    place = tmp_path / "drafter"
    small = ["--groups", "4", "--members", "2", "--steps", "3", "--batch", "4"]
    made = json.loads(_said("train", str(run_file), "--out", str(place), *small, "--json"))
    assert made["directory"] == str(place)
    assert made["texts"] == 6
    assert made["judged"] == 2
    assert set(made["acceptance"]) == {"ngram", "ngram, own text", "trained, likeliest", "trained, coupled"}
    assert all(1 <= part["length"] <= 4 for part in made["acceptance"].values())
    first = load_drafter(place, model_config("base"))
    text = _said("train", str(run_file), "--out", str(place), *small, "--resume", str(place), "--seed", "1")
    assert "3 steps on 6 texts" in text
    assert not load_drafter(place, model_config("base")).fc.weight.equal(first.fc.weight)
    measured = json.loads(_said("measure", str(run_file), "--drafter", str(place), "--groups", "2", "--members", "2", "--json"))
    assert measured["judged"] == 4


def test_a_recording_is_enough(run_file: Path) -> None:
    recording = Path(__file__).parents[2] / "replay" / "data" / "recorded.dlr"
    measured = json.loads(_said("measure", str(run_file), "--groups", "0", "--recording", str(recording), "--json"))
    assert measured["judged"] > 0
    assert set(measured["acceptance"]) == {"ngram", "ngram, own text"}


def test_nothing_to_learn_from_is_said(run_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--groups"):
        _said("train", str(run_file), "--out", str(tmp_path / "d"), "--groups", "0")
