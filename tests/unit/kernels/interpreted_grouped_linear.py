"""`grouped_linear`'s kernels, as Triton's interpreter runs them, against float64. Run by test_kernels_interpreted.py in a process of its own.

The interpreter cuts to bfloat16 where a device rounds, so its errors are twice a device's; tiles are small, so that a few rows make many.
"""

from __future__ import annotations

import pytest
import torch
from expert_cases import error, matrices
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.grouped_linear import groups_of
from driftline.kernels.grouped_linear import triton as kernels
from driftline.kernels.grouped_linear.autograd import GroupedLinear
from driftline.kernels.moe.plan import Plan, plan
from driftline.kernels.moe.triton_tiles import Form
from driftline.kernels.moe.triton_wgrad import WeightBlocks
from driftline.kernels.mxfp4.weights import ExpertWeight

torch.set_num_threads(1)

SMALL = kernels.Blocks(16, 32, 32, 1, 1)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "NARROW", SMALL)
    monkeypatch.setattr(kernels, "WIDE", SMALL)
    monkeypatch.setattr("driftline.kernels.moe.triton_wgrad.weight_gradient.__kwdefaults__", {"blocks": WeightBlocks(32, 32, 16, 1, 1)})


def rows_of(ids: list[int], groups: int) -> tuple[Plan, torch.Tensor]:
    """The plan in small tiles, and the group of each sorted row."""
    column = torch.tensor(ids)[:, None]
    rows = plan(column, groups, SMALL.rows)
    return rows, column[rows.pairs.long(), 0]


def wanted(x: torch.Tensor, groups: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    for r, group in enumerate(groups.tolist()):
        if 0 <= group < weight.shape[0]:
            out[r] = weight[group].double() @ x[r].double()
    return out


def rows(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


IDS = [3, 0, -1, 0, 2, 2, 0, 5, 3, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]


@pytest.mark.parametrize(("form", "size_out", "size_in"), [
    (Form.BFLOAT16, 64, 96), (Form.BFLOAT16, 7, 40), (Form.BFLOAT16, 40, 5), (Form.MXFP4, 48, 64), (Form.MXFP4, 96, 32), (Form.FP8, 32, 128),
], ids=str)
def test_products_and_their_gradient_in_every_form_at_whole_and_ragged_sizes(form: Form, size_out: int, size_in: int) -> None:
    """Most rows are of group 0, which makes two tiles; 1 and 4 have none; -1 and 9 are no group."""
    weight, exact = matrices(form, (6, size_out, size_in), 1)
    table, groups = rows_of(IDS, 6)
    x, dy = rows(len(IDS), size_in), rows(len(IDS), size_out, 1)
    found = kernels.product(x, table, weight)
    assert error(found, wanted(x, groups, exact)) < 0.01
    back = kernels.transposed(dy, table, weight)
    assert error(back, wanted(dy, groups, exact.mT)) < 0.01
    for out in (found, back):
        assert not out[(groups < 0) | (groups >= 6)].any()


def test_gradients_of_an_adapter_s_halves() -> None:
    table, groups = rows_of(IDS, 6)
    x = rows(len(IDS), 40).requires_grad_()
    a, b = ((torch.randn(6, *shape, generator=torch.Generator().manual_seed(2)) / 4).bfloat16().requires_grad_() for shape in ((5, 40), (24, 5)))
    dy = rows(len(IDS), 24, 3)
    GroupedLinear.apply(GroupedLinear.apply(x, table, torch.Tensor, a, None), table, torch.Tensor, b, None).backward(dy)
    leaves = [t.detach().double().requires_grad_() for t in (x, a, b)]
    out = torch.stack([leaves[2][g] @ (leaves[1][g] @ row) if 0 <= g < 6 else torch.zeros(24, dtype=torch.float64)
                       for row, g in zip(leaves[0], groups.tolist(), strict=True)])
    out.backward(dy.double())
    for name, found, exact in zip(("x", "a", "b"), (x, a, b), leaves, strict=True):
        assert error(found.grad, exact.grad) < 0.03, name
    assert not a.grad[1].any()
    assert not a.grad[4].any()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=1, max_size=40), st.integers(0, 1000))
def test_a_row_s_bits_do_not_depend_on_the_others(ids: list[int], seed: int) -> None:
    weight: ExpertWeight
    weight, _ = matrices(Form.BFLOAT16, (4, 20, 48), 1)
    table, _ = rows_of(ids, 4)
    x = rows(len(ids), 48, seed)
    together = kernels.product(x[table.pairs.long()], table, weight)[table.rows.long()]
    pick = seed % len(ids)
    alone_table, _ = rows_of([ids[pick]], 4)
    assert torch.equal(kernels.product(x[pick : pick + 1], alone_table, weight)[0], together[pick])


def test_a_rank_padded_with_zeros_gives_the_bits_of_the_rank_itself() -> None:
    table, _ = rows_of(IDS, 6)
    x = rows(len(IDS), 64)
    a, b = ((torch.randn(6, *shape, generator=torch.Generator().manual_seed(2)) / 4).bfloat16() for shape in ((5, 64), (24, 5)))
    wide_a, wide_b = torch.zeros(6, 48, 64, dtype=torch.bfloat16), torch.zeros(6, 24, 48, dtype=torch.bfloat16)
    wide_a[:, :5], wide_b[:, :, :5] = a, b
    own = kernels.product(kernels.product(x, table, a), table, b)
    assert torch.equal(kernels.product(kernels.product(x, table, wide_a), table, wide_b), own)
    wide_a[:, 5] = 1
    wide_b[:, :, 5] = 1
    assert not torch.equal(kernels.product(kernels.product(x, table, wide_a), table, wide_b), own)


def test_no_rows_and_no_group_give_zeros() -> None:
    weight, _ = matrices(Form.BFLOAT16, (4, 20, 48), 1)
    assert kernels.product(rows(0, 48), groups_of(torch.zeros(0, 1, dtype=torch.int64), 4), weight).shape == (0, 20)
    table, _ = rows_of([-1, -1], 4)
    assert not kernels.product(rows(2, 48), table, weight).any()
