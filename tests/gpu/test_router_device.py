"""The router on a CUDA device at K3's shapes: fp32's accuracy, ties, bits in any batch, gradients; and that the checks can fail."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from driftline.kernels.moe import triton_router as kernels
    from driftline.kernels.moe.router import route

DEPTH, EXPERTS, TOP = 7168, 896, 16
KINDS = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float32)]


def operands(rows: int, kinds: tuple[torch.dtype, torch.dtype] = KINDS[0], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator("cuda").manual_seed(seed)
    weight = torch.randn(EXPERTS, DEPTH, device="cuda", generator=random) * DEPTH**-0.5
    bias = 0.05 * torch.randn(EXPERTS, device="cuda", generator=random)
    return torch.randn(rows, DEPTH, device="cuda", generator=random).to(kinds[0]), weight.to(kinds[1]), bias


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("split", [True, False])
def test_logits_are_no_further_from_float64_than_an_fp32_product(kinds: tuple[torch.dtype, torch.dtype], split: bool) -> None:
    x, weight, _ = operands(300, kinds)
    exact = x.double() @ weight.double().t()
    assert not torch.backends.cuda.matmul.allow_tf32
    plain = (x.float() @ weight.float().t() - exact).abs()
    parts = kernels.scores(x, weight, split=split)
    found = torch.zeros_like(parts[0])
    for part in parts:
        found += part
    mine = (found.double() - exact).abs()
    assert mine.square().mean().sqrt() <= 1.5 * plain.square().mean().sqrt()
    assert mine.max() <= 2 * plain.max()
    shortened = (x.bfloat16().double() @ weight.bfloat16().double().t() - exact).abs()
    assert kinds == KINDS[0] or shortened.max() > 2 * plain.max(), "operands cut to bfloat16 would be seen"


def test_a_choice_is_float64s_but_for_scores_that_fp32_cannot_tell_apart() -> None:
    x, weight, bias = operands(2000)
    ids, gates = route(x, weight, bias, TOP, 1.0)
    score = torch.sigmoid(x.double() @ weight.double().t())
    biased = score + bias.double()
    chosen = biased.gather(-1, ids)
    best = biased.topk(TOP, dim=-1).values
    assert (chosen - best).abs().max() < 1e-6
    assert (torch.sort(ids, -1).values.diff(dim=-1) > 0).all()
    picked = score.gather(-1, ids)
    torch.testing.assert_close(gates.double(), picked / picked.sum(-1, keepdim=True), rtol=3e-6, atol=0)


def test_ties_go_to_the_lowest_index_over_the_whole_width() -> None:
    x, _, bias = operands(5)
    flat = torch.zeros(EXPERTS, DEPTH, dtype=torch.bfloat16, device="cuda")
    assert route(x, flat, torch.zeros_like(bias), TOP, 1.0)[0].tolist() == [list(range(TOP))] * 5
    raised = torch.zeros_like(bias)
    raised[[3, 500, 895]] = 1
    assert route(x, flat, raised, TOP, 1.0)[0].tolist() == [[3, 500, 895, 0, 1, 2, *range(4, TOP - 2)]] * 5


@pytest.mark.parametrize("kinds", [KINDS[0], KINDS[1], KINDS[3]])
def test_a_row_is_routed_with_the_same_bits_in_any_batch(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """512 rows are past where the chunks go to programs of their own, 64 are not."""
    x, weight, bias = operands(512, kinds)
    whole = route(x, weight, bias, TOP, 1.0)
    for count in (1, 2, 7, 64, 511):
        for some in (slice(0, count), slice(512 - count, 512)):
            part = route(x[some], weight, bias, TOP, 1.0)
            assert all(torch.equal(a, b[some]) for a, b in zip(part, whole, strict=True)), count
    apart, together = kernels.scores(x, weight, split=True), kernels.scores(x, weight, split=False)
    total, backwards = torch.zeros_like(apart[0]), torch.zeros_like(apart[0])
    for i in range(apart.shape[0]):
        total += apart[i]
        backwards += apart[-1 - i]
    assert torch.equal(total, together[0])
    assert not torch.equal(backwards, together[0]), "another order of the chunks would be seen"
    again = route(x, weight, bias, TOP, 1.0, whole[0])
    assert all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))


def test_a_thousand_repeats_give_one_result() -> None:
    x, weight, bias = operands(64)
    ids, gates = route(x, weight, bias, TOP, 1.0)
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        again = route(x, weight, bias, TOP, 1.0)
        differs |= (again[0] != ids).any() | (again[1] != gates).any()
    assert not differs.item()


@pytest.mark.parametrize("kinds", [KINDS[0], KINDS[3]])
def test_gradients_are_float64s(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    x, weight, bias = operands(700, kinds)
    x.requires_grad_()
    weight.requires_grad_()
    ids, gates = route(x, weight, bias, TOP, 2.5)
    d_gates = torch.randn_like(gates)
    found = torch.autograd.grad(gates, (x, weight), d_gates)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted = torch.autograd.grad(route(*wide, bias.double(), TOP, 2.5, ids)[1], wide, d_gates.double())
    for mine, right in zip(found, wanted, strict=True):
        assert mine.dtype == kinds[0]
        relative = ((mine.double() - right).norm() / right.norm()).item()
        assert relative < (0.003 if kinds[0] is torch.bfloat16 else 1e-5)
    unchosen = torch.ones(EXPERTS, dtype=torch.bool, device="cuda")
    unchosen[ids.flatten()] = False
    assert not found[1][unchosen].any()
    again = torch.autograd.grad(route(x, weight, bias, TOP, 2.5)[1], (x, weight), d_gates)
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))
    alone = x[300:301].detach().requires_grad_()
    assert torch.equal(torch.autograd.grad(route(alone, weight, bias, TOP, 2.5)[1], alone, d_gates[300:301])[0][0], found[0][300])
