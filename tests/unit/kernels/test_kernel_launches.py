"""Whether products and sums may be contracted decides bits, and its default differs between releases of Triton: every launch says it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
SOURCES = [p for p in sorted(KERNELS.glob("*/*.py")) if p.parent.name != "policy_delta"]


def launches(source: str) -> list[ast.Call]:
    """Calls of `kernel[grid](...)`."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]


def unsaid(source: str) -> list[int]:
    return [call.lineno for call in launches(source) if not {"enable_fp_fusion", None} & {k.arg for k in call.keywords}]


def test_there_are_launches_to_look_at_and_one_that_says_nothing_is_seen() -> None:
    assert sum(len(launches(p.read_text())) for p in SOURCES) > 30
    assert unsaid("kernel[(1,)](x, num_warps=4)") == [1]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_every_launch_says_whether_it_may_contract(path: Path) -> None:
    assert unsaid(path.read_text()) == []
