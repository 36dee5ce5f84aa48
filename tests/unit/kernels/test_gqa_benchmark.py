"""What the attention benchmark compares is the same function, and what it counts is what the shapes say."""

from __future__ import annotations

import pytest
import torch
from benchmark_scripts import script

from driftline.kernels.gqa import attention

torch.set_num_threads(1)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("steps", "columns"), [(5, 5), (1, 7)])
def test_the_peer_computes_the_same(steps: int, columns: int, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gqa = script("gqa", monkeypatch)
    given = [t.float() for t in gqa.Case(2, steps, columns, 6, 2, 16).drawn("cpu")]
    theirs = given if grouped else [t.repeat_interleave(6 // t.shape[2], 2) for t in given]
    torch.testing.assert_close(attention(*given), gqa.torchs(*theirs, grouped=grouped))


def test_costs_are_of_the_keys_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    gqa = script("gqa", monkeypatch)
    assert gqa.Case(2, 3, 3, 4, 2, 64).pairs == 2 * 4 * (1 + 2 + 3)
    case = gqa.Case(2, 2, 10, 4, 2, 64)
    assert case.pairs == 2 * 4 * (9 + 10)
    assert (case.forward_flops, case.backward_flops) == (4 * 64 * case.pairs, 10 * 64 * case.pairs)
    assert case.cached_bytes == sum(t.nbytes for t in case.drawn("cpu")[1:])
    assert len({c.name for c in (*gqa.PREFILL, *gqa.DECODE)}) == len(gqa.PREFILL) + len(gqa.DECODE)
