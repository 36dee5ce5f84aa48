"""The pure parts of the benchmark of real updates: bounds and totals must not flatter the codec they judge."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from math import log2
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline.policy_store.forms import Codec, EncodedShard
from driftline.policy_store.tensor import SHARD_BYTES, HostTensor, State

BF16 = (7, 8)


def _load() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "policy_updates.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


updates = _load()


def state(values: np.ndarray, dtype: str = "bfloat16") -> State:
    return {"w": HostTensor.from_numpy(values, dtype)}


def bits_by_hand(old: np.ndarray, new: np.ndarray) -> tuple[float, float, float]:
    """The three bounds again, one element at a time, as minus the logarithm of each one's frequency. Bits."""
    changed = [(int(a), int(b)) for a, b in zip(old, new, strict=True) if a != b]
    n, k = len(old), len(changed)
    mask = -k * log2(k / n) - ((n - k) * log2((n - k) / n) if n > k else 0.0)
    xors, differences = (Counter(f(a, b) for a, b in changed) for f in (lambda a, b: a ^ b, lambda a, b: (b - a) % 65536))
    whole = [mask - sum(count * log2(count / k) for count in counts.values()) for counts in (xors, differences)]
    exponent = Counter((int(a) >> 7) & 255 for a in old)
    moved = Counter((a >> 7) & 255 for a, _ in changed)
    values = Counter(((a >> 7) & 255, (b - a) % 65536) for a, b in changed)
    given_exponent = 0.0
    for a, b in zip(old.tolist(), new.tolist(), strict=True):
        e = (a >> 7) & 255
        if a == b:
            given_exponent -= log2((exponent[e] - moved[e]) / exponent[e])
        else:
            given_exponent -= log2(moved[e] / exponent[e]) + log2(values[e, (b - a) % 65536] / moved[e])
    return whole[0], whole[1], given_exponent


@given(st.lists(st.tuples(st.sampled_from([0x3C00, 0x3C01, 0x3D7F, 0xBC00, 0x7FC1, 0x0000]), st.integers(-2, 2)), min_size=1, max_size=60))
def test_bounds_are_the_logarithms_of_the_frequencies(drawn: list[tuple[int, int]]) -> None:
    old = np.array([value for value, _ in drawn], np.uint16)
    new = (old + np.array([step for _, step in drawn])).astype(np.uint16)
    found = updates.bounds_between(state(old), state(new))
    assert (found.changed, found.elements) == (int((old != new).sum()), old.size)
    if found.changed:
        assert found[:3] == pytest.approx(bits_by_hand(old, new), abs=1e-6)
    else:
        assert found[:3] == (0, 0, 0)
    assert found.exponent <= found.difference + 1e-6  # knowing more never costs bits


def test_bounds_do_not_depend_on_how_a_version_is_cut_into_shards() -> None:
    rng = np.random.default_rng(3)
    old = rng.integers(0x3A00, 0x3E00, SHARD_BYTES // 2 + 1000, dtype=np.uint16)
    new = np.where(rng.random(old.size) < 0.02, old + 1, old).astype(np.uint16)
    whole = updates.bounds_of([updates.changed_in(updates.Pair(old.view(np.uint8), new.view(np.uint8), 2, BF16))], BF16)
    assert len(list(updates.pairs_of(state(old), state(new)))) == 2
    assert updates.bounds_between(state(old), state(new)) == pytest.approx(whole)


def test_tensors_of_other_dtypes_have_statistics_of_their_own() -> None:
    old, new = np.full(64, 0x3F80, np.uint16), np.full(64, 0x3F81, np.uint16)
    gate = np.ones(64, np.float32)
    base = {**state(old), "gate": HostTensor.from_numpy(gate)}
    found = updates.bounds_between(base, {**state(new), "gate": HostTensor.from_numpy(gate)})
    assert found[:3] == (0, 0, 0)  # all of one changed, alike, and none of the other: nothing is left to say
    assert (found.changed, found.elements) == (64, 128)


def test_totals_repeat_the_published_figure_of_fulls_in_place_of_deltas() -> None:
    fulls, deltas = {25: 102_400, 50: 102_400}, [2_030] * 50
    total = updates.transferred(deltas, fulls, 25, instead=True)
    assert total / (50 * 102_400) == pytest.approx((2 * 1024 + 48 * 20.3) / 51_200)


def test_a_full_beside_a_delta_counts_both_and_one_every_50_only_once() -> None:
    fulls, deltas = {25: 700, 50: 900}, list(range(1, 51))
    assert updates.transferred(deltas, fulls, 25, instead=False) == sum(deltas) + 1600
    assert updates.transferred(deltas, fulls, 50, instead=False) == sum(deltas) + 900
    assert updates.transferred(deltas, fulls, 50, instead=True) == sum(deltas) - 50 + 900


def test_every_form_gives_back_what_it_coded() -> None:
    old = np.arange(5000, dtype=np.uint16)
    new = old.copy()
    new[::97] ^= 0x8001
    gates = [np.linspace(0, 1, 300, dtype=np.float32), np.linspace(1, 0, 300, dtype=np.float32)]
    states = [{**state(values), "gate": HostTensor.from_numpy(gate)} for values, gate in zip((old, new), gates, strict=True)]
    with ThreadPoolExecutor(1) as pool:
        coded = updates.Meter(pool).code(*states)
    assert all(0 < one.size < 2 * old.nbytes for one in coded.values())


def test_a_form_that_loses_a_bit_ends_the_measurement() -> None:
    def forgetful(encoded: EncodedShard, pair: object, out: np.ndarray) -> None:
        out[:] = 0

    form = updates.Form("forgetful", lambda pair: EncodedShard(Codec.DENSE, b"", 0), forgetful)
    values = np.arange(8, dtype=np.uint16)
    with ThreadPoolExecutor(1) as pool, pytest.raises(SystemExit, match="forgetful"):
        updates.Meter(pool, [form]).code(state(values), state(values))
