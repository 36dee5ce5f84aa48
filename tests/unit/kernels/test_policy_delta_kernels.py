"""The policy-delta operators: the reference against bits."""

from __future__ import annotations

import pytest
import torch
from delta_cases import WIDTHS, noise, nudged

from driftline.kernels import policy_delta

torch.set_num_threads(1)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_difference_applied_to_the_base_is_the_new_tensor_bit_for_bit(width: int) -> None:
    base = noise(3001, WIDTHS[width])
    new = nudged(base, 0.3)
    at, xor = policy_delta.diff(base, new)
    assert bool((at[1:] > at[:-1]).all())
    assert bool((xor != 0).all())
    policy_delta.apply_xor(base, at, xor)
    assert torch.equal(base.view(torch.uint8), new.view(torch.uint8))


def test_the_sign_of_a_zero_and_the_payload_of_a_nan_are_changes() -> None:
    base = torch.tensor([0x0000, 0x7FC0, 0x3F80, 0x0001], dtype=torch.int16).view(torch.bfloat16)
    new = torch.tensor([-0x8000, 0x7FC1, 0x3F80, 0x0002], dtype=torch.int16).view(torch.bfloat16)
    at, xor = policy_delta.diff(base, new)
    assert at.tolist() == [0, 1, 3]
    assert xor.tolist() == [-0x8000, 1, 3]


def test_rounding_writes_what_torch_writes_and_says_what_that_changed() -> None:
    master = noise(4097, torch.float32)
    param = noise(4097, torch.bfloat16, 2)
    before = param.clone()
    at, xor = policy_delta.round_and_diff(master, param)
    assert torch.equal(param.view(torch.int16), master.to(torch.bfloat16).view(torch.int16))
    policy_delta.apply_xor(before, at, xor)
    assert torch.equal(before.view(torch.int16), param.view(torch.int16))


def test_a_span_that_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="elements"):
        policy_delta.diff(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="does not take"):
        policy_delta.round_and_diff(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match="contiguous"):
        policy_delta.Comparison([torch.zeros(4, 2)[:, 0]], [torch.zeros(4)]).run()


def test_one_changed_word_always_changes_the_fingerprint_and_its_place_counts() -> None:
    span = noise(4 * 513 + 3, torch.float8_e4m3fn)
    plain = policy_delta.fingerprint([span])
    for byte in (0, 1, 4 * 513, 4 * 513 + 2):
        other = span.clone()
        other.view(torch.uint8)[byte] ^= 1
        assert not torch.equal(policy_delta.fingerprint([other]), plain)
    swapped = torch.cat([span[4:8], span[:4], span[8:]])
    assert not torch.equal(policy_delta.fingerprint([swapped]), plain)


def test_a_fingerprint_is_the_formula_of_its_docstring() -> None:
    words = [7, 0, 0xFFFFFFFF, 123456789]
    total = 0
    for i, word in enumerate(words):
        x = i * 0x9E3779B1 % 2**32
        x ^= x >> 15
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        total += word * (x | 1)
    span = torch.tensor(words, dtype=torch.int64).to(torch.int32)
    assert policy_delta.fingerprint([span]).item() % 2**64 == total % 2**64
