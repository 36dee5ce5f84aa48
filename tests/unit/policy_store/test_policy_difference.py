"""What changed between two versions: how much of it, by how much, and by how many representable numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftline.messages.errors import ConfigError
from driftline.policy_store.difference import Change, Difference, compare
from driftline.policy_store.floats import FLOATS, from_float32, ordered, to_float32, values
from driftline.policy_store.tensor import DTYPES, SHARD_BYTES, HostTensor, tensor_digest

TORCH = {
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "float8_e8m0fnu": torch.float8_e8m0fnu, "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def bits_of(dtype: str) -> np.ndarray:
    """Every bit pattern there is."""
    width = DTYPES[dtype].width
    return np.arange(2 ** (8 * width), dtype=f"<u{width}").view(np.uint8)


@pytest.mark.parametrize("dtype", TORCH)
def test_every_bit_pattern_means_what_torch_says(dtype: str) -> None:
    bits = bits_of(dtype)
    theirs = torch.from_numpy(bits.copy()).view(TORCH[dtype]).double().numpy()
    assert np.array_equal(values(dtype, bits), theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", TORCH)
def test_neighbouring_numbers_are_one_ulp_apart(dtype: str) -> None:
    numbers, order = values(dtype, bits_of(dtype)), ordered(dtype, bits_of(dtype))
    finite = np.isfinite(numbers)
    by_value = np.argsort(numbers[finite], kind="stable")
    steps = np.diff(order[finite][by_value])
    differ = np.diff(numbers[finite][by_value]) > 0
    assert (steps[differ] == 1).all()
    assert (steps[~differ] == 0).all()  # only the two zeros


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_torch_s_for_every_half_way_case(dtype: str) -> None:
    exact = torch.from_numpy(bits_of(dtype).copy()).view(TORCH[dtype]).float()
    between = (exact[:-1] + (exact[1:] - exact[:-1]) / 2).numpy()
    numbers = np.concatenate([exact.numpy(), between, np.asarray([3.4e38, -3.4e38, np.inf, -np.inf, 1e-45], np.float32)])
    ours = from_float32(numbers, dtype)
    theirs = torch.from_numpy(numbers).to(TORCH[dtype])
    nan = torch.isnan(theirs).numpy()
    assert np.array_equal(ours.data.view("<u2")[~nan], theirs.view(torch.int16).numpy().view(np.uint16)[~nan])
    assert np.isnan(to_float32(ours)[nan]).all()


@given(st.sampled_from(["float32", "float64"]), st.data())
def test_ulps_of_wide_floats_are_nextafter_s(dtype: str, data: st.DataObject) -> None:
    width = 32 if dtype == "float32" else 64
    number = np.dtype(dtype).type(data.draw(st.floats(width=width, allow_nan=False, allow_infinity=False)))
    with np.errstate(over="ignore"):
        above = np.nextafter(number, np.dtype(dtype).type(np.inf))
    pair = np.asarray([number, above], dtype)
    if number == above or not np.isfinite(above):
        return
    low, high = ordered(dtype, pair.view(np.uint8))
    assert high - low == 1


def difference(old: HostTensor | None, new: HostTensor | None) -> Difference:
    (found,) = compare({} if old is None else {"t": old}, {} if new is None else {"t": new})
    return found


def test_elements_are_compared_as_bits_and_amounts_as_numbers() -> None:
    nan = np.uint32(0x7FC00001).view(np.float32)
    old = HostTensor.from_numpy(np.asarray([1.0, 0.0, nan, 2.0, 5.0, 1.0], np.float32))
    new = HostTensor.from_numpy(np.asarray([1.5, -0.0, nan, np.inf, 5.0, np.nextafter(np.float32(1), np.float32(2))], np.float32))
    found = difference(old, new)
    assert (found.change, found.elements, found.changed, found.not_finite) == (Change.VALUES, 6, 4, 1)
    assert found.largest == 0.5
    assert found.ulps == 2**22
    assert found.share == pytest.approx(4 / 6)
    assert (found.old_digest, found.new_digest) == (tensor_digest("t", old), tensor_digest("t", new))


@pytest.mark.parametrize(("dtype", "old", "new", "apart"), [
    ("int64", [1, -5], [1, 5], 10.0), ("uint8", [255, 0], [0, 0], 255.0), ("bool", [True, False], [True, True], 1.0), ("uint64", [2**64 - 1], [0], 2.0**64),
])
def test_integers_have_amounts_and_no_ulps(dtype: str, old: list[int], new: list[int], apart: float) -> None:
    found = difference(*(HostTensor.from_numpy(np.asarray(side, dtype)) for side in (old, new)))
    assert (found.changed, found.largest, found.ulps) == (1, apart, None)


@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_a_scalar_of_any_float_is_compared(dtype: str) -> None:
    width = DTYPES[dtype].width
    old, new = (HostTensor(dtype, (), np.asarray([bits], f"<u{width}").view(np.uint8)) for bits in (8, 9))
    found = difference(old, new)
    assert (found.changed, found.ulps, found.not_finite) == (1, 1, 0)
    assert found.largest > 0 or dtype == "float64"  # between two of the smallest it underflows


def test_float64_as_far_apart_as_can_be_does_not_wrap_round() -> None:
    largest = np.finfo(np.float64).max
    found = difference(*(HostTensor.from_numpy(np.asarray([side])) for side in (-largest, largest)))
    assert found.largest == math.inf
    assert found.ulps == pytest.approx(2 * 0x7FEF_FFFF_FFFF_FFFF)


def test_a_tensor_of_several_shards_is_counted_once() -> None:
    count = SHARD_BYTES // 4 * 2 + 5
    old, new = np.zeros(count, np.float32), np.zeros(count, np.float32)
    new[[0, SHARD_BYTES // 4, count - 1]] = [1.0, 3.0, 2.0]
    found = difference(HostTensor.from_numpy(old), HostTensor.from_numpy(new))
    assert (found.changed, found.largest) == (3, 3.0)


def test_the_most_changed_come_first_and_the_unchanged_not_at_all() -> None:
    def tensor(*numbers: float) -> HostTensor:
        return HostTensor.from_numpy(np.asarray(numbers, np.float32))

    old = {"same": tensor(1, 2), "few": tensor(1, 2, 3, 4), "gone": tensor(1), "reshaped": tensor(1, 2, 3), "empty": HostTensor.from_numpy(np.zeros((0, 2)))}
    new = {"same": tensor(1, 2), "few": tensor(1, 2, 3, 5), "come": tensor(1, 2), "reshaped": tensor(1, 2), "empty": HostTensor.from_numpy(np.zeros((2, 0)))}
    found = compare(old, new)
    assert [(item.name, item.change.value, item.changed, item.share) for item in found] == [
        ("come", "added", 2, 1.0), ("reshaped", "layout", 2, 1.0), ("gone", "removed", 1, 1.0), ("few", "values", 1, 0.25), ("empty", "layout", 0, 0.0),
    ]
    digests = tuple({name: tensor_digest(name, tensor) for name, tensor in state.items()} for state in (old, new))
    assert compare({name: old[name] for name in old if name != "same"}, new, (digests[0], digests[1])) == found


def test_what_is_no_float_has_no_floats() -> None:
    with pytest.raises(ConfigError):
        values("int8", np.zeros(1, np.uint8))
    with pytest.raises(ConfigError):
        to_float32(HostTensor.from_numpy(np.zeros(1, np.int8)))
