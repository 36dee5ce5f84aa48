"""Draws made on the device are those that the host makes, to the last bit: a run that moves to a GPU, or to graphs, samples the same tokens of the same weights."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftline.services.rollout.randomness import device_uniforms, member_key, uniforms
from driftline.services.rollout.sampler import choose, sample

torch.set_num_threads(1)

KEYS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20)


def on_device(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return device_uniforms(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions)).numpy()


@given(KEYS, st.integers(0, 2**40))
def test_every_draw_of_the_device_is_the_hosts(keys: list[int], position: int) -> None:
    some = np.array(keys, dtype=np.uint64)
    positions = position + np.arange(len(keys), dtype=np.int64)
    assert np.array_equal(on_device(some, positions), uniforms(some, positions))


def test_the_ends_of_the_range_wrap_alike() -> None:
    keys = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], dtype=np.uint64)
    for position in (0, 1, 2**31, 2**62):
        positions = np.full(keys.shape, position, dtype=np.int64)
        assert np.array_equal(on_device(keys, positions), uniforms(keys, positions))


def test_draws_of_a_window_are_those_of_one_step_after_another() -> None:
    keys = np.array([member_key(3, "g", i) for i in range(5)], dtype=np.uint64)
    begun = np.array([0, 4, 9, 1, 2], dtype=np.int64)
    window = device_uniforms(torch.from_numpy(keys.view(np.int64))[:, None], torch.from_numpy(begun)[:, None] + torch.arange(4)).numpy()
    for step in range(4):
        assert np.array_equal(window[:, step], uniforms(keys, begun + step))


def test_a_sign_that_is_shifted_in_would_show() -> None:
    """Half of all keys have the highest bit: an arithmetic shift in the place of a logical one gives some of them other draws."""
    keys = np.array([member_key(5, "g", i) for i in range(64)], dtype=np.uint64)
    signed = torch.from_numpy(keys.view(np.int64))
    assert bool(((signed >> 30) != torch.from_numpy((keys >> np.uint64(30)).view(np.int64))).any())
    assert np.array_equal(on_device(keys, np.zeros(64, dtype=np.int64)), uniforms(keys, np.zeros(64, dtype=np.int64)))


def test_tokens_drawn_with_draws_on_the_device_are_the_same() -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) * 3
    temperature = torch.linspace(0.3, 1.7, 40)
    draws = uniforms(np.arange(40, dtype=np.uint64), np.arange(40))
    for form in (lambda given: sample(logits, temperature, given)[0], lambda given: choose(logits, temperature, given)):
        assert torch.equal(form(draws), form(torch.from_numpy(draws)))
