"""Adapters to and from PEFT's own library: what it saves computes the same here, what is written here computes the same there, and nothing else is taken for one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model_cases import ours, theirs
from k3_checkpoint_cases import packed_checkpoint
from lora_cases import disturbed, drawn_adapter, same
from model_cases import random_model, random_tokens
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.checkpoint import load_checkpoint
from driftline.models.lora import (
    Adapter,
    AdapterBank,
    LoraConfig,
    Scaling,
    Update,
    adapt,
    adapter_of,
    merge_lora,
    put_adapter,
)
from driftline.models.lora.peft import CONFIG, WEIGHTS, read_peft, write_peft
from driftline.models.state import export_state
from driftline.policy_store.adapters import AdapterConfig, to_peft
from driftline.services.tensors import to_host

TOKENS = torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(3))
SETTINGS: dict[str, dict[str, Any]] = {
    "two projections": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all linears, rsLoRA": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear", "use_rslora": True},
    "a regular expression": {"r": 2, "lora_alpha": 2, "target_modules": r".*layers\.[12]\..*(o|down)_proj"},
    "patterns": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "gate_proj"], "rank_pattern": {"q_proj": 2, "layers.1.mlp.gate_proj": 6},
                 "alpha_pattern": {"layers.2.self_attn.q_proj": 16, "gate_proj": 3}},
}
MODELS = ["llama", "llama biases", "qwen2", "qwen3"]


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(TOKENS).logits
    return out


@torch.no_grad()
def our_logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model.logits(model(TOKENS).hidden)
    return out


@pytest.mark.parametrize("settings", list(SETTINGS))
@pytest.mark.parametrize("name", MODELS)
def test_what_peft_saved_computes_the_same_here(name: str, settings: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    peft = disturbed_peft(get_peft_model(theirs(name), PeftConfig(**SETTINGS[settings])))
    peft.save_pretrained(tmp_path)
    model = ours(name)
    base = our_logits(model)
    put_adapter(model, read_peft(tmp_path))
    want, found = logits(peft), our_logits(model)
    assert (found - base).abs().max() > 0.1, "the adapter does something"
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
    merge_lora(model)
    torch.testing.assert_close(our_logits(model), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("settings", list(SETTINGS))
def test_a_read_adapter_is_written_as_it_was_read(settings: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    disturbed_peft(get_peft_model(theirs("llama"), PeftConfig(**SETTINGS[settings]))).save_pretrained(tmp_path / "theirs")
    adapter = read_peft(tmp_path / "theirs")
    write_peft(adapter, tmp_path / "ours")
    assert same(read_peft(tmp_path / "ours"), adapter)
    first, second = load_file(tmp_path / "theirs" / WEIGHTS), load_file(tmp_path / "ours" / WEIGHTS)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("scaling", list(Scaling))
@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_here_computes_the_same_in_peft(name: str, scaling: Scaling, tmp_path: Path) -> None:
    model = ours(name)
    linears = [module for module, found in model.named_modules() if isinstance(found, nn.Linear)]
    adapt(model, LoraConfig(3, 7.5, "all-linear", scaling))
    disturbed(model, 2)
    write_peft(adapter_of(model, "some/base"), tmp_path, linears=linears)
    document = json.loads((tmp_path / CONFIG).read_text())
    assert document["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (document["base_model_name_or_path"], document["use_rslora"], document["lora_alpha"]) == ("some/base", scaling is Scaling.ROOT, 7.5)
    peft = PeftModel.from_pretrained(theirs(name), tmp_path).eval()
    torch.testing.assert_close(our_logits(model), logits(peft), rtol=0, atol=1e-5)


def test_ranks_and_alphas_that_differ_by_module_are_read_by_peft(tmp_path: Path) -> None:
    model = ours("llama")
    names = {name: found.weight.shape for name, found in model.named_modules() if isinstance(found, nn.Linear) and name != "lm_head"}
    random = torch.Generator().manual_seed(5)
    updates = {name: Update(torch.randn(1 + i % 3, shape[1], generator=random) * 0.1, torch.randn(shape[0], 1 + i % 3, generator=random), 1.0 + i % 4)
               for i, (name, shape) in enumerate(sorted(names.items())) if i % 5}
    put_adapter(model, Adapter(updates))
    write_peft(adapter_of(model), tmp_path)
    peft = PeftModel.from_pretrained(theirs("llama"), tmp_path).eval()
    torch.testing.assert_close(our_logits(model), logits(peft), rtol=0, atol=1e-5)


class Matrices(nn.Module):
    """An expert as the release's modules have it."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)


class Released(nn.Module):
    """The names of one layer's experts, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Module()
        layer.block_sparse_moe = nn.Module()
        layer.block_sparse_moe.experts = nn.ModuleList(Matrices() for _ in range(6))
        layer.self_attn = nn.Module()
        layer.self_attn.q_proj = nn.Linear(32, 16, bias=False)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.Module(), layer])

    def prepare_inputs_for_generation(self, **given: Any) -> dict[str, Any]:
        """PEFT asks every causal model for one."""
        return given


def test_experts_are_stacked_from_peft_s_linears_and_apart_again(tmp_path: Path) -> None:
    """w2 of expert 3 has no adapter there: it gets a zero one here."""
    torch.manual_seed(0)
    targets = [f"experts.{e}.{which}" for e in range(6) for which in ("w1", "w2", "w3") if (e, which) != (3, "w2")]
    peft = disturbed_peft(get_peft_model(Released(), PeftConfig(r=2, lora_alpha=6, target_modules=[*targets, "q_proj"])))
    peft.save_pretrained(tmp_path / "theirs")
    adapter = read_peft(tmp_path / "theirs")
    stem = "model.layers.1.block_sparse_moe.experts"
    assert set(adapter.updates) == {f"{stem}.w1", f"{stem}.w2", f"{stem}.w3", "model.layers.1.self_attn.q_proj"}
    model = random_model(dtype=torch.float32)
    before = {name: getattr(model.model.layers[1].block_sparse_moe.experts, name).clone() for name in ("w1", "w2", "w3")}
    put_adapter(model, adapter)
    merge_lora(model)
    merged = peft.merge_and_unload()
    torch.manual_seed(0)
    plain = Released()
    for e in range(6):
        for which in ("w1", "w2", "w3"):
            delta = getattr(merged.model.layers[1].block_sparse_moe.experts[e], which).weight - getattr(plain.model.layers[1].block_sparse_moe.experts[e], which).weight
            found = getattr(model.model.layers[1].block_sparse_moe.experts, which)[e] - before[which][e]
            torch.testing.assert_close(found, delta, rtol=0, atol=1e-6)
            assert bool(delta.any()) is ((e, which) != (3, "w2"))
    write_peft(adapter, tmp_path / "ours")
    again = load_file(tmp_path / "ours" / WEIGHTS)
    assert all(torch.equal(tensor, again[name]) for name, tensor in load_file(tmp_path / "theirs" / WEIGHTS).items())
    loaded = PeftModel.from_pretrained(Released(), tmp_path / "ours")
    assert loaded.base_model.model.model.layers[1].block_sparse_moe.experts[5].w1.scaling == {"default": 3.0}


def test_experts_of_two_scales_are_stacked_only_where_that_rounds_nothing(tmp_path: Path) -> None:
    targets = ["experts.0.w1", "experts.1.w1"]
    for alpha, stacks in ((3.0, True), (4.5, False)):
        torch.manual_seed(0)
        settings = PeftConfig(r=4, lora_alpha=6, target_modules=targets, rank_pattern={"experts.1.w1": 2}, alpha_pattern={"experts.1.w1": alpha})
        peft = disturbed_peft(get_peft_model(Released(), settings))
        peft.save_pretrained(tmp_path / str(alpha))
        if not stacks:
            with pytest.raises(ConfigError, match="one scale") as refused:
                read_peft(tmp_path / str(alpha))
            assert "expert 1" in refused.value.field
            continue
        update = read_peft(tmp_path / str(alpha)).updates["model.layers.1.block_sparse_moe.experts.w1"]
        assert (update.rank, update.scale, update.experts) == (4, 1.5, 2)
        linear = peft.base_model.model.model.layers[1].block_sparse_moe.experts[1].w1
        torch.testing.assert_close(update.delta()[1], linear.get_delta_weight("default"), rtol=0, atol=1e-7)


def test_an_adapter_of_some_experts_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    """Of the first 4 of 6, as a file cannot say how many there are."""
    adapter = drawn_adapter(random_model(dtype=torch.float32), 4, targets=r".*experts$")
    some = Adapter({name: Update(update.a[:4], update.b[:4], update.alpha) for name, update in adapter.updates.items()})
    write_peft(some, tmp_path)
    model, tokens = random_model(dtype=torch.float32), random_tokens(2, 8)
    put_adapter(model, read_peft(tmp_path))
    zeroed = {name: Update(update.a, torch.cat([update.b[:4], torch.zeros_like(update.b[4:])]), update.alpha) for name, update in adapter.updates.items()}
    wanted, banked = random_model(dtype=torch.float32), random_model(dtype=torch.float32)
    put_adapter(wanted, Adapter(zeroed))
    bank = AdapterBank(banked, slots=1, rank=3)
    bank.put(0, read_peft(tmp_path))
    with torch.no_grad(), bank.rows([0, 0]):
        assert torch.equal(model(tokens).hidden, wanted(tokens).hidden)
        torch.testing.assert_close(banked(tokens).hidden, wanted(tokens).hidden, rtol=0, atol=1e-5)
    with pytest.raises(IntegrityError):
        put_adapter(random_model(), Adapter({name: update.of_experts(7) for name, update in adapter.updates.items()}))


@pytest.mark.parametrize("packed", [False, True])
def test_a_k3_adapter_goes_round_and_computes_the_same_bits(packed: bool, tmp_path: Path) -> None:
    directory = packed_checkpoint(tmp_path / "base") if packed else None

    def make() -> Any:
        return load_checkpoint(str(directory)) if directory else random_model(dtype=torch.float32)

    adapted = make()
    adapter = drawn_adapter(adapted, 4, scaling=Scaling.ROOT)
    write_peft(adapter, tmp_path / "adapter")
    other = make()
    put_adapter(other, read_peft(tmp_path / "adapter"))
    tokens = random_tokens(2, 8)
    with torch.no_grad():
        assert torch.equal(other(tokens).hidden, adapted(tokens).hidden)
        assert not torch.equal(make()(tokens).hidden, adapted(tokens).hidden)


def test_copies_of_the_base_s_head_are_refused_and_an_adapter_of_the_head_alone_is_read(tmp_path: Path) -> None:
    torch.manual_seed(1)
    peft = disturbed_peft(get_peft_model(theirs("llama"), PeftConfig(r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"])))
    peft.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="save_embedding_layers=False"):
        read_peft(tmp_path)
    peft.save_pretrained(tmp_path, save_embedding_layers=False)
    model = ours("llama")
    put_adapter(model, read_peft(tmp_path))
    torch.testing.assert_close(our_logits(model), logits(peft), rtol=0, atol=1e-5)


def test_a_policy_s_export_and_a_model_s_are_the_same_tensors(tmp_path: Path) -> None:
    """The store knows PEFT's names without torch: both must name, split and lay out alike."""
    model = random_model(dtype=torch.float32)
    drawn_adapter(model, 4, alpha=7.0)
    write_peft(adapter_of(model), tmp_path)
    written = load_file(tmp_path / WEIGHTS)
    exported = export_state(model, torch.float32)
    layouts = {name: tensor.layout for name, tensor in to_host(exported).items()}
    named = to_peft(layouts)
    assert named.keys() == written.keys()
    for name, (layout, source) in named.items():
        tensor = exported[source.name] if source.expert is None else exported[source.name][source.expert]
        assert tuple(layout.shape) == tuple(written[name].shape)
        assert torch.equal(tensor, written[name])
    theirs, ours_ = json.loads(AdapterConfig.of(layouts, 7.0).document([])), json.loads((tmp_path / CONFIG).read_text())
    assert {key: ours_[key] for key in theirs} == theirs


@pytest.mark.parametrize(("theirs_", "name"), [
    ("language_model.model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"), ("language_model.lm_head", "lm_head"),
    ("model.language_model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"), ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
    ("vision_tower.language_model.q_proj", "vision_tower.language_model.q_proj"),
])
def test_an_adapter_of_a_multimodal_model_s_text_model_has_the_text_model_s_names(theirs_: str, name: str, tmp_path: Path) -> None:
    write_peft(Adapter({theirs_: Update(torch.ones(2, 3), torch.ones(4, 2), 6.0)}), tmp_path)
    assert set(read_peft(tmp_path).updates) == {name}


def plain_adapter(directory: Path, **changes: Any) -> Path:
    write_peft(Adapter({"m.q": Update(torch.ones(2, 3), torch.ones(4, 2), 6.0)}), directory)
    document = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps({**document, **changes}))
    return directory


@pytest.mark.parametrize(("field", "value"), [
    ("peft_type", "IA3"), ("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"]), ("fan_in_fan_out", True), ("target_parameters", ["experts.w1"]),
    ("lora_bias", True), ("layer_replication", [[0, 2]]), ("trainable_token_indices", [1]), ("lora_alpha", 0), ("lora_alpha", None), ("lora_alpha", True),
    ("lora_alpha", "8"), ("alpha_pattern", {"q": -1}), ("alpha_pattern", {"(": 2}), ("use_qalora", True),
])
def test_what_is_not_plain_lora_is_refused_by_its_field(field: str, value: Any, tmp_path: Path) -> None:
    assert read_peft(plain_adapter(tmp_path)).updates["m.q"].scale == 3.0
    with pytest.raises(ConfigError) as refused:
        read_peft(plain_adapter(tmp_path, **{field: value}))
    assert field in refused.value.field
    assert refused.value.remedy


@pytest.mark.parametrize(("tensors", "error"), [
    ({"base_model.model.m.q.lora_A.weight": torch.ones(2, 3)}, IntegrityError),
    ({"base_model.model.m.q.lora_A.weight": torch.ones(2, 3), "base_model.model.m.q.lora_B.weight": torch.ones(4, 3)}, IntegrityError),
    ({"base_model.model.m.q.lora_A.weight": torch.ones(2, 3).int(), "base_model.model.m.q.lora_B.weight": torch.ones(4, 2).int()}, IntegrityError),
    ({"base_model.model.m.q.lora_embedding_A": torch.ones(2, 3)}, ConfigError), ({"m.q.lora_A": torch.ones(2, 3)}, ConfigError), ({}, IntegrityError),
])
def test_tensors_that_are_no_update_are_refused(tensors: dict[str, torch.Tensor], error: type[Exception], tmp_path: Path) -> None:
    plain_adapter(tmp_path)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(error):
        read_peft(tmp_path)


def test_a_file_that_is_missing_or_cut_short_is_refused_with_its_name(tmp_path: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        plain_adapter(tmp_path)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ConfigError, match=name):
            read_peft(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(ConfigError, match=name):
            read_peft(tmp_path)


def test_a_failed_write_leaves_the_adapter_that_was_there(tmp_path: Path) -> None:
    plain_adapter(tmp_path)
    before = read_peft(tmp_path)
    mixed = Adapter({"a": Update(torch.ones(2, 3), torch.ones(4, 2), 1.0), "b": Update(torch.ones(2, 3), torch.ones(4, 2), 1.0, Scaling.ROOT)})
    with pytest.raises(ConfigError, match="one scaling"):
        write_peft(mixed, tmp_path)
    assert same(read_peft(tmp_path), before)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        write_peft(before, tmp_path / "file")


def test_an_adapter_of_another_base_is_refused_and_changes_nothing() -> None:
    model = ours("llama")
    for updates in ({"model.layers.0.self_attn.q_proj": Update(torch.ones(2, 47), torch.ones(48, 2), 1.0)},
                    {"model.layers.7.self_attn.q_proj": Update(torch.ones(2, 48), torch.ones(48, 2), 1.0)},
                    {"model.layers.0.self_attn.q_proj": Update(torch.ones(6, 2, 48), torch.ones(6, 48, 2), 1.0)}):
        with pytest.raises(IntegrityError) as refused:
            put_adapter(model, Adapter(updates))
        assert refused.value.remedy
    assert all(parameter.requires_grad for parameter in model.parameters())
    put_adapter(model, Adapter({"model.layers.0.self_attn.q_proj": Update(torch.ones(2, 48), torch.ones(48, 2), 1.0)}))
    with pytest.raises(IntegrityError):
        put_adapter(model, Adapter({"model.layers.0.self_attn.q_proj": Update(torch.ones(2, 48), torch.ones(48, 2), 1.0)}))


def test_factors_of_both_scalings() -> None:
    a, b = torch.ones(4, 3), torch.ones(2, 4)
    assert Update(a, b, 8.0).scale == 2.0
    assert Update(a, b, 8.0, Scaling.ROOT).scale == 4.0
    torch.testing.assert_close(Update(a, b, 8.0, Scaling.ROOT).delta(), torch.full((2, 3), 16.0))
    for alpha in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError):
            Scaling.RANK.factor(alpha, 4)


def disturbed_peft(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model.eval()
