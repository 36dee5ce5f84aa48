"""Log-probabilities on a CUDA device, at K3's vocabulary: close to fp64, the same bits for a row in any batch, every time, in a small workspace; and that
each check can say no."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from dense_device_cases import (
    batch_invariant,
    captured,
    drawn,
    prefix_stable,
    relative_error,
    repeats_alike,
    written,
)

from driftline.kernels.linear import linear
from driftline.kernels.logprob import reference, selected_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

V, D = 163840, 7168
APART = 2e-3
"""Nats. Of fp32 logits of up to 30 that are summed on the matrix units; logits rounded to 8 bits are wrong by up to 6e-2."""
ROUNDED = 5e-3
"""Relative error of gradients that are rounded to 8 bits, made of logits' gradients that were."""


def case(rows: int, vocabulary: int = V, d: int = D, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a standard deviation of 3 before the temperature, from 0.5 to 1.5."""
    ids = torch.randint(vocabulary, (rows,), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    temperature = 0.5 + torch.rand(rows, device="cuda", generator=torch.Generator("cuda").manual_seed(4))
    return drawn(rows, d, dtype=dtype), drawn(vocabulary, d, scale=3 * d**-0.5, dtype=dtype, seed=1), ids, temperature


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other).abs().max())


def test_it_is_the_log_softmax_of_fp32_logits_at_k3s_vocabulary() -> None:
    hidden, weight, ids, temperature = case(300)
    wanted = reference.selected_logprobs(hidden.double(), weight.double(), ids, temperature.double())
    logprob, entropy = selected_logprobs(hidden, weight, ids, temperature)
    assert logprob.dtype == entropy.dtype == torch.float32
    assert apart(logprob, wanted[0]) < APART
    assert apart(entropy, wanted[1]) < APART
    rounded = selected_logprobs(hidden, weight, ids, temperature, round_logits=True)
    assert apart(rounded[0], wanted[0]) > APART, "or the bound sees nothing"
    written_by_a_model = reference.selected_logprobs(hidden, weight, ids, temperature, round_logits=True)
    assert float((rounded[0] - written_by_a_model[0]).abs().median()) < 1e-3, "but for logits that another order of the sum rounds the other way"
    assert written(lambda: selected_logprobs(hidden, weight, ids, temperature))
    assert torch.equal(selected_logprobs(hidden, weight, ids, 0.7)[0], selected_logprobs(hidden, weight, ids, torch.full_like(temperature, 0.7))[0])


def test_a_vocabulary_of_any_length_and_fp32_states() -> None:
    for vocabulary in (1, 255, 1000, 4097):
        hidden, weight, ids, temperature = case(77, vocabulary, 96, torch.float32)
        wanted = reference.selected_logprobs(hidden.double(), weight.double(), ids, temperature.double())
        assert all(apart(a, b) < 2e-5 for a, b in zip(selected_logprobs(hidden, weight, ids, temperature), wanted, strict=True))
        hidden, weight, ids, temperature = case(77, vocabulary, 96)
        wanted = reference.selected_logprobs(hidden.double(), weight.double(), ids, temperature.double())
        assert all(apart(a, b) < APART for a, b in zip(selected_logprobs(hidden, weight, ids, temperature), wanted, strict=True))


def test_gradients_are_those_of_the_definition() -> None:
    hidden, weight, ids, temperature = case(700, 40_000, 1024)
    upstream = drawn(700, dtype=torch.float32, seed=7)
    hidden.requires_grad_()
    weight.requires_grad_()

    def both() -> Sequence[torch.Tensor]:
        return torch.autograd.grad(selected_logprobs(hidden, weight, ids, temperature)[0], (hidden, weight), upstream)

    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = torch.autograd.grad(reference.selected_logprobs(*wide, ids, temperature.double())[0], wide, upstream.double())
    assert all(relative_error(a, b) < ROUNDED for a, b in zip(both(), wanted, strict=True))
    assert written(both)
    no_temperature = torch.autograd.grad(selected_logprobs(hidden, weight, ids)[0], (hidden, weight), upstream)
    assert all(relative_error(a, b) > ROUNDED for a, b in zip(no_temperature, wanted, strict=True))


def test_the_parts_that_gradients_are_made_in_are_not_in_their_bits() -> None:
    from driftline.kernels.logprob import triton as kernels

    hidden, weight, ids, temperature = case(500, 10_000, 1024)
    inverse = temperature.reciprocal()
    normaliser = kernels.forward(hidden, weight, ids, inverse)[2]
    rest = (hidden, weight, ids, inverse, normaliser, drawn(500, dtype=torch.float32, seed=7))
    whole = kernels.gradients(*rest, to_hidden=True, to_weight=True, width=10_000)
    for width in (1024, 2064):
        parts = kernels.gradients(*rest, to_hidden=True, to_weight=True, width=width)
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


def test_a_row_has_the_same_bits_in_any_batch_and_a_number_that_knows_the_batch_would_be_seen() -> None:
    hidden, weight, ids, temperature = case(600, 32_000, 2048)

    def both(rows: torch.Tensor, tokens: torch.Tensor, scales: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = rows.detach().requires_grad_()
        logprob, entropy = selected_logprobs(rows, weight, tokens, scales)
        return [logprob.detach(), entropy, *torch.autograd.grad(logprob.sum(), rows)]

    assert batch_invariant(both, hidden, ids, temperature)
    assert prefix_stable(both, hidden, ids, temperature)

    def otherwise(rows: torch.Tensor, tokens: torch.Tensor, scales: torch.Tensor) -> Sequence[torch.Tensor]:
        return selected_logprobs(rows, weight, tokens, scales * (1 + 2**-16 * (rows.shape[0] > 64)))

    assert not batch_invariant(otherwise, hidden, ids, temperature)
    assert not prefix_stable(lambda rows, tokens, scales: selected_logprobs(rows - rows.mean(0), weight, tokens, scales), hidden, ids, temperature)


def test_rows_beyond_one_launch_have_the_bits_of_rows_within_it() -> None:
    hidden, weight, ids, temperature = case(9000, 2048, 512)
    whole = selected_logprobs(hidden, weight, ids, temperature)
    for a, b in zip(whole, selected_logprobs(hidden[8100:], weight, ids[8100:], temperature[8100:]), strict=True):
        assert torch.equal(a[8100:], b)
    hidden.requires_grad_()
    weight.requires_grad_()
    wanted = torch.autograd.grad(reference.selected_logprobs(hidden.double(), weight.double(), ids, temperature.double())[0].sum(), (hidden, weight))
    for a, b in zip(torch.autograd.grad(selected_logprobs(hidden, weight, ids, temperature)[0].sum(), (hidden, weight)), wanted, strict=True):
        assert relative_error(a, b) < 2 * ROUNDED


def test_a_thousand_repeats_have_one_result_and_another_would_be_seen() -> None:
    hidden, weight, ids, temperature = case(64, 32_000, 1024)
    assert repeats_alike(lambda: selected_logprobs(hidden, weight, ids, temperature), 1000)
    turn = iter(range(10))
    assert not repeats_alike(lambda: selected_logprobs(hidden, weight, ids, temperature * (1 + 2**-16 * (next(turn) == 7))), 10)
    hidden.requires_grad_()
    weight.requires_grad_()
    assert repeats_alike(lambda: torch.autograd.grad(selected_logprobs(hidden, weight, ids, temperature)[0].sum(), (hidden, weight)), 100)


def test_the_logits_are_never_held_and_holding_them_would_be_seen() -> None:
    hidden, weight, ids, _ = case(8192, V, 512)
    hidden.requires_grad_()
    logits = 8192 * V * 2

    def peak(step: object) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        assert callable(step)
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak(lambda: torch.autograd.grad(selected_logprobs(hidden, weight, ids)[0].sum(), hidden)) < logits // 4
    assert peak(lambda: linear(hidden.detach(), weight)) >= logits


def test_a_token_outside_of_the_vocabulary_is_nan_and_alone_in_it() -> None:
    hidden, weight, ids, _ = case(300, 5000, 256)
    wrong = ids.clone()
    wrong[7], wrong[299] = -100, 5000
    assert selected_logprobs(hidden, weight, wrong)[0].isnan().nonzero().view(-1).tolist() == [7, 299]


def test_it_can_be_captured_and_replayed_on_other_values() -> None:
    hidden, weight, ids, temperature = case(64, 5000, 256)
    replay = captured(lambda: selected_logprobs(hidden, weight, ids, temperature))
    hidden.copy_(drawn(64, 256, seed=9))
    assert all(torch.equal(a, b) for a, b in zip(replay(), selected_logprobs(hidden, weight, ids, temperature), strict=True))
