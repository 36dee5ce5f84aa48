"""The compiled KDA decode kernels on a CUDA device at K3's widths: near fp64, and replay, fold and decode the same bits whatever surrounds a row."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.kda_decode import Window, fold, kda_decode, reference, replay_decode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
HEADS, DIM, CAPACITY = 96, 128, 5


class Inputs(NamedTuple):
    """Raw inputs of some rows' tokens: [B, T, H, ...], or [B, H, ...] of one token."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    z: torch.Tensor
    beta: torch.Tensor

    def at(self, t: int) -> Inputs:
        return Inputs(*(a[:, t] for a in self))

    def rows(self, start: int, stop: int) -> Inputs:
        return Inputs(*(a[start:stop] for a in self))

    def wide(self) -> Inputs:
        return Inputs(*(a.double() for a in self))


def inputs(rows: int, tokens: int, seed: int = 0, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    rng = torch.Generator(DEVICE).manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device=DEVICE)

    q, k, v, z = (noise(rows, tokens, heads, DIM) for _ in range(4))
    return Inputs(*(a.to(dtype) for a in (q, k, v, 2 * z - 2, noise(rows, tokens, heads))))


def weights(heads: int = HEADS) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator(DEVICE).manual_seed(1)
    return 0.3 * torch.randn(heads, generator=rng, device=DEVICE), torch.randn(heads * DIM, generator=rng, device=DEVICE)


def wide_weights(heads: int = HEADS) -> tuple[torch.Tensor, torch.Tensor]:
    a_log, dt_bias = weights(heads)
    return a_log.double(), dt_bias.double()


def states(slots: int, heads: int = HEADS) -> torch.Tensor:
    return torch.randn(slots, heads, DIM, DIM, generator=torch.Generator(DEVICE).manual_seed(2), device=DEVICE)


def window(slots: int, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16) -> Window:
    """Of a pool in use: what it holds of a slot with nothing accepted is another request's, or no number."""
    held = Window.empty(slots, CAPACITY, heads, DIM, dtype=dtype, device=DEVICE)
    for tensor in (held.k, held.v, held.z, held.beta):
        tensor.fill_(torch.nan)
    return held


def int32(values: list[int] | range) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def decode(x: Inputs, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    poison(x.v.numel())
    return kda_decode(*x, *weights(x.q.shape[-2]), pool, slots)


def replay(x: Inputs, pool: torch.Tensor, slots: torch.Tensor, held: Window, accepted: torch.Tensor) -> torch.Tensor:
    poison(x.v.numel())
    return replay_decode(*x, *weights(x.q.shape[-2]), pool, slots, held, accepted)


def poison(elements: int) -> None:
    """The memory that the next result is put in is full of NaN."""
    block = torch.full((elements,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    del block


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_it_is_the_kernels_that_run_here() -> None:
    assert runs_triton(states(1, 1))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 3e-3), (torch.float32, 2e-6)])
def test_decode_is_near_fp64_for_fast_and_slow_gates(dtype: torch.dtype, bound: float) -> None:
    """bfloat16's own rounding of the output is 1.7e-3 by this norm; the state is fp32."""
    for shift in (-8, 0, 8):
        x = inputs(4, 1, dtype=dtype).at(0)
        x = x._replace(z=x.z + shift)
        pool, slots = states(6), int32([5, 0, 3, 1])
        wide = pool.double()
        wanted = reference.kda_decode(*x.wide(), *wide_weights(), wide, slots, -5.0)
        assert error(decode(x, pool, slots), wanted) < bound
        assert error(pool, wide) < 2e-6


def test_decode_of_repeated_and_nearly_repeated_keys_stays_near_fp64() -> None:
    x = inputs(2, 64, heads=8)
    key = x.k[:, :1] + torch.tensor([0.0, 0.02], device=DEVICE).to(x.k.dtype)[:, None, None, None] * x.k
    x = x._replace(k=key.contiguous(), z=torch.full_like(x.z, -6.0), beta=torch.full_like(x.beta, 3.0))
    pool, slots = states(2, 8), int32([0, 1])
    wide, rates = pool.double(), wide_weights(8)
    for t in range(64):
        wanted = reference.kda_decode(*x.at(t).wide(), *rates, wide, slots, -5.0)
        found = decode(x.at(t), pool, slots)
    assert error(found, wanted) < 3e-3
    assert error(pool, wide) < 1e-5


def decoded(x: Inputs, pool: torch.Tensor, slots: torch.Tensor, counts: list[int] | None = None) -> torch.Tensor:
    """By plain decode, a call a token; row i stops behind counts[i]."""
    outs = []
    for t in range(x.q.shape[1]):
        live = slots if counts is None else torch.where(int32(counts) > t, slots, -1)
        outs.append(decode(x.at(t), pool, live))
    return torch.stack(outs, 1)


@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_replay_is_plain_decode_bit_for_bit_whatever_was_accepted(tokens: int) -> None:
    counts = [0, 1, 2, CAPACITY - 1, CAPACITY, CAPACITY, 0, 3]
    slots = int32([9, 4, 0, 7, 2, 8, 1, 5])
    pool, held = states(10), window(10)
    plain = pool.clone()
    first, second = inputs(8, CAPACITY, 3), inputs(8, tokens, 4)
    scored = replay(first, pool, slots, held, int32([0] * 8))
    assert torch.equal(pool, plain)
    assert torch.equal(scored, decoded(first, plain.clone(), slots))
    out = replay(second, pool, slots, held, int32(counts))
    decoded(first, plain, slots, counts)
    assert torch.equal(pool, plain)
    assert torch.equal(out, decoded(second, plain, slots))
    assert torch.equal(held.k[slots.long(), :tokens], second.k)
    assert torch.equal(held.beta[slots.long(), :tokens], second.beta)


def test_one_token_too_many_or_too_few_is_seen() -> None:
    """The equality above can fail."""
    slots, held, first = int32([0, 1]), window(2), inputs(2, CAPACITY)
    pool = states(2)
    replay(first, pool, slots, held, int32([0, 0]))
    plain, wrong = pool.clone(), pool.clone()
    decoded(first, plain, slots, [3, 2])
    fold(*weights(), pool, slots, held, int32([3, 2]))
    fold(*weights(), wrong, slots, held, int32([3, 3]))
    assert torch.equal(pool, plain)
    assert torch.equal(wrong[0], plain[0])
    assert not torch.equal(wrong[1], plain[1])


def test_five_thousand_drafts_taken_and_refused_drift_by_nothing() -> None:
    heads, slots, held = 4, int32([1, 0]), window(2, 4)
    pool = states(2, heads)
    plain = pool.clone()
    drafts = [inputs(2, CAPACITY, seed, heads) for seed in range(8)]
    counts = [[1 + (i * 7) % 5, (i * 3) % 6] for i in range(5000)]
    wrong = torch.zeros((), dtype=torch.bool, device=DEVICE)
    accepted = [0, 0]
    takes = {pair: int32(list(pair)) for pair in {tuple(c) for c in counts} | {(0, 0)}}
    lives = {pair: [torch.where(takes[pair] > t, slots, -1) for t in range(CAPACITY)] for pair in takes}
    a_log, dt_bias = weights(heads)
    before = None
    for i, after in enumerate(counts):
        x = drafts[i % 8]
        out = replay_decode(*x, a_log, dt_bias, pool, slots, held, takes[tuple(accepted)])
        if before is not None:
            for t in range(max(accepted)):
                kda_decode(*before.at(t), a_log, dt_bias, plain, lives[tuple(accepted)][t])
        wrong |= (pool != plain).any() | ~out.isfinite().all()
        before, accepted = x, after
    assert not wrong
    assert pool.abs().max() > 0


def test_a_row_of_any_batch_is_the_row_alone() -> None:
    pool, x = states(512), inputs(512, 4)
    held = window(512)
    whole = replay(x, pool, int32(range(512)), held, int32([0] * 512))
    for rows in (1, 2, 7, 64):
        part = replay(x.rows(0, rows), pool, int32(range(rows)), window(512), int32([0] * rows))
        assert torch.equal(part, whole[:rows])
        last = replay(x.rows(512 - rows, 512), pool, int32(range(512 - rows, 512)), window(512), int32([0] * rows))
        assert torch.equal(last, whole[512 - rows :])
    state = pool[:7].clone()
    alone = decode(x.at(0).rows(6, 7), state, int32([6]))
    assert torch.equal(alone, decode(x.at(0), pool, int32(range(512)))[6:7])
    assert torch.equal(state[6], pool[6])


def test_a_later_token_changes_no_earlier_output() -> None:
    x, slots = inputs(8, 5), int32(range(8))
    first = replay(x, states(8), slots, window(8), int32([0] * 8))
    changed = Inputs(*(a.clone() for a in x))
    for a in changed:
        a[:, 3] += 1
    second = replay(changed, states(8), slots, window(8), int32([0] * 8))
    assert torch.equal(first[:, :3], second[:, :3])
    assert not torch.equal(first[:, 3], second[:, 3])


def test_a_thousand_repeats_give_the_same_bits() -> None:
    x, slots, held, start = inputs(8, 4, heads=12), int32(range(8)), window(8, 12), states(8, 12)
    a_log, dt_bias = weights(12)
    replay_decode(*x, a_log, dt_bias, start, slots, held, int32([0] * 8))
    counts = int32([0, 1, 2, 3, 4, 4, 2, 1])
    saved = [t.clone() for t in (held.k, held.v, held.z, held.beta)]
    pool = start.clone()
    wanted = replay_decode(*x, a_log, dt_bias, pool, slots, held, counts)
    state = pool.clone()
    wrong = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(1000):
        pool.copy_(start)
        for tensor, value in zip((held.k, held.v, held.z, held.beta), saved, strict=True):
            tensor.copy_(value)
        out = replay_decode(*x, a_log, dt_bias, pool, slots, held, counts)
        wrong |= (out != wanted).any() | (pool != state).any()
    assert not wrong
    assert not torch.equal(state, start)


def test_padding_rows_touch_nothing_and_give_zeros() -> None:
    x, pool, held = inputs(3, 4), states(3), window(3)
    held.k.fill_(7)
    before = pool.clone()
    out = replay(x, pool, int32([-1, 2, -1]), held, int32([3, 0, 5]))
    assert torch.equal(pool, before)
    assert not out[[0, 2]].any()
    assert out[1].isfinite().all()
    assert bool((held.k[:2] == 7).all())
    out = decode(x.at(0), pool, int32([-1, 2, -1]))
    assert torch.equal(pool[:2], before[:2])
    assert not out[[0, 2]].any()


def test_padding_rows_among_many_change_nothing_of_the_others() -> None:
    """A program goes through the heads of many rows, and asks for a state while it works on the one before: also behind padding."""
    rows = 64
    x, real = inputs(rows, 4), torch.rand(rows, generator=torch.Generator().manual_seed(3)) < 0.6
    slots, live = int32(range(rows)), real.to(DEVICE)
    padded = torch.where(live, slots, -1)
    pools, helds = (states(rows), states(rows)), (window(rows), window(rows))
    for accepted in (int32([0] * rows), int32([1, 4, 0, 2] * 16)):
        wanted = replay(x, pools[0], slots, helds[0], accepted)
        found = replay(x, pools[1], padded, helds[1], accepted)
        assert torch.equal(found[live], wanted[live])
        assert not found[~live].any()
    assert torch.equal(pools[1][live], pools[0][live])
    assert torch.equal(pools[1][~live], states(rows)[~live])


def test_a_pool_of_more_than_two_billion_elements_is_reached_to_its_end() -> None:
    slots = 1400
    pool = torch.empty(slots, HEADS, DIM, DIM, device=DEVICE)
    assert pool.numel() > 2**31
    pool[-1] = states(1)[0]
    held, x, small = window(slots), inputs(1, 4), states(1)
    out = replay(x, pool, int32([slots - 1]), held, int32([0]))
    assert torch.equal(out, replay(x, small, int32([0]), window(1), int32([0])))
    fold(*weights(), pool, int32([slots - 1]), held, int32([4]))
    decoded(x, small, int32([0]))
    assert torch.equal(pool[-1], small[0])


def test_views_of_a_mixed_tensor_are_read_where_they_lie() -> None:
    x, slots = inputs(4, 4), int32(range(4))
    q, k, v = torch.stack(x[:3], 2).unbind(2)
    views, pools = Inputs(q, k, v, x.z, x.beta), (states(4), states(4))
    assert not q.is_contiguous()
    out = replay(views, pools[0], slots, window(4), int32([0] * 4))
    assert torch.equal(out, replay(x, pools[1], slots, window(4), int32([0] * 4)))


def test_a_captured_step_is_the_step() -> None:
    x, slots, held, pool = inputs(4, 4), int32(range(4)), window(4), states(4)
    counts = int32([0] * 4)
    a_log, dt_bias = weights()
    replay(x, states(4), slots, window(4), counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = replay_decode(*x, a_log, dt_bias, pool, slots, held, counts)
    other, again = states(4), window(4)
    for step, accepted in enumerate(([0] * 4, [1, 2, 3, 4], [4, 0, 1, 2])):
        for tensor, value in zip(x, inputs(4, 4, 20 + step), strict=True):
            tensor.copy_(value)
        counts.copy_(int32(accepted))
        graph.replay()
        assert torch.equal(out, replay(x, other, slots, again, counts))
        assert torch.equal(pool, other)


@pytest.mark.parametrize("candidate", range(3))
def test_how_programs_are_built_changes_no_bit(candidate: int) -> None:
    from driftline.kernels.kda_decode import triton

    rows = 16
    x, slots = inputs(rows, 4), int32(range(rows))
    pools, helds = (states(rows), states(rows)), (window(rows), window(rows))
    other = triton.CANDIDATES[candidate]
    for accepted in (int32([0] * rows), int32([1, 4, 0, 2] * 4)):
        wanted = replay(x, pools[0], slots, helds[0], accepted)
        assert torch.equal(triton.replay_decode(*x, *weights(), pools[1], slots, helds[1], accepted, -5.0, other), wanted)
    assert torch.equal(*pools)
    assert torch.equal(decode(x.at(0), pools[0], slots), triton.kda_decode(*x.at(0), *weights(), pools[1], slots, -5.0, other))
    assert torch.equal(*pools)


def test_heads_that_the_kernels_do_not_take_are_run_by_the_reference() -> None:
    rng = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, z = (torch.randn(2, 3, 64, generator=rng, device=DEVICE) for _ in range(4))
    pool = torch.zeros(2, 3, 64, 64, device=DEVICE)
    out = kda_decode(q, k, v, z, z[..., 0].contiguous(), torch.zeros(3, device=DEVICE), torch.zeros(192, device=DEVICE), pool, int32([1, 0]))
    assert bool(out.isfinite().all())
    assert bool(pool.any())


def test_the_error_is_no_worse_than_that_of_fla() -> None:
    ops = pytest.importorskip("fla.ops.kda")
    x, pool = inputs(8, 1), states(8)
    a_log, dt_bias = weights()
    wide = pool.double()
    wanted = reference.kda_decode(*x.at(0).wide(), a_log.double(), dt_bias.double(), wide, int32(range(8)), -5.0)
    theirs, state = ops.fused_recurrent_kda(*x, A_log=a_log, dt_bias=dt_bias, initial_state=pool.clone(), output_final_state=True, use_qk_l2norm_in_kernel=True,
                                            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0)
    ours = decode(x.at(0), pool, int32(range(8)))
    assert error(ours, wanted) <= 1.05 * error(theirs[:, 0], wanted)
    assert error(pool, wide) <= max(1.05 * error(state, wide), 2e-6)
