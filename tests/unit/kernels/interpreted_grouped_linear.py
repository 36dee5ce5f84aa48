"""`grouped_linear`'s kernels, as Triton's interpreter runs them, against float64. Run by test_kernels_interpreted.py in a process of its own.

The interpreter cuts to bfloat16 where a device rounds, so its errors are twice a device's; tiles are small, so that a few rows make many.
"""

from __future__ import annotations

import pytest
import torch
from expert_cases import choices, error, matrices
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.grouped_linear import groups_of
from driftline.kernels.grouped_linear import triton as kernels
from driftline.kernels.grouped_linear.autograd import GroupedLinear
from driftline.kernels.moe.plan import Plan, plan
from driftline.kernels.moe.reference import expert_mlp
from driftline.kernels.moe.triton_tiles import Form
from driftline.kernels.moe.triton_wgrad import WeightBlocks
from driftline.kernels.mxfp4.weights import ExpertWeight
from driftline.models.linear import Linear
from driftline.models.lora import Adapter, AdapterBank, LoraExperts, Scaling, Update
from driftline.models.mlp import PackedExperts

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


@settings(max_examples=8, deadline=None)
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


@pytest.fixture
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftline.kernels.grouped_linear.runs_triton", lambda *_: True)
    monkeypatch.setattr("driftline.models.lora.bank_layers.runs_triton", lambda *_: True)
    monkeypatch.setattr("driftline.kernels.grouped_linear._BLOCK", SMALL.rows)


class Base(torch.nn.Module):
    """Experts packed to MXFP4, [E, 32, 64] and [E, 64, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (matrices(Form.MXFP4, shape, seed)[0] for seed, shape in enumerate([(5, 32, 64), (5, 32, 64), (5, 64, 32)]))

    def forward(self, z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
        return expert_mlp(z, ids, gates, self.w1, self.w3, self.w2, beta, linear_beta)


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, gates = choices(count, 5, 2)
    ids[1, 0] = -1
    return rows(count, 64).float().clamp(-1, 1).bfloat16(), ids, gates


def adapted(base: Base, seed: int, rank: int) -> LoraExperts:
    torch.manual_seed(seed)
    held = LoraExperts.drawn(base, rank, 2.0 * rank, Scaling.RANK, torch.bfloat16)  # type: ignore[arg-type]
    for expert in held.delta.values():
        torch.nn.init.normal_(expert.lora_B, std=0.3)
    return held


@pytest.mark.usefixtures("_by_kernels")
def test_adapted_experts_by_the_kernels_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Base()
    held = adapted(base, 0, 5)
    z, ids, gates = tokens(11)
    found, wanted = [], []
    for out, kernels_run in ((found, True), (wanted, False)):
        monkeypatch.setattr("driftline.kernels.grouped_linear.runs_triton", lambda *_, run=kernels_run: run)
        leaves = [z.clone().requires_grad_(), gates.clone().requires_grad_()]
        y = held._grouped(leaves[0], ids, leaves[1], 4.0, 25.0)
        grads = torch.autograd.grad(y, [*leaves, *held.parameters()], rows(11, 64, 8))
        out += [y.detach(), *grads]
    assert len(found) == 9
    for mine, right in zip(found, wanted, strict=True):
        assert error(mine, right) < 0.04
    assert error(found[0], base(z, ids, gates, 4.0, 25.0)) > 0.1


@pytest.mark.usefixtures("_by_kernels")
@torch.no_grad()
def test_a_bank_s_rows_by_one_grouped_product_are_each_their_adapter_s() -> None:
    """Ranks are padded; an expert's rows have two adapters; row 3 has none."""
    base = Base()
    held = [adapted(base, seed, rank) for seed, rank in ((1, 3), (2, 6))]
    linears = [Update(rows(rank, 64, 7).div(8), rows(24, rank, 9).div(2), 3.0) for rank in (3, 6)]
    model = torch.nn.Module()
    model.experts, model.q_proj = PackedExperts.__new__(PackedExperts), Linear(64, 24).bfloat16()
    torch.nn.Module.__init__(model.experts)
    for name in ("w1", "w3", "w2"):
        weight = getattr(base, name)
        model.experts.register_buffer(f"{name}_packed", weight.packed)
        model.experts.register_buffer(f"{name}_scale", weight.scale)
    plain = model.q_proj
    bank = AdapterBank(model, slots=2, rank=8, targets="all-linear")
    for slot in range(2):
        bank.put(slot, Adapter({"q_proj": linears[slot], **{f"experts.{name}": update for name, update in held[slot].updates.items()}}))
    z, ids, gates = tokens(8)
    index = [0, 1, 1, -1, 0, 0, 1, 0]
    with bank.rows(index):
        found, projected = model.experts(z, ids, gates, 4.0, 25.0), model.q_proj(z)
    for row, slot in enumerate(index):
        one = slice(row, row + 1)
        alone = base(z[one], ids[one], gates[one], 4.0, 25.0) if slot < 0 else held[slot]._grouped(z[one], ids[one], gates[one], 4.0, 25.0)
        assert error(found[one], alone) < (0.02 if slot < 0 else 1e-6), row
        want = plain(z[one])
        if slot >= 0:
            want = want + (z[one] @ linears[slot].a.T @ linears[slot].b.T) * linears[slot].scale
        assert error(projected[one], want) < 0.03, row
