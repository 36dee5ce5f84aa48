"""What is sampled under drafts has the target's distribution: total variation under 0.003 on five tokens in 4e5 trials, by both rules, and the same measure
catches two rules that look right and are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from driftline.models.logprob import scaled_log_softmax
from driftline.services.rollout.randomness import uniforms
from driftline.services.rollout.sampler import sample
from driftline.services.rollout.speculation.judging import judge
from driftline.services.rollout.speculation.rules import (
    Purpose,
    Verdict,
    agreeing,
    matching,
    rejecting,
    stream,
    streams,
)

VOCABULARY = 5
TRIALS = 400_000
BOUND = 0.003
TEMPERATURE = 0.8


def _chain(seed: int) -> torch.Tensor:
    """Logits [V, V] of the next token after each token: a first-order language, so that what follows a wrong path differs."""
    return 1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TARGET, DRAFTER = _chain(1), _chain(2)


def _drawn(probs: torch.Tensor, draws: np.ndarray) -> torch.Tensor:
    running = probs.double().cumsum(-1)
    point = torch.from_numpy(draws)[:, None] * running[:, -1:]
    return torch.searchsorted(running, point, right=True).squeeze(-1).clamp_max(VOCABULARY - 1)


def _drafted(keys: np.ndarray, first: int, length: int, *, greedy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens int64 [N, 1 + length]: token 0, then the drafter's chain; and probs fp32 [N, length, V]."""
    tokens = [torch.zeros(len(keys), dtype=torch.int64)]
    probs = []
    for place in range(length):
        q = scaled_log_softmax(DRAFTER[tokens[-1]], TEMPERATURE).exp().float()
        probs.append(q)
        tokens.append(q.argmax(-1) if greedy else _drawn(q, uniforms(streams(keys, Purpose.DRAFT), np.full(len(keys), first + place))))
    return torch.stack(tokens, 1), torch.stack(probs, 1)


def _keys() -> np.ndarray:
    return np.arange(TRIALS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(12345)


def _expected(length: int) -> torch.Tensor:
    """Probability of each sequence of `length` tokens after token 0, [V] * length."""
    p = scaled_log_softmax(TARGET, TEMPERATURE).exp()
    joint = p[0]
    for _ in range(length - 1):
        joint = joint[..., None] * p
    return joint


def _tv(sequences: torch.Tensor) -> float:
    """Total variation between counts of sequences int64 [N, n] and the target's chain."""
    length = sequences.shape[1]
    code = sum(sequences[:, i] * VOCABULARY ** (length - 1 - i) for i in range(length))
    assert isinstance(code, torch.Tensor)
    seen = torch.bincount(code, minlength=VOCABULARY**length).double() / len(sequences)
    return float((seen - _expected(length).flatten()).abs().sum() / 2)


def _two(tokens: torch.Tensor, verdict: Verdict, keys: np.ndarray) -> torch.Tensor:
    """The first two tokens that a row gains, the second by a plain draw where one step gave only one: [N, 2]."""
    first, second = verdict.tokens[:, 0], verdict.tokens[:, 1]
    plain = _drawn(scaled_log_softmax(TARGET[first], TEMPERATURE).exp(), uniforms(keys, np.ones(len(keys))))
    return torch.stack([first, torch.where(verdict.accepted > 0, second, plain)], 1)


def _judged(tokens: torch.Tensor, keys: np.ndarray, probs: torch.Tensor | None) -> Verdict:
    counts = torch.full((len(keys),), tokens.shape[1] - 1, dtype=torch.int32)
    return judge(TARGET[tokens], tokens, counts, torch.full((len(keys),), TEMPERATURE), torch.from_numpy(keys.view(np.int64)), torch.zeros(len(keys), dtype=torch.int64), probs)


@pytest.mark.parametrize("case", ["sampled", "greedy draft, certain", "sampled draft, certain"])
def test_rejection_leaves_the_targets_distribution(case: str) -> None:
    keys = _keys()
    tokens, probs = _drafted(keys, 0, 3, greedy=case.startswith("greedy"))
    verdict = _judged(tokens, keys, probs if case == "sampled" else None)
    assert _tv(verdict.tokens[:, :1]) < BOUND
    two = _two(tokens, verdict, keys)
    assert _tv(two) < 2 * BOUND, "25 pairs: noise is larger than of 5 tokens"
    assert 0.1 < float((verdict.accepted > 0).double().mean()) < 0.95


def test_rejection_accepts_as_often_as_the_two_distributions_overlap() -> None:
    keys = _keys()
    tokens, probs = _drafted(keys, 0, 1, greedy=False)
    overlap = float(torch.minimum(scaled_log_softmax(TARGET[0:1], TEMPERATURE).exp(), probs[0, :1].double()).sum())
    assert float(_judged(tokens, keys, probs).accepted.double().mean()) == pytest.approx(overlap, abs=0.003)


def test_matching_leaves_the_targets_distribution_and_its_path() -> None:
    keys = _keys()
    tokens, _ = _drafted(keys, 0, 3, greedy=False)
    chosen = torch.stack([sample(TARGET[tokens[:, j]], TEMPERATURE, uniforms(keys, np.full(len(keys), j)))[0] for j in range(4)], 1)
    counts = torch.full((len(keys),), 3, dtype=torch.int32)
    accepted = matching(tokens[:, 1:], counts, chosen)
    assert (agreeing(tokens[:, 1:].numpy(), counts.numpy(), chosen.numpy()) == accepted.numpy()).all()
    two = _two(tokens, Verdict(chosen, chosen.float(), accepted), keys)
    assert _tv(two[:, :1]) < BOUND
    assert _tv(two) < 2 * BOUND
    plain = [torch.zeros(len(keys), dtype=torch.int64)]
    for j in range(2):
        plain.append(sample(TARGET[plain[-1]], TEMPERATURE, uniforms(keys, np.full(len(keys), j)))[0])
    assert torch.equal(two, torch.stack(plain[1:], 1)), "token for token what plain decoding samples"


def test_a_greedy_draft_under_its_softmax_is_caught() -> None:
    """The draft is the likeliest token, q says it was drawn: a biased rule."""
    keys = _keys()
    tokens, probs = _drafted(keys, 0, 3, greedy=True)
    assert _tv(_judged(tokens, keys, probs).tokens[:, :1]) > 10 * BOUND


def test_probabilities_of_another_temperature_are_caught() -> None:
    keys = _keys()
    tokens, probs = _drafted(keys, 0, 3, greedy=False)
    other = scaled_log_softmax(probs.log().flatten(0, 1), 1.25).exp().view_as(probs)
    assert _tv(_judged(tokens, keys, other).tokens[:, :1]) > 3 * BOUND


def test_one_draw_for_draft_and_acceptance_is_caught() -> None:
    """Streams of their own are not decoration: the draft's draw, used again to judge it, tells what was drafted."""
    keys = _keys()
    tokens, probs = _drafted(keys, 0, 1, greedy=False)
    shared = torch.from_numpy(uniforms(streams(keys, Purpose.DRAFT), np.zeros(len(keys))))[:, None].expand(-1, 2)
    draws = torch.from_numpy(uniforms(keys, np.zeros(len(keys))))[:, None].expand(-1, 2)
    verdict = rejecting(TARGET[tokens], tokens, torch.ones(len(keys), dtype=torch.int32), torch.full((len(keys),), TEMPERATURE), shared, draws, probs)
    assert _tv(verdict.tokens[:, :1]) > 3 * BOUND


def test_the_logprob_is_the_targets_at_the_temperature_whatever_the_rule_took() -> None:
    keys = _keys()[:2000]
    tokens, probs = _drafted(keys, 0, 3, greedy=False)
    verdict = _judged(tokens, keys, probs)
    logp = scaled_log_softmax(TARGET, TEMPERATURE)
    before = tokens  # a draft that stands is the token before the next place
    for place in range(4):
        valid = verdict.accepted >= place
        expected = logp[before[valid, place], verdict.tokens[valid, place]]
        assert torch.allclose(verdict.logprobs[valid, place], expected.float())


def test_a_rows_verdict_does_not_depend_on_the_rows_beside_it() -> None:
    keys = _keys()[:64]
    tokens, probs = _drafted(keys, 0, 3, greedy=False)
    together = _judged(tokens, keys, probs)
    for i in range(0, 64, 9):
        alone = _judged(tokens[i : i + 1], keys[i : i + 1], probs[i : i + 1])
        kept = int(alone.accepted[0]) + 1
        assert int(together.accepted[i]) == kept - 1
        assert torch.equal(alone.tokens[0, :kept], together.tokens[i, :kept])


def test_drafts_behind_the_count_never_stand() -> None:
    keys = _keys()[:500]
    tokens, probs = _drafted(keys, 0, 3, greedy=False)
    counts = torch.arange(500, dtype=torch.int32) % 4
    verdict = judge(TARGET[tokens], tokens, counts, torch.full((500,), TEMPERATURE), torch.from_numpy(keys.view(np.int64)), torch.zeros(500, dtype=torch.int64), probs)
    assert (verdict.accepted <= counts).all()
    assert (verdict.accepted[counts == 3] == 3).any()
    chosen = tokens[:, 1:].numpy()
    assert (agreeing(chosen, counts.numpy(), np.concatenate([chosen, chosen[:, :1]], 1)) == counts.numpy()).all(), "all agree: as many as there are"


def test_equal_distributions_accept_everything_and_an_empty_residual_falls_back_to_the_target() -> None:
    keys = _keys()[:1000]
    logits = TARGET[torch.zeros(1000, 2, dtype=torch.int64)]
    temperature = torch.full((1000,), TEMPERATURE, dtype=torch.float64)
    p = scaled_log_softmax(logits[:, 0], temperature).exp()
    tokens = torch.stack([torch.zeros(1000, dtype=torch.int64), _drawn(p, uniforms(keys, np.zeros(1000)))], 1)
    ones, half = torch.ones(1000, dtype=torch.int32), torch.full((1000, 2), 0.5, dtype=torch.float64)
    assert (rejecting(logits, tokens, ones, temperature, half, half, p[:, None]).accepted == 1).all()
    # A draft whose draw says "no" although q = p: nothing is left of p - q, and the token comes from p.
    beyond = torch.full((1000, 2), 1 + 1e-9, dtype=torch.float64)
    fallen = rejecting(logits, tokens, ones, temperature, beyond, half, p[:, None])
    assert (fallen.accepted == 0).all()
    assert torch.equal(fallen.tokens[:, 0], _drawn(p, np.full(1000, 0.5)))


def test_a_window_without_drafts_is_a_plain_draw() -> None:
    keys = _keys()[:1000]
    tokens = torch.zeros(1000, 1, dtype=torch.int64)
    verdict = judge(TARGET[tokens], tokens, torch.zeros(1000, dtype=torch.int32), torch.full((1000,), TEMPERATURE), torch.from_numpy(keys.view(np.int64)),
                    torch.zeros(1000, dtype=torch.int64))
    assert torch.equal(verdict.tokens[:, 0], sample(TARGET[tokens[:, 0]], TEMPERATURE, uniforms(keys, np.zeros(1000)))[0])


def test_streams_on_the_host_and_on_the_device_are_the_same() -> None:
    keys = _keys()[:100]
    for purpose in Purpose:
        assert (streams(keys, purpose).view(np.int64) == stream(torch.from_numpy(keys.view(np.int64)), purpose).numpy()).all()
