"""The commands' refusals and exit codes, without a broker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from loop_processes import write_config
from recording_cases import CONFIG, write_small
from typer.testing import CliRunner

from driftline.cli import app
from driftline.messages.errors import ConfigError
from driftline.services.replay.comparison import Comparison, Difference, Mode, Span

RUNNER = CliRunner()


def refused(*arguments: str) -> str:
    result = RUNNER.invoke(app, list(arguments))
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


def test_a_recording_without_the_runs_settings_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--run-file FILE" in refused("record", "demo", "-o", "demo.dlr")
    copy = write_config(CONFIG, tmp_path / "runs" / "demo-20260101-000000" / "config.toml")
    assert f"--run-file {copy.relative_to(tmp_path)}" in refused("record", "demo", "-o", "demo.dlr")


def test_the_run_file_of_another_run_is_refused(tmp_path: Path) -> None:
    path = write_config(CONFIG, tmp_path / "run.toml")
    assert f"it describes run {CONFIG.run.name!r}" in refused("record", "demo", "-o", str(tmp_path / "demo.dlr"), "--run-file", str(path))


def test_an_absent_recording_is_named(tmp_path: Path) -> None:
    assert "absent.dlr" in refused("replay", str(tmp_path / "absent.dlr"))


def test_versions_that_are_not_recorded_are_refused(tmp_path: Path) -> None:
    assert "holds versions 0 to 3" in refused("replay", str(write_small(tmp_path / "run.dlr")), "--to", "4")


def test_feeding_needs_live_services(tmp_path: Path) -> None:
    assert "--into" in refused("replay", str(write_small(tmp_path / "run.dlr")), "--into", "live", "--learner-only")


def test_a_damaged_recording_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    path = write_small(tmp_path / "run.dlr")
    path.write_bytes(path.read_bytes()[:-1])
    result = RUNNER.invoke(app, ["replay", str(path)])
    assert result.exit_code == 4
    assert "section" in result.output


@pytest.mark.parametrize("as_json", [False, True])
def test_a_version_that_differs_ends_with_1_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    difference = Difference(2, "a" * 32, "b" * 32, {"torch": ("1", "2")})
    found = Comparison("run.dlr", "demo", Mode.LEARNER, Span(0, 3), 3, 3, difference)
    monkeypatch.setattr("driftline.commands.replay._compare", lambda *_: found)
    result = RUNNER.invoke(app, ["replay", str(write_small(tmp_path / "run.dlr")), "--learner-only", *(["--json"] if as_json else [])])
    assert result.exit_code == 1
    if as_json:
        document = json.loads(result.output)
        assert (document["equal"], document["difference"]["version"]) == (False, 2)
    else:
        assert f"version 2 differs: recorded {'a' * 32}, here {'b' * 32}\n  torch: recorded 1, here 2" in result.output


def test_reading_a_recording_loads_no_torch() -> None:
    code = "import sys, driftline.services.replay.reader, driftline.services.replay.writer, driftline.services.replay.record, " \
           "driftline.services.replay.into, driftline.commands.replay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
