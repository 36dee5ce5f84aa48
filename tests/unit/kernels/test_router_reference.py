"""Routing without a GPU: ties go to the lowest index, replay is what it was, what cannot be routed is refused."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.moe.reference import route as plain
from driftline.kernels.moe.router import route

torch.set_num_threads(1)


def operands(rows: int = 12, experts: int = 10) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(rows, 8, generator=random), torch.randn(experts, 8, generator=random), torch.randn(experts, generator=random)


def test_equal_scores_are_taken_from_the_lowest_index_up() -> None:
    ids, gates = route(torch.zeros(3, 8), torch.randn(40, 8), torch.zeros(40), 4, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    torch.testing.assert_close(gates, torch.full((3, 4), 0.25))
    bias = torch.zeros(40)
    bias[[7, 30]] = 1.0
    assert route(torch.zeros(1, 8), torch.randn(40, 8), bias, 4, 1.0)[0].tolist() == [[7, 30, 0, 1]]


def test_without_ties_the_choice_and_the_gates_are_bit_for_bit_those_of_torchs_top_k() -> None:
    x, weight, bias = operands()
    for found, wanted in zip(route(x, weight, bias, 3, 2.0), plain(x, weight, bias, 3, 2.0), strict=True):
        assert torch.equal(found, wanted)


def test_a_recorded_choice_is_kept_and_carries_the_gradient() -> None:
    x, weight, bias = operands()
    x.requires_grad_()
    recorded = torch.arange(3).flip(0).expand(12, 3)
    ids, gates = route(x, weight, bias, 3, 1.0, recorded)
    assert torch.equal(ids, recorded)
    gates[:, 0].sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_what_cannot_be_routed_is_refused_by_name() -> None:
    x, weight, bias = operands()
    with pytest.raises(ValueError, match="weight"):
        route(x[:, :7], weight, bias, 3, 1.0)
    with pytest.raises(ValueError, match="bias"):
        route(x, weight, bias[:9], 3, 1.0)
    for top_k in (0, 11):
        with pytest.raises(ValueError, match="top_k"):
            route(x, weight, bias, top_k, 1.0)
    with pytest.raises(ValueError, match="ids"):
        route(x, weight, bias, 3, 1.0, torch.zeros(12, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="ids"):
        route(x, weight, bias, 3, 1.0, torch.zeros(12, 3))
