"""The command line answers fast, refuses in one sentence, and loads only what a command needs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "examples" / "demo.toml"


def driftline(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "driftline", *arguments], capture_output=True, text=True, timeout=120, cwd=cwd)


@pytest.mark.parametrize(
    "module",
    ["driftline.cli", "driftline.services.dispatcher.service", "driftline.services.wiring", "driftline.services.supervisor.local",
     "driftline.services.watch.screen"],
)
def test_no_torch_is_loaded(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_help_loads_no_torch_and_names_every_service() -> None:
    code = ("import sys; from driftline.cli import app; sys.argv[1:] = ['--help']\n"
            "try: app()\nexcept SystemExit: print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    for name in ("run", "nats", "dispatcher", "rollout", "grader", "learner", "evaluator", "policy-store", "watch", "status",
                 "doctor", "policy", "pretrain"):
        assert f" {name} " in done.stdout


def test_dry_run_prints_every_setting_and_starts_nothing(tmp_path: Path) -> None:
    done = driftline("run", str(DEMO), "--dry-run", "--set", "learner.lr=1e-4", cwd=tmp_path)
    assert done.returncode == 0
    document = tomllib.loads(done.stdout)
    assert document["learner"]["lr"] == 1e-4
    assert len(document) == 14
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("run", str(DEMO), "--set", "learner.lrr=1"), 2, "did you mean learner.lr?"),
        (("run", "absent.toml"), 2, "no such file"),
        (("run", str(DEMO), "--set", "policy.init=nowhere"), 2, "no such checkpoint directory"),
        (("dispatcher", "--config", str(DEMO)), 2, "broker.url"),
        (("status", "demo", "--url", "nats://127.0.0.1:1"), 3, "127.0.0.1:1"),
    ],
)
def test_a_refusal_is_a_sentence_and_a_code(arguments: tuple[str, ...], code: int, words: str, tmp_path: Path) -> None:
    done = driftline(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
