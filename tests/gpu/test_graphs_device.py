"""On a CUDA device: replayed steps are eager steps to the bit, draws are the host's, weights that change in place are the next replay's, and what cannot be captured goes on
eagerly and says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from driftline.kernels.mode import Numerics, using
from driftline.models.causal_lm import CausalLM
from driftline.models.config import K3Config
from driftline.models.dense.config import DenseConfig
from driftline.models.paged import Pool
from driftline.models.random_weights import random_model
from driftline.services.rollout.randomness import device_uniforms, uniforms
from driftline.services.rollout.runner import DecodeBatch, EagerRunner, GraphRunner, PrefillBatch, Sampled
from driftline.services.rollout.speculation.judging import judge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS, PAGES, WINDOW = 12, 4, 4
VOCABULARY = 1024


def k3() -> CausalLM:
    return random_model(K3Config.model_validate({
        "vocab_size": VOCABULARY, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024, "q_lora_rank": 256,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 32, "num_experts_per_token": 4, "num_shared_experts": 1,
        "moe_intermediate_size": 256, "routed_expert_hidden_size": 512, "attn_res_block_size": 2,
        "linear_attn_config": {"num_heads": 4, "head_dim": 128, "full_attn_layers": (4,), "kda_layers": (1, 2, 3)},
    }), device="cuda")


def dense() -> CausalLM:
    return random_model(DenseConfig.of({
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 9,
        "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu",
    }, "smollm2"), device="cuda")


MODELS = {"k3": k3, "dense": dense}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> CausalLM:
    return MODELS[request.param]().eval().requires_grad_(False)


class Sequences:
    """Rows in a pool of a runner's own, decoded as asked."""

    def __init__(self, model: CausalLM, *, graphs: bool, window: int = 1, **settings: Any) -> None:
        self.pool = Pool.make(model, pages=1 + ROWS * PAGES, slots=ROWS, window=window)
        self.runner = GraphRunner(model, self.pool, 8, **settings) if graphs else EagerRunner(model, self.pool, **settings)
        self.tables = 1 + np.arange(ROWS * PAGES, dtype=np.int32).reshape(ROWS, PAGES)
        self.keys = np.arange(ROWS, dtype=np.uint64) * np.uint64(2**60) + np.uint64(5)
        self.pending = np.zeros(ROWS, dtype=np.int32)
        rng = np.random.default_rng(0)
        self.tokens = [rng.integers(0, VOCABULARY, 5 + 9 * i).tolist() for i in range(ROWS)]
        self.prompts = [len(tokens) for tokens in self.tokens]
        out = self.runner.prefill(PrefillBatch(
            np.concatenate(self.tokens).astype(np.int64), self.prompts, np.arange(ROWS, dtype=np.int32), self.tables, np.zeros(ROWS, dtype=np.int32), self.keys,
            np.zeros(ROWS, dtype=np.int64), np.ones(ROWS, dtype=np.float32)))
        for i in range(ROWS):
            self.tokens[i].append(int(out.tokens[i, 0]))
        self.seen = [out]

    def step(self, rows: Sequence[int], drafts: np.ndarray | None = None) -> Sampled:
        at = np.array(rows)
        tokens = np.array([self.tokens[i][-1:] for i in rows], dtype=np.int64)
        tokens = tokens if drafts is None else np.concatenate([tokens, drafts], axis=1)
        lengths = np.array([len(self.tokens[i]) - 1 for i in rows], dtype=np.int32)
        positions = np.array([len(self.tokens[i]) - self.prompts[i] for i in rows], dtype=np.int64)
        out = self.runner.decode(DecodeBatch(tokens, at.astype(np.int32), self.tables[at], lengths, self.keys[at], positions, np.ones(len(rows), dtype=np.float32),
                                             accepted=None if drafts is None else self.pending[at]))
        for n, i in enumerate(rows):
            stand = 0
            if drafts is not None:
                stand = next((j for j in range(drafts.shape[1]) if drafts[n, j] != out.tokens[n, j]), drafts.shape[1])
                self.pending[i] = stand + 1
            self.tokens[i] += out.tokens[n, : stand + 1].tolist()
        self.seen.append(out)
        return out


def equal(one: Sequences, other: Sequences) -> bool:
    """To the bit, and numbers."""
    return all(np.isfinite(sampled.logprobs).all() for sampled in one.seen) and all(np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs.view(np.int32), b.logprobs.view(np.int32)) and np.array_equal(a.routes, b.routes)
               for a, b in zip(one.seen, other.seen, strict=True))


def test_draws_of_the_device_are_the_hosts_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, 100_000, dtype=np.uint64)
    positions = rng.integers(0, 2**40, 100_000)
    found = device_uniforms(torch.from_numpy(keys.view(np.int64)).cuda(), torch.from_numpy(positions).cuda()).cpu().numpy()
    assert np.array_equal(found, uniforms(keys, positions))


@pytest.mark.parametrize("numerics", list(Numerics))
def test_replayed_steps_are_eager_steps(model: CausalLM, numerics: Numerics) -> None:
    """In fast mode of whole buckets, because a batch of another size may be summed in another order; in deterministic mode of any rows."""
    with using(numerics):
        replayed, eager = Sequences(model, graphs=True), Sequences(model, graphs=False)
        batches = [[0, 1, 2, 3], [4, 5], [3, 1, 0, 2], [7], [4, 8, 9, 10, 11, 2, 1, 0]]
        batches += [] if numerics is Numerics.FAST else [[0, 1, 2], [11, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4, 3]]
        for rows in batches * 3:
            replayed.step(rows)
            eager.step(rows)
    assert isinstance(replayed.runner, GraphRunner)
    assert replayed.runner.refused == {}
    assert replayed.runner.tally.replayed == len(batches) * 3
    assert equal(replayed, eager)
    if numerics is Numerics.DETERMINISTIC:
        assert replayed.runner.tally.padding > 0


def test_windows_are_replayed_too(model: CausalLM) -> None:
    with using(Numerics.DETERMINISTIC):
        plain, replayed = Sequences(model, graphs=False), Sequences(model, graphs=True, window=WINDOW)
        rows = [0, 3, 5]
        for _ in range(10):
            plain.step(rows)
        gained = 0
        for step in range(3):
            drafts = np.array([plain.tokens[i][len(replayed.tokens[i]) :][: WINDOW - 1] for i in rows], dtype=np.int64)
            drafts[:, step:] = (drafts[:, step:] + 1) % VOCABULARY
            replayed.step(rows, drafts)
            gained += int(replayed.pending[rows].sum())
        assert gained == 3 * (1 + 2 + 3)
    assert isinstance(replayed.runner, GraphRunner)
    assert replayed.runner.tally.replayed == 3
    for i in rows:
        assert replayed.tokens[i] == plain.tokens[i][: len(replayed.tokens[i])]


def test_a_rule_is_replayed(model: CausalLM) -> None:
    made = [Sequences(model, graphs=graphs, window=WINDOW, rule=judge) for graphs in (True, False)]
    drafts = np.arange(4 * (WINDOW - 1), dtype=np.int64).reshape(4, -1)
    one, other = (sequences.step([0, 1, 2, 3], drafts) for sequences in made)
    assert isinstance(made[0].runner, GraphRunner)
    assert made[0].runner.refused == {}
    assert one.accepted is not None
    assert np.array_equal(one.accepted, other.accepted)  # type: ignore[arg-type]
    assert np.array_equal(one.tokens, other.tokens)


def test_weights_changed_in_place_are_the_next_replays(model: CausalLM) -> None:
    replayed, eager = Sequences(model, graphs=True), Sequences(model, graphs=False)
    weight = model.lm_head.weight
    rows = [0, 1, 2, 3]
    for sequences in (replayed, eager):
        sequences.step(rows)
    before = weight.clone()
    try:
        weight.copy_(before.roll(1, 0))
        assert isinstance(replayed.runner, GraphRunner)
        replayed.runner.weights_changed()
        assert len(replayed.runner.graphs) == 1
        for sequences in (replayed, eager):
            sequences.step(rows)
        assert equal(replayed, eager)
        changed = replayed.seen[-1].logprobs.copy()
    finally:
        weight.copy_(before)
    replayed.tokens = [tokens[:-1] for tokens in replayed.tokens]
    assert not np.array_equal(replayed.step(rows).logprobs, changed)


@pytest.mark.parametrize("spoils", [lambda: float(torch.ones(1, device="cuda").sum()), torch.cuda.synchronize], ids=["reads a value", "waits for the device"])
def test_what_cannot_be_captured_goes_on_eagerly_and_spoils_nothing_else(model: CausalLM, spoils: Callable[[], object]) -> None:
    """The first is found by the watch; the second by the driver, in the middle of a capture, after which others must still be made."""
    rows = [0, 1, 2, 3]
    spoiled, eager = Sequences(model, graphs=True), Sequences(model, graphs=False)

    def spoiling(module: torch.nn.Module, args: object, out: object) -> None:
        spoils()

    hook = model.get_submodule("model.layers.1").register_forward_hook(spoiling)
    try:
        spoiled.step(rows)
    finally:
        hook.remove()
    eager.step(rows)
    assert isinstance(spoiled.runner, GraphRunner)
    assert len(spoiled.runner.refused) == 1
    assert equal(spoiled, eager)
    spoiled.step([0, 1])
    eager.step([0, 1])
    assert spoiled.runner.tally.replayed == 1
    assert equal(spoiled, eager)
    torch.cuda.synchronize()


def test_graphs_share_the_memory_of_what_is_made_within(model: CausalLM) -> None:
    sequences = Sequences(model, graphs=True)
    assert isinstance(sequences.runner, GraphRunner)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    assert sequences.runner.warm() == 4
    both = torch.cuda.memory_reserved() - before
    alone = Sequences(model, graphs=True)
    assert isinstance(alone.runner, GraphRunner)
    before = torch.cuda.memory_reserved()
    alone.step(list(range(8)))
    assert both <= 2 * max(torch.cuda.memory_reserved() - before, 64 << 20)
