"""The gated norm's kernels, as Triton's interpreter runs them on the CPU, against the reference. Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.gated_norm import autograd, reference
from driftline.kernels.gated_norm import triton as kernels
from driftline.kernels.rmsnorm.reference import rmsnorm

torch.set_num_threads(1)

EPS = 1e-5


def case(*lead: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    o, gate = torch.randn(*lead, 128, generator=rng), 2 * torch.randn(*lead, 128, generator=rng)
    return o, 1 + 0.2 * torch.randn(128, generator=rng), gate


@pytest.mark.parametrize("lead", [(1,), (33,), (2, 5, 7)])
def test_the_forward_rounds_where_the_reference_rounds(lead: tuple[int, ...]) -> None:
    """In half precision one rounding more would move a third of the elements; approximate exponentials move a few in ten thousand. Of float16: the
    interpreter cuts off where it is to round to bfloat16."""
    o, weight, gate = case(*lead)
    out = kernels.forward(o, weight, gate.half(), EPS)
    want = reference.gated_norm(o, weight, gate.half(), EPS)
    assert (out != want).float().mean() < 2e-3
    torch.testing.assert_close(out, want, rtol=2**-9, atol=0)
    wide = kernels.forward(o, weight, gate, EPS)
    torch.testing.assert_close(wide, reference.gated_norm(o, weight, gate, EPS), rtol=3e-6, atol=1e-7)


def test_a_rounding_too_many_would_be_seen() -> None:
    o, weight, gate = case(33)
    want = reference.gated_norm(o, weight, gate.half(), EPS)
    stepwise = rmsnorm(o.half(), weight, EPS) * torch.sigmoid(gate.half())
    assert (stepwise != want).float().mean() > 0.2


@pytest.mark.parametrize("rows", [1, 40, 300])
def test_the_backward_is_that_of_the_reference(rows: int) -> None:
    o, weight, gate = case(rows)
    ours = [t.clone().requires_grad_() for t in (o, weight, gate)]
    theirs = [t.double().requires_grad_() for t in (o, weight, gate)]
    for (a, b, c), run in ((ours, autograd.gated_norm), (theirs, reference.gated_norm)):
        out = run(a, b, c, EPS)
        torch.autograd.backward([(out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum()])
    for got, want in zip(ours, theirs, strict=True):
        assert got.grad is not None
        assert want.grad is not None
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-5, atol=2e-5)


def test_a_row_is_the_same_wherever_it_lies() -> None:
    o, weight, gate = case(70)
    out = kernels.forward(o, weight, gate.half(), EPS)
    moved = kernels.forward(o[37:], weight, gate[37:].half(), EPS)
    assert torch.equal(out[37:], moved)
