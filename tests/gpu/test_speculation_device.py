"""Speculation on the device: the bits of plain decoding, eagerly and in graphs, whoever drafts; and rejection's distribution where its draws are made."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from driftline.kernels.mode import Numerics, using
from driftline.models.causal_lm import CausalLM
from driftline.models.config import tiny
from driftline.models.dense.config import DenseConfig
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.drafter import Drafter, DrafterConfig
from driftline.models.model import K3ForCausalLM
from driftline.services.rollout.speculation import NgramDrafter, Speculator
from driftline.services.rollout.speculation.judging import judge
from driftline.services.rollout.speculation.learned import TrainedDrafter
from driftline.services.rollout_config import SpeculationRule

sys.path.insert(0, str(Path(__file__).parents[1]))
from speculated import sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [[7, 8, 9, 7, 8], [7, 8, 9, 7, 8, 1, 2, 3, 7, 8, 9], [5] * 70, [1, 2, 3, 4]]


def _model(kind: str) -> CausalLM:
    torch.manual_seed(3)
    if kind == "k3":
        model: CausalLM = K3ForCausalLM(tiny(vocab_size=64, max_position_embeddings=512))
    else:
        model = DenseForCausalLM(DenseConfig(model_type="llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                                             num_key_value_heads=2, head_dim=32, vocab_size=64, max_position_embeddings=512))
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
    return model.to("cuda", torch.bfloat16).eval()


def _drafter(name: str, model: CausalLM) -> NgramDrafter | TrainedDrafter:
    if name == "ngram":
        return NgramDrafter(shortest=1)
    torch.manual_seed(4)
    return TrainedDrafter(Drafter(DrafterConfig.of(model.config)).to("cuda", torch.bfloat16), model)


@pytest.mark.parametrize("kind", ["k3", "dense"])
@pytest.mark.parametrize("name", ["ngram", "trained"])
@pytest.mark.parametrize("graphs", [False, True])
def test_matching_gives_the_bits_of_plain_decoding_on_a_device(kind: str, name: str, graphs: bool) -> None:
    model = _model(kind)
    speculator = Speculator(_drafter(name, model))
    with using(Numerics.DETERMINISTIC):
        plain = sample(model, PROMPTS, None, tokens=40)
        drafted = sample(model, PROMPTS, speculator, tokens=40, graphs=graphs)
    assert [row.sampled for row in drafted] == [row.sampled for row in plain]
    assert [row.logprobs for row in drafted] == [row.logprobs for row in plain]
    assert sum(speculator.acceptance.stood) < sum(speculator.acceptance.reached), "nothing was refused, and nothing was shown"
    if (kind, name) != ("dense", "trained"):  # an untrained drafter of that model never guesses right
        assert sum(speculator.acceptance.stood) > 0


@pytest.mark.parametrize("name", ["ngram", "trained"])
def test_rejection_in_graphs_and_eagerly_takes_the_same_path(name: str) -> None:
    model = _model("dense")
    paths = []
    for graphs in (False, True):
        with using(Numerics.DETERMINISTIC):
            speculator = Speculator(_drafter(name, model), rule=SpeculationRule.REJECTION)
            paths.append([row.sampled for row in sample(model, PROMPTS, speculator, tokens=40, graphs=graphs)])
    assert paths[0] == paths[1]


def test_rejection_leaves_the_distribution_on_a_device() -> None:
    rows, size = 400_000, 5
    random = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(size, size, device="cuda", generator=random)
    q = torch.softmax(torch.randn(size, device="cuda", generator=random), 0)
    draft = torch.multinomial(q, rows, replacement=True, generator=random)
    tokens = torch.stack([torch.zeros_like(draft), draft], 1)
    keys = torch.from_numpy((np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)).cuda()
    ones = torch.ones(rows, dtype=torch.int32, device="cuda")
    verdict = judge(logits[tokens], tokens, ones, torch.ones(rows, device="cuda"), keys, torch.zeros_like(keys), q.expand(rows, 1, size))
    seen = torch.bincount(verdict.tokens[:, 0], minlength=size).double() / rows
    assert float((seen - logits[0].softmax(0).double()).abs().sum() / 2) < 0.003
    assert float((torch.bincount(draft, minlength=size).double() / rows - logits[0].softmax(0).double()).abs().sum() / 2) > 0.03, "the drafts alone are far from it"
