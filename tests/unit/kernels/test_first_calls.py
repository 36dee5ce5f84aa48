"""What is compiled ahead of a run: every operator is called, in as many processes as asked for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from driftline.cli import app
from driftline.kernels import first_calls
from driftline.kernels.first_calls import CALLS, compiled, first_call
from driftline.messages.errors import ConfigError

KERNELS = Path(first_calls.__file__).parent
CHEAP = ["rmsnorm", "situ_glu", "xor"]


def test_every_operator_with_kernels_is_called() -> None:
    with_kernels = {path.parent.name for pattern in ("*triton*.py", "gluon*.py") for path in KERNELS.glob(f"*/{pattern}")}
    tree = ast.parse(Path(first_calls.__file__).read_text())
    imported = {node.module.split(".")[2] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("driftline.kernels.")}
    assert with_kernels
    assert with_kernels - imported == set()


def test_calls_are_made_in_other_processes_and_each_is_reported_once() -> None:
    done = list(compiled(CHEAP, processes=2, device="cpu"))
    assert sorted(one.name for one in done) == sorted(CHEAP)
    assert all(one.seconds > 0 for one in done)


def test_a_call_that_fails_fails_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setitem(CALLS, "broken", broken)
    with pytest.raises(RuntimeError, match="no such instruction"):
        first_call("broken", "cpu")
    with pytest.raises(KeyError, match="broken"):  # a process of its own has read the module anew
        list(compiled(["broken"], processes=1, device="cpu"))


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'flash'.*rmsnorm"):
        list(compiled(["flash"], processes=1, device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it compiles")
def test_without_a_gpu_there_is_nothing_to_compile() -> None:
    result = CliRunner().invoke(app, ["kernels", "compile"])
    assert isinstance(result.exception, ConfigError)
    assert "no CUDA device" in str(result.exception)
    assert "computed by torch" in str(result.exception)
