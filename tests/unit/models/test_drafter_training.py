"""A drafter is trained as it is used: unrolled over its own outputs it computes what drafting step by step computes, and it learns what there is to learn."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.causal_lm import CausalLM
from driftline.models.config import tiny
from driftline.models.dense.config import DenseConfig
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.drafter import Drafter, DrafterConfig, Taps, load_drafter, save_drafter
from driftline.models.drafter.text import Text, embedding, frequent, observed
from driftline.models.drafter.training import Schedule, losses, train, unrolled
from driftline.models.model import K3ForCausalLM
from driftline.services.rollout.speculation import NgramDrafter, Row, Seen, Speculator
from driftline.services.rollout.speculation.learned import Choice, TrainedDrafter
from driftline.services.rollout.speculation.refresh import Refresher
from driftline.services.rollout.speculation.rehearsal import rehearse

VOCABULARY = 32


def _model(kind: str = "dense", **changes: int) -> CausalLM:
    torch.manual_seed(5)
    if kind == "k3":
        return K3ForCausalLM(tiny(num_hidden_layers=4, hidden_size=64, vocab_size=VOCABULARY)).eval()
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": VOCABULARY, "max_position_embeddings": 512} | changes
    return DenseForCausalLM(DenseConfig(model_type="llama", intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16, **sizes)).eval()


def _drafter(model: CausalLM, **changes: int) -> Drafter:
    torch.manual_seed(6)
    return Drafter(DrafterConfig.of(model.config, **changes)).eval()  # type: ignore[arg-type]


def _sampled(model: CausalLM, count: int, tokens: int, prompt: int = 4, seed: int = 0, temperature: float = 0.5) -> list[Text]:
    random = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, VOCABULARY, (count, prompt), generator=random)
    with torch.no_grad():
        for _ in range(tokens):
            p = (model.logits(model(rows, keep=False).hidden[:, -1]) / temperature).softmax(-1)
            rows = torch.cat([rows, torch.multinomial(p, 1, generator=random)], 1)
    return [Text(row.numpy().astype(np.int32), prompt, temperature) for row in rows]


def test_taps_of_a_dense_model_are_the_streams_that_its_norms_read() -> None:
    model = _model()
    tokens = torch.randint(0, VOCABULARY, (2, 9))
    with Taps(model, (0, 2, 3)) as taps:
        out = model(tokens, keep=False)
        rows = taps.take()
        with pytest.raises(RuntimeError, match="take once"):
            taps.take()
    assert rows.shape == (2, 9, 3 * 64)
    first, _, last = rows.chunk(3, -1)
    scaled = model.get_submodule("model.embed_tokens")(tokens)
    assert torch.allclose(first, scaled / scaled.square().mean(-1, keepdim=True).add(1e-6).sqrt(), atol=1e-5)
    assert torch.allclose(last * model.get_parameter("model.norm.weight"), out.hidden, atol=1e-3), "the last norm's input, without its weight"
    model(tokens, keep=False)
    with pytest.raises(RuntimeError, match="0 layers"):
        taps.take()  # closed


def test_taps_of_k3_are_mixtures_and_not_prefixes() -> None:
    model = _model("k3")
    tokens = torch.randint(0, VOCABULARY, (1, 7))
    norm = model.get_parameter("model.norm.weight")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("res.proj.weight"):
                parameter.normal_(0, 0.3)
    with Taps(model, (4,)) as taps, torch.no_grad():
        hidden = model(tokens, keep=False).hidden
        assert torch.allclose(taps.take() * norm, hidden, atol=2e-3), "what the final norm saw is the mix of all blocks"


def test_taps_do_not_change_what_the_target_computes() -> None:
    for kind in ("dense", "k3"):
        model, tokens = _model(kind), torch.randint(0, VOCABULARY, (2, 8))
        with torch.no_grad():
            alone = model(tokens, keep=False).hidden
            with Taps(model, (1, 3)):
                assert torch.equal(model(tokens, keep=False).hidden, alone)


@pytest.mark.parametrize("window", [16, 64])
def test_unrolling_is_what_drafting_step_by_step_computes(window: int) -> None:
    """Every chain of three drafts from every position, through the rings that an engine keeps, against the one pass that training makes."""
    model = _model()
    network = _drafter(model, window=window)
    text = _sampled(model, 1, 36)[0]
    tokens = torch.from_numpy(text.tokens.astype(np.int64))
    with Taps(model, network.config.taps) as taps, torch.no_grad():
        features = observed(model, taps, [text]).features
        embedded = embedding(model)(tokens[None, 1:])
        steps = [network.logits(after)[0] for after in unrolled(network, features, embedded, 3)]
    drafter = TrainedDrafter(network, model, choice=Choice.LIKELIEST)
    compared = 0
    for known in range(2, len(text.tokens)):  # tokens known; positions 0 .. known - 2 were computed
        fed = 1 if known > 2 else known - 1
        row = Row("a", array("i", text.tokens[:known].tolist()), 9)
        drafter.saw([row], Seen(features[0, known - 1 - fed : known - 1], [fed]))
        drafts = drafter.propose([row], [3]).tokens[0]
        for k in range(3):
            place = known - 2 + k
            if k and (place + 1 >= len(text.tokens) or drafts[k - 1] != text.tokens[place + 1]):
                break  # training went on with another token than was drafted
            assert int(drafts[k]) == int(steps[k][place].argmax()), (known, k)
            compared += k > 0
    if window == 64:
        assert compared > 0, "no chain went further than its first draft"


def test_it_learns_a_language_that_can_be_predicted() -> None:
    model = _model()
    with torch.no_grad():
        model.lm_head.weight.mul_(6.0)
        embedding(model).get_parameter("weight").mul_(100.0)  # the next token depends on the last one, and hardly on those before it
    texts, unseen = _sampled(model, 48, 24), _sampled(model, 12, 24, seed=1)
    network = _drafter(model)
    network.begin(model.lm_head.weight.detach(), frequent(texts, VOCABULARY, VOCABULARY))
    with Taps(model, network.config.taps) as taps:
        features = [observed(model, taps, [text]).features[0] for text in unseen]
        lengths = []
        for steps in (0, 100):
            if steps:
                train(network, model, taps, texts, Schedule(steps=steps, texts=16, lr=2e-3))
            lengths.append(rehearse(Speculator(TrainedDrafter(network, model, choice=Choice.LIKELIEST)), unseen, range(12), features).length())
    assert lengths[1] > lengths[0] + 0.3
    assert 1 <= lengths[0] < lengths[1] <= 4


def test_training_is_repeatable() -> None:
    model = _model()
    texts = _sampled(model, 6, 8)
    weights = []
    for _ in range(2):
        network = _drafter(model)
        with Taps(model, network.config.taps) as taps:
            train(network, model, taps, texts, Schedule(steps=4, texts=3))
        weights.append(network.fc.weight.detach().clone())
    assert torch.equal(*weights)


def test_tokens_that_cannot_be_drafted_weigh_nothing_and_padding_neither() -> None:
    model = _model()
    network = _drafter(model, draft_vocab_size=8)
    network.begin(model.lm_head.weight.detach(), torch.arange(0, 32, 4))
    short, long = _sampled(model, 1, 6)[0], _sampled(model, 1, 20, seed=2)[0]
    with Taps(model, network.config.taps) as taps, torch.no_grad():
        alone = [torch.stack(losses(network, model, observed(model, taps, [text]), 2)) for text in (short, long)]
        both = torch.stack(losses(network, model, observed(model, taps, [short, long]), 2))
    # The first place of the chain is judged at every sampled token but those before which nothing stands: 6 and 20 of them.
    weights = [(6, 20), (6, 20)]
    for k in range(2):
        assert float(both[k]) == pytest.approx(float(alone[0][k] * weights[k][0] + alone[1][k] * weights[k][1]) / sum(weights[k]), rel=1e-4)
    assert (alone[1] < np.log(8)).all(), "8 of 32 tokens carry a part of the probability"


def test_drafts_are_ids_of_the_target() -> None:
    model = _model()
    network = _drafter(model, draft_vocab_size=8)
    network.begin(model.lm_head.weight.detach(), torch.arange(3, 32, 4)[:8])
    drafter = TrainedDrafter(network, model)
    text = _sampled(model, 1, 6)[0]
    with Taps(model, network.config.taps) as taps:
        features = observed(model, taps, [text]).features[0]
    row = Row("a", array("i", text.tokens.tolist()), 9, None, 3, 4, 0.7)
    drafter.saw([row], Seen(features, [len(features)]))
    drafts = drafter.propose([row], [3], probs=True)
    assert set(drafts.tokens[0].tolist()) <= set(range(3, 32, 4))
    assert drafts.probs is not None
    assert drafts.probs.sum(-1)[0].tolist() == pytest.approx([1.0] * 3, abs=1e-5)
    assert float(drafts.probs[..., ::4].abs().sum()) == 0.0


def test_a_slot_that_is_used_again_begins_empty() -> None:
    model = _model()
    drafter = TrainedDrafter(_drafter(model), model, choice=Choice.LIKELIEST)
    one, two = _sampled(model, 2, 20)
    with Taps(model, drafter.taps) as taps:
        features = [observed(model, taps, [text]).features[0] for text in (one, two)]

    def said(name: str, text: Text, rows: torch.Tensor) -> list[int]:
        row = Row(name, array("i", text.tokens[:9].tolist()), 9)
        drafter.saw([row], Seen(rows[5:8], [3]))
        drafts: list[int] = drafter.propose([row], [3]).tokens[0].tolist()
        return drafts

    fresh = said("a", two, features[1])
    drafter.retire("a")
    long = Row("b", array("i", one.tokens.tolist()), 9)
    drafter.saw([long], Seen(features[0], [len(features[0])]))
    drafter.retire("b")
    assert said("c", two, features[1]) == fresh


def test_more_rows_than_there_were_slots() -> None:
    model = _model()
    drafter = TrainedDrafter(_drafter(model), model, choice=Choice.LIKELIEST)
    text = _sampled(model, 1, 8)[0]
    with Taps(model, drafter.taps) as taps:
        features = observed(model, taps, [text]).features[0]
    rows = [Row(i, array("i", text.tokens.tolist()), 9) for i in range(40)]
    drafter.saw(rows, Seen(features.repeat(40, 1), [len(features)] * 40))
    drafts = drafter.propose(rows, [2] * 40)
    assert (drafts.tokens == drafts.tokens[:1]).all()


def test_tap_rows_that_do_not_fit_the_counts_are_refused() -> None:
    model = _model()
    drafter = TrainedDrafter(_drafter(model), model)
    with pytest.raises(ValueError, match="one behind another"):
        drafter.saw([Row("a", array("i", [1, 2, 3]), 9)], Seen(torch.zeros(3, 192), [2]))


def test_rehearsing_without_hidden_states_is_refused() -> None:
    model = _model()
    with pytest.raises(ValueError, match="hidden states"):
        rehearse(Speculator(TrainedDrafter(_drafter(model), model)), _sampled(model, 1, 4), ["f"])


def test_a_rehearsal_counts_every_token_once() -> None:
    texts = [Text(np.array([1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2], dtype=np.int32), 4), Text(np.array([9, 8], dtype=np.int32), 1)]
    found = rehearse(Speculator(NgramDrafter()), texts, ["a", "b"])
    assert int((found.stood + 1).sum()) == 6, "all sampled tokens but each text's first, which its prompt gives"
    assert found.length(0, 6) > 1
    assert np.isnan(found.length(100))


def test_a_drafter_comes_back_from_its_files(tmp_path: Path) -> None:
    model = _model()
    network = _drafter(model, draft_vocab_size=8)
    network.begin(model.lm_head.weight.detach(), torch.arange(0, 32, 4))
    save_drafter(network, tmp_path / "d", dtype=torch.float32)
    again = load_drafter(tmp_path / "d", model.config)
    assert again.config == network.config
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), network.state_dict().values(), strict=True))


def test_files_that_are_no_drafter_of_this_model_are_refused_by_name(tmp_path: Path) -> None:
    model = _model()
    with pytest.raises(ConfigError, match=r"rollout\.drafter"):
        load_drafter(tmp_path, model.config)
    save_drafter(_drafter(model), tmp_path)
    with pytest.raises(ConfigError, match="hidden_size"):
        load_drafter(tmp_path, _model(hidden_size=32).config)
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        load_drafter(tmp_path, _model(num_hidden_layers=2).config)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        load_drafter(tmp_path, model.config)
    weights.unlink()
    with pytest.raises(ConfigError, match="no weights"):
        load_drafter(tmp_path, model.config)
    save_drafter(_drafter(model, draft_vocab_size=8), tmp_path / "other")
    weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(IntegrityError, match=r"lm_head|drafted"):
        load_drafter(tmp_path, model.config)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_drafter(tmp_path, model.config)


@pytest.mark.parametrize(("change", "field"), [({"taps": (2, 1)}, "taps"), ({"taps": (9,)}, "taps"), ({"draft_vocab_size": 64}, "draft_vocab_size"),
                                               ({"num_key_value_heads": 3, "num_attention_heads": 4}, "num_key_value_heads"), ({"model_type": "llama"}, "model_type")])
def test_configurations_that_cannot_be_are_refused(change: dict[str, object], field: str) -> None:
    body = DrafterConfig.of(_model().config).model_dump() | change
    with pytest.raises(ConfigError, match=field):
        DrafterConfig.model_validate(body)


def test_texts_without_anything_to_learn_are_refused() -> None:
    model = _model()
    network = _drafter(model)
    with Taps(model, network.config.taps) as taps:
        with pytest.raises(ConfigError, match="texts"):
            train(network, model, taps, [Text(np.array([1, 2], dtype=np.int32), 1)], Schedule(steps=1))
        with pytest.raises(ValueError, match="fewer than 2"):
            observed(model, taps, [])
    with pytest.raises(ConfigError, match="steps"):
        Schedule(steps=0)


def test_a_refresh_follows_the_policy_and_one_that_does_not_help_is_dropped() -> None:
    model = _model()
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)
    network = _drafter(model)
    refresher = Refresher(network, model, recent=48, judged=8, every=40, schedule=Schedule(steps=30, texts=8, lr=2e-3, warmup=2))
    with pytest.raises(ConfigError, match="too few"):
        refresher.refresh()
    for text in _sampled(model, 40, 16):
        assert not refresher.due(2.0)
        refresher.add(text)
    assert refresher.due(2.0), "as many texts as it waits for"
    before = network.fc.weight.detach().clone()
    done = refresher.refresh()
    assert done.kept
    assert done.after < done.before
    assert not torch.equal(network.fc.weight, before)
    assert not refresher.due(2.0)
    for text in _sampled(model, 14, 16, seed=3):
        refresher.add(text)
    assert not refresher.due(1.95)
    assert refresher.due(1.5), "it drafts worse than it did"
    wild = Refresher(network, model, recent=48, judged=8, schedule=Schedule(steps=6, texts=8, lr=30.0, warmup=1))
    for text in _sampled(model, 20, 16, seed=4):
        wild.add(text)
    before = network.fc.weight.detach().clone()
    dropped = wild.refresh()
    assert not dropped.kept
    assert torch.equal(network.fc.weight, before)


def test_a_speculator_refreshes_by_itself_when_its_drafter_falls_behind_a_policy_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftline.services.rollout.speculation.speculator.MONITORED", 64)
    model = _model()
    with torch.no_grad():
        model.lm_head.weight.mul_(6.0)
        embedding(model).get_parameter("weight").mul_(100.0)
    network = _drafter(model)
    texts = _sampled(model, 48, 20)
    with Taps(model, network.config.taps) as taps:
        train(network, model, taps, texts, Schedule(steps=60, texts=16, lr=2e-3))
    refresher = Refresher(network, model, recent=64, judged=8, every=10**6, loss=0.15, schedule=Schedule(steps=60, texts=16, lr=2e-3, warmup=2))
    speculator = Speculator(TrainedDrafter(network, model, choice=Choice.LIKELIEST), refresher=refresher)

    def run(seed: int) -> float:
        unseen = _sampled(model, 24, 20, seed=seed)
        with Taps(model, network.config.taps) as taps:
            features = [observed(model, taps, [text]).features[0] for text in unseen]
        with torch.inference_mode():  # as within an engine's step
            return rehearse(speculator, unseen, range(24), features).length()

    good = run(1)
    assert not speculator.refreshes, "nothing moved"
    with torch.no_grad():  # every token's answer is another's now
        model.lm_head.weight.copy_(model.lm_head.weight.roll(5, 0))
    fallen = run(2)
    for seed in range(3, 6):
        run(seed)
    assert speculator.refreshes
    assert any(done.kept for done in speculator.refreshes), (speculator.refreshes, good, fallen)
    assert fallen < good - 0.3
    assert run(9) > fallen + 0.2


def test_a_model_of_another_family_has_no_taps() -> None:
    class Other(nn.Module):
        pass

    with pytest.raises(ValueError, match="Other"):
        Taps(Other(), (0,))  # type: ignore[arg-type]
