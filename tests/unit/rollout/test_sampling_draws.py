"""Draws are a function of key and position, and sampling follows the distribution it reports."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftline.services.rollout.randomness import member_key, uniforms
from driftline.services.rollout.sampler import greedy, sample

torch.set_num_threads(1)

LARGEST = 1 - 2.0**-53


def keys(count: int, seed: int = 0) -> np.ndarray:
    return np.array([member_key(seed, f"g{i:08d}", 0) for i in range(count)], dtype=np.uint64)


def grid(rows: int, columns: int) -> np.ndarray:
    """Draws of `rows` members at their first `columns` positions."""
    draws = uniforms(np.repeat(keys(rows), columns), np.tile(np.arange(columns), rows))
    return draws.reshape(rows, columns)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """In standard deviations above what chance gives: the statistic of k cells has mean k - 1 and variance 2 (k - 1)."""
    free = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / math.sqrt(2 * free))


def test_a_draw_is_the_same_in_any_company() -> None:
    some = keys(50)
    positions = np.arange(50) % 7
    together = uniforms(some, positions)
    for i in range(50):
        assert uniforms(some[i : i + 1], positions[i : i + 1])[0] == together[i]
    assert np.array_equal(uniforms(some[::-1], positions[::-1]), together[::-1])


def test_draws_are_pinned() -> None:
    """Another value would make a redelivered group sample other tokens than the build before."""
    assert member_key(7, "g00000000", 0) == 0x5034B57ADF2804E5
    draws = uniforms(np.array([1, 2**64 - 1], dtype=np.uint64), np.array([0, 5]))
    assert draws.tolist() == [0.36818951565166946, 0.005278265288656048]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_every_draw_is_in_the_half_open_unit_interval(key: int, position: int) -> None:
    draw = uniforms(np.array([key], dtype=np.uint64), np.array([position]))[0]
    assert 0 <= draw < 1


def test_keys_tell_seed_group_and_member_apart() -> None:
    made = {member_key(seed, name, member) for seed in (0, 1, 11) for name in ("g1", "g11", "1") for member in (0, 1, 11)}
    assert len(made) == 27


def test_draws_are_uniform() -> None:
    draws = grid(400, 50).ravel()
    counts, _ = np.histogram(draws, 64, (0, 1))
    assert abs(chi_square(counts, np.full(64, draws.size / 64))) < 4
    low = np.floor(draws * 2**20).astype(int) % 64
    assert abs(chi_square(np.bincount(low, minlength=64), np.full(64, draws.size / 64))) < 4, "low bits too"


def test_neighbouring_positions_and_members_are_independent() -> None:
    draws = grid(400, 50)
    by_position, _, _ = np.histogram2d(draws[:, :-1].ravel(), draws[:, 1:].ravel(), 8, ((0, 1), (0, 1)))
    by_member, _, _ = np.histogram2d(draws[:-1].ravel(), draws[1:].ravel(), 8, ((0, 1), (0, 1)))
    for table in (by_position, by_member):
        assert abs(chi_square(table.ravel(), np.full(64, table.sum() / 64))) < 4
    consecutive = uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.int64))
    assert abs(np.corrcoef(consecutive[:-1], consecutive[1:])[0, 1]) < 4 / math.sqrt(20_000), "keys one apart"


def test_tokens_follow_the_distribution_at_each_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.5])
    for temperature in (0.6, 1.0, 2.0):
        draws = grid(400, 25).ravel()
        tokens, logp = sample(logits.expand(draws.size, -1), temperature, draws)
        p = torch.softmax(logits / temperature, -1).double().numpy()
        assert abs(chi_square(np.bincount(tokens.numpy(), minlength=5), p * draws.size)) < 4
        np.testing.assert_allclose(logp.numpy(), np.log(p)[tokens.numpy()], atol=1e-6)


def test_each_row_has_its_own_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0]]).expand(3, -1)
    _, logp = sample(logits, torch.tensor([0.5, 1.0, 4.0]), np.zeros(3))
    want = [math.log(1 / (1 + math.exp(1 / t))) for t in (0.5, 1.0, 4.0)]
    np.testing.assert_allclose(logp.numpy(), want, rtol=1e-6)


def test_a_token_of_probability_zero_is_never_sampled() -> None:
    """At the ends of the interval, and where the running sum is rounded."""
    rng = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4000, 33, generator=rng)
    logits[:, :4] = -math.inf
    logits[:, 15] = -math.inf
    logits[:, 28:] = -math.inf
    for draw in (0.0, 2.0**-53, 0.5, 1 - 2.0**-24, LARGEST):
        tokens, logp = sample(logits, 1.0, np.full(4000, draw))
        assert torch.isfinite(logp).all(), draw
        assert ((tokens >= 4) & (tokens != 15) & (tokens < 28)).all(), draw
    below = sample(torch.tensor([[0.0, -1e4]]), 1.0, np.array([LARGEST]))
    assert below[0].item() == 0, "underflow to zero counts as zero"


def test_the_ends_of_the_interval_pick_the_first_and_last_possible_token() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, 0.0, -math.inf]])
    assert sample(logits, 1.0, np.array([0.0]))[0].item() == 1
    assert sample(logits, 1.0, np.array([LARGEST]))[0].item() == 3


def test_a_rare_token_keeps_its_chance() -> None:
    """In single precision the running sum would swallow a probability of 1e-9 before the end."""
    logits = torch.tensor([[0.0, math.log(1e-9), 0.0]])
    p = torch.softmax(logits.double(), -1)[0]
    inside = float(p[0] + p[1] / 2)
    assert sample(logits, 1.0, np.array([inside]))[0].item() == 1


def test_greedy_takes_the_largest() -> None:
    assert greedy(torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]])).tolist() == [1, 0]
