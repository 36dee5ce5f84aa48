"""Runners over real models and pools: prompts, steps and windows give what the model gives, and a graph's padding, buckets and replays are not to be seen in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from runner_cases import Remembers

from driftline.kernels.mode import Numerics, using
from driftline.models.causal_lm import CausalLM
from driftline.models.config import tiny
from driftline.models.dense.config import DenseConfig
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.drafter.taps import Taps
from driftline.models.lora.bank import AdapterBank
from driftline.models.model import K3ForCausalLM
from driftline.models.paged import Pool
from driftline.services.rollout.randomness import uniforms
from driftline.services.rollout.runner import DecodeBatch, EagerRunner, GraphRunner, PrefillBatch, Sampled
from driftline.services.rollout.sampler import draw

torch.set_num_threads(1)

PROMPTS = ([5, 9, 30, 2], [7] * 70, [11, 3])
PAGES = 4


def k3() -> CausalLM:
    torch.manual_seed(0)
    return K3ForCausalLM(tiny(num_hidden_layers=4)).eval()


def dense() -> CausalLM:
    torch.manual_seed(0)
    return DenseForCausalLM(DenseConfig.of({
        "model_type": "llama", "vocab_size": 264, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": True, "hidden_act": "silu",
    }, "test")).eval()


class Rows:
    """Sequences in a pool, as an engine would drive a runner over them."""

    def __init__(self, runner: EagerRunner, prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
        self.runner, self.count = runner, len(prompts)
        self.tokens = [list(prompt) for prompt in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.slots = np.arange(self.count, dtype=np.int32)
        self.tables = 1 + np.arange(self.count * PAGES, dtype=np.int32).reshape(self.count, PAGES)
        self.keys = np.arange(self.count, dtype=np.uint64) * np.uint64(2**61) + np.uint64(3)
        self.pending = np.zeros(self.count, dtype=np.int32)
        self.first: dict[int, int] = {}

    def prefill(self, chunk: int = 1000) -> Sampled:
        done = 0
        while True:
            parts = [tokens[done : done + chunk] for tokens in self.tokens]
            rows = [i for i, part in enumerate(parts) if part]
            ends = [i for i in rows if done + len(parts[i]) == len(self.tokens[i])]
            at = np.array(rows)
            out = self.runner.prefill(PrefillBatch(
                np.array([t for i in rows for t in parts[i]], dtype=np.int64), [len(parts[i]) for i in rows], self.slots[at], self.tables[at],
                np.full(len(rows), done, dtype=np.int32), self.keys[at], np.zeros(len(rows), dtype=np.int64), np.ones(len(rows), dtype=np.float32), sample=bool(ends)))
            sampled = {i: (int(out.tokens[n, 0]), float(out.logprobs[n, 0])) for n, i in enumerate(rows) if i in ends}
            done += chunk
            for i, (token, logprob) in sampled.items():
                self.first[i] = token
                self.logprobs[i].append(logprob)
            if len(self.first) == self.count:
                for i, token in self.first.items():
                    self.tokens[i].append(token)
                return out

    def decode(self, rows: Sequence[int], *, adapters: Sequence[int] | None = None, drafts: np.ndarray | None = None) -> Sampled:
        at = np.array(rows)
        last = np.array([[self.tokens[i][-1]] for i in rows], dtype=np.int64)
        lengths = np.array([len(self.tokens[i]) - 1 for i in rows], dtype=np.int32)
        positions = np.array([len(self.logprobs[i]) for i in rows], dtype=np.int64)
        tokens = last if drafts is None else np.concatenate([last, drafts], axis=1)
        out = self.runner.decode(DecodeBatch(tokens, self.slots[at], self.tables[at], lengths, self.keys[at], positions, np.ones(len(rows), dtype=np.float32),
                                             accepted=None if drafts is None else self.pending[at], adapters=adapters))
        for n, i in enumerate(rows):
            stand = 0
            if drafts is not None:
                while stand < drafts.shape[1] and drafts[n, stand] == out.tokens[n, stand]:
                    stand += 1
                self.pending[i] = stand + 1
            self.tokens[i] += out.tokens[n, : stand + 1].tolist()
            self.logprobs[i] += out.logprobs[n, : stand + 1].tolist()
        return out


def graphs(model: CausalLM, window: int = 1, **settings: object) -> GraphRunner:
    return GraphRunner(model, pool(model, window), 8, capture=Remembers(watched=False), **settings)  # type: ignore[arg-type]


def pool(model: CausalLM, window: int = 1) -> Pool:
    return Pool.make(model, pages=1 + len(PROMPTS) * PAGES, slots=len(PROMPTS), window=window)


@pytest.fixture(autouse=True)
def bits() -> object:
    with using(Numerics.DETERMINISTIC):
        yield


@pytest.mark.parametrize("make", [k3, dense])
def test_a_prefill_samples_what_the_forward_of_the_whole_prompt_does(make) -> None:  # type: ignore[no-untyped-def]
    model = make()
    rows = Rows(EagerRunner(model, pool(model)))
    out = rows.prefill()
    for i, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            whole = model(torch.tensor([prompt]))
            token, logprob = draw(model, whole.hidden[:, -1], torch.ones(1), uniforms(rows.keys[i : i + 1], np.zeros(1, dtype=np.int64)))
        assert rows.tokens[i][-1] == int(token)
        assert rows.logprobs[i][0] == float(logprob)
    assert out.routes.shape[0] == sum(map(len, PROMPTS))


@pytest.mark.parametrize("make", [k3, dense])
def test_graphs_and_pieces_of_prompts_are_not_to_be_seen_in_what_is_sampled(make) -> None:  # type: ignore[no-untyped-def]
    model = make()
    eager, replayed = Rows(EagerRunner(model, pool(model))), Rows(graphs(model))
    eager.prefill()
    replayed.prefill(chunk=64)
    for rows in ([0, 1, 2], [2, 0], [1], [0, 1, 2], [1, 2]):
        one, other = eager.decode(rows), replayed.decode(rows)
        assert np.array_equal(one.routes, other.routes)
    assert eager.tokens == replayed.tokens
    assert eager.logprobs == replayed.logprobs
    assert isinstance(replayed.runner, GraphRunner)
    assert replayed.runner.tally.replayed == 5
    assert replayed.runner.refused == {}


@pytest.mark.parametrize("make", [k3, dense])
def test_windows_of_drafts_sample_what_steps_sample(make) -> None:  # type: ignore[no-untyped-def]
    """Drafts that stand in part, wholly and not at all: the path is plain decoding's, and so are its log-probabilities."""
    model = make()
    plain, drafted = Rows(EagerRunner(model, pool(model))), Rows(graphs(model, 3))
    plain.prefill()
    drafted.prefill()
    for _ in range(9):
        plain.decode([0, 1, 2])
    rng = np.random.default_rng(0)
    accepted = 0
    for step in range(3):
        drafts = np.array([plain.tokens[i][len(drafted.tokens[i]) :][:2] for i in range(3)], dtype=np.int64)
        wrong = rng.integers(0, 264, drafts.shape)
        drafts = np.where(np.arange(2) < np.array([[step], [2 - step], [1]]), drafts, wrong)
        drafted.decode([0, 1, 2], drafts=drafts)
        accepted += int((drafted.pending - 1).sum())
    assert accepted >= 9
    for i in range(3):
        count = len(drafted.logprobs[i])
        assert drafted.tokens[i] == plain.tokens[i][: len(drafted.tokens[i])]
        assert drafted.logprobs[i] == plain.logprobs[i][:count]
    assert isinstance(drafted.runner, GraphRunner)
    assert drafted.runner.tally.replayed == 3


def test_members_of_a_group_draw_behind_one_prompt() -> None:
    """Each with a draw of its own, and as if the prompt had been computed for it alone; the likeliest where the temperature is 0."""
    model = k3()
    alone = Rows(EagerRunner(model, pool(model)))
    alone.keys[:] = 7
    alone.prefill()
    rows = Rows(EagerRunner(model, pool(model)))
    out = rows.runner.prefill(PrefillBatch(
        np.array([t for p in PROMPTS for t in p], dtype=np.int64), [len(p) for p in PROMPTS], rows.slots, rows.tables, np.zeros(3, dtype=np.int32),
        np.array([3, 7, 9, 7, 7], dtype=np.uint64), np.zeros(5, dtype=np.int64), np.array([1, 1, 1, 1, 0], dtype=np.float32), behind=np.array([0, 0, 2, 1, 1])))
    assert out.tokens.shape == (5, 1)
    assert (out.tokens[1, 0], out.tokens[3, 0]) == (alone.tokens[0][-1], alone.tokens[1][-1])
    assert (out.logprobs[1, 0], out.logprobs[3, 0]) == (np.float32(alone.logprobs[0][0]), np.float32(alone.logprobs[1][0]))
    with torch.inference_mode():
        assert out.tokens[4, 0] == int(model.logits(out.hidden[1, 0]).argmax())


@pytest.mark.parametrize("make", [k3, dense])
def test_what_a_drafter_taps_is_of_each_token_and_the_same_from_a_graph(make) -> None:  # type: ignore[no-untyped-def]
    model = make()
    with Taps(model, (1, 2)) as taps:
        eager, replayed = Rows(EagerRunner(model, pool(model), taps=taps.take)), Rows(graphs(model, taps=taps.take))
        begun = [rows.prefill() for rows in (eager, replayed)]
        stepped = [rows.decode([0, 2, 1]) for rows in (eager, replayed)]
    width = 2 * model.config.hidden_size
    for (one, other), shape in ((begun, (sum(map(len, PROMPTS)), width)), (stepped, (3, 1, width))):
        assert one.taps is not None
        assert other.taps is not None
        assert tuple(one.taps.shape) == shape
        assert torch.equal(one.taps, other.taps)


def test_rows_without_an_adapter_are_replayed_under_a_bank_and_others_are_not() -> None:
    plain = Rows(EagerRunner(k3(), pool(k3())))
    plain.prefill()
    plain.decode([0, 1])
    model = k3()
    bank = AdapterBank(model, slots=2, rank=2)
    banked = Rows(graphs(model, bank=bank))
    banked.prefill()
    banked.decode([0, 1], adapters=[-1, -1])
    assert isinstance(banked.runner, GraphRunner)
    assert (banked.runner.tally.replayed, banked.runner.tally.eager) == (1, 0)
    assert banked.tokens == plain.tokens
    assert banked.logprobs == plain.logprobs


def test_a_step_that_is_not_within_its_own_slot_shows() -> None:
    """What the bitwise tests above rest on: a row decoded over another row's state and pages gives other log-probabilities."""
    model = k3()
    right, wrong = Rows(EagerRunner(model, pool(model))), Rows(EagerRunner(model, pool(model)))
    for rows in (right, wrong):
        rows.prefill()
    wrong.slots[:2] = wrong.slots[[1, 0]]
    right.decode([0, 1])
    wrong.decode([0, 1])
    assert right.logprobs != wrong.logprobs
