"""A dense decoder's one forward in all its forms: whole, in pieces, padded, packed, forked and recomputed are one function, and no sequence knows another."""

from __future__ import annotations

import math

import pytest
import torch
from dense_model_cases import random_dense, small_dense, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.rope import rotate
from driftline.models.cache import Cache, KeyValues
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.dense.mlp import silu, silu_glu
from driftline.models.dense.positions import Rope, RopeType
from driftline.models.dense.rope import Tables
from driftline.models.packed import Packed
from driftline.models.recompute import Recompute

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(scope="module")
def model() -> DenseForCausalLM:
    return random_dense()


def alone(model: DenseForCausalLM, row: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = model(row[None]).hidden[0]
    return hidden


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(0, 999))
@torch.no_grad()
def test_packed_in_any_pieces_is_each_sequence_alone(lengths: list[int], seed: int) -> None:
    """Two packs after one another, sequences of no token among them; then each row's next token, padded."""
    model = random_dense()
    more = [(length * 3 + seed) % 5 for length in lengths]
    rows = [tokens_of(1, a + b + 1, seed=seed + i)[0] for i, (a, b) in enumerate(zip(lengths, more, strict=True))]
    first = model(torch.cat([r[:a] for r, a in zip(rows, lengths, strict=True)])[None], packed=Packed.of(lengths, "cpu"))
    second = model(torch.cat([r[a:-1] for r, a in zip(rows, lengths, strict=True)])[None], cache=first.cache, packed=Packed.of(more, "cpu"))
    last = model(torch.stack([r[-1:] for r in rows]), cache=second.cache)
    parts = zip(rows, first.hidden[0].split(lengths), second.hidden[0].split(more), last.hidden, strict=True)
    for row, *got in parts:
        torch.testing.assert_close(torch.cat(got), alone(model, row), **CLOSE)
    assert last.cache.lengths.tolist() == [len(row) for row in rows]
    assert last.cache.valid.sum(1).tolist() == [len(row) for row in rows]


@torch.no_grad()
def test_padded_rows_are_each_row_alone_whatever_the_padding_holds(model: DenseForCausalLM) -> None:
    lengths = [5, 0, 9, 1]
    tokens = tokens_of(4, 9)
    out = model(tokens, lengths=torch.tensor(lengths))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(out.hidden[row, :length], alone(model, tokens[row, :length]), **CLOSE)
    other = tokens.where(torch.arange(9) < torch.tensor(lengths)[:, None], 3)
    again = model(other, lengths=torch.tensor(lengths))
    assert torch.isfinite(out.hidden).all()
    assert all(torch.equal(again.hidden[row, :length], out.hidden[row, :length]) for row, length in enumerate(lengths))


@torch.no_grad()
def test_a_cache_compacted_or_stacked_with_others_goes_on_the_same(model: DenseForCausalLM) -> None:
    """Columns that no row needs are dropped; rows of other lengths stand beside each other; positions stay the numbers of real tokens."""
    short, long = model(tokens_of(2, 6), lengths=torch.tensor([2, 3])).cache, model(tokens_of(1, 8, seed=1)).cache
    both = Cache.cat([short, long, model.empty_cache(1)])
    assert short.columns == 6
    assert short.compact().columns == 3
    assert both.lengths.tolist() == [2, 3, 8, 0]
    more = tokens_of(4, 3, seed=2)
    got = model(more, cache=both.compact()).hidden
    prompts = [tokens_of(2, 6)[0, :2], tokens_of(2, 6)[1, :3], tokens_of(1, 8, seed=1)[0], tokens_of(1, 0)[0]]
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(got[row], alone(model, torch.cat([prompt, more[row]]))[-3:], **CLOSE)


@torch.no_grad()
def test_forks_do_not_touch_each_other_or_what_they_grew_from(model: DenseForCausalLM) -> None:
    held = model(tokens_of(1, 7)).cache
    before = [(s.keys.clone(), s.values.clone()) for s in held.layers if isinstance(s, KeyValues)]
    more = tokens_of(3, 4, seed=3)
    got = model(more, cache=held.repeat(3)).hidden
    for row in range(3):
        torch.testing.assert_close(got[row], alone(model, torch.cat([tokens_of(1, 7)[0], more[row]]))[-4:], **CLOSE)
    assert all(torch.equal(s.keys, k) and torch.equal(s.values, v) for s, (k, v) in zip(held.layers, before, strict=True) if isinstance(s, KeyValues))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_no_token_sees_a_later_one_or_another_sequence(packed: bool, dtype: torch.dtype) -> None:
    """To the bit: one token is changed, and only those after it in its own sequence move."""
    model, lengths = random_dense(dtype=dtype), [4, 6, 3]
    changed = tokens_of(3, 6)
    changed[1, 2] = (changed[1, 2] + 1) % 97

    def hidden(tokens: torch.Tensor) -> list[torch.Tensor]:
        if not packed:
            return list(model(tokens, lengths=torch.tensor(lengths)).hidden)
        row = torch.cat([tokens[i, :n] for i, n in enumerate(lengths)])[None]
        return list(model(row, packed=Packed.of(lengths, "cpu")).hidden[0].split(lengths))

    for row, (a, b) in enumerate(zip(hidden(tokens_of(3, 6)), hidden(changed), strict=True)):
        same = (a == b).all(-1)[: lengths[row]].tolist()
        assert same == [row != 1 or place < 2 for place in range(lengths[row])]


@pytest.mark.parametrize("packed", [False, True])
def test_recomputed_layers_have_the_same_gradients_to_the_bit(packed: bool) -> None:
    found = []
    for how in Recompute:
        model = random_dense(dtype=torch.float32)
        model.recompute = how
        prompt = model(tokens_of(2, 5)).cache
        more = tokens_of(4, 3, seed=1)
        out = model(more.reshape(1, -1), cache=prompt.repeat(2), packed=Packed.of([3, 3, 3, 3], "cpu")) if packed else model(more, cache=prompt.repeat(2))
        model.logits(out.hidden).square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    kept, again = found
    assert all(g is not None and g.abs().max() > 0 for g in kept.values())
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_finite_differences(tied: bool) -> None:
    """In fp64, through the fork of a prompt's cache: a direction in each parameter."""
    model = random_dense(small_dense(num_hidden_layers=2, tie_word_embeddings=tied))

    def loss() -> torch.Tensor:
        held = model(tokens_of(1, 4)).cache
        logits = model.logits(model(tokens_of(2, 3, seed=1), cache=held.repeat(2)).hidden)
        return torch.log_softmax(logits, -1).square().mean()

    loss().backward()
    for index, (name, parameter) in enumerate(model.named_parameters()):
        way = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        assert parameter.grad is not None
        step, slopes = 1e-6, []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.add_(sign * step * way)
                slopes.append(float(loss()))
                parameter.sub_(sign * step * way)
        assert (slopes[0] - slopes[1]) / (2 * step) == pytest.approx(float((parameter.grad * way).sum()), rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("how", list(Recompute))
def test_a_pack_that_nothing_follows_is_the_same_function_and_is_never_padded(cached: bool, how: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states to the bit and gradients to rounding, with ragged prompts, holes in the cache and a sequence of no token; the cache comes back as it was."""
    found, padded = [], []
    pad = Packed.padded
    monkeypatch.setattr(Packed, "padded", lambda self, x, fill=0.0: padded.append(x.shape) or pad(self, x, fill))
    for keep in (True, False):
        model = random_dense()
        model.recompute = how
        held = model(tokens_of(2, 7), lengths=torch.tensor([3, 7])).cache if cached else model.empty_cache(2)
        held = model(tokens_of(2, 2, seed=5), lengths=torch.tensor([2, 0]), cache=held).cache.repeat(2) if cached else held.repeat(2)
        before = len(padded)
        out = model(tokens_of(1, 9, seed=1), cache=held, packed=Packed.of([4, 1, 0, 4], "cpu"), keep=keep)
        out.hidden.square().sum().backward()
        assert (len(padded) > before) is keep
        assert (out.cache is held) is not keep
        found.append((out.hidden, [p.grad for p in model.parameters()]))
    (kept, kept_grads), (dropped, dropped_grads) = found
    assert torch.equal(kept, dropped)
    for a, b in zip(kept_grads, dropped_grads, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@torch.no_grad()
def test_a_pack_of_nothing_keeps_the_cache(model: DenseForCausalLM) -> None:
    held = model(tokens_of(2, 3)).cache
    out = model(tokens_of(1, 0), cache=held, packed=Packed.of([0, 0], "cpu"))
    assert out.hidden.shape == (1, 0, 48)
    assert out.cache is held
    assert out.routes.shape == (1, 0, 0, 1)


def test_routes_are_empty_and_some_given_are_refused(model: DenseForCausalLM) -> None:
    tokens = tokens_of(2, 3)
    out = model(tokens, replay=torch.zeros(2, 3, 0, 1, dtype=torch.int64))
    assert out.routes.shape == (2, 3, 0, 1)
    with pytest.raises(ValueError, match="has no experts, so leave replay out"):
        model(tokens, replay=torch.zeros(2, 3, 1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="one row of 5"):
        model(tokens, packed=Packed.of([2, 3], "cpu"))


def test_a_model_that_sampled_can_be_trained() -> None:
    """The tables of cosines are made while sampling, where torch marks every tensor as none to differentiate with."""
    model = random_dense()
    with torch.inference_mode():
        model(tokens_of(1, 5))
    model(tokens_of(1, 5)).hidden.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def test_a_position_turns_by_the_same_bits_however_far_the_table_has_grown() -> None:
    """Asked for one at a time from the back, all at once, and after others: a table of another length would else have another vector tail."""
    rope = Rope(rope_type=RopeType.LINEAR, factor=3.0)
    want = Tables(rope, 20).at(torch.arange(1500), 1500, torch.float32)
    grown = Tables(rope, 20)
    for below in (1, 300, 257, 1025, 1500):
        at = torch.tensor([[below - 1]])
        got = grown.at(at, below, torch.float32)
        assert all(torch.equal(g[0, 0], w[below - 1]) for g, w in zip(got, want, strict=True))
    angle = torch.arange(1500)[:, None].double() * (10000.0 ** (-torch.arange(0, 20, 2).double() / 20) / 3)
    torch.testing.assert_close(want[0].double(), angle.cos(), rtol=0, atol=1e-4)
    torch.testing.assert_close(want[1].double(), angle.sin(), rtol=0, atol=1e-4)


def test_turning_keeps_lengths_and_products_depend_on_distance_alone() -> None:
    tables = Tables(Rope(), 8)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(0)
    cos, sin = tables.at(torch.arange(40), 40, torch.float64)
    turned_q, turned_k = rotate(q.expand(40, 1, 8), cos, sin)[:, 0], rotate(k.expand(40, 1, 8), cos, sin)[:, 0]
    products = turned_q @ turned_k.T
    for distance in (-7, 0, 12):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)  # angles are fp32
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(40), **CLOSE)
    assert (products.diagonal(0) - products.diagonal(0)[0]).abs().max() < 1e-5 < (products[0, 0] - products[0, 5]).abs()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_silu_of_an_element_has_the_same_bits_at_every_place(dtype: torch.dtype) -> None:
    x = 6 * torch.randn(3001, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    x[:4] = torch.tensor([0.0, -200.0, 200.0, -1000.0])
    whole = silu(x)
    assert torch.equal(whole, torch.cat([silu(part.clone()) for part in x.split(7)]))
    want = x.double() * torch.sigmoid(x.double())
    torch.testing.assert_close(whole.double(), want, rtol={torch.bfloat16: 2**-8, torch.float32: 1e-6, torch.float64: 1e-12}[dtype], atol=1e-30)


def test_the_gradient_of_silu_is_finite_where_the_exponential_is_not() -> None:
    x = torch.tensor([-1000.0, -90.0, -1.0, 0.0, 3.0, 200.0], requires_grad=True)
    silu_glu(x, torch.full((6,), 2.0)).sum().backward()
    assert x.grad is not None
    s = torch.sigmoid(x.detach())
    torch.testing.assert_close(x.grad, 2 * s * (1 + x.detach() * (1 - s)), rtol=1e-5, atol=1e-6)
    assert math.isfinite(float(x.grad.sum()))


def test_the_gated_product_keeps_its_inputs_alone_for_the_backward_pass() -> None:
    """Three of four tensors as wide as the inner layer is what autograd would hold of it, the down projection's input among them."""
    gate, up = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        out = silu_glu(gate, up)
    assert sorted(t.data_ptr() for t in held) == sorted((gate.data_ptr(), up.data_ptr()))
    assert torch.autograd.gradcheck(silu_glu, (gate, up))
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up, **CLOSE)
