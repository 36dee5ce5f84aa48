"""`driftline model`: a random checkpoint of any size is made, inspected, loaded and run; at K3's own sizes it is K3, parameter for parameter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_checkpoint_cases import Reads, reshard, same_state, stored
from model_cases import PUBLIC, random_tokens
from typer.testing import CliRunner

from driftline.cli import app
from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.checkpoint import load_checkpoint, save_checkpoint
from driftline.models.config import K3Config
from driftline.models.inspection import inspect_checkpoint
from driftline.models.model import K3ForCausalLM
from driftline.models.quantisation import Quantisation
from driftline.models.random_weights import RandomTensors, make_checkpoint, random_model
from driftline.models.sizes import like_k3
from driftline.models.state import export_state
from driftline.models.stored import public_shapes, skeleton

SMALL = ["--hidden", "64", "--experts", "4", "--heads", "1", "--intermediate", "96", "--latent", "64", "--moe-intermediate", "32", "--q-lora-rank", "32",
         "--kv-lora-rank", "32", "--kda-head-dim", "32", "--qk-nope-head-dim", "16", "--qk-rope-head-dim", "8", "--v-head-dim", "16"]


def command(*argv: str) -> str:
    result = CliRunner().invoke(app, ["model", *argv], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def document(*argv: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(command(*argv, "--json"))
    return body


def test_at_k3_s_depth_width_and_vocabulary_the_configuration_is_k3_s() -> None:
    assert like_k3(93, 7168, vocab_size=163840) == K3Config.model_validate(PUBLIC)


def test_the_release_has_the_parameters_its_report_counts() -> None:
    """2,779.5 billion, of which 104.2 take part in a token, from the modules themselves: a projection too many or too narrow would show."""
    config = K3Config.model_validate(PUBLIC)
    shapes = {name: p.numel() for name, p in skeleton(config, Quantisation.NONE).named_parameters()}
    routed = sum(size for name, size in shapes.items() if ".experts." in name)
    total = sum(shapes.values())
    active = total - routed + routed * 16 // 896 - shapes["model.embed_tokens.weight"]
    assert round(total / 1e8) / 10 == 2779.5
    assert round(active / 1e8) / 10 == 104.2


def test_the_release_packs_its_experts_into_1446_gigabytes() -> None:
    buffers = list(skeleton(K3Config.model_validate(PUBLIC), Quantisation.MXFP4).named_buffers())
    assert round(sum(buffer.nbytes for _, buffer in buffers) / 1e9) == 1446
    one = {name.rsplit(".", 1)[1]: tuple(buffer.shape) for name, buffer in buffers if name.startswith("model.layers.1.")}
    assert one == {"w1_packed": (896, 3072, 1792), "w1_scale": (896, 3072, 112), "w3_packed": (896, 3072, 1792), "w3_scale": (896, 3072, 112),
                   "w2_packed": (896, 3584, 1536), "w2_scale": (896, 3584, 96)}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 100), st.integers(1, 8192))
def test_any_depth_and_width_is_a_model_whose_experts_can_be_packed(layers: int, hidden: int) -> None:
    config = like_k3(layers, hidden)
    assert (config.num_hidden_layers, config.hidden_size) == (layers, hidden)
    assert not config.is_kda(layers - 1), "the last layer is MLA"
    assert all(config.is_kda(i) == ((i + 1) % 4 != 0) for i in range(layers - 1))
    assert config.moe_intermediate_size % 128 == config.routed_expert_hidden_size % 128 == 0
    assert -(-layers // config.attn_res_block_size) <= 8
    assert layers > 8 * (config.attn_res_block_size - 1), "no block is longer than eight of them need"
    assert 2 <= config.num_experts_per_token <= config.num_experts


@pytest.mark.parametrize("form", ["none", "mxfp4"])
def test_what_is_made_is_inspected_loaded_run_and_saved_again_to_the_bit(tmp_path: Path, form: str) -> None:
    made = document("make", "-o", str(tmp_path / "made"), "--quantise", form, "--shard-size", "100000", *SMALL)
    assert len(made["files"]) > 1
    assert made == document("inspect", str(tmp_path / "made"))
    model = load_checkpoint(str(tmp_path / "made"), dtype=torch.bfloat16)
    tensors = stored(tmp_path / "made")
    assert same_state(export_state(model), tensors)
    assert torch.isfinite(model(random_tokens(2, 5)).hidden).all()
    save_checkpoint(model, tmp_path / "saved", shard_bytes=100_000)
    assert same_state(stored(tmp_path / "saved"), tensors)
    assert same_state(export_state(load_checkpoint(str(tmp_path / "saved"), dtype=torch.bfloat16)), tensors)


def test_inspection_counts_what_is_there(tmp_path: Path) -> None:
    found = document("make", "-o", str(tmp_path), "--quantise", "mxfp4", "--layers", "5", *SMALL)
    assert found["quantisation"] == "mxfp4"
    assert [(layer["attention"], layer["feed_forward"]) for layer in found["layers"]] == [
        ("KDA", "dense"), ("KDA", "MoE"), ("KDA", "MoE"), ("MLA", "MoE"), ("MLA", "MoE")]
    tensors, whole = stored(tmp_path), load_checkpoint(str(tmp_path), experts=Quantisation.NONE)
    assert found["tensors"] == len(tensors)
    assert found["parameters"] == sum(p.numel() for p in whole.parameters())
    assert found["bytes"] == sum(t.nbytes for t in tensors.values())
    by_dtype = Counter[str]()
    for tensor in tensors.values():
        by_dtype[{torch.uint8: "MXFP4", torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]] += tensor.nbytes
    assert found["bytes_by_dtype"] == by_dtype
    experts = 3 * 32 * 64
    layer = found["layers"][1]
    assert layer["parameters"] - layer["active"] == (4 - 2) * experts, "two of four experts take part in a token"
    assert layer["bytes_by_dtype"]["MXFP4"] == 4 * experts * 17 // 32
    assert found["around"]["parameters"] - found["around"]["active"] == 264 * 64, "of the embedding only a row is looked up"
    assert sum(layer["parameters"] for layer in found["layers"]) + found["around"]["parameters"] == found["parameters"]


def test_packed_experts_are_the_unpacked_ones_of_the_same_seed_packed(tmp_path: Path) -> None:
    for form in ("none", "mxfp4"):
        command("make", "-o", str(tmp_path / form), "--quantise", form, *SMALL)
    packing = load_checkpoint(str(tmp_path / "none"), experts=Quantisation.MXFP4)
    assert same_state(export_state(packing), stored(tmp_path / "mxfp4"))


def test_a_seed_makes_the_same_files_and_another_makes_others(tmp_path: Path) -> None:
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        command("make", "-o", str(tmp_path / name), "--seed", seed, *SMALL)
    data = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert data[0] == data[1] != data[2]
    parts = {"model.layers.1.block_sparse_moe.experts.0.w1.weight", "model.layers.1.block_sparse_moe.experts.1.w1.weight"}
    one, other = (stored(tmp_path / "a")[name] for name in sorted(parts))
    assert not torch.equal(one, other), "a draw of its own for each tensor"


@pytest.mark.parametrize("form", list(Quantisation))
def test_a_random_model_is_its_checkpoint_without_the_files(tmp_path: Path, form: Quantisation) -> None:
    config = like_k3(4, 128, num_experts=8)
    make_checkpoint(config, tmp_path, seed=3, experts=form)
    made, loaded = random_model(config, seed=3, experts=form), load_checkpoint(str(tmp_path), dtype=torch.bfloat16)
    assert same_state(made.state_dict(), loaded.state_dict())
    assert {n: p.dtype for n, p in made.named_parameters()} == {n: p.dtype for n, p in loaded.named_parameters()}


def test_values_are_those_a_fresh_model_starts_with() -> None:
    """Constants equal, spreads alike: two places state the rule."""
    config = like_k3(4, 256, num_experts=4, vocab_size=264)
    torch.manual_seed(0)
    model = K3ForCausalLM(config)
    draw = RandomTensors(config, public_shapes(model, torch.float32), 0)
    for name, want in export_state(model, torch.float32).items():
        got = draw.read(name)
        assert got.shape == want.shape, name
        if want.unique().numel() == 1:
            assert torch.equal(got, want), name
        else:
            assert float(got.std() / want.std()) == pytest.approx(1.0, abs=0.25), name
            assert abs(float(got.mean() - want.mean())) < 0.25 * float(want.std()), name


def test_making_holds_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    plain = RandomTensors.read

    def read(self: RandomTensors, name: str) -> torch.Tensor:
        tensor = plain(self, name)
        reads.add(name, tensor)
        return tensor

    monkeypatch.setattr(RandomTensors, "read", read)
    config = like_k3(4, 128, num_experts=8)
    make_checkpoint(config, tmp_path, experts=Quantisation.MXFP4)
    shapes = public_shapes(skeleton(config, Quantisation.NONE))
    assert sorted(reads.names) == sorted(shapes), "each is drawn once"
    assert reads.most == max(shape.nbytes for shape in shapes.values())


def test_inspection_reads_no_tensor_and_says_what_a_load_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(like_k3(4, 128, num_experts=8), tmp_path)
    reads = Reads(monkeypatch)
    inspect_checkpoint(tmp_path)
    assert reads.opened
    assert not reads.names
    tensors = stored(tmp_path)
    del tensors["model.norm.weight"]
    reshard(tmp_path, {"model-00001-of-00001.safetensors": tensors})
    with pytest.raises(IntegrityError, match=r"model\.norm\.weight"):
        inspect_checkpoint(tmp_path)


def test_text_names_layers_quantisation_and_files(tmp_path: Path) -> None:
    text = command("make", "-o", str(tmp_path / "made"), "--quantise", "mxfp4", *SMALL)
    for part in ("KDA", "MLA", "dense", "MoE", "MXFP4", "model.safetensors", "parameters", "as released"):
        assert part in text, part
    assert "base" in command("inspect", str(Path(__file__).parents[3] / "models" / "base"))


@pytest.mark.parametrize(("argv", "field"), [
    (["--layers", "0"], "layers"), (["--experts-per-token", "9"], "sizes"), (["--latent", "48", "--quantise", "mxfp4"], "experts.0.w1"),
    (["--shard-size", "much"], "--shard-size"), (["--device", "abacus"], "--device"), (["--hidden", "-1"], "hidden"),
])
def test_what_cannot_be_made_is_refused_by_name_and_nothing_is_written(tmp_path: Path, argv: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, ["model", "make", "-o", str(tmp_path / "made"), *SMALL, *argv], catch_exceptions=False)
    assert field in refused.value.field
    assert refused.value.remedy
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_directory_that_holds_something_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        CliRunner().invoke(app, ["model", "make", "-o", str(tmp_path), *SMALL], catch_exceptions=False)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_directory_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        CliRunner().invoke(app, ["model", "inspect", "/nowhere"], catch_exceptions=False)


def test_the_commands_load_torch_only_when_they_run() -> None:
    code = "import sys, driftline.commands.model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
