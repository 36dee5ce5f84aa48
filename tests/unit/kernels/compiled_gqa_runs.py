"""Attention's kernels for Hopper as they are compiled, run on a CPU: the copy engine's boxes and swizzles, operands' descriptors, layouts, barriers."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import ptx_bulk
import pytest
import torch
from gqa_cases import Case, Widths, error, packed
from ptx_machine import launches_of

from driftline.kernels.gqa import reference, triton_backward, triton_forward

torch.set_num_threads(1)
SCALE = 0.2
NARROW, WIDE = Widths(6, 2, 64, 64), Widths(4, 1, 128, 128)
CASES = {
    "whole sequences": packed([33, 1, 0, 90], [33, 1, 0, 90], NARROW, dtype=torch.bfloat16),
    "keys in any order": packed([5, 80], [150, 197], NARROW, shuffled=True, dtype=torch.bfloat16),
    "wide heads after others": packed([5, 20], [150, 97], WIDE, dtype=torch.bfloat16),
}


class _Machine(ptx_bulk.BulkMachine):
    """Also boxes of one row, which no swizzle touches."""

    def _bulk(self, line: Any, live: Any) -> None:
        inner = re.match(r"\[\s*(%\w+)\s*,\s*\{([^}]*)\}", line.text[line.text.index("],") + 2 :].strip())
        assert inner is not None
        box = self.descriptors[int(self._value(inner[1], np.uint64)[0]) - ptx_bulk._DESCRIPTOR]
        if box.block_shape[0] != 1:
            super()._bulk(line, live)
            return
        target = self._address(line.operands[0])
        column, row = (self._value(x.strip()).view(np.int32) for x in inner[2].split(","))
        bar = re.findall(r"\[[^\[\]]*\]", line.text)[-1]
        for t in np.flatnonzero(live):
            assert int(column[t]) % 4 == 0, "the copy engine refuses a column that is no multiple of 16 bytes"
            here = torch.zeros(box.block_shape[1], dtype=box.base.dtype)
            part = box.base[int(row[t]), int(column[t]) :][: here.numel()]
            here[: part.numel()] = part
            cells = int(target[t]) + np.arange(here.nbytes)
            if (self.read_epoch[cells] == self.epoch).any():
                self.hazards.add(f"copy without a barrier after the read: {line.text}")
            self.written[cells] = False
            self.bars[int(self._address(bar)[0])]["pending"].append((cells, here.view(torch.uint8).numpy().reshape(-1)))


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_bulk, "BulkMachine", _Machine)


def sums(case: Case) -> torch.Tensor:
    """The log-sums that the forward leaves, in fp64 and rounded: the machine has no logarithm."""
    layout, group = case.layout, case.sizes.group
    out = torch.full(triton_forward.row_numbers(layout, case.sizes).shape, torch.nan)
    for i, (first, last, begin, count) in enumerate(reference.spans(layout)):
        rows = torch.arange(begin, begin + count) if layout.rows is None else layout.rows[begin : begin + count].long()
        score = torch.einsum("thd,shd->hts", case.q[0, first:last].double(), case.keys[0, rows].double().repeat_interleave(group, 1)) * SCALE
        score = score.masked_fill(torch.arange(count) >= layout.seen[first:last, None], -torch.inf)
        at = (first + 3 * i + 3) // 4 * 4
        out[:, at : at + last - first] = (torch.logsumexp(score, -1) / math.log(2)).float()
    return out


@pytest.mark.parametrize("name", CASES)
def test_both_ways_are_near_fp64(name: str) -> None:
    case = CASES[name]
    exact = case.double()
    wanted = reference.attention(*exact, case.layout, SCALE, torch.float64)
    held: list[torch.Tensor] = []
    launches = launches_of(lambda: held.extend(triton_forward.forward(*case[:3], case.layout, case.sizes, SCALE, torch.float32, part=128)))
    for tensor in held:
        tensor.fill_(torch.nan)
    assert ptx_bulk.run_on_cpu(launches, held) == set()
    assert error(held[0], wanted.detach()) < 2e-3
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    wanted.backward(grad.double())
    found: list[torch.Tensor] = []
    lse = sums(case)
    launches = launches_of(lambda: found.extend(triton_backward.backward(*case[:3], case.layout, held[0], lse, grad, case.sizes, SCALE)))
    between = [x for x in launches[0].arguments if isinstance(x, torch.Tensor) and x.shape == lse.shape]
    for tensor in (found[0], *between):
        tensor.fill_(torch.nan)
    assert ptx_bulk.run_on_cpu(launches, [*found, *between]) == set()
    for one, other in zip(found, exact, strict=True):
        assert other.grad is not None
        assert error(one, other.grad) < 5e-3
