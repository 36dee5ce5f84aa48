"""Deterministic mode: whatever the engine's memory went through, the same tokens and log-probabilities to the bit; and a memory that errs is found."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from engine_cases import config, policy

from driftline.kernels.mode import Numerics, using
from driftline.messages.types import Sampling
from driftline.models.causal_lm import CausalLM
from driftline.models.dense.config import DenseConfig
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.model import K3ForCausalLM
from driftline.models.paged import Pool
from driftline.services.rollout.engine import Engine, EngineMemory, Request
from driftline.services.rollout.prefix import PrefixCache

torch.set_num_threads(1)
pytestmark = pytest.mark.slow

SESSIONS, TURNS, SAMPLED, TOOL = 5, 3, 7, 9
HEAD = array("i", (i * 7 % 250 for i in range(70)))
DENSE = DenseConfig.of({
    "model_type": "llama", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False, "hidden_act": "silu",
}, "small")


def k3() -> CausalLM:
    model = K3ForCausalLM(config(max_position_embeddings=512))
    model.load_state_dict(policy(stops=False).state_dict())
    return model


def dense() -> CausalLM:
    torch.manual_seed(0)
    model = DenseForCausalLM(DENSE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


MODELS: dict[str, Callable[[], CausalLM]] = {"k3": k3, "dense": dense}


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: bytes


@dataclass
class Run:
    answers: dict[tuple[int, int], Answer]
    engine: Engine
    cached: int = 0


def run(model: CausalLM, *, sampled: int = SAMPLED, max_batch: int = 8, pages: int = 0, slots: int = 0, host_bytes: int = 0, prefix_cache: bool = True,
        prefill_tokens: int = 2048, turns: int = TURNS) -> Run:
    """Sessions that share the beginning of their prompts take turns; `pages` and `slots` of memory, 0 for plenty."""
    sizes = Pool.sizes(model)
    cache_bytes = max(pages * sizes.page_bytes, slots * sizes.state_bytes) * (2 if sizes.state_bytes else 1) if pages else 0
    engine = Engine(model, version=0, max_batch=max_batch, record_routes=False, prefill_tokens=prefill_tokens,
                    memory=EngineMemory(cache_bytes=cache_bytes, host_bytes=host_bytes, prefix_cache=prefix_cache))
    said = {s: HEAD + array("i", [(s * 31 + i) % 250 for i in range(10 + 30 * s)]) for s in range(SESSIONS)}
    out = Run({}, engine)
    for turn in range(turns):
        for s in range(SESSIONS):
            engine.submit_request(Request(id=f"{s}", tokens=said[s], sampling=Sampling(temperature=1.0, max_tokens=sampled), key=1000 * turn + s, session=f"s{s}", stop_ids=()))
        for _ in range(4000):
            if engine.idle:
                break
            engine.step()
            for done in engine.take_completions():
                s = int(done.id)
                out.answers[s, turn] = Answer(done.tokens.tolist(), done.logprobs.tobytes())
                out.cached += done.cached_tokens
                said[s] = said[s] + array("i", done.tokens.tolist()) + array("i", [(s + turn * 17 + i) % 250 for i in range(TOOL)])
        assert engine.idle, "it never came to an end"
    engine.cache.check()
    assert engine.cache.stats.leased_page_bytes == 0
    return out


class Way(NamedTuple):
    """How the memory is, and whether what it is for came to pass."""

    how: dict[str, int]
    happened: Callable[[Run], bool]


def lost(one: Run) -> bool:
    moves = one.engine.cache.stats.moves
    return (moves.lost_states if one.engine.cache.stock.stateful else moves.lost_pages) > 0


WAYS = {
    "a hit": Way({}, lambda one: one.cached > 500),
    "prompts in pieces": Way({"prefill_tokens": 64}, lambda one: one.cached > 500),
    "slots used again": Way({"max_batch": 2}, lambda one: one.cached > 0),
    "eviction": Way({"max_batch": 2, "pages": 9, "slots": 3}, lost),
    "preemption": Way({"max_batch": 4, "pages": 9, "slots": 6, "sampled": 110, "turns": 1}, lambda one: one.engine.preemptions > 0),
    "the host and back": Way({"max_batch": 2, "pages": 9, "slots": 3, "host_bytes": 2**20}, lambda one: one.engine.cache.stats.moves.restored_pages > 0),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", WAYS)
def test_memory_changes_no_bit(kind: str, name: str) -> None:
    way, model = WAYS[name], MODELS[kind]()
    with using(Numerics.DETERMINISTIC):
        plain = run(model, prefix_cache=False, sampled=way.how.get("sampled", SAMPLED), turns=way.how.get("turns", TURNS))
        one = run(model, **way.how)  # type: ignore[arg-type]
    assert plain.cached == 0
    assert way.happened(one), "what this is for did not come to pass"
    assert one.answers == plain.answers


FAULTS = [
    ("k3", {}, "copy_pages"), ("k3", {}, "copy_states"), ("k3", {"max_batch": 2, "prefix_cache": False}, "clear_states"),
    ("k3", {"max_batch": 2, "pages": 9, "slots": 3, "host_bytes": 2**20}, "import_states"),
    ("dense", {}, "copy_pages"), ("dense", {"max_batch": 2, "pages": 9, "slots": 3, "host_bytes": 2**20}, "import_pages"),
]


@pytest.mark.parametrize(("kind", "how", "name"), FAULTS)
def test_what_is_not_moved_is_found(kind: str, how: dict[str, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[kind]()
    with using(Numerics.DETERMINISTIC):
        plain = run(model, prefix_cache=False)
        monkeypatch.setattr(Pool, name, lambda *_, **__: None)
        assert run(model, **how).answers != plain.answers  # type: ignore[arg-type]


@pytest.mark.parametrize("stale", [False, True])
def test_nothing_of_the_version_before_is_used(stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that forgets whose rows they are is another answer."""
    engine = Engine(k3(), version=0, max_batch=2)
    with using(Numerics.DETERMINISTIC):
        old = engine.cache_key()
        first, _ = answered(engine, HEAD)
        if stale:
            monkeypatch.setattr(PrefixCache, "forget", lambda *_: 0)
            monkeypatch.setattr(Engine, "cache_key", lambda *_: old)
        engine.adopt(1, lambda: changed(engine.model))
        prompt = HEAD + array("i", first) + array("i", [1, 2, 3])
        again = answered(engine, prompt)
        fresh = Engine(k3(), version=1, max_batch=2)
        fresh.adopt(1, lambda: changed(fresh.model))
        assert (again == answered(fresh, prompt)) != stale


def answered(engine: Engine, prompt: array[int]) -> Answer:
    engine.submit_request(Request(id="r", tokens=prompt, sampling=Sampling(temperature=1.0, max_tokens=5), key=3, stop_ids=()))
    while not engine.idle:
        engine.step()
    (done,) = engine.take_completions()
    return Answer(done.tokens.tolist(), done.logprobs.tobytes())


def changed(model: CausalLM) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.01)
