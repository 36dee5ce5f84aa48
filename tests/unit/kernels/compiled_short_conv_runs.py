"""The short convolution's backward as the compiler leaves it for Hopper, its PTX run on the CPU: Triton 3.6 loses values that a loop carries when they
start as one. Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from ptx_machine import Launched, launches_of, run_on_cpu

from driftline.kernels.short_conv import reference
from driftline.kernels.short_conv import triton as conv

torch.set_num_threads(1)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())


@pytest.mark.parametrize("steps", [1, 70])
def test_the_compiled_convolution_and_its_gradients_are_the_references(steps: int) -> None:
    """70: a block of 64 steps and six, so that both a block's start and its end are inside."""
    random = torch.Generator().manual_seed(steps)
    x, grad = (torch.randn(1, steps, 256, generator=random).bfloat16() for _ in range(2))
    tail, weight = torch.randn(1, 3, 256, generator=random).bfloat16(), torch.randn(256, 4, generator=random) / 2
    real = torch.empty
    made: list[torch.Tensor] = []

    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        made.append(real(*args, **kwargs))  # type: ignore[call-overload]
        return made[-1]

    results: list[tuple[torch.Tensor, ...]] = []
    with mock.patch.object(torch, "empty", empty):
        launches: list[Launched] = launches_of(lambda: results.extend((conv.forward(x, weight, tail, None), conv.backward(x, weight, tail, grad))))
    (out, new_tail), (grad_x, _, grad_tail) = results
    parts = made[-1]
    assert parts.shape[1:] == (4, 256)
    for output in (out, new_tail, grad_x, grad_tail, parts):
        output.fill_(float("nan"))
    assert run_on_cpu(launches, [x, weight, tail, grad, out, new_tail, grad_x, grad_tail, parts]) == set()
    leaves = [t.double().requires_grad_() for t in (x, weight, tail)]
    wanted, wanted_tail = reference.short_conv(*leaves)
    gradients = torch.autograd.grad(wanted, leaves, grad.double())
    assert torch.equal(new_tail.double(), wanted_tail)
    found = (out, grad_x, parts.sum(0).T, grad_tail)
    assert [error(a, b) < 0.004 for a, b in zip(found, (wanted, *gradients), strict=True)] == [True] * 4
