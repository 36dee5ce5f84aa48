"""The warm start: what it may see, what it optimises, and what it says it did."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from driftline.environments.source import MixturePart
from driftline.environments.split import is_heldout
from driftline.messages.errors import ConfigError
from driftline.models.checkpoint import checkpoint_dir, load_checkpoint
from driftline.models.config import tiny
from driftline.models.logprob import token_logprobs
from driftline.models.model import K3ForCausalLM
from driftline.models.tokenizer import ByteTokenizer
from driftline.services.learner.corpus import Corpus, build_corpus
from driftline.services.learner.pretrain import PretrainConfig, answer_loss, main, pretrain

torch.set_num_threads(1)
RECIPE = Path(__file__).parents[3] / "examples" / "pretrain.toml"
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_experts": 4}
TOKENIZER = ByteTokenizer()


def made_of(pairs: list[tuple[str, str]]) -> Corpus:
    prompts = [TOKENIZER.encode_prompt(question) for question, _ in pairs]
    rows = [[*p, *TOKENIZER.encode(answer), TOKENIZER.eos] for p, (_, answer) in zip(prompts, pairs, strict=True)]
    tokens = np.full((len(rows), max(map(len, rows))), TOKENIZER.pad, dtype=np.int16)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return Corpus(tokens, np.array([len(p) for p in prompts], dtype=np.int16), np.array([len(r) for r in rows], dtype=np.int16))


def recipe(**train: float) -> PretrainConfig:
    settings = {"steps": 30, "batch": 16, "warmup": 5, **train}
    return PretrainConfig.model_validate({"model": SIZES, "train": settings, "mixture": [{"family": "gcd"}]})


TRIVIAL = made_of([(f"copy {c}", c * 2) for c in "abcdefgh"])


def loss_on(model: K3ForCausalLM, corpus: Corpus) -> float:
    tokens, prompt, total = (torch.from_numpy(x.astype("int64")) for x in (corpus.tokens, corpus.prompt, corpus.total))
    with torch.no_grad():
        return float(answer_loss(model, tokens, prompt, total))


@pytest.fixture(scope="module")
def shipped_corpus() -> Corpus:
    config = PretrainConfig.load(RECIPE)
    return build_corpus(config.parts(), 600, 0, config.train.max_tokens)


def test_no_held_out_question_is_in_the_shipped_recipes_corpus(shipped_corpus: Corpus) -> None:
    questions = [TOKENIZER.decode(row[1 : end - 1].tolist())
                 for row, end in zip(shipped_corpus.tokens, shipped_corpus.prompt, strict=True)]
    assert len(questions) > 550
    assert len(set(questions)) > 300
    assert not any(is_heldout(question) for question in questions)


def test_every_row_is_a_prompt_and_an_ended_answer(shipped_corpus: Corpus) -> None:
    assert shipped_corpus.total.max() == shipped_corpus.tokens.shape[1] <= 112
    for row, prompt, total in zip(shipped_corpus.tokens, shipped_corpus.prompt, shipped_corpus.total, strict=True):
        assert row[0] == TOKENIZER.bos
        assert row[prompt - 1] == ord("\n")
        assert row[total - 1] == TOKENIZER.eos
        assert total > prompt + 1  # an answer, not only its end
        assert (row[total:] == TOKENIZER.pad).all()
        assert ((row[1 : total - 1] >= 0) & (row[1 : total - 1] < 256)).all()


def test_parts_share_the_corpus_by_weight_and_the_seed_decides_it() -> None:
    parts = (MixturePart("gcd", {}, 3.0), MixturePart("count_bits", {"min_n": 1, "max_n": 1023}, 1.0))
    corpus = build_corpus(parts, 40, 5, 200)
    bits = sum("binary" in TOKENIZER.decode(row.tolist()) for row in corpus.tokens)
    assert (len(corpus), bits) == (40, 10)
    assert np.array_equal(corpus.tokens, build_corpus(parts, 40, 5, 200).tokens)
    other = build_corpus(parts, 40, 6, 200)
    assert other.tokens.shape != corpus.tokens.shape or not np.array_equal(other.tokens, corpus.tokens)


def test_questions_that_cannot_fit_are_refused_by_family() -> None:
    with pytest.raises(ConfigError, match=r"gcd.*max_tokens = 8"):
        build_corpus((MixturePart("gcd", {}, 1.0),), 2, 0, 8)


def test_a_corpus_survives_its_file_and_another_file_is_refused(tmp_path: Path) -> None:
    TRIVIAL.save(tmp_path / "c.npz")
    again = Corpus.load(tmp_path / "c.npz")
    assert np.array_equal(again.tokens, TRIVIAL.tokens)
    assert np.array_equal(again.total, TRIVIAL.total)
    (tmp_path / "bad.npz").write_bytes(b"no corpus")
    with pytest.raises(ConfigError, match="not a corpus file"):
        Corpus.load(tmp_path / "bad.npz")
    with pytest.raises(ConfigError, match="not a corpus file"):
        Corpus.load(tmp_path / "missing.npz")


def test_the_loss_is_the_mean_over_answer_tokens_and_no_prompt_token() -> None:
    torch.manual_seed(0)
    model = K3ForCausalLM(tiny(**SIZES)).double()
    corpus = made_of([("a longer question", "yes"), ("short", "n")])
    want = []
    for row, prompt, total in zip(corpus.tokens.astype("int64"), corpus.prompt, corpus.total, strict=True):
        ids = torch.from_numpy(row[:total])
        with torch.no_grad():
            logits = model.logits(model(ids[None, :-1]).hidden[0])
        want.append(-token_logprobs(logits, ids[1:])[0][prompt - 1 :])
    assert [len(w) for w in want] == [4, 2]  # eos is an answer token
    assert abs(loss_on(model, corpus) - float(torch.cat(want).mean())) < 1e-10


def test_thirty_steps_learn_a_trivial_corpus_and_the_summary_is_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = loss_on(K3ForCausalLM(tiny(**SIZES)), TRIVIAL)
    summary = pretrain(recipe(lr=1e-2), tmp_path, corpus=TRIVIAL)
    model = load_checkpoint(str(tmp_path))
    assert before > 0.8 * math.log(264)
    assert loss_on(model, TRIVIAL) < 0.5 * before
    assert json.loads((tmp_path / "pretrain.json").read_text()) == summary
    assert summary["config"] == recipe(lr=1e-2).model_dump(mode="json")
    assert summary["parameters"] == sum(p.numel() for p in model.parameters())
    assert summary["examples"] == len(TRIVIAL)
    assert summary["curve"][-1]["step"] == 30


def test_stopping_early_leaves_the_schedule_of_the_whole_run(tmp_path: Path) -> None:
    whole = pretrain(recipe(steps=6), tmp_path / "whole", corpus=TRIVIAL, save_every=2)
    short = pretrain(recipe(steps=6, stop_after=2), tmp_path / "short", corpus=TRIVIAL)
    assert (whole["curve"][-1]["step"], short["curve"][-1]["step"]) == (6, 2)
    there, here = load_checkpoint(str(tmp_path / "whole" / "step-2")), load_checkpoint(str(tmp_path / "short"))
    assert all(torch.equal(a, b) for a, b in zip(there.parameters(), here.parameters(), strict=True))
    end = load_checkpoint(str(tmp_path / "whole"))
    assert not all(torch.equal(a, b) for a, b in zip(end.parameters(), here.parameters(), strict=True))


def test_the_corpus_alone_can_be_made_and_trained_on_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        '[model]\nnum_hidden_layers = 2\nhidden_size = 32\n[train]\nexamples = 8\nsteps = 1\nbatch = 4\nmax_tokens = 200\n[[mixture]]\nfamily = "gcd"\n'
    )
    main(file, tmp_path / "out", corpus_only=tmp_path / "c.npz")
    assert not (tmp_path / "out").exists()
    main(file, tmp_path / "out", corpus=tmp_path / "c.npz", device="cpu")
    assert json.loads((tmp_path / "out" / "pretrain.json").read_text())["examples"] == 8


@pytest.mark.parametrize(("text", "message"), [
    ("[train]\nstep = 3\n[[mixture]]\nfamily = 'gcd'\n", r"train\.step"),
    ("[train]\nlr = 0.0\n[[mixture]]\nfamily = 'gcd'\n", r"train\.lr"),
    ("[train]\n", "mixture"),
    ("[[mixture]]\nfamily = 'gcd'\nweight = 0\n", "weight"),
    ("[train", "cannot be read"),
])
def test_a_wrong_recipe_is_refused_by_field(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        PretrainConfig.load(tmp_path / "r.toml")


def test_the_shipped_policy_was_made_by_the_shipped_recipe() -> None:
    shipped = json.loads((checkpoint_dir("base") / "pretrain.json").read_text())
    assert shipped["config"] == PretrainConfig.load(RECIPE).model_dump(mode="json")
    assert shipped["curve"][-1]["step"] == 750
    assert shipped["parameters"] == sum(p.numel() for p in load_checkpoint("base").parameters())
