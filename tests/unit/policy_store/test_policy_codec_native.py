"""The native kernels and the numpy code are one codec: the same bytes out, the same weights, and the same payloads refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
from codec_cases import Pair, built, pairs, using, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.messages.errors import IntegrityError
from driftline.policy_store import native as native_module
from driftline.policy_store.codec import (
    Changes,
    Codec,
    DeltaForm,
    apply,
    changes,
    encode_changes,
    encode_delta,
)
from driftline.policy_store.native import Native, open_native
from driftline.policy_store.tensor import SHARD_BYTES

R = TypeVar("R")
FORMS = st.sampled_from(list(DeltaForm))
LEVELS = st.sampled_from([0, 1, 2])
"""What the kernels may use: plain C, AVX2, AVX-512; each as far as this machine has it."""


@pytest.fixture(scope="module")
def native() -> Iterator[Native]:
    found = built()
    yield found
    found.level(2)


def outcomes(native: Native, work: Callable[[], R]) -> list[R | str]:
    """What numpy and the kernels make of the same work; a refusal counts as one."""
    found: list[R | str] = []
    for kernels in (None, native):
        with using(kernels):
            try:
                found.append(work())
            except IntegrityError:
                found.append("refused")
    return found


@given(pairs(least=0), FORMS, LEVELS)
@settings(max_examples=500, deadline=None)
def test_both_write_the_same_bytes_and_read_the_same_weights(native: Native, pair: Pair, form: DeltaForm, level: int) -> None:
    native.level(level)
    by_numpy, by_native = outcomes(native, lambda: encode_delta(pair.old, pair.new, pair.width, exponent=pair.exponent, form=form))
    assert by_native == by_numpy
    assert not isinstance(by_numpy, str)

    def applied() -> bytes:
        out = pair.old.copy()
        apply(by_numpy.codec, by_numpy.payload, out, pair.width, exponent=pair.exponent)
        return out.tobytes()

    assert outcomes(native, applied) == [pair.new.tobytes()] * 2
    old_n, new_n = pair.elements
    at = np.flatnonzero(old_n != new_n).astype(np.int32)
    found = Changes(at, (old_n ^ new_n)[at])
    assert outcomes(native, lambda: encode_changes(pair.old, found, pair.width, exponent=pair.exponent, form=form)) == [by_numpy] * 2


@given(pairs(), FORMS, LEVELS, st.data())
@settings(max_examples=1500, deadline=None)
def test_both_refuse_the_same_damage_and_agree_on_what_they_accept(
    native: Native, pair: Pair, form: DeltaForm, level: int, data: st.DataObject
) -> None:
    encoded = encode_delta(pair.old, pair.new, pair.width, exponent=pair.exponent, form=form)
    damaged = bytearray(encoded.payload)
    for _ in range(data.draw(st.integers(1, 3))):
        if damaged:
            place = data.draw(st.one_of(st.integers(0, min(len(damaged), 24) - 1), st.integers(0, len(damaged) - 1)))
            damaged[place] = data.draw(st.integers(0, 255))
    payload = bytes(damaged[: data.draw(st.sampled_from([len(damaged), len(damaged) - 1, len(damaged) // 2]))])
    native.level(level)

    def applied() -> bytes:
        out = pair.old.copy()
        apply(encoded.codec, payload, out, pair.width)
        return out.tobytes()

    def listed() -> tuple[bytes, bytes] | None:
        found = changes(encoded.codec, payload, pair.old, pair.width)
        return None if found is None else (found.at.tobytes(), found.xor.tobytes())

    for work in (applied, listed):
        by_numpy, by_native = outcomes(native, work)
        assert by_native == by_numpy


@given(st.binary(max_size=120), st.sampled_from([1, 2, 4, 8]), st.integers(0, 300), st.booleans(), LEVELS)
@settings(max_examples=1500, deadline=None)
def test_both_agree_on_random_ranked_payloads(native: Native, data: bytes, width: int, count: int, shaped: bool, level: int) -> None:
    """`shaped`: behind a head that is right, so that the rest is reached."""
    base = np.arange(count * width, dtype=np.uint64).astype(np.uint8)
    payload = bytes([0, 0, 0, 0, 1, 0]) + data if shaped else data
    native.level(level)

    def applied() -> bytes:
        out = base.copy()
        apply(Codec.RANKED, payload, out, width)
        return out.tobytes()

    by_numpy, by_native = outcomes(native, applied)
    assert by_native == by_numpy


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("share", [0.0, 0.0002, 0.01, 0.3, 1.0])
def test_whole_shards_agree_at_every_density(native: Native, level: int, share: float) -> None:
    rng = np.random.default_rng(level)
    old = weights("bfloat16", SHARD_BYTES // 2, rng)
    new = old.copy()
    new.view("<u2")[rng.random(SHARD_BYTES // 2) < share] += np.uint16(1)
    native.level(level)
    for form in DeltaForm:
        by_numpy, by_native = outcomes(native, lambda form=form: encode_delta(old, new, 2, exponent=(7, 8), form=form))
        assert by_native == by_numpy
        assert not isinstance(by_native, str)
        out = old.copy()
        with using(native):
            apply(by_native.codec, by_native.payload, out, 2)
        assert np.array_equal(out, new)


def test_threads_share_the_kernels(native: Native) -> None:
    rng = np.random.default_rng(1)
    old = [weights("bfloat16", 40_000, rng) for _ in range(16)]
    new = [shard.copy() for shard in old]
    for shard in new:
        shard.view("<u2")[::37] ^= np.uint16(3)

    def there_and_back(k: int) -> bool:
        encoded = encode_delta(old[k % 16], new[k % 16], 2, exponent=(7, 8))
        out = old[k % 16].copy()
        apply(encoded.codec, encoded.payload, out, 2)
        return np.array_equal(out, new[k % 16])

    with using(native), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(there_and_back, range(200)))


def test_a_view_that_starts_at_an_odd_byte_is_coded_as_any_other(native: Native) -> None:
    rng = np.random.default_rng(2)
    old = weights("float32", 1000, rng)
    new = old.copy()
    new.view("<u4")[::7] += np.uint32(5)
    shifted = [np.concatenate([np.zeros(1, np.uint8), shard])[1:] for shard in (old, new)]
    for form in DeltaForm:
        with using(native):
            assert encode_delta(*shifted, 4, exponent=(23, 8), form=form) == encode_delta(old, new, 4, exponent=(23, 8), form=form)


def test_the_kernels_can_be_forbidden() -> None:
    code = "from driftline.policy_store.native import native; print(native)"
    environment = {**os.environ, "DRIFTLINE_NATIVE": "0"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=60)
    assert found.stdout.strip() == "None"


def test_a_library_of_another_interface_is_not_used(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions would read the arguments as others."""
    assert open_native() is not None
    monkeypatch.setattr(native_module, "_INTERFACE", native_module._INTERFACE + 1)
    assert open_native() is None
    with pytest.raises(OSError, match="other sources"):
        Native(native.path)
