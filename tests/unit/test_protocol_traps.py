"""The table of traps in docs/protocol.md names tests that exist, and every test of the traps' file is in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {"C": "test_bus_conformance.py", "F": "test_nats_faults.py", "T": "test_nats_traps.py"}
NAMED = re.compile(r"\b([CFT]) `(test_\w+)`")


def table() -> list[str]:
    text = (ROOT / "docs" / "protocol.md").read_text().split("## Traps of the client and the server")[1]
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| trap")]


def named_in(name: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / "unit" / "messages" / name).read_text())
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")}


@pytest.mark.parametrize("letter", FILES)
def test_the_table_of_traps_names_tests_that_exist(letter: str) -> None:
    named = {test for line in table() for file, test in NAMED.findall(line) if file == letter}
    assert named
    assert named <= named_in(FILES[letter])


def test_every_trap_has_a_test_or_is_not_used() -> None:
    for line in table():
        _, here, tests = (cell.strip() for cell in line.strip("|").rsplit("|", 2))
        assert NAMED.search(tests) or "not used" in here or "neither" in here, line


def test_every_test_of_a_trap_is_in_the_table() -> None:
    named = {test for line in table() for _, test in NAMED.findall(line)}
    assert named_in(FILES["T"]) <= named
