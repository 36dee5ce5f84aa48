"""The log-probability kernels, as Triton's interpreter runs them on the CPU, against float64. Run by test_kernels_interpreted.py in a process of its own.

Operands of two bytes are fp16 here, because the interpreter cuts where it should round to bfloat16."""

from __future__ import annotations

import pytest
import torch
from dense_cases import dot_in_order
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driftline.kernels.linear.tiles import Tile
from driftline.kernels.logprob import triton as kernels
from driftline.kernels.logprob.autograd import SelectedLogprobs
from driftline.kernels.logprob.reference import selected_logprobs

torch.set_num_threads(1)
__all__ = ["dot_in_order"]
pytestmark = [pytest.mark.usefixtures("dot_in_order"), pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of which a small vocabulary has many, rows in several launches, and gradients in several parts."""
    tile = Tile(16, 32, 16, warps=4, stages=2)
    monkeypatch.setattr(kernels, "TILES", {2: (tile,), 4: (tile,)})
    monkeypatch.setattr(kernels, "ROWS_AT_ONCE", 32)


def case(rows: int, vocabulary: int, d: int, dtype: torch.dtype = torch.float16, *, scale: float = 2.0, seed: int = 0):
    random = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(rows, d, generator=random)).to(dtype)
    weight = (torch.randn(vocabulary, d, generator=random) / d**0.5).to(dtype)
    ids = torch.randint(vocabulary, (rows,), generator=random)
    temperature = 0.3 + torch.rand(rows, generator=random)
    return hidden, weight, ids, temperature


def ours(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, *, round_logits: bool = False):
    return kernels.forward(hidden, weight, ids, temperature.reciprocal(), round_logits=round_logits)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 40), vocabulary=st.integers(1, 100), d=st.integers(1, 40), seed=st.integers(0, 99))
def test_any_shape_gives_the_log_probability_and_the_entropy(rows: int, vocabulary: int, d: int, seed: int) -> None:
    hidden, weight, ids, temperature = case(rows, vocabulary, d, seed=seed)
    logprob, entropy, normaliser = ours(hidden, weight, ids, temperature)
    wanted = selected_logprobs(hidden.double(), weight.double(), ids, temperature.double())
    torch.testing.assert_close(logprob, wanted[0].float(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropy, wanted[1].float(), rtol=1e-5, atol=2e-5)
    logits = hidden.double() @ weight.double().t() / temperature.double()[:, None]
    torch.testing.assert_close(normaliser, logits.logsumexp(-1).float(), rtol=1e-5, atol=2e-5)


def test_logits_can_be_rounded_as_a_model_that_writes_them_does() -> None:
    hidden, weight, ids, temperature = case(40, 100, 24, scale=8.0)
    wanted = selected_logprobs(hidden, weight, ids, temperature, round_logits=True)
    torch.testing.assert_close(ours(hidden, weight, ids, temperature, round_logits=True)[:2], wanted, rtol=1e-4, atol=1e-4)
    full = selected_logprobs(hidden, weight, ids, temperature)
    assert (full[0] - wanted[0]).abs().max() > 1e-3, "or this test pins nothing"


def test_a_near_certain_token_keeps_its_small_numbers() -> None:
    """Both are differences of numbers near 60; relative to the largest logit they do not cancel."""
    weight = torch.eye(64)[:50].contiguous()
    hidden = torch.zeros(3, 64)
    hidden[0, 33], hidden[1, 2], hidden[2, 49] = 60.0, 14.0, -60.0
    ids = torch.tensor([33, 2, 49])
    logprob, entropy, _ = ours(hidden, weight, ids, torch.ones(3))
    wanted = selected_logprobs(hidden.double(), weight.double(), ids)
    torch.testing.assert_close(logprob.double(), wanted[0], rtol=1e-6, atol=3e-7)
    torch.testing.assert_close(entropy.double(), wanted[1], rtol=2e-3, atol=3e-7)


def test_a_row_has_the_same_bits_alone_in_any_batch_and_anywhere_in_it() -> None:
    hidden, weight, ids, temperature = case(40, 70, 24)
    whole = ours(hidden, weight, ids, temperature)
    for rows in (slice(0, 1), slice(5, 7), slice(17, 40)):
        assert all(torch.equal(a[rows], b) for a, b in zip(whole, ours(hidden[rows], weight, ids[rows], temperature[rows]), strict=True))


def test_a_token_outside_the_vocabulary_is_nan_and_no_other_row_is_touched() -> None:
    hidden, weight, ids, temperature = case(20, 90, 24)
    whole = ours(hidden, weight, ids, temperature)
    wrong = ids.clone()
    wrong[3], wrong[4], wrong[19] = -100, 90, 2**31 + 5
    logprob, entropy, _ = ours(hidden, weight, wrong, temperature)
    assert logprob.isnan().nonzero().view(-1).tolist() == [3, 4, 19]
    kept = ~logprob.isnan()
    assert torch.equal(logprob[kept], whole[0][kept])
    assert torch.equal(entropy, whole[1])


def test_the_gradients_are_those_of_the_reference() -> None:
    hidden, weight, ids, temperature = case(70, 90, 24, torch.float32)
    upstream = torch.randn(70, generator=torch.Generator().manual_seed(9))
    hidden.requires_grad_()
    weight.requires_grad_()
    logprob, entropy = SelectedLogprobs.apply(hidden, weight, ids, temperature.reciprocal(), False)
    assert not entropy.requires_grad
    found = torch.autograd.grad(logprob, (hidden, weight), upstream)
    wanted = torch.autograd.grad(selected_logprobs(hidden.double(), weight.double(), ids, temperature.double())[0], (hidden, weight), upstream.double())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_width_of_a_part_is_not_in_the_gradients() -> None:
    hidden, weight, ids, temperature = case(40, 120, 24)
    _, _, normaliser = ours(hidden, weight, ids, temperature)
    upstream = torch.randn(40, generator=torch.Generator().manual_seed(9))
    rest = (hidden, weight, ids, temperature.reciprocal(), normaliser, upstream)
    whole = kernels.gradients(*rest, to_hidden=True, to_weight=True, width=128)
    for width in (16, 80):
        parts = kernels.gradients(*rest, to_hidden=True, to_weight=True, width=width)
        assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))
    assert torch.equal(kernels.gradients(*rest, to_hidden=True, to_weight=False, width=64)[0], whole[0])
    assert torch.equal(kernels.gradients(*rest, to_hidden=False, to_weight=True, width=64)[1], whole[1])


def test_a_rows_gradient_is_the_same_in_any_batch() -> None:
    hidden, weight, ids, temperature = case(70, 90, 24)
    _, _, normaliser = ours(hidden, weight, ids, temperature)
    upstream = torch.randn(70, generator=torch.Generator().manual_seed(9))

    def to_hidden(rows: slice) -> torch.Tensor:
        found = kernels.gradients(hidden[rows], weight, ids[rows], temperature[rows].reciprocal(), normaliser[rows], upstream[rows], to_hidden=True, to_weight=False)[0]
        assert found is not None
        return found

    whole = to_hidden(slice(0, 70))
    assert torch.equal(to_hidden(slice(5, 7)), whole[5:7])
    assert torch.equal(to_hidden(slice(33, 69)), whole[33:69])


def test_a_weight_that_lies_transposed_has_the_same_numbers_and_gradients() -> None:
    hidden, weight, ids, temperature = case(20, 40, 24)
    across = weight.t().contiguous().t()
    assert all(torch.equal(a, b) for a, b in zip(ours(hidden, across, ids, temperature), ours(hidden, weight, ids, temperature), strict=True))
    rest = (ids, temperature.reciprocal(), ours(hidden, weight, ids, temperature)[2], torch.ones(20))
    for a, b in zip(kernels.gradients(hidden, across, *rest, to_hidden=True, to_weight=True),
                    kernels.gradients(hidden, weight, *rest, to_hidden=True, to_weight=True), strict=True):
        assert a is not None
        assert torch.equal(a, b)


def test_no_rows_have_no_numbers_and_no_gradients() -> None:
    hidden, weight, ids, temperature = case(0, 90, 24)
    assert [t.shape for t in ours(hidden, weight, ids, temperature)] == [(0,)] * 3
    empty = torch.empty(0)
    d_hidden, d_weight = kernels.gradients(hidden, weight, ids, empty, empty, empty, to_hidden=True, to_weight=True)
    assert d_hidden is not None
    assert d_hidden.shape == (0, 24)
    assert d_weight is not None
    assert not bool(d_weight.any())


def test_parts_stay_within_the_workspace() -> None:
    for rows in (1, 7, 64, 1024, 8192, 100_000):
        width = kernels.part_width(rows, 2)
        assert width % 1024 == 0
        assert width == 1024 or min(rows, kernels.ROWS_AT_ONCE) * width * 2 <= kernels.WORKSPACE
