"""The plan of a decode step, counted by kernels in Triton's interpreter, against the one that is sorted."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.moe import triton_plan
from driftline.kernels.moe.plan import most_tiles, plan

torch.set_num_threads(1)


@pytest.mark.parametrize(("tokens", "top_k", "experts", "block"), [(1, 1, 1, 16), (1, 16, 896, 16), (9, 3, 7, 4), (20, 16, 5, 160), (64, 16, 896, 16)])
@pytest.mark.parametrize("kind", ["spread", "one expert", "with padding"])
def test_counting_gives_the_sorted_plan(tokens: int, top_k: int, experts: int, block: int, kind: str) -> None:
    random = torch.Generator().manual_seed(tokens)
    least, most = {"spread": (0, experts), "one expert": (0, 1), "with padding": (-1, experts + 1)}[kind]
    ids = torch.randint(least, most, (tokens, top_k), generator=random)
    expected = plan(ids, experts, block)
    found = triton_plan.tables(ids, experts, block, most_tiles(ids.numel(), experts, block))
    for one, other in zip(found, expected, strict=False):
        assert torch.equal(one, other)
