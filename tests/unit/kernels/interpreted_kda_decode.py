"""The KDA decode kernels' own source, run on the CPU, against the recurrence in fp64 and against each other. Run by
test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from gluon_on_cpu import launcher
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.kda_decode import reference
from driftline.kernels.kda_decode import triton as kernels
from driftline.kernels.kda_decode.window import Window

torch.set_num_threads(1)

HEADS, DIM, SLOTS, CAPACITY = 2, 128, 5, 4
LOWER = -5.0
NAMES = {
    "_wait": lambda gl: gl.barrier, "_reinterpret": lambda gl: lambda tile, dtype, shape, layout: tile, "_copy": lambda gl: gl.copies.copy,
    "async_copy": lambda gl: gl.copies,
}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one multiprocessor, so that a program goes through several states."""
    monkeypatch.setattr(kernels, "_replay", launcher(kernels._replay, kernels, NAMES))
    monkeypatch.setattr(kernels, "_multiprocessors", lambda device: 1)


def inputs(rows: int, tokens: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    rng = torch.Generator().manual_seed(seed)
    q, k, v, z = (torch.randn(rows, tokens, HEADS, DIM, generator=rng).to(dtype) for _ in range(4))
    return q, k, v, (2 * z - 2).to(dtype), torch.randn(rows, tokens, HEADS, generator=rng).to(dtype)


def token(x: Inputs, t: int, rows: slice | list[int] = slice(None)) -> Inputs:
    q, k, v, z, beta = x
    return q[rows, t], k[rows, t], v[rows, t], z[rows, t], beta[rows, t]


def row(x: Inputs, i: int) -> Inputs:
    q, k, v, z, beta = (a[i : i + 1] for a in x)
    return q, k, v, z, beta


def double(x: Inputs) -> Inputs:
    q, k, v, z, beta = (a.double() for a in x)
    return q, k, v, z, beta


def held(window: Window) -> list[torch.Tensor]:
    return [t.clone() for t in (window.k, window.v, window.z, window.beta)]


def weights(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(HEADS, generator=rng), torch.randn(HEADS * DIM, generator=rng)


def states(seed: int = 2) -> torch.Tensor:
    return torch.randn(SLOTS, HEADS, DIM, DIM, generator=torch.Generator().manual_seed(seed))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> bool:
    return bool(((got.double() - want.double()).norm() <= bound * want.double().norm()).item())


def decoded(x: Inputs, pool: torch.Tensor, slots: torch.Tensor, counts: list[int] | None = None) -> torch.Tensor:
    """The same tokens by plain decode, one call a token: what a window is to equal. Row i stops after counts[i] tokens."""
    outs = torch.zeros_like(x[2])
    for t in range(x[0].shape[1]):
        rows = [i for i in range(len(slots)) if counts is None or t < counts[i]]
        if rows:
            outs[rows, t] = kernels.kda_decode(*token(x, t, rows), *weights(), pool, slots[rows], LOWER)
    return outs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode_is_the_recurrence_in_fp64(dtype: torch.dtype) -> None:
    x, slots = inputs(3, 1, dtype=dtype), int32(4, 0, 2)
    pool = states()
    wide = pool.double()
    got = kernels.kda_decode(*token(x, 0), *weights(), pool, slots, LOWER)
    want = reference.kda_decode(*token(double(x), 0), *weights(), wide, slots, LOWER)
    assert close(pool, wide, 1e-6)
    assert close(got, want, 4e-3 if dtype is torch.bfloat16 else 2e-6)


def test_a_padding_row_touches_no_state_and_gives_zeros() -> None:
    x, pool = inputs(3, 1), states()
    before = pool.clone()
    out = kernels.kda_decode(*token(x, 0), *weights(), pool, int32(-1, 3, -1), LOWER)
    assert torch.equal(pool[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    assert not torch.equal(pool[3], before[3])
    assert not out[[0, 2]].any()
    window = Window.empty(SLOTS, CAPACITY, HEADS)
    window.k.fill_(7)
    out = kernels.replay_decode(*inputs(1, 2), *weights(), pool, int32(-1), window, int32(3), LOWER)
    assert not out.any()
    assert bool((window.k == 7).all())


@settings(max_examples=6, deadline=None)
@given(counts=st.lists(st.integers(0, CAPACITY), min_size=3, max_size=3), tokens=st.integers(1, CAPACITY), seed=st.integers(0, 99))
def test_a_folded_window_is_bit_for_bit_the_window_decoded(counts: list[int], tokens: int, seed: int) -> None:
    slots, pool, window = int32(3, 0, 4), states(), Window.empty(SLOTS, CAPACITY, HEADS)
    plain = pool.clone()
    first, second = inputs(3, CAPACITY, seed), inputs(3, tokens, seed + 1)
    scored = kernels.replay_decode(*first, *weights(), pool, slots, window, int32(0, 0, 0), LOWER)
    assert torch.equal(pool, plain)
    out = kernels.replay_decode(*second, *weights(), pool, slots, window, int32(*counts), LOWER)
    ahead = plain.clone()
    assert torch.equal(scored, decoded(first, ahead, slots))
    decoded(first, plain, slots, counts)
    assert torch.equal(pool, plain)
    assert torch.equal(out, decoded(second, plain, slots))


def test_folding_for_a_snapshot_is_the_fold_of_the_next_step() -> None:
    slots, pool, window = int32(1, 2), states(), Window.empty(SLOTS, CAPACITY, HEADS)
    kernels.replay_decode(*inputs(2, CAPACITY), *weights(), pool, slots, window, int32(0, 0), LOWER)
    other, before = pool.clone(), held(window)
    kernels.fold(*weights(), pool, slots, window, int32(3, 1), LOWER)
    assert all(torch.equal(a, b) for a, b in zip(held(window), before, strict=True))
    kernels.replay_decode(*inputs(2, 2, 9), *weights(), other, slots, window, int32(3, 1), LOWER)
    assert torch.equal(pool, other)
    assert not torch.equal(pool, states())


def test_a_count_that_is_no_count_reads_nothing_outside_the_window() -> None:
    slots, pool, window = int32(SLOTS - 1), states(), Window.empty(SLOTS, CAPACITY, HEADS)
    kernels.replay_decode(*inputs(1, CAPACITY), *weights(), pool, slots, window, int32(0), LOWER)
    most, none = pool.clone(), pool.clone()
    kernels.fold(*weights(), most, slots, window, int32(CAPACITY), LOWER)
    kernels.fold(*weights(), pool, slots, window, int32(1000), LOWER)
    assert torch.equal(pool, most)
    kernels.fold(*weights(), none, slots, window, int32(-3), LOWER)
    assert torch.equal(none, states())


def test_a_row_is_the_same_whatever_the_other_rows() -> None:
    x, pool = inputs(3, 2), states()
    alone, window = pool.clone(), Window.empty(SLOTS, CAPACITY, HEADS)
    out = kernels.replay_decode(*x, *weights(), pool, int32(2, 0, 4), window, int32(0, 0, 0), LOWER)
    one = kernels.replay_decode(*row(x, 2), *weights(), alone, int32(4), Window.empty(SLOTS, CAPACITY, HEADS), int32(0), LOWER)
    assert torch.equal(out[2:], one)


@pytest.mark.parametrize("configuration", kernels.CANDIDATES)
def test_how_programs_are_built_changes_no_bit(configuration: kernels.Configuration) -> None:
    x, slots, counts = inputs(3, 2), int32(2, -1, 4), int32(2, 1, 1)
    pools, windows = (states(), states()), (Window.empty(SLOTS, CAPACITY, HEADS), Window.empty(SLOTS, CAPACITY, HEADS))
    for accepted in (int32(0, 0, 0), counts):
        want = kernels.replay_decode(*x, *weights(), pools[0], slots, windows[0], accepted, LOWER)
        assert torch.equal(kernels.replay_decode(*x, *weights(), pools[1], slots, windows[1], accepted, LOWER, configuration), want)
    want = kernels.kda_decode(*token(x, 1), *weights(), pools[0], slots, LOWER)
    assert torch.equal(kernels.kda_decode(*token(x, 1), *weights(), pools[1], slots, LOWER, configuration), want)
    assert torch.equal(*pools)


def test_views_of_one_mixed_tensor_are_taken_as_they_are() -> None:
    x = inputs(2, 3)
    q, k, v = torch.stack(x[:3], 2).unbind(2)
    views = q, k, v, x[3], x[4]
    window, other = (Window.empty(SLOTS, CAPACITY, HEADS) for _ in range(2))
    pools = states(), states()
    got = kernels.replay_decode(*views, *weights(), pools[0], int32(0, 3), window, int32(0, 0), LOWER)
    assert torch.equal(got, kernels.replay_decode(*x, *weights(), pools[1], int32(0, 3), other, int32(0, 0), LOWER))
    assert torch.equal(window.k, other.k)


def test_a_wrong_order_of_folding_is_seen() -> None:
    """The equality above can fail: folding the window's tokens in another order is another state."""
    slots, pool, window = int32(1), states(), Window.empty(SLOTS, CAPACITY, HEADS)
    kernels.replay_decode(*inputs(1, 2), *weights(), pool, slots, window, int32(0), LOWER)
    right = pool.clone()
    kernels.fold(*weights(), right, slots, window, int32(2), LOWER)
    turned = Window(*(t.flip(1)[:, 2:].contiguous() for t in held(window)))
    kernels.fold(*weights(), pool, slots, turned, int32(2), LOWER)
    assert not torch.equal(pool, right)


def test_gates_that_are_shut_or_open_stay_finite() -> None:
    q, k, v, _, _ = inputs(2, 1)
    z = torch.full_like(q, 300.0)
    z[1] = -300.0
    beta = torch.tensor([[300.0] * HEADS, [-300.0] * HEADS], dtype=torch.bfloat16)
    pool = states()
    before = pool.clone()
    out = kernels.kda_decode(q[:, 0], 0 * k[:, 0], v[:, 0], z[:, 0], beta, *weights(), pool, int32(0, 1), LOWER)
    assert bool(out.isfinite().all())
    assert close(pool[0], before[0] * torch.e**-5, 1e-5)
    assert torch.equal(pool[1], before[1])
