"""The kernel of whole sequences, run on the CPU: the bits of decoding token by token, whatever the pieces, the padding and the sequences beside.
Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import types
from itertools import pairwise

import pytest
import torch
from gluon_on_cpu import launcher

from driftline.kernels.kda.composed import kda_composed
from driftline.kernels.kda.operator import PADDING
from driftline.kernels.kda_decode import sequence, triton

torch.set_num_threads(1)

HEADS, DIM, LOWER = 2, 128, -5.0
NAMES = {
    "_wait": lambda gl: gl.barrier, "_reinterpret": lambda gl: lambda tile, dtype, shape, layout: tile, "_copy": lambda gl: gl.copies.copy,
    "async_copy": lambda gl: gl.copies,
}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    both = types.SimpleNamespace(**{**vars(triton), **vars(sequence)})
    monkeypatch.setattr(sequence, "_sequence", launcher(sequence._sequence, both, NAMES))
    monkeypatch.setattr(triton, "_replay", launcher(triton._replay, triton, NAMES))
    monkeypatch.setattr(triton, "_multiprocessors", lambda device: 1)


def inputs(rows: int, tokens: int, seed: int = 0) -> Inputs:
    rng = torch.Generator().manual_seed(seed)
    raw = torch.randn(rows, tokens, 3, HEADS, DIM, generator=rng).bfloat16()
    q, k, v = raw.unbind(2)
    z = (2 * torch.randn(rows, tokens, HEADS, DIM, generator=rng) - 2).bfloat16()
    return q, k, v, z, torch.randn(rows, tokens, HEADS, generator=rng).bfloat16()


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return 0.3 * torch.randn(HEADS, generator=rng), torch.randn(HEADS * DIM, generator=rng)


def states(rows: int) -> torch.Tensor:
    return torch.randn(rows, HEADS, DIM, DIM, generator=torch.Generator().manual_seed(2))


def run(x: Inputs, initial: torch.Tensor | None = None, bounds: torch.Tensor | None = None, window: int = sequence.WINDOW) -> tuple[torch.Tensor, torch.Tensor]:
    return sequence.kda_sequence(*x, *weights(), LOWER, initial, bounds, window)


def part(x: Inputs, start: int, stop: int) -> Inputs:
    q, k, v, z, beta = (a[:, start:stop] for a in x)
    return q, k, v, z, beta


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("tokens", [1, 7, 8, 19])
def test_a_sequence_has_the_bits_of_its_tokens_decoded_one_by_one(tokens: int) -> None:
    x, pool = inputs(2, tokens), states(2)
    o, final = run(x, pool.clone())
    slots = torch.arange(2, dtype=torch.int32)
    for t in range(tokens):
        one = [a[:, t].contiguous() for a in x]
        assert same(o[:, t], triton.kda_decode(*one, *weights(), pool, slots, LOWER))
    assert same(final, pool)


def test_the_outputs_are_those_of_the_recurrence() -> None:
    x, start = inputs(1, 12), states(1)
    o, final = run(x, start)
    want, state = kda_composed(*(a.double() for a in x), *(w.double() for w in weights()), LOWER, start.double())
    assert (o.double() - want).norm() <= 4e-3 * want.norm()
    assert (final.double() - state).norm() <= 1e-5 * state.norm()


def test_pieces_and_windows_leave_no_trace() -> None:
    x = inputs(1, 18)
    o, final = run(x)
    state, outs = None, []
    for start, stop in pairwise((0, 3, 4, 13, 18)):
        piece, state = run(part(x, start, stop), state)
        outs.append(piece)
    assert same(torch.cat(outs, 1), o)
    assert state is not None
    assert same(state, final)
    for window in sequence.WINDOWS:
        again = run(x, window=window)
        assert same(again[0], o)
        assert same(again[1], final)


def test_a_packed_row_has_the_bits_of_its_sequences_alone_and_an_empty_one_keeps_its_state() -> None:
    x, start, bounds = inputs(1, 17), states(4), torch.tensor([0, 9, 9, 10, 17], dtype=torch.int32)
    o, final = run(x, start, bounds)
    for n, (first, last) in enumerate(pairwise(bounds.tolist())):
        if first == last:
            assert same(final[n], start[n])
            continue
        alone, state = run(part(x, first, last), start[n : n + 1])
        assert same(o[:, first:last], alone)
        assert same(final[n : n + 1], state)


def test_padding_behind_a_row_leaves_its_state_as_it_was() -> None:
    q, k, v, z, beta = (a.clone() for a in inputs(1, 11))
    o, state = run(part((q, k, v, z, beta), 0, 6))
    z[:, 6:], beta[:, 6:] = PADDING, PADDING
    padded, final = run((q, k, v, z, beta))
    assert same(padded[:, :6], o)
    assert same(final, state)
