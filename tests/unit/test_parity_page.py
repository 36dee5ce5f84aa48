"""The table of parity in docs/models.md is that of the results, and the results are within their bounds."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu-2core" / "parity.json"


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parity_benchmark", ROOT / "benchmarks" / "parity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def body() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def test_the_page_holds_the_results(parity: ModuleType) -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    assert parity.paged(text, body()) == text
    changed = body()
    changed["rows"][0]["ours"] = 0.5
    assert parity.paged(text, changed) != text
    with pytest.raises(ValueError, match="restore them"):
        parity.paged("no table", body())


def test_every_row_is_within_its_bound_and_rows_without_one_say_what_they_are_for() -> None:
    rows = {row["case"]: row for row in body()["rows"]}
    bounded = {case: row for case, row in rows.items() if row["bound"] is not None}
    assert {"KDA layer", "MLA layer", "router and experts", "decoder of five layers", "all of K3 in fp64"} <= bounded.keys()
    assert all(row["ours"] <= row["bound"] for row in bounded.values())
    assert max(rows[case]["bound"] for case in ("KDA layer", "MLA layer", "router and experts", "decoder of five layers")) == 1e-5
    flipped = rows["the same, a weight's last bit flipped"]
    assert flipped["ours"] > 0


def test_a_row_compares_whole_distributions(parity: ModuleType) -> None:
    import torch

    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    row = parity.compared("case", "peer", logits + 5.0, logits)
    assert row["ours"] < 1e-6, "logits may be moved together"
    assert row["top1"] == 1.0
    moved = parity.compared("case", "peer", logits + torch.tensor([0.0, 0.1, 0.0]), logits)
    assert moved["ours"] == pytest.approx(0.1, rel=0.5)
    assert moved["k3"] > 0
