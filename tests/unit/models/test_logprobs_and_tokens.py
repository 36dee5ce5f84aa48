"""Log-probabilities at a temperature, and the byte tokenizer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import random_model

from driftline.models.logprob import scaled_log_softmax, token_logprobs
from driftline.models.lora import add_lora
from driftline.models.tokenizer import ByteTokenizer

torch.set_num_threads(1)

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)


@pytest.mark.parametrize(("temperature", "want"), [(0.6, -0.208060405), (1.0, -0.440189699)])
def test_temperature_divides_logits_before_the_softmax(temperature: float, want: float) -> None:
    """Dividing the log-probabilities afterwards would give -0.7336 at 0.6, and not a distribution."""
    got, _ = token_logprobs(LOGITS, torch.tensor([0]), temperature)
    assert got.item() == pytest.approx(want, abs=1e-9)
    per_row, _ = token_logprobs(LOGITS, torch.tensor([0]), torch.tensor([temperature], dtype=torch.float64))
    assert per_row.item() == pytest.approx(want, abs=1e-9)


def test_every_row_has_its_own_temperature() -> None:
    logits = LOGITS.float().expand(3, -1)
    got = scaled_log_softmax(logits, torch.tensor([0.6, 1.0, 2.0]))
    for row, temperature in enumerate((0.6, 1.0, 2.0)):
        torch.testing.assert_close(got[row], scaled_log_softmax(logits[row : row + 1], temperature)[0])
    torch.testing.assert_close(got.exp().sum(-1), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_scores_tokens_as_its_logits_do_bit_for_bit(dtype: torch.dtype, adapted: bool) -> None:
    """What the learner takes its ratio from and what the sampler recorded come from the same rounded logits; an adapter on the head changes nothing of that."""
    model = random_model().to(dtype)
    if adapted:
        add_lora(model, 2, targets=r"lm_head$")
        torch.nn.init.normal_(model.lm_head.lora_B)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, model.config.hidden_size, generator=random).to(dtype)
    tokens = torch.randint(0, model.config.vocab_size, (7,), generator=random)
    temperature = torch.rand(7, generator=random) + 0.5
    for scale in (1.0, temperature):
        ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
        for one, other in zip(model.logprobs(ours, tokens, scale), token_logprobs(model.logits(theirs), tokens, scale), strict=True):
            assert torch.equal(one, other)
        model.logprobs(ours, tokens, scale)[0].sum().backward()
        token_logprobs(model.logits(theirs), tokens, scale)[0].sum().backward()
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_entropy_is_that_of_the_scaled_distribution() -> None:
    _, entropy = token_logprobs(torch.zeros(1, 8), torch.tensor([3]))
    assert entropy.item() == pytest.approx(math.log(8))
    _, sharp = token_logprobs(LOGITS, torch.tensor([0]), 0.6)
    p = torch.softmax(LOGITS / 0.6, -1)
    assert sharp.item() == pytest.approx(float(-(p * p.log()).sum()))


def test_a_token_of_probability_zero_leaves_the_entropy_finite() -> None:
    logp, entropy = token_logprobs(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([1]))
    assert logp.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))


def test_half_precision_logits_are_widened_first() -> None:
    logits = LOGITS.bfloat16()
    got, _ = token_logprobs(logits, torch.tensor([0]), 0.6)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(-0.208060405, abs=1e-6)


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.encode_prompt(text)
    assert prompt[0] == tokenizer.bos
    assert tokenizer.decode(prompt) == text + "\n"


@given(st.lists(st.integers(0, 263)))
def test_whatever_a_policy_samples_decodes(ids: list[int]) -> None:
    assert isinstance(ByteTokenizer().decode(ids), str)


def test_special_tokens_are_skipped_and_broken_bytes_are_marked() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([tokenizer.bos, 104, 105, tokenizer.eos, tokenizer.pad, 263]) == "hi"
    assert tokenizer.decode([0xE2, 0x82, 65]) == "�A"
