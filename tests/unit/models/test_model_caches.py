"""Caches are values: taking, stacking, repeating and compacting move MLA rows and KDA states together and change no number."""

from __future__ import annotations

import pytest
import torch
from model_cases import random_model, random_tokens

from driftline.models.cache import Cache, KdaState, MlaRows
from driftline.models.model import K3ForCausalLM


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return random_model()


@torch.no_grad()
def next_hidden(model: K3ForCausalLM, cache: Cache) -> torch.Tensor:
    """What the model says next from each row, after a fixed token: the whole cache's observable content."""
    return model(torch.full((cache.batch, 1), 65), cache=cache).hidden[:, 0]


@torch.no_grad()
def prefilled(model: K3ForCausalLM, lengths: list[int]) -> Cache:
    return model(random_tokens(len(lengths), max(lengths)), lengths=torch.tensor(lengths)).cache


def test_take_selects_reorders_and_forks(model: K3ForCausalLM) -> None:
    cache = prefilled(model, [3, 8, 5])
    want = next_hidden(model, cache)
    index = torch.tensor([2, 0, 0, 1])
    taken = cache.take(index)
    assert taken.batch == 4
    assert taken.lengths.tolist() == [5, 3, 3, 8]
    torch.testing.assert_close(next_hidden(model, taken), want[index], rtol=0, atol=1e-10)


def test_repeat_puts_members_of_a_row_side_by_side(model: K3ForCausalLM) -> None:
    cache = prefilled(model, [3, 8])
    assert cache.repeat(3).lengths.tolist() == [3, 3, 3, 8, 8, 8]
    torch.testing.assert_close(next_hidden(model, cache.repeat(2)), next_hidden(model, cache).repeat_interleave(2, 0), rtol=0, atol=1e-10)


def test_cat_pads_the_shorter_and_hides_the_padding(model: K3ForCausalLM) -> None:
    caches = [prefilled(model, [4, 2]), prefilled(model, [9]), prefilled(model, [1, 6])]
    want = torch.cat([next_hidden(model, c) for c in caches])
    joined = Cache.cat(caches)
    assert joined.batch == 5
    assert joined.columns == 9
    assert joined.valid.sum(1).tolist() == [4, 2, 9, 1, 6]
    torch.testing.assert_close(next_hidden(model, joined), want, rtol=0, atol=1e-10)


def test_compact_drops_only_columns_no_row_uses(model: K3ForCausalLM) -> None:
    cache = prefilled(model, [3, 9, 4])
    left = cache.take(torch.tensor([0, 2]))
    small = left.compact()
    assert left.columns == 9
    assert small.columns == 4
    assert small.nbytes() < left.nbytes()
    torch.testing.assert_close(next_hidden(model, small), next_hidden(model, left), rtol=0, atol=1e-10)
    assert small.compact() is small


@torch.no_grad()
def test_compact_drops_columns_in_the_middle(model: K3ForCausalLM) -> None:
    """Ragged prompts leave holes before the decoded columns; when their owners leave, the holes go."""
    cache = model(random_tokens(3, 1, seed=3), cache=prefilled(model, [3, 9, 5])).cache
    left = cache.take(torch.tensor([0, 2]))
    assert left.columns == 10
    small = left.compact()
    assert small.columns == 6
    assert small.valid.tolist() == [[True] * 3 + [False] * 2 + [True], [True] * 6]
    torch.testing.assert_close(next_hidden(model, small), next_hidden(model, left), rtol=0, atol=1e-10)


def test_an_empty_cache_is_a_fresh_start(model: K3ForCausalLM) -> None:
    with torch.no_grad():
        tokens = random_tokens(2, 5)
        one, two = model(tokens), model(tokens, cache=model.empty_cache(2))
    assert torch.equal(one.hidden, two.hidden)


def test_size_is_the_sum_of_its_tensors(model: K3ForCausalLM) -> None:
    cache = prefilled(model, [4])
    kda, mla = cache.layers[0], cache.layers[3]
    assert isinstance(kda, KdaState)
    assert isinstance(mla, MlaRows)
    per_layer = 3 * (3 * 3 * 16 + 2 * 8 * 8) + 2 * (4 * 16)
    assert cache.nbytes() == 8 * per_layer + 4 + 8
