"""`selected_logprobs` is what a model's logits and `models.logprob` give, and says no to arguments that do not go together."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.linear import linear
from driftline.kernels.logprob import selected_logprobs
from driftline.models.logprob import token_logprobs

torch.set_num_threads(1)


def case(rows: int = 9, vocabulary: int = 50, d: int = 16, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(rows, d, generator=random).to(dtype), torch.randn(vocabulary, d, generator=random).to(dtype)
    return hidden, weight, torch.randint(vocabulary, (rows,), generator=random)


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.3, 2, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_definition_of_the_models(temperature: torch.Tensor | float, dtype: torch.dtype) -> None:
    hidden, weight, ids = case(dtype=dtype)
    for ours, theirs in zip(selected_logprobs(hidden, weight, ids, temperature), token_logprobs(linear(hidden, weight), ids, temperature), strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)


def test_rounded_logits_are_those_that_a_model_in_bfloat16_writes() -> None:
    hidden, weight, ids = case(dtype=torch.bfloat16)
    written = token_logprobs(linear(hidden, weight), ids)
    rounded = selected_logprobs(hidden, weight, ids, round_logits=True)
    kept = selected_logprobs(hidden, weight, ids)
    assert all(torch.equal(a, b) for a, b in zip(rounded, written, strict=True))
    assert kept[0].dtype == torch.float32
    wide = token_logprobs(linear(hidden.double(), weight.double()), ids)
    assert (kept[0] - wide[0]).abs().max() < 1e-5 < (rounded[0] - wide[0]).abs().max()


def test_gradients_go_to_both_through_the_log_probability_alone() -> None:
    hidden, weight, ids = case(4, 11, 6, torch.float64)
    hidden.requires_grad_()
    weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: selected_logprobs(h, w, ids, 0.8)[0], (hidden, weight))
    assert not selected_logprobs(hidden, weight, ids)[1].requires_grad


def test_ids_may_be_int32() -> None:
    hidden, weight, ids = case()
    assert torch.equal(selected_logprobs(hidden, weight, ids.int())[0], selected_logprobs(hidden, weight, ids)[0])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"hidden": torch.zeros(9, 15)}, r"hidden \(9, 15\) and weight \(50, 16\)"),
        ({"hidden": torch.zeros(9, 16, dtype=torch.bfloat16)}, "hidden is torch.bfloat16 and weight torch.float32"),
        ({"ids": torch.zeros(8, dtype=torch.int64)}, "one int32 or int64 for each of the 9 rows"),
        ({"ids": torch.zeros(9)}, "ids are torch.float32"),
        ({"ids": torch.full((9,), 50)}, "from 0 to 49"),
        ({"ids": torch.full((9,), -100)}, "ids go from -100"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": torch.ones(8)}, "one for each of the 9 rows"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, object], what: str) -> None:
    hidden, weight, ids = case()
    with pytest.raises(ValueError, match=what):
        selected_logprobs(**({"hidden": hidden, "weight": weight, "ids": ids} | change))  # type: ignore[arg-type]
