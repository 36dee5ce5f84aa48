"""What the dense benchmarks compare is the same function, and what they count is what the shapes say."""

from __future__ import annotations

import pytest
import torch
from benchmark_scripts import script

from driftline.kernels.logprob import selected_logprobs

torch.set_num_threads(1)


def test_a_product_reads_both_operands_once_and_writes_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = script("linear", monkeypatch)
    case = linear.Case("forward x", 64, 7168, 12288)
    assert case.cost() == {"flops": 2 * 64 * 7168 * 12288, "bytes": 2 * (64 * 7168 + 7168 * 12288 + 64 * 12288)}
    assert {str(c) for c in linear.cases(True)} < {str(c) for c in linear.cases(False)}


def test_the_peer_that_holds_the_logits_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logprob = script("logprob", monkeypatch)
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 8, generator=random), torch.randn(30, 8, generator=random)
    ids = torch.randint(30, (5,), generator=random)
    for ours, theirs in zip(selected_logprobs(hidden, weight, ids, 0.7), logprob.held(hidden, weight, ids, 0.7), strict=True):
        torch.testing.assert_close(ours, theirs)
    found = logprob.step(selected_logprobs, hidden, weight, ids, to_weight=True)()
    for ours, theirs in zip(found, logprob.step(logprob.held, hidden, weight, ids, to_weight=True)(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_eager_peer_of_rmsnorm_has_the_gradients_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    rmsnorm = script("rmsnorm", monkeypatch)
    x, weight, dy = torch.randn(6, 16), torch.rand(16), torch.randn(6, 16)
    for ours, theirs in zip(rmsnorm.backward_of(rmsnorm.rmsnorm, x, weight, dy)(), rmsnorm.backward_of(rmsnorm.fused, x, weight, dy)(), strict=True):
        torch.testing.assert_close(ours, theirs)
