"""Any way to feed sequences to a model is the whole sequences: packs and padded batches in turn, unequal pieces with none among them, forks, rows in another order,
columns dropped. In fp64 to rounding; in deterministic mode to the bit, in fp32."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from model_cases import random_model, small

from driftline.kernels.mode import Numerics, using
from driftline.models.cache import Cache
from driftline.models.causal_lm import CausalLM, ModelOutput
from driftline.models.dense.config import DenseConfig
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.lora import add_lora
from driftline.models.packed import Packed

torch.set_num_threads(1)


def k3() -> CausalLM:
    return random_model(small())


def dense() -> CausalLM:
    """Grouped queries, biases, normed and rotated heads of a width that divides nothing, a tied head."""
    torch.manual_seed(5)
    config = DenseConfig.of({
        "model_type": "qwen3", "vocab_size": 256, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 10, "attention_bias": True, "tie_word_embeddings": True, "rope_theta": 100.0, "max_position_embeddings": 512,
    }, "here")
    model = DenseForCausalLM(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((0.3 if "norm" in name or "bias" in name else 0.15) * torch.randn_like(parameter))
    return model


def adapted() -> CausalLM:
    """K3 with an update beside every linear and expert, of a rank that no block divides."""
    model = random_model(small())
    torch.manual_seed(7)
    add_lora(model, rank=3, alpha=4.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.2)
    return model


class Feed:
    """Sequences of random lengths, fed to the model piece by piece as a seed says."""

    def __init__(self, model: CausalLM, seed: int) -> None:
        self.model, self.rng = model, random.Random(seed)
        draws = torch.Generator().manual_seed(seed)
        self.sequences = [torch.randint(0, 256, (self.rng.randint(1, 45),), generator=draws) for _ in range(self.rng.randint(1, 4))]
        self.whole: list[ModelOutput] = [model(s[None]) for s in self.sequences]
        self.done = [0] * len(self.sequences)
        self.got: list[list[torch.Tensor]] = [[] for _ in self.sequences]

    def run(self) -> None:
        cache: Cache | None = None
        while any(done < len(s) for done, s in zip(self.done, self.sequences, strict=True)):
            cache = self._step(self._moved(cache))

    def _moved(self, cache: Cache | None) -> Cache | None:
        if cache is None:
            return None
        if self.rng.random() < 0.3:
            cache = cache.compact()
        if self.rng.random() < 0.3:
            cache = Cache.cat([cache.repeat(2), cache]).take(torch.arange(cache.batch) * 2 + self.rng.randint(0, 1))
        return cache

    def _step(self, cache: Cache | None) -> Cache:
        pieces = [s[d : d + self.rng.choice([0, 1, 2, 5, 9, 33])] for d, s in zip(self.done, self.sequences, strict=True)]
        taken = [len(piece) for piece in pieces]
        routes = [out.routes[0, d : d + n] for out, d, n in zip(self.whole, self.done, taken, strict=True)]
        if self.rng.random() < 0.5:
            out = self.model(torch.cat(pieces)[None], cache=cache, packed=Packed.of(taken, "cpu"), replay=torch.cat(routes)[None])
            parts = list(out.hidden[0].split(taken))
        else:
            width = max(1, *taken) + self.rng.randint(0, 2)
            tokens = torch.full((len(pieces), width), 7)
            replay = torch.full((len(pieces), width, *routes[0].shape[1:]), -1)
            for row, (piece, ids) in enumerate(zip(pieces, routes, strict=True)):
                tokens[row, : len(piece)], replay[row, : len(piece)] = piece, ids
            out = self.model(tokens, lengths=torch.tensor(taken), cache=cache, replay=replay)
            parts = [out.hidden[row, :n] for row, n in enumerate(taken)]
        for row, part in enumerate(parts):
            self.got[row].append(part)
            self.done[row] += taken[row]
        assert out.cache.lengths.tolist() == self.done
        assert out.cache.valid.sum(1).tolist() == self.done
        return out.cache


@torch.no_grad()
@pytest.mark.parametrize("make", [k3, dense, adapted])
@pytest.mark.parametrize("seed", range(6))
def test_in_fp64_any_schedule_is_the_whole_sequence(make: Callable[[], CausalLM], seed: int) -> None:
    feed = Feed(make(), seed)
    feed.run()
    for parts, whole in zip(feed.got, feed.whole, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole.hidden[0], rtol=1e-9, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("make", [k3, dense, adapted])
@pytest.mark.parametrize("seed", range(6, 9))
def test_in_deterministic_mode_any_schedule_is_the_whole_sequence_to_the_bit(make: Callable[[], CausalLM], seed: int) -> None:
    model = make().float()
    with using(Numerics.DETERMINISTIC):
        feed = Feed(model, seed)
        feed.run()
    for parts, whole in zip(feed.got, feed.whole, strict=True):
        assert torch.equal(torch.cat(parts).view(torch.int32), whole.hidden[0].view(torch.int32))


@torch.no_grad()
@pytest.mark.parametrize("make", [k3, dense, adapted])
def test_in_fast_mode_bits_do_depend_on_the_schedule(make: Callable[[], CausalLM]) -> None:
    """So that the test above could fail."""
    model, same = make().float(), True
    with using(Numerics.FAST):
        for seed in range(6, 9):
            feed = Feed(model, seed)
            feed.run()
            same &= all(torch.equal(torch.cat(parts), whole.hidden[0]) for parts, whole in zip(feed.got, feed.whole, strict=True))
    assert not same
