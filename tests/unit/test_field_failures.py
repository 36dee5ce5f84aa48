"""Every kind of failure in docs/field_failures.md has a test whose docstring names it, or a reason why it cannot happen here.

The table is read from the document; the ids from the docstrings of test functions and of test modules all over tests/.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "field_failures.md"
ROW = re.compile(r"^\| ([HSLWMRD]\d{1,2}) \| (.+?) \| (.+) \|$")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
ID = re.compile(r"\b([HSLWMRD]\d{1,2})\b")


def table() -> dict[str, str]:
    rows = [match for line in DOCUMENT.read_text().splitlines() if (match := ROW.match(line))]
    assert len({row[1] for row in rows}) == len(rows)
    return {row[1]: row[3] for row in rows}


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name.startswith("test_")]


def named_in_docstrings() -> dict[str, set[tuple[str, str]]]:
    """Test functions by the ids their own docstring names."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for function in functions(path):
            for name in ID.findall(ast.get_docstring(function) or ""):
                found[name].add((str(path.relative_to(ROOT)), function.name))
    return found


FAILURES = table()
DOCSTRINGS = named_in_docstrings()


def test_the_document_has_every_kind_of_hang_staleness_loss_and_memory() -> None:
    hangs = {f"H{n}" for n in (1, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 23, 24, 25, 27, 28, 29, 30, 32, 33, 34, 35)}
    stale = {f"S{n}" for n in (1, 2, 4, 5, 6, 7, 8, 10, 12, 13, 15, 17, 18, 19, 20)}
    lost = {f"L{n}" for n in (1, 3, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 19, 20, 22)}
    assert hangs | stale | lost | {"W1", "W2", "W3", "W5", "M1", "M3", "M5"} <= FAILURES.keys()


@pytest.mark.parametrize("name", FAILURES)
def test_a_kind_has_a_test_that_names_it_or_cannot_happen_here(name: str) -> None:
    cell = FAILURES[name]
    if cell.startswith("Not here:"):
        return
    listed = set(NAMED.findall(cell))
    assert listed, f"{name}: list a test, or say why it cannot happen"
    missing = listed - DOCSTRINGS[name]
    assert not missing, f"{name}: no such test, or its docstring does not name {name}: {sorted(missing)}"


def test_a_docstring_names_no_kind_that_the_document_does_not_explain() -> None:
    unknown = {name: sorted(tests)[:3] for name, tests in DOCSTRINGS.items() if name not in FAILURES and name[0] in "HSLWM"}
    assert not unknown
