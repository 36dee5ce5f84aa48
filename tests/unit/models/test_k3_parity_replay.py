"""The gates of a replayed route: golden values, and the gradient that the closed form of K3's sigmoid router gives."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.moe import route

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
"""Scores sigmoid: .880797, .731059, .5, .268941."""


def gates_of(ids: list[int], logits: torch.Tensor = LOGITS, scaling: float = 1.0, bias: float = 0.0) -> torch.Tensor:
    """Through the op itself: x is one row of ones' unit vector, so that the weight's only column is the logits."""
    weight = logits.t().contiguous()
    _, gates = route(torch.ones(1, 1, dtype=logits.dtype), weight, torch.full((4,), bias, dtype=logits.dtype), len(ids), scaling, torch.tensor([ids]))
    return gates[0]


@pytest.mark.parametrize(("ids", "want"), [
    ([0, 2], [0.637890311, 0.362109689]), ([2, 0], [0.362109689, 0.637890311]), ([0, 1], [0.546449103, 0.453550897]), ([3], [1.0]),
    ([1, 2, 3], [0.487372386, 0.333333333, 0.179294281]),
])
def test_gates_are_current_scores_at_the_recorded_ids_in_the_recorded_order(ids: list[int], want: list[float]) -> None:
    """Also where the recorded experts are not those that would be chosen now; the bias is not in them, the scaling is."""
    torch.testing.assert_close(gates_of(ids), torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-8)
    torch.testing.assert_close(gates_of(ids, scaling=2.446, bias=0.7), 2.446 * torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-8)


def test_the_gradient_is_the_closed_form_and_zero_outside_the_set() -> None:
    """ds_i = (dp_i - sum_j dp_j p_j) / sum s and dlogit_i = ds_i s_i (1 - s_i): not that of scores gathered from a zeroed table, nor of a softmax."""
    ids, down = [2, 0], torch.tensor([0.3, -1.1], dtype=torch.float64)
    logits = LOGITS.clone().requires_grad_()
    gates = gates_of(ids, logits)
    (gates * down).sum().backward()
    s, p = torch.sigmoid(LOGITS[0, ids]), gates.detach()
    ds = (down - (down * p).sum()) / s.sum()
    want = torch.zeros(4, dtype=torch.float64)
    want[ids] = ds * s * (1 - s)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0], want, rtol=1e-12, atol=1e-12)
    assert (want[ids] != 0).all()
    step = 1e-6
    for i in range(4):
        moved = torch.zeros_like(LOGITS)
        moved[0, i] = step
        slope = float(((gates_of(ids, LOGITS + moved) - gates_of(ids, LOGITS - moved)) * down).sum() / (2 * step))
        assert slope == pytest.approx(float(want[i]), abs=1e-8)
