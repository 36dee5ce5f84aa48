"""The router's kernels, as Triton's interpreter runs them, against torch in float64. Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.moe import triton_router as kernels
from driftline.kernels.moe.router import _Route, route

torch.set_num_threads(1)

SMALL = kernels.Tile(16, 16, 1, 1)
"""The same sums in small tiles, so that a few rows make several of them."""

KINDS = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float32)]


def operands(rows: int, experts: int, depth: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, depth, generator=random), torch.randn(experts, depth, generator=random) * depth**-0.5,
            0.2 * torch.randn(experts, generator=random))


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("depth", [256, 300])
def test_logits_have_the_accuracy_of_fp32_whatever_the_operands_are_kept_in(kinds: tuple[torch.dtype, torch.dtype], depth: int) -> None:
    x, weight, _ = operands(20, 24, depth)
    x, weight = x.to(kinds[0]), weight.to(kinds[1])
    exact = x.double() @ weight.double().t()
    bound = depth**0.5 * 2**-23 * (x.double().abs() @ weight.double().abs().t())
    found = kernels.scores(x, weight, SMALL, split=False)
    assert ((found[0].double() - exact).abs() <= bound).all()
    shortened = (x.bfloat16().double() @ weight.bfloat16().double().t() - exact).abs()
    assert kinds == KINDS[0] or (shortened > bound).any(), "operands cut to bfloat16 would be seen"


@pytest.mark.parametrize("kinds", KINDS)
def test_chunks_in_programs_of_their_own_sum_to_the_same_bits(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    x, weight, bias = operands(9, 40, 700)
    x, weight = x.to(kinds[0]), weight.to(kinds[1])
    whole = kernels.select(x, weight, bias, 5, 1.0, None, tile=SMALL, split=False)
    apart = kernels.select(x, weight, bias, 5, 1.0, None, tile=SMALL, split=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, apart, strict=True))
    parts = kernels.scores(x, weight, SMALL, split=True)
    backwards = parts.flip(0).cumsum(0)[-1]
    assert not torch.equal(backwards, kernels.scores(x, weight, SMALL, split=False)[0]), "another order of the chunks would be seen"


def test_choice_and_gates_are_those_of_the_reference() -> None:
    x, weight, bias = operands(33, 50, 256)
    ids, gates, picked = kernels.select(x, weight, bias, 6, 2.5, None, tile=SMALL)
    want_ids, want = route(x.double(), weight.double(), bias.double(), 6, 2.5)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(gates.double(), want, rtol=2e-6, atol=0)
    torch.testing.assert_close(picked.double(), torch.sigmoid(x.double() @ weight.double().t()).gather(-1, ids), rtol=2e-6, atol=0)


def test_a_replayed_choice_keeps_its_order_and_its_own_choice_its_bits() -> None:
    x, weight, bias = operands(7, 20, 128)
    ids, gates, _ = kernels.select(x, weight, bias, 4, 1.0, None, tile=SMALL)
    again, same, _ = kernels.select(x, weight, bias, 4, 1.0, ids, tile=SMALL)
    assert torch.equal(ids, again)
    assert torch.equal(gates, same)
    turned = ids.flip(1).to(torch.int32)
    _, backwards, _ = kernels.select(x, weight, bias, 4, 1.0, turned, tile=SMALL)
    torch.testing.assert_close(backwards, gates.flip(1), rtol=1e-6, atol=0)
    padded = torch.full_like(ids, -1)
    assert torch.equal(kernels.select(x, weight, bias, 4, 1.0, padded, tile=SMALL)[1], torch.zeros(7, 4))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.data())
def test_ties_go_to_the_lowest_index_and_no_expert_is_chosen_twice(experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, min(experts, 8)))
    levels = data.draw(st.lists(st.sampled_from([-0.5, -0.0, 0.0, 0.25, float("nan"), float("-inf"), float("inf")]), min_size=experts, max_size=experts))
    weight, bias = torch.zeros(experts, 16), torch.tensor(levels) - 0.5
    ids, _, _ = kernels.select(torch.ones(1, 16), weight, bias, top_k, 1.0, None, tile=SMALL)
    order = sorted(range(experts), key=lambda e: (-bias[e].item() if bias[e] == bias[e] else float("inf"), bias[e] != bias[e], e))
    assert ids[0].tolist() == order[:top_k]


def test_a_row_has_its_bits_in_any_batch() -> None:
    """With numbers whose sums are exact: the interpreter's products are a BLAS's, whose order is not the device's and differs by row."""
    x, weight, bias = operands(21, 40, 384)
    x, weight = (x * 4).round(), (weight * 256).round() / 64
    whole = kernels.select(x, weight, bias, 5, 1.0, None, tile=SMALL, split=False)
    for at in ([0], [20], [3, 17], list(range(20, -1, -1))):
        part = kernels.select(x[at], weight, bias, 5, 1.0, None, tile=SMALL)
        assert all(torch.equal(a, b[at]) for a, b in zip(part, whole, strict=True))


@pytest.mark.parametrize("replay", [False, True])
def test_gradients_are_the_references(replay: bool) -> None:
    x, weight, bias = operands(30, 12, 200)
    random = torch.Generator().manual_seed(5)
    recorded = torch.stack([torch.randperm(11, generator=random)[:4] for _ in range(30)]) if replay else None
    d_gates = torch.randn(30, 4, generator=random)
    wide = [t.double().requires_grad_() for t in (x, weight)]
    ids, gates = route(*wide, bias.double(), 4, 1.7, recorded)
    wanted = torch.autograd.grad(gates, wide, d_gates.double())
    _, _, picked = kernels.select(x, weight, bias, 4, 1.7, ids, tile=SMALL)
    found = kernels.gradients(x, weight, ids, picked, d_gates, 1.7, True, True)
    for mine, exact in zip(found, wanted, strict=True):
        assert mine is not None
        assert (mine.double() - exact).norm() <= 1e-6 * exact.norm()
    assert not replay or torch.equal(found[1][11], torch.zeros(200)), "an expert that nobody chose"
    assert kernels.gradients(x, weight, ids, picked, d_gates, 1.7, False, False) == (None, None)


def test_no_rows_are_no_choices() -> None:
    x, weight, bias = operands(0, 12, 64)
    ids, gates, picked = kernels.select(x, weight, bias, 4, 1.0, None)
    assert ids.shape == gates.shape == picked.shape == (0, 4)
    d_x, d_weight = kernels.gradients(x, weight, ids, picked, gates, 1.0, True, True)
    assert d_x is not None
    assert d_x.shape == (0, 64)
    assert torch.equal(d_weight, torch.zeros(12, 64))


@pytest.mark.parametrize("replay", [False, True])
def test_the_op_on_a_device_carries_these_gradients(replay: bool) -> None:
    """The autograd function by its own name: on the CPU `route` takes the reference."""
    x, weight, bias = operands(5, 12, 128)
    recorded = torch.arange(4).expand(5, 4).contiguous() if replay else None
    leaves, wide = [t.clone().requires_grad_() for t in (x, weight)], [t.double().requires_grad_() for t in (x, weight)]
    ids, gates = _Route.apply(*leaves, bias, 4, 1.7, recorded)
    want_ids, want = route(*wide, bias.double(), 4, 1.7, recorded)
    assert torch.equal(ids, want_ids)
    assert not ids.requires_grad
    d_gates = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    for mine, exact in zip(torch.autograd.grad(gates, leaves, d_gates), torch.autograd.grad(want, wide, d_gates.double()), strict=True):
        assert (mine.double() - exact).norm() <= 1e-6 * exact.norm()
    frozen = _Route.apply(leaves[0], weight, bias, 4, 1.7, recorded)[1]
    assert torch.autograd.grad(frozen, leaves[0], d_gates)[0].shape == (5, 128)
