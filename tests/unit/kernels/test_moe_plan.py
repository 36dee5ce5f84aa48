"""A plan is a function of the ids: every pair once, an expert's pairs together and in order, tiles that cover them and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.moe.plan import most_tiles, plan

torch.set_num_threads(1)


@settings(max_examples=80, deadline=None)
@given(tokens=st.integers(0, 40), top_k=st.integers(1, 4), experts=st.integers(1, 9), block=st.integers(1, 20), seed=st.integers(0, 10**6), skew=st.booleans())
def test_tiles_cover_each_experts_pairs_in_order(tokens: int, top_k: int, experts: int, block: int, seed: int, skew: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=random)
    ids = ids.clamp(max=0) if skew else ids
    found = plan(ids, experts, block)
    flat = ids.reshape(-1).tolist()
    covered: list[int] = []
    for expert in range(experts):
        first, last = found.starts[expert], found.starts[expert + 1]
        assert found.pairs[first:last].tolist() == [s for s, e in enumerate(flat) if e == expert]
    assert found.starts[experts] == sum(0 <= e < experts for e in flat)
    assert torch.equal(found.rows[found.pairs.long()], torch.arange(len(flat), dtype=torch.int32))
    for expert, start in zip(found.tile_expert.tolist(), found.tile_start.tolist(), strict=True):
        if expert >= 0:
            covered += range(start, min(start + block, int(found.starts[expert + 1])))
            assert found.starts[expert] <= start < found.starts[expert + 1]
    assert covered == list(range(int(found.starts[experts])))
    exists = found.tile_expert >= 0
    assert not (exists[1:] & ~exists[:-1]).any(), "tiles that exist come first"
    assert found.tile_expert.numel() == most_tiles(len(flat), experts, block)


def test_the_bound_on_tiles_is_reached() -> None:
    ids = torch.tensor([[0], [1], [2], [2], [2], [2], [2]])
    assert (plan(ids, 3, 4).tile_expert >= 0).sum() == most_tiles(7, 3, 4) - 0


@pytest.mark.parametrize(
    ("ids", "experts", "block", "named"),
    [(torch.zeros(3, dtype=torch.int64), 2, 8, "ids"), (torch.zeros(3, 2), 2, 8, "ids"), (torch.zeros(3, 2, dtype=torch.int64), 0, 8, "experts"),
     (torch.zeros(3, 2, dtype=torch.int64), 2, 0, "block")],
)
def test_what_cannot_be_planned_is_named(ids: torch.Tensor, experts: int, block: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plan(ids, experts, block)
