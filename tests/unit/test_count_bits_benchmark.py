"""The rows of the count_bits benchmark: after beside before, and training questions beside what their most frequent answer is worth."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import smollm2_count_bits as benchmark

FOUND = benchmark.Outcome(0.1, 0.4, 0.05, 0.3, 0.2, 0.6, 100.0, 80, 2000, 1.5, 8, 0.31, 0.375)


def test_a_seed_has_a_row_before_and_after_of_each_way_and_one_beside_the_most_frequent_answer() -> None:
    greedy, sampled, trained = benchmark.rows_of(benchmark.Case(3, 2), FOUND)
    assert (greedy["ours"], greedy["peer_value"], greedy["peer"]) == (0.4, 0.1, "before training")
    assert (sampled["ours"], sampled["peer_value"]) == (0.3, 0.05)
    assert "0.375" in sampled["note"]
    assert (trained["ours"], trained["peer_value"], trained["peer"]) == (0.6, 0.31, "always the most frequent answer")
    assert all("seed 3" in row["case"] and "max_lag 2" in row["case"] for row in (greedy, sampled, trained))


def test_bounds_are_compared_over_the_same_seeds() -> None:
    found = {benchmark.Case(seed, lag): FOUND._replace(greedy_last=0.1 * seed + 0.01 * lag) for seed in (0, 1, 2) for lag in (0, 8)}
    rows = {row["case"]: row for row in benchmark.compared(found)}
    row = rows["max_lag 8, all seeds: held-out, greedy"]
    assert row["ours"] == pytest.approx(0.18)
    assert row["peer_value"] == pytest.approx(0.1)
    assert row["peer"] == "max_lag 0"


def test_the_most_frequent_answer_is_counted_over_the_questions_that_a_run_asks(tmp_path: Path) -> None:
    """Numbers from 1 to 63, eight held out: three 1 bits have most, 20 of 63."""
    (tmp_path / "config.toml").write_text((benchmark.ROOT / benchmark.EXAMPLE).read_text())
    trained, heldout = benchmark.constant(tmp_path)
    assert trained == pytest.approx(17 / 55)
    assert heldout == pytest.approx(3 / 8)
