"""What a benchmark's row says is arithmetic on what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "kernels"))

import harness

CEILINGS = harness.Ceilings(copy_tbs=4.0, bf16_tflops=800.0, fp8_tflops=1600.0)


@pytest.mark.parametrize(
    ("row", "floor"),
    [
        (harness.Row("bytes", 1.0, bytes=2e9), 0.5),
        (harness.Row("matrix", 1.0, bytes=1e6, flops=4e11), 0.5),
        (harness.Row("fp8", 1.0, flops=4e11, fp8=True), 0.25),
        (harness.Row("neither", 1.0), 0.0),
    ],
)
def test_the_floor_is_the_larger_of_what_must_be_moved_and_done(row: harness.Row, floor: float) -> None:
    assert harness.floor_ms(row, CEILINGS) == pytest.approx(floor)


def test_a_line_says_ratio_rates_and_peaks() -> None:
    row = harness.Row("a", 2.0, "b", 5.0, bytes=4e9, flops=8e11, peak=2**30, peer_peak=2**31, note="x")
    said = harness.line(row, CEILINGS)
    assert said["ratio"] == pytest.approx(0.4)
    assert said["bound"] == pytest.approx(1.0)
    assert said["note"] == "x; 2.50x as fast; 2.00 TB/s; 400 TFLOP/s; 50% of the ceiling; peak 1.00 GiB against 2.00"


def test_a_case_without_a_peer_has_no_ratio() -> None:
    said = harness.line(harness.Row("a", 2.0), CEILINGS)
    assert said["ratio"] is None
    assert said["bound"] is None
    assert said["note"] == ""
