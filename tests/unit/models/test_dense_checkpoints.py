"""Checkpoints of dense models: what transformers writes is loaded, what is saved transformers loads, bit for bit, under Hugging Face's own names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model_cases import THEIRS, ours, random_dense, saved, small_dense, tokens_of
from k3_checkpoint_cases import Reads, reshard, same_state, stored
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from driftline.cli import app
from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.architectures import config_of, skeleton
from driftline.models.checkpoint import checkpoint_dir, load_checkpoint, save_checkpoint
from driftline.models.config import tiny
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.inspection import Attention, FeedForward, inspect_checkpoint
from driftline.models.locate import located
from driftline.models.model import K3ForCausalLM
from driftline.models.quantisation import Quantisation
from driftline.models.random_weights import make_checkpoint, random_model
from driftline.models.state import export_state, load_state

EVERY = pytest.mark.parametrize("name", list(THEIRS))


def copied(name: str, directory: Path, **tensors: torch.Tensor | None) -> Path:
    """The checkpoint in one file, with tensors replaced, added or (None) removed; `__` in a name stands for a dot."""
    shutil.copytree(saved(name), directory, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    found = stored(saved(name)) | {key.replace("__", "."): value for key, value in tensors.items() if value is not None}
    for key in (key.replace("__", ".") for key, value in tensors.items() if value is None):
        del found[key]
    save_file(found, directory / "model.safetensors")
    return directory


def reconfigured(directory: Path, **fields: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return directory


@EVERY
def test_every_stored_tensor_is_a_parameter_of_its_own_name(name: str) -> None:
    assert len(list(saved(name).glob("*.safetensors"))) > 1
    state, files = export_state(ours(name), torch.float32), stored(saved(name))
    assert same_state(state, files)


@EVERY
@pytest.mark.parametrize("shard_bytes", [20_000, 10**9])
def test_what_is_saved_transformers_loads(name: str, shard_bytes: int, tmp_path: Path) -> None:
    model = ours(name)
    files = save_checkpoint(model, tmp_path, dtype=torch.float32, shard_bytes=shard_bytes)
    assert (len(files) > 1) == (shard_bytes == 20_000)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = tokens_of(1, 20)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model.logits(model(tokens).hidden), rtol=1e-5, atol=1e-5)
    assert same_state(export_state(load_checkpoint(str(tmp_path)), torch.float32), export_state(model, torch.float32))


def test_saved_loaded_and_saved_again_is_the_same_bytes(tmp_path: Path) -> None:
    save_checkpoint(ours("qwen2"), tmp_path / "a", shard_bytes=30_000)
    save_checkpoint(load_checkpoint(str(tmp_path / "a"), dtype=torch.bfloat16), tmp_path / "b", shard_bytes=30_000)
    save_checkpoint(load_checkpoint(str(tmp_path / "a")), tmp_path / "b", shard_bytes=30_000)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_model_is_held_in_the_dtype_that_is_asked_for(dtype: torch.dtype) -> None:
    model = ours("llama biases", dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(tokens_of(1, 3)).hidden.dtype == dtype
    assert model.logits(model(tokens_of(1, 3)).hidden).dtype == torch.promote_types(dtype, torch.float32)


def test_loading_reads_every_tensor_once_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    files = stored(saved("llama"))
    reads = Reads(monkeypatch)
    load_checkpoint(str(saved("llama")))
    assert sorted(reads.names) == sorted(files)
    assert reads.most == max(tensor.nbytes for tensor in files.values())


def test_a_prefix_of_a_multimodal_file_is_read_off_and_its_other_tensors_are_left_unread(tmp_path: Path) -> None:
    model = ours("mistral")
    names = {f"language_model.{name}": tensor for name, tensor in stored(saved("mistral")).items()}
    save_checkpoint(model, tmp_path, dtype=torch.float32)
    reshard(tmp_path, {"a.safetensors": names, "b.safetensors": {"vision_tower.x": torch.zeros(3)}})
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    (tmp_path / "b.safetensors").write_bytes(b"never opened")
    assert same_state(export_state(load_checkpoint(str(tmp_path)), torch.float32), export_state(model, torch.float32))


def test_a_tied_head_that_is_stored_too_is_read_when_it_is_the_embedding_and_refused_when_not(tmp_path: Path) -> None:
    embedding = stored(saved("qwen3"))["model.embed_tokens.weight"]
    same = copied("qwen3", tmp_path / "same", lm_head__weight=embedding.clone())
    assert same_state(export_state(load_checkpoint(str(same)), torch.float32), export_state(ours("qwen3"), torch.float32))
    other = copied("qwen3", tmp_path / "other", lm_head__weight=embedding + 1)
    with pytest.raises(IntegrityError, match=r"lm_head\.weight.*tie_word_embeddings = false"):
        load_checkpoint(str(other))
    misfit = copied("qwen3", tmp_path / "misfit", lm_head__weight=embedding[1:].clone())
    with pytest.raises(IntegrityError, match="differs from the embedding"):
        load_checkpoint(str(misfit))
    untied = load_checkpoint(str(reconfigured(other, tie_word_embeddings=False)))
    assert torch.equal(untied.lm_head.weight, embedding + 1)


def test_frequencies_that_early_files_store_are_left_unread(tmp_path: Path) -> None:
    place = copied("llama", tmp_path / "old", model__layers__0__self_attn__rotary_emb__inv_freq=torch.full((6,), 7.0))
    assert same_state(export_state(load_checkpoint(str(place)), torch.float32), export_state(ours("llama"), torch.float32))


@pytest.mark.parametrize(("name", "tensors", "says"), [
    ("llama", {"lm_head__weight": None}, ["1 tensors missing", "['lm_head.weight']"]),
    ("llama", {"model__layers__1__self_attn__k_proj__weight": None}, ["1 tensors missing", "layers.1.self_attn.k_proj.weight"]),
    ("llama", {"model__layers__1__self_attn__k_proj__bias": torch.zeros(24)}, ["1 not in the model", "k_proj.bias"]),
    ("llama", {"model__layers__1__self_attn__k_proj__weight": torch.zeros(48, 48)}, ["shape differs", "(48, 48)", "(24, 48)", "model.safetensors"]),
    ("llama", {"model__norm__weight": torch.zeros(48, dtype=torch.int8)}, ["another dtype", "I8", "BF16"]),
    ("qwen2", {"model__layers__0__self_attn__q_proj__bias": None}, ["1 tensors missing", "q_proj.bias"]),
    ("qwen3", {"model__layers__2__self_attn__q_norm__weight": None}, ["1 tensors missing", "q_norm"]),
    ("llama tied", {"lm_head__weight": torch.zeros(97, 48), "lm_head__bias": torch.zeros(97)}, ["2 not in the model"]),
])
def test_what_does_not_fit_its_config_is_refused_before_a_tensor_is_read(
    name: str, tensors: dict[str, torch.Tensor | None], says: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = copied(name, tmp_path / "changed", **tensors)
    reads = Reads(monkeypatch)
    with pytest.raises(IntegrityError) as refused:
        load_checkpoint(str(place))
    assert all(word in str(refused.value) for word in says), str(refused.value)
    assert not reads.names


def test_experts_are_not_packed_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match="no routed experts"):
        load_checkpoint(str(saved("llama")), experts=Quantisation.MXFP4)
    assert load_checkpoint(str(saved("llama")), experts=Quantisation.NONE).config == ours("llama").config


@pytest.mark.parametrize("init", ["nowhere", "nowhere.gguf", "package:no_such_package_here"])
def test_a_start_that_is_not_there_is_refused(init: str) -> None:
    with pytest.raises(ConfigError, match=init.rpartition(":")[2]):
        located(init)


def test_a_file_is_no_directory_of_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert located(str(file)) == file
    assert located("base") == checkpoint_dir("base")
    with pytest.raises(ConfigError, match="a file, not a checkpoint directory"):
        checkpoint_dir(str(file))
    with pytest.raises((ConfigError, IntegrityError), match=r"model\.gguf"):
        load_checkpoint(str(file))


def test_a_policy_of_a_dense_model_travels_under_the_files_names() -> None:
    source, target = random_dense(seed=1, dtype=torch.float32), random_dense(seed=2, dtype=torch.float32)
    state = export_state(source, torch.float32)
    load_state(target, state)
    tokens = tokens_of(1, 9)
    assert torch.equal(source(tokens).hidden, target(tokens).hidden)
    assert "lm_head.weight" not in state
    assert target.lm_head.weight is target.model.embed_tokens.weight
    assert {t.dtype for t in export_state(source).values()} == {torch.bfloat16}


def test_the_headers_say_what_the_modules_count(tmp_path: Path) -> None:
    found, model = inspect_checkpoint(saved("llama")), ours("llama")
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.active == found.parameters - model.model.embed_tokens.weight.numel()
    assert found.total_bytes == 4 * found.parameters
    assert found.nbytes == {"F32": found.total_bytes}
    assert [(part.attention, part.feed_forward) for part in found.parts] == [(None, None), *[(Attention.GQA, FeedForward.DENSE)] * 3]
    assert sum(p.numel() for p in model.model.layers[1].parameters()) == found.parts[2].parameters
    tied = inspect_checkpoint(saved("qwen3"))
    assert tied.active == tied.parameters


def test_inspect_prints_a_dense_model(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["model", "inspect", str(saved("qwen2"))], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "qwen2" in shown.output
    assert "GQA" in shown.output
    assert "experts" not in shown.output
    document = json.loads(CliRunner().invoke(app, ["model", "inspect", str(saved("qwen2")), "--json"], catch_exceptions=False).output)
    assert document["config"]["model_type"] == "qwen2"
    assert document["config"]["qkv_bias"] is True
    assert document["layers"][0]["attention"] == "GQA"
    assert document["quantisation"] == "none"
    for absent in (str(tmp_path / "none.gguf"), "package:none_such"):
        refused = CliRunner().invoke(app, ["model", "inspect", absent])
        assert isinstance(refused.exception, ConfigError)
        assert absent in str(refused.exception)
    shipped = CliRunner().invoke(app, ["model", "inspect", "base"], catch_exceptions=False)
    assert "kimi_linear" in shipped.output
    assert "16, 2 a token" in shipped.output


def test_a_random_model_and_its_files_are_equal(tmp_path: Path) -> None:
    config = small_dense()
    make_checkpoint(config, tmp_path / "made", seed=3, shard_bytes=20_000)
    made, loaded = random_model(config, seed=3), load_checkpoint(str(tmp_path / "made"), dtype=torch.bfloat16)
    assert isinstance(made, DenseForCausalLM)
    assert config_of(loaded) == config
    assert same_state(export_state(made), export_state(loaded))
    fresh = DenseForCausalLM(config)
    for (name, drawn), start in zip(made.named_parameters(), fresh.parameters(), strict=True):
        assert float(drawn.detach().float().std()) == pytest.approx(float(start.detach().std()), rel=0.25), name
    assert not torch.equal(random_model(config, seed=4).lm_head.weight, made.lm_head.weight)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "made").config.model_type == "qwen3"


def test_each_configuration_makes_its_own_model() -> None:
    assert isinstance(skeleton(small_dense(), Quantisation.NONE), DenseForCausalLM)
    assert isinstance(skeleton(tiny(), Quantisation.MXFP4), K3ForCausalLM)
    made = skeleton(tiny(), Quantisation.NONE)
    made.config = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="not a configuration that has files"):
        save_checkpoint(made, "/nowhere")
