"""What the decode benchmark says an operator must move and do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "kernels"))

import kda_decode as benchmark


def test_a_step_moves_each_state_twice_and_little_else() -> None:
    """64 rows of 96 heads: 805 MB of states; 4 tokens' inputs, outputs and window are 71 MB more."""
    case = benchmark.Case(96, 64, 4)
    state = 64 * 96 * 128 * 128 * 4
    assert benchmark.least_bytes(case, folds=True) - 2 * state == 64 * 96 * 4 * (4 * 256 + 2 + 256 + 2 * (3 * 256 + 2))
    assert benchmark.least_bytes(case, folds=False) - 2 * state == 64 * 96 * 4 * (4 * 256 + 2 + 256)


def test_folding_costs_no_output() -> None:
    case = benchmark.Case(1, 1, 4)
    assert benchmark.flops(case, folded=4) - benchmark.flops(case, folded=0) == 4 * 5 * 128 * 128
