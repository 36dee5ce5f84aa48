"""The tables of docs/numerics.md are those of the results, and their figures are what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import make_numerics_page as maker
import numerics as benchmark


def test_the_page_holds_the_results_that_are_there() -> None:
    text = maker.PAGE.read_text()
    assert maker.page(text, maker.measured()) == text


def test_a_fraction_just_below_one_is_not_printed_as_one() -> None:
    assert maker.fraction(1.0) == "1"
    assert maker.fraction(1 - 1e-9) == "0.999999"


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="restore"):
        maker.page("no markers", [])


def test_a_row_says_what_two_arrays_differ_by() -> None:
    theirs = -np.ones(100, dtype=np.float32)
    ours = theirs.copy()
    ours[:10] = -1.5
    row = benchmark.compared("case", ours, theirs)
    assert row["ours"] == pytest.approx(0.9)
    assert row["max_abs"] == pytest.approx(0.5)
    assert row["mean_abs"] == pytest.approx(0.05)
    assert row["k3"] == pytest.approx(0.1 * (np.expm1(-0.5) + 0.5))
    assert benchmark.compared("case", theirs, theirs)["ours"] == 1.0
