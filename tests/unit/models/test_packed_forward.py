"""Sequences packed into one row: each gets what it gets alone, and no more of another than nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from model_cases import random_model, random_tokens, small

from driftline.kernels.mode import Numerics, using
from driftline.models.cache import Cache, KdaState, MlaRows
from driftline.models.causal_lm import CausalLM, ModelOutput
from driftline.models.packed import Packed, moved

torch.set_num_threads(1)
LENGTHS = (5, 0, 1, 17, 3)


def packed_tokens(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> tuple[torch.Tensor, Packed]:
    return random_tokens(1, sum(lengths), seed=seed), Packed.of(lengths, "cpu")


def parts(x: torch.Tensor, packed: Packed) -> tuple[torch.Tensor, ...]:
    return tuple(x[0, a:b] for a, b in pairwise(packed.bounds.tolist()))


def prefixes(model: CausalLM) -> Cache:
    """Of five sequences that have seen 4, 0, 7, 1 and 2 tokens."""
    lengths = torch.tensor([4, 0, 7, 1, 2])
    out: ModelOutput = model(random_tokens(5, 7, seed=3), lengths=lengths)
    return out.cache


def row_of(cache: Cache | None, row: int) -> Cache | None:
    return None if cache is None else cache.take(torch.tensor([row]))


@pytest.mark.parametrize("continued", [False, True])
def test_a_packed_sequence_gets_what_it_gets_alone(continued: bool) -> None:
    model = random_model()
    tokens, packed = packed_tokens()
    cache = prefixes(model) if continued else None
    out = model(tokens, cache=cache, packed=packed)
    for row, (mine, hidden, routes) in enumerate(zip(parts(tokens, packed), parts(out.hidden, packed), parts(out.routes, packed), strict=True)):
        if not len(mine):
            continue
        alone = model(mine[None], cache=row_of(cache, row))
        assert (hidden - alone.hidden[0]).abs().max() < 1e-12
        assert torch.equal(routes, alone.routes[0])
    padded = model(packed.padded(tokens[0]), lengths=packed.lengths_s, cache=cache)
    assert torch.equal(padded.cache.valid, out.cache.valid)
    assert torch.equal(padded.cache.lengths, out.cache.lengths)
    for a, b in zip(out.cache.layers, padded.cache.layers, strict=True):
        if isinstance(a, KdaState) and isinstance(b, KdaState):
            assert (a.tail - b.tail).abs().max() < 1e-12
            assert (a.state - b.state).abs().max() < 1e-12
        else:
            assert isinstance(a, MlaRows)
            assert isinstance(b, MlaRows)
            assert (a.rows - b.rows)[padded.cache.valid].abs().max() < 1e-12


def test_a_packed_pass_goes_on_from_a_packed_pass() -> None:
    model = random_model()
    tokens, packed = packed_tokens()
    more, after = packed_tokens((2, 3, 1, 0, 4), seed=5)
    out = model(more, cache=model(tokens, packed=packed).cache, packed=after)
    for first, second, hidden in zip(parts(tokens, packed), parts(more, after), parts(out.hidden, after), strict=True):
        if len(second):
            whole = model(torch.cat([first, second])[None]).hidden[0, len(first) :]
            assert (hidden - whole).abs().max() < 1e-12


@pytest.mark.parametrize("changed", [0, 2, 3])
def test_another_sequence_of_the_pack_changes_no_bit_of_ours(changed: int) -> None:
    model = random_model(dtype=torch.float32)
    tokens, packed = packed_tokens()
    cache = prefixes(model)
    other = tokens.clone()
    at = slice(int(packed.bounds[changed]), int(packed.bounds[changed + 1]))
    other[0, at] = (other[0, at] + 1) % 256
    ours, theirs = (parts(model(t, cache=cache, packed=packed).hidden, packed) for t in (tokens, other))
    for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b) == (row != changed or not len(a))


def test_a_packed_gradient_is_the_sum_of_those_alone() -> None:
    model = random_model()
    tokens, packed = packed_tokens((5, 1, 9))
    weight = torch.randn(1, 15, model.config.hidden_size, dtype=torch.float64)
    trained = [p for p in model.parameters() if p.requires_grad]
    whole = torch.autograd.grad((model(tokens, packed=packed).hidden * weight).sum(), trained, allow_unused=True)
    loss = sum((model(mine[None]).hidden[0] * w).sum() for mine, w in zip(parts(tokens, packed), parts(weight, packed), strict=True))
    assert isinstance(loss, torch.Tensor)
    alone = torch.autograd.grad(loss, trained, allow_unused=True)
    assert sum(g is not None for g in whole) > 50
    for a, b in zip(whole, alone, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_replayed_experts_go_with_their_packed_tokens() -> None:
    model = random_model()
    tokens, packed = packed_tokens()
    free = model(tokens, packed=packed)
    replay = (free.routes + 1) % model.config.num_experts
    out = model(tokens, packed=packed, replay=replay)
    assert torch.equal(out.routes, replay)
    for mine, hidden, ids in zip(parts(tokens, packed), parts(out.hidden, packed), parts(replay, packed), strict=True):
        if len(mine):
            assert (hidden - model(mine[None], replay=ids[None]).hidden[0]).abs().max() < 1e-12
    assert (out.hidden - free.hidden).abs().max() > 1e-6


def test_a_pack_of_empty_sequences_leaves_the_cache_as_it_was() -> None:
    model = random_model()
    cache = prefixes(model)
    out = model(torch.zeros(1, 0, dtype=torch.int64), cache=cache, packed=Packed.of([0] * 5, "cpu"))
    assert out.hidden.shape == (1, 0, model.config.hidden_size)
    assert torch.equal(out.cache.lengths, cache.lengths)
    more = random_tokens(5, 3, seed=7)
    assert torch.equal(model(more, cache=out.cache).hidden, model(more, cache=cache).hidden)


def test_what_does_not_go_with_the_pack_is_refused() -> None:
    model = random_model(small())
    tokens, packed = packed_tokens()
    with pytest.raises(ValueError, match=r"tokens is \(1, 25\).*one row of 26"):
        model(tokens[:, 1:], packed=packed)
    with pytest.raises(ValueError, match="leave lengths out"):
        model(tokens, packed=packed, lengths=torch.tensor([26]))
    with pytest.raises(ValueError, match="cache has 2 rows for 5 sequences"):
        model(tokens, packed=packed, cache=model.empty_cache(2))
    with pytest.raises(ValueError, match="at least one sequence"):
        Packed.of([], "cpu")
    with pytest.raises(ValueError, match=r"\[3, -1\]"):
        Packed.of([3, -1], "cpu")


def test_the_padded_form_and_the_packed_one_are_moves_of_one_another() -> None:
    packed = Packed.of(LENGTHS, "cpu")
    x = torch.randn(packed.tokens, 2, dtype=torch.float64, requires_grad=True)
    padded = packed.padded(x, fill=7.0)
    assert padded.shape == (5, 17, 2)
    assert bool((padded[~packed.real] == 7.0).all())
    assert torch.equal(packed.unpadded(padded), x)
    assert torch.autograd.gradcheck(packed.padded, (x,))
    assert torch.autograd.gradcheck(lambda y: packed.unpadded(packed.padded(y)), (x,))
    assert packed.sequence.tolist() == [0] * 5 + [2] + [3] * 17 + [4] * 3
    assert packed.offset.tolist() == [*range(5), 0, *range(17), *range(3)]
    assert moved(torch.ones(0, 2), torch.tensor([-1]), torch.empty(0, dtype=torch.int64), 3.0).tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize("continued", [False, True])
def test_in_deterministic_mode_packed_padded_and_alone_are_the_same_bits(continued: bool) -> None:
    model = random_model(dtype=torch.float32)
    tokens, packed = packed_tokens()
    cache = prefixes(model) if continued else None

    def forms() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(packed, padded, alone) of each sequence that has tokens."""
        together = parts(model(tokens, cache=cache, packed=packed).hidden, packed)
        padded = model(packed.padded(tokens[0]), lengths=packed.lengths_s, cache=cache).hidden
        return [(hidden, padded[row, : len(mine)], model(mine[None], cache=row_of(cache, row)).hidden[0])
                for row, (hidden, mine) in enumerate(zip(together, parts(tokens, packed), strict=True)) if len(mine)]

    with torch.no_grad(), using(Numerics.DETERMINISTIC):
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in forms())
    with torch.no_grad(), using(Numerics.FAST):
        assert not all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in forms())


@pytest.mark.parametrize("packs", [False, True])
def test_a_pass_that_nothing_follows_has_the_same_bits_and_gives_the_cache_back(packs: bool) -> None:
    model = random_model(dtype=torch.float32)
    tokens, packed = packed_tokens()
    cache = prefixes(model)
    given: dict[str, Any] = {"packed": packed} if packs else {"lengths": packed.lengths_s}
    fed = tokens if packs else packed.padded(tokens[0])
    kept, last = (model(fed, cache=cache, keep=keep, **given) for keep in (True, False))
    assert torch.equal(kept.hidden, last.hidden)
    assert torch.equal(kept.routes, last.routes)
    assert last.cache is cache
    assert kept.cache.columns == cache.columns + packed.longest
