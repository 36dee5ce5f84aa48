"""KDA decode on a pool, by the reference: closed-loop replay is plain decode bit for bit, whatever was accepted, and bad arguments are named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.kda import bounded_gate, kda_recurrent, l2_normalise
from driftline.kernels.kda_decode import Window, fold, kda_decode, replay_decode

torch.set_num_threads(1)

HEADS, DIM, SLOTS, CAPACITY = 2, 8, 6, 4
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(rows: int, tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    rng = torch.Generator().manual_seed(seed)
    q, k, v, z = (torch.randn(rows, tokens, HEADS, DIM, generator=rng).to(dtype) for _ in range(4))
    return q, k, v, z, torch.randn(rows, tokens, HEADS, generator=rng).to(dtype)


def token(x: Inputs, t: int, rows: list[int]) -> Inputs:
    q, k, v, z, beta = x
    return q[rows, t], k[rows, t], v[rows, t], z[rows, t], beta[rows, t]


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return 0.3 * torch.randn(HEADS, generator=rng), torch.randn(HEADS * DIM, generator=rng)


def states() -> torch.Tensor:
    return torch.randn(SLOTS, HEADS, DIM, DIM, generator=torch.Generator().manual_seed(2))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_decode_is_the_recurrence_of_the_layer() -> None:
    q, k, v, z, beta = (t.double() for t in inputs(1, 5, 0))
    a_log, dt_bias = (t.double() for t in weights())
    pool = states().double()
    g = bounded_gate(z + dt_bias.view(HEADS, DIM), a_log)
    want, end = kda_recurrent(l2_normalise(q), l2_normalise(k), v, g, torch.sigmoid(beta), pool[3:4])
    got = [kda_decode(q[:, t], k[:, t], v[:, t], z[:, t], beta[:, t], a_log, dt_bias, pool, int32(3)) for t in range(5)]
    torch.testing.assert_close(torch.stack(got, 1), want, rtol=0, atol=1e-14)
    torch.testing.assert_close(pool[3:4], end, rtol=0, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(rounds=st.lists(st.tuples(st.integers(1, CAPACITY), st.integers(0, CAPACITY), st.integers(0, CAPACITY)), min_size=1, max_size=6), data=st.data())
def test_any_history_of_drafts_leaves_the_state_of_plain_decode(rounds: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Rows that come and go, in any order, with any counts: state and outputs are those of decoding the accepted tokens alone."""
    pool, plain, window = states(), states(), Window.empty(SLOTS, CAPACITY, HEADS, DIM)
    waiting: dict[int, int] = {}
    last: dict[int, Inputs] = {}
    for i, (tokens, first, second) in enumerate(rounds):
        slots = data.draw(st.permutations(range(3)))[:2]
        counts = [waiting.pop(slot, 0) for slot in slots]
        for slot, count in zip(slots, counts, strict=True):
            for t in range(count):
                kda_decode(*token(last[slot], t, [0]), *weights(), plain, int32(slot))
        x = inputs(2, tokens, i)
        out = replay_decode(*x, *weights(), pool, int32(*slots), window, int32(*counts))
        ahead = plain.clone()
        for t in range(tokens):
            assert torch.equal(kda_decode(*token(x, t, [0, 1]), *weights(), ahead, int32(*slots)), out[:, t])
        assert torch.equal(pool[list(slots)], plain[list(slots)])
        for row, (slot, count) in enumerate(zip(slots, (first, second), strict=True)):
            waiting[slot] = min(count, tokens)
            q, k, v, z, beta = (a[row : row + 1] for a in x)
            last[slot] = q, k, v, z, beta


def test_a_state_folded_before_it_is_copied_is_the_state_of_the_next_step() -> None:
    pool, window, slots = states(), Window.empty(SLOTS, CAPACITY, HEADS, DIM), int32(5, 1)
    replay_decode(*inputs(2, 4, 0), *weights(), pool, slots, window, int32(0, 0))
    other = pool.clone()
    fold(*weights(), pool, slots, window, int32(2, 4))
    replay_decode(*inputs(2, 1, 1), *weights(), other, slots, window, int32(2, 4))
    assert torch.equal(pool, other)


def test_a_slot_that_is_used_again_forgets_its_window() -> None:
    window, slots, x = Window.empty(SLOTS, CAPACITY, HEADS, DIM), int32(2), inputs(1, 3, 1)
    clean, used = states(), states()
    replay_decode(*inputs(1, 4, 0), *weights(), used, slots, window, int32(0))
    out = replay_decode(*x, *weights(), used, slots, window, int32(0))
    assert torch.equal(out, replay_decode(*x, *weights(), clean, slots, Window.empty(SLOTS, CAPACITY, HEADS, DIM), int32(0)))


def test_padding_rows_touch_nothing() -> None:
    pool, window = states(), Window.empty(SLOTS, CAPACITY, HEADS, DIM)
    assert not replay_decode(*inputs(2, 2, 0), *weights(), pool, int32(-1, -1), window, int32(2, 2)).any()
    assert torch.equal(pool, states())
    assert not window.k.any()


def test_a_window_says_how_large_it_is() -> None:
    window = Window.empty(3, 5, 96)
    assert window.capacity == 5
    assert window.bytes == 3 * 5 * 96 * (3 * 256 + 2)
    for capacity in (0, 17):
        with pytest.raises(ValueError, match=f"capacity is {capacity}"):
            Window.empty(3, capacity, 96)


@pytest.mark.parametrize(("change", "named"), [
    ({"q": torch.zeros(2, HEADS, DIM)}, "q is"), ({"k": torch.zeros(2, 3, HEADS, 4)}, "k is"), ({"beta": torch.zeros(2, 3)}, "beta is"),
    ({"a_log": torch.zeros(128)}, "a_log is"), ({"slots": torch.zeros(2, dtype=torch.int64)}, "slots is"), ({"accepted": torch.zeros(2)}, "accepted is"),
    ({"pool": torch.zeros(SLOTS, HEADS, DIM, 2 * DIM)[..., ::2]}, "pool is"), ({"window": Window.empty(SLOTS - 1, CAPACITY, HEADS, DIM)}, "window holds"),
    ({"window": Window.empty(SLOTS, 2, HEADS, DIM)}, "q has 3 tokens"), ({"window": Window.empty(SLOTS, CAPACITY, HEADS, DIM, dtype=torch.float32)}, "k is"),
])
def test_an_argument_that_does_not_fit_is_named(change: dict[str, object], named: str) -> None:
    q, k, v, z, beta = inputs(2, 3, 0)
    a_log, dt_bias = weights()
    fit = {"q": q, "k": k, "v": v, "z": z, "beta": beta, "a_log": a_log, "dt_bias": dt_bias, "pool": states(), "slots": int32(0, 1),
           "window": Window.empty(SLOTS, CAPACITY, HEADS, DIM), "accepted": int32(0, 0)}
    with pytest.raises(ValueError, match=named):
        replay_decode(**{**fit, **change})  # type: ignore[arg-type]
