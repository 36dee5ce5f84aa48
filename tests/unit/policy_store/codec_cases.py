"""Pairs of shards, old and new: drawn from every dtype, share and kind of change, and fixed ones whose payloads are kept in tests/data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

from driftline.policy_store import native as kernels
from driftline.policy_store.codec import Codec, DeltaForm
from driftline.policy_store.native import Native, open_native
from driftline.policy_store.tensor import DTYPES, Bytes1D

GOLDEN = Path(__file__).parents[2] / "data" / "policy_codec_golden.json"


class Pair(NamedTuple):
    """A shard before and after, of elements `width` bytes wide."""

    old: Bytes1D
    new: Bytes1D
    dtype: str

    @property
    def width(self) -> int:
        return DTYPES[self.dtype].width

    @property
    def exponent(self) -> tuple[int, int] | None:
        return DTYPES[self.dtype].exponent

    @property
    def elements(self) -> tuple[np.ndarray, np.ndarray]:
        return self.old.view(f"<u{self.width}"), self.new.view(f"<u{self.width}")


@st.composite
def pairs(draw: st.DrawFn, least: int = 1) -> Pair:
    """Any dtype, count and share of changed elements; weights or any bits; small steps, large ones, or the sign alone."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    width = DTYPES[dtype].width
    count = draw(st.one_of(st.integers(least, 40), st.sampled_from([63, 64, 65, 255, 256, 257]), st.integers(least, 6000)))
    share = draw(st.one_of(st.sampled_from([0.0, 0.01, 0.5, 1.0]), st.floats(0, 1)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = weights(dtype, count, rng) if draw(st.booleans()) else rng.integers(0, 256, count * width, dtype=np.uint8)
    steps = {
        "ulps": lambda: rng.integers(-3, 4, count),
        "many ulps": lambda: np.round(rng.standard_normal(count) * 1000).astype(np.int64),
        "any": lambda: rng.integers(-(2**62), 2**62, count),
        "the sign": lambda: np.full(count, 1 << (8 * width - 1), np.uint64).astype(np.int64),
        "the second byte": lambda: np.full(count, 0x0100, np.int64),
    }
    step = steps[draw(st.sampled_from(sorted(steps)))]()
    new = old.copy()
    elements = new.view(f"<u{width}")
    moved = rng.random(count) < share
    elements[moved] += step.astype(elements.dtype)[moved]
    return Pair(old, new, dtype)


def weights(dtype: str, count: int, rng: np.random.Generator) -> Bytes1D:
    """Bits as a model's weights have them, N(0, 0.02), or small integers."""
    values = rng.standard_normal(count) * 0.02
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    if dtype.startswith("float8"):  # the upper byte of a narrow float stands in for one
        return values.astype("<f2").view(np.uint8)[1::2].copy()
    if dtype.startswith("float"):
        return values.astype(DTYPES[dtype].numpy).view(np.uint8)
    return rng.integers(0, 100, count).astype(f"<u{DTYPES[dtype].width}").view(np.uint8)


class GoldenCase(NamedTuple):
    """How a kept payload came to be: the shard follows from the arguments alone, on any machine."""

    name: str
    dtype: str
    count: int
    every: int
    step: int
    codec: Codec
    form: DeltaForm

    def pair(self) -> Pair:
        """Every `every`-th element of a scrambled sequence moves, by up to `step` either way; the last by the sign bit alone."""
        width = DTYPES[self.dtype].width
        mixed = np.arange(1, self.count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        old = (mixed >> np.uint64(64 - 8 * width)).astype(f"<u{width}")
        if (exponent := DTYPES[self.dtype].exponent) is not None:  # octaves as unlike as those of weights
            low, bits = exponent
            octave = (np.uint64(1 << (bits - 1)) - np.uint64(1) - np.minimum(mixed & np.uint64(63), np.uint64(20)) % np.uint64(1 << (bits - 1)))
            field = np.asarray(((1 << bits) - 1) << low, old.dtype)
            old = (old & ~field) | (octave.astype(old.dtype) << np.asarray(low, old.dtype))
        new = old.copy()
        mixed ^= mixed >> np.uint64(17)
        moved = (mixed >> np.uint64(5)) % np.uint64(self.every) == 0
        size = ((mixed >> np.uint64(20)) % np.uint64(self.step) + np.uint64(1)).astype(old.dtype)
        new[moved] += np.where(mixed >> np.uint64(63), size, -size)[moved]
        new[-1] ^= old.dtype.type(1 << (8 * width - 1))
        return Pair(old.view(np.uint8), new.view(np.uint8), self.dtype)


GOLDEN_CASES = (
    GoldenCase("ranked bfloat16", "bfloat16", 3000, 40, 2, Codec.RANKED, DeltaForm.SMALL),
    GoldenCase("ranked float32, large steps", "float32", 700, 5, 5000, Codec.RANKED, DeltaForm.SMALL),
    GoldenCase("ranked float64", "float64", 500, 9, 3, Codec.RANKED, DeltaForm.SMALL),
    GoldenCase("ranked float16, most changed", "float16", 600, 1, 1, Codec.RANKED, DeltaForm.SMALL),
    GoldenCase("ranked float8", "float8_e4m3fn", 2000, 20, 2, Codec.RANKED, DeltaForm.SMALL),
    GoldenCase("ranked packed bytes", "uint8", 2000, 30, 100, Codec.RANKED, DeltaForm.SMALL),
    GoldenCase("sparse bfloat16", "bfloat16", 3000, 40, 2, Codec.SPARSE, DeltaForm.FAST),
    GoldenCase("dense float16", "float16", 300, 1, 1, Codec.DENSE, DeltaForm.FAST),
)


def golden_payloads() -> dict[str, bytes]:
    return {name: bytes.fromhex(text) for name, text in json.loads(GOLDEN.read_text()).items()}


def built() -> Native:
    """The native library, or a skip where none could be built."""
    found = open_native()
    if found is None:
        pytest.skip("no native kernels: no compiler at install time, or DRIFTLINE_NATIVE=0")
    return found


@contextmanager
def using(native: Native | None) -> Iterator[None]:
    """The codec with these kernels, None for numpy."""
    before, kernels.native = kernels.native, native
    try:
        yield
    finally:
        kernels.native = before
