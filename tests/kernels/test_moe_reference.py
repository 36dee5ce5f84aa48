"""Routing and the expert MLP: the bias selects and never weighs, replay fixes ids alone, both schedules are one function."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from driftline.kernels.moe import expert_mlp, route
from driftline.kernels.situ_glu import situ_glu

torch.set_num_threads(1)

EXPERTS, TOP_K, WIDTH, INNER = 6, 3, 8, 5
MANY = 8 * EXPERTS + 1  # one token more than the batched schedule takes


def router(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, WIDTH, generator=rng, dtype=torch.float64) for n in (tokens, EXPERTS))
    return x, weight, 0.3 * torch.randn(EXPERTS, generator=rng, dtype=torch.float64)


def stacks(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = ((EXPERTS, INNER, WIDTH), (EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER))
    w1, w3, w2 = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes)
    return w1, w3, w2


def one_by_one(z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    rows = []
    for row, chosen, weights in zip(z, ids.tolist(), gates, strict=True):
        parts = [weight * (w2[e] @ situ_glu(w1[e] @ row, w3[e] @ row)) for e, weight in zip(chosen, weights, strict=True)]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


def test_bias_selects_and_never_weighs() -> None:
    x, weight, _ = router(20)
    bias = torch.zeros(EXPERTS, dtype=torch.float64)
    bias[4] = 10
    ids, gates = route(x, weight, bias, TOP_K, 1.0)
    assert (ids[:, 0] == 4).all(), "a bias above every score puts its expert first"
    scores = torch.sigmoid(x @ weight.t()).gather(-1, ids)
    torch.testing.assert_close(gates, scores / scores.sum(-1, keepdim=True))


def test_ids_are_ordered_by_biased_score_and_gates_sum_to_the_scaling() -> None:
    x, weight, bias = router(50)
    ids, gates = route(x, weight, bias, TOP_K, 2.5)
    biased = (torch.sigmoid(x @ weight.t()) + bias).gather(-1, ids)
    assert (biased.diff(dim=-1) <= 0).all()
    assert all(len(set(row)) == TOP_K for row in ids.tolist())
    torch.testing.assert_close(gates.sum(-1), torch.full((50,), 2.5, dtype=torch.float64))


def test_half_precision_rows_are_scored_in_single_precision() -> None:
    x, weight, bias = (t.bfloat16() for t in router(200))
    ids, gates = route(x, weight, bias, TOP_K, 1.0)
    want_ids, want = route(x.float(), weight.float(), bias.float(), TOP_K, 1.0)
    assert gates.dtype == torch.float32
    assert torch.equal(ids, want_ids)
    assert torch.equal(gates, want)


def test_replayed_ids_are_kept_in_their_order_whatever_the_router_prefers() -> None:
    x, weight, bias = router(10)
    recorded = torch.stack([torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(i))[:TOP_K] for i in range(10)])
    ids, gates = route(x, weight, bias, TOP_K, 1.0, recorded)
    assert torch.equal(ids, recorded)
    scores = torch.sigmoid(x @ weight.t()).gather(-1, recorded)
    torch.testing.assert_close(gates, scores / scores.sum(-1, keepdim=True))


def test_replaying_the_own_choice_changes_nothing() -> None:
    x, weight, bias = router(30)
    ids, gates = route(x, weight, bias, TOP_K, 1.0)
    again, same = route(x, weight, bias, TOP_K, 1.0, ids)
    assert torch.equal(ids, again)
    assert torch.equal(gates, same)


def test_gradient_reaches_the_router_through_replayed_gates_and_nothing_else() -> None:
    """Finite differences with the ids fixed: with free ids the loss jumps where the choice changes."""
    x, weight, bias = router(4)
    recorded = route(x, weight, bias, TOP_K, 1.0)[0]
    leaves = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, w: route(x, w, bias, TOP_K, 1.5, recorded)[1], leaves)
    bias.requires_grad_()
    route(x, weight, bias, TOP_K, 1.0)[1].square().sum().backward()
    assert bias.grad is None


def test_experts_outside_the_replayed_set_get_no_gradient() -> None:
    x, weight, bias = router(5)
    weight.requires_grad_()
    recorded = torch.tensor([[0, 2, 3]]).expand(5, -1)
    route(x, weight, bias, TOP_K, 1.0, recorded)[1].square().sum().backward()
    assert torch.equal(weight.grad[[1, 4, 5]], torch.zeros(3, WIDTH, dtype=torch.float64))
    assert (weight.grad[[0, 2, 3]] != 0).all()


@pytest.mark.parametrize("tokens", [1, 8 * EXPERTS, MANY, 2 * MANY])
def test_both_schedules_equal_token_by_token(tokens: int) -> None:
    z, weight, bias = router(tokens)
    ids, gates = route(z, weight, bias, TOP_K, 1.0)
    torch.testing.assert_close(expert_mlp(z, ids, gates, *stacks(), 4.0, 25.0), one_by_one(z, ids, gates, *stacks()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chosen", [[0, 1, 2], [5, 3, 1]])
def test_experts_without_tokens_and_experts_with_all_of_them(chosen: list[int]) -> None:
    z, weight, _ = router(MANY)
    recorded = torch.tensor([chosen]).expand(MANY, -1)
    ids, gates = route(z, weight, torch.zeros(EXPERTS), TOP_K, 1.0, recorded)
    torch.testing.assert_close(expert_mlp(z, ids, gates, *stacks(), 4.0, 25.0), one_by_one(z, ids, gates, *stacks()), rtol=0, atol=1e-12)
    few = expert_mlp(z[:3], ids[:3], gates[:3], *stacks(), 4.0, 25.0)
    torch.testing.assert_close(few, one_by_one(z[:3], ids[:3], gates[:3], *stacks()), rtol=0, atol=1e-12)


def test_schedules_agree_in_gradient() -> None:
    z, weight, bias = router(MANY)
    ids, gates = route(z, weight, bias, TOP_K, 1.0)
    grads = []
    for cut in ((0, MANY), (0, MANY // 2, MANY)):
        leaves = [t.clone().requires_grad_() for t in (z, gates, *stacks())]
        for start, stop in pairwise(cut):
            out = expert_mlp(leaves[0][start:stop], ids[start:stop], leaves[1][start:stop], *leaves[2:], 4.0, 25.0)
            out.sin().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_no_tokens_give_no_rows() -> None:
    none = torch.zeros(0, WIDTH, dtype=torch.float64)
    out = expert_mlp(none, torch.zeros(0, TOP_K, dtype=torch.int64), torch.zeros(0, TOP_K), *stacks(), 4.0, 25.0)
    assert out.shape == (0, WIDTH)
