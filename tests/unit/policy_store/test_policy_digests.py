"""The digest of a state is its name, however many threads took it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline.policy_store.digests import digest_state
from driftline.policy_store.tensor import HostTensor, State, state_digest
from driftline.policy_store.workers import Workers


def state(sizes: list[int], seed: int = 0) -> State:
    random = np.random.default_rng(seed)
    return {f"t{i}": HostTensor("bfloat16", (n,), random.integers(0, 256, 2 * n, dtype=np.uint8)) for i, n in enumerate(sizes)}


@given(sizes=st.lists(st.integers(0, 300), max_size=8), threads=st.integers(1, 5))
async def test_the_digest_by_many_threads_is_the_digest(sizes: list[int], threads: int) -> None:
    workers = Workers(threads)
    try:
        assert await digest_state(state(sizes), workers) == state_digest(state(sizes))
    finally:
        workers.close()


@pytest.mark.parametrize("at", [0, 1, 2])
async def test_a_bit_in_any_tensor_changes_it(at: int) -> None:
    one, other = state([5, 5, 5]), state([5, 5, 5])
    other[f"t{at}"].data[3] ^= 1
    assert await digest_state(one) != await digest_state(other)
