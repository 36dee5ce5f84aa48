"""Speculation on real layers: the tokens and, in deterministic mode, the bits of plain decoding, whoever drafts; under rejection the log-probabilities of the target."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from speculated import sample

from driftline.kernels.mode import Numerics, using
from driftline.models.causal_lm import CausalLM
from driftline.models.config import tiny
from driftline.models.dense.config import DenseConfig
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.drafter import Drafter, DrafterConfig
from driftline.models.model import K3ForCausalLM
from driftline.services.rollout.speculation import Drafts, NgramDrafter, Row, Speculator
from driftline.services.rollout.speculation.learned import Choice, TrainedDrafter
from driftline.services.rollout_config import SpeculationRule

PROMPTS = [[7, 8, 9, 7, 8], [7, 8, 9, 7, 8, 1, 2, 3, 7, 8, 9], [5] * 70]
TOKENS = 40


def _model(kind: str) -> CausalLM:
    torch.manual_seed(3)
    if kind == "k3":
        model: CausalLM = K3ForCausalLM(tiny(num_hidden_layers=3, hidden_size=64, vocab_size=24, max_position_embeddings=512))
    else:
        model = DenseForCausalLM(DenseConfig(model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                             vocab_size=24, max_position_embeddings=512))
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)  # sure of itself, so that drafts stand now and then
    return model.eval()


def _drafter(name: str, model: CausalLM) -> NgramDrafter | TrainedDrafter:
    if name == "ngram":
        return NgramDrafter(shortest=1)
    torch.manual_seed(4)
    network = Drafter(DrafterConfig.of(model.config))
    return TrainedDrafter(network, model, choice=Choice(name))


@pytest.mark.parametrize("kind", ["k3", "dense"])
@pytest.mark.parametrize("name", ["ngram", "likeliest", "coupled"])
def test_matching_gives_the_bits_of_plain_decoding(kind: str, name: str) -> None:
    model = _model(kind)
    speculator = Speculator(_drafter(name, model))
    with using(Numerics.DETERMINISTIC):
        plain = sample(model, PROMPTS, None, tokens=TOKENS)
        drafted = sample(model, PROMPTS, speculator, tokens=TOKENS)
    assert [row.sampled for row in drafted] == [row.sampled for row in plain]
    assert [row.logprobs for row in drafted] == [row.logprobs for row in plain]
    assert sum(speculator.acceptance.stood) > 0, "nothing was accepted, and nothing was shown"
    assert sum(speculator.acceptance.stood) < sum(speculator.acceptance.reached), "nothing was refused, and nothing was shown"


class _Fixed(NgramDrafter):
    """Drafts what a plain run sampled, but for every third token."""

    def __init__(self, paths: Sequence[list[int]], prompts: Sequence[int]) -> None:
        super().__init__()
        self._paths, self._prompts = paths, prompts

    def propose(self, rows: Sequence[Row], limits: Sequence[int], *, probs: bool = False) -> Drafts:
        tokens = np.zeros((len(rows), max(limits)), dtype=np.int64)
        for i, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            assert isinstance(row.id, int)
            at = len(row.history) - self._prompts[row.id]
            for j, token in enumerate(self._paths[row.id][at : at + limit]):
                tokens[i, j] = token if (at + j) % 3 else (token + 1) % 24
        return Drafts(tokens, np.array(limits, dtype=np.int32))


@pytest.mark.parametrize("kind", ["k3", "dense"])
def test_a_token_too_many_would_be_seen(kind: str) -> None:
    """The comparison above can fail: drafts that are taken without agreeing change what is sampled."""
    model = _model(kind)
    with using(Numerics.DETERMINISTIC):
        plain = sample(model, PROMPTS, None, tokens=TOKENS)
        honest = sample(model, PROMPTS, Speculator(_Fixed([row.sampled for row in plain], [len(p) for p in PROMPTS])), tokens=TOKENS)
        assert [row.sampled for row in honest] == [row.sampled for row in plain]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("speculated.agreeing", lambda drafts, counts, chosen: counts.copy())
            credulous = sample(model, PROMPTS, Speculator(_Fixed([row.sampled for row in plain], [len(p) for p in PROMPTS])), tokens=TOKENS)
    assert [row.sampled for row in credulous] != [row.sampled for row in plain]


@pytest.mark.parametrize("kind", ["k3", "dense"])
@pytest.mark.parametrize("name", ["ngram", "coupled"])
def test_rejection_reports_what_the_target_says_of_its_path(kind: str, name: str) -> None:
    model = _model(kind)
    speculator = Speculator(_drafter(name, model), rule=SpeculationRule.REJECTION)
    rows = sample(model, PROMPTS, speculator, tokens=TOKENS, temperature=0.9)
    assert 0 < sum(speculator.acceptance.stood) < sum(speculator.acceptance.reached)
    for row in rows:
        assert len(row.sampled) == TOKENS
        hidden = model(torch.tensor([list(row.history)[:-1]])).hidden[0, row.prompt - 1 :]
        expected = torch.log_softmax(model.logits(hidden) / 0.9, -1).gather(-1, torch.tensor(row.sampled)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(row.logprobs), expected, atol=2e-4)


def test_rejection_leaves_the_distribution_with_a_trained_drafter_on_a_real_model() -> None:
    """A chi-squared test of second tokens, which a draft gives in a good part of the rows, against the model's own probabilities."""
    model = _model("dense")
    rows = []
    accepted = 0
    for part in range(4):
        speculator = Speculator(_drafter("coupled", model), rule=SpeculationRule.REJECTION)
        rows += sample(model, [[7, 8, 9, part]] * 500, speculator, tokens=3)
        accepted += sum(speculator.acceptance.stood)
    assert accepted > 100
    seen = np.zeros((24,))
    expected = np.zeros((24,))
    with torch.no_grad():
        for row in rows:
            seen[row.sampled[1]] += 1
        for part in range(4):
            firsts = [row.sampled[0] for row in rows if row.history[3] == part]
            tokens = torch.tensor([[7, 8, 9, part, first] for first in firsts])
            expected += model.logits(model(tokens).hidden[:, -1]).softmax(-1).sum(0).numpy()
    common = expected >= 5
    statistic = float((((seen - expected) ** 2 / expected)[common]).sum())
    freedom = int(common.sum())
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_greedy_rows_under_rejection_take_the_likeliest_tokens() -> None:
    model = _model("dense")
    plain = sample(model, PROMPTS, None, tokens=20, temperature=0.0)
    drafted = sample(model, PROMPTS, Speculator(NgramDrafter(shortest=1), rule=SpeculationRule.REJECTION), tokens=20, temperature=0.0)
    assert [row.sampled for row in drafted] == [row.sampled for row in plain]
    assert np.allclose([row.logprobs for row in drafted], [row.logprobs for row in plain], atol=1e-5)


def test_a_row_whose_newest_position_the_drafter_has_not_seen_has_no_drafts() -> None:
    model = _model("dense")
    drafter = _drafter("coupled", model)
    assert isinstance(drafter, TrainedDrafter)
    assert drafter.propose([Row("stranger", array("i", [1, 2, 3]), 9)], [3]).counts.tolist() == [0]
