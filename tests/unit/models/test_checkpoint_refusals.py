"""Checkpoints that do not fit: each is refused before anything is built, by an error that names the file, the tensor, what was found and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from k3_checkpoint_cases import (
    EXPERTS,
    Reads,
    changed,
    config_of,
    packable,
    packed_checkpoint,
    reshard,
    rounded_model,
    stored,
)
from model_cases import PUBLIC
from safetensors.torch import save_file

from driftline.messages.errors import ConfigError, DriftlineError, IntegrityError
from driftline.models.checkpoint import load_checkpoint, save_checkpoint
from driftline.models.naming import Naming
from driftline.models.quantisation import Quantisation
from driftline.models.shards import INDEX

A_LOG = "model.layers.0.self_attn.A_log"
SCALE, PACKED = f"{EXPERTS}.0.w1.weight_scale", f"{EXPERTS}.0.w1.weight_packed"


def refused(directory: Path, **options: Any) -> DriftlineError:
    with pytest.raises((ConfigError, IntegrityError)) as found:
        load_checkpoint(str(directory), **options)
    assert found.value.field
    assert found.value.remedy
    return found.value


@pytest.mark.parametrize(("change", "names", "says"), [
    ({SCALE: None}, SCALE, "1 tensors missing, 0 not in the model"),
    ({"model.layers.4.self_attn.q_proj.weight": torch.zeros(2, 2)}, "model.layers.4.self_attn.q_proj.weight", "0 tensors missing, 1 not in the model"),
    ({f"{EXPERTS}.6.w1.weight_packed": torch.zeros(32, 32, dtype=torch.uint8)}, f"{EXPERTS}.6.w1", "1 not in the model"),
    ({"model.norm.weight": torch.zeros(31)}, "model.safetensors: model.norm.weight", "expected (32,)"),
    ({PACKED: torch.zeros(32, 16, dtype=torch.uint8)}, f"model.safetensors: {PACKED}", "expected (32, 32)"),
    ({SCALE: torch.zeros(32, 4, dtype=torch.uint8)}, f"model.safetensors: {SCALE}", "expected (32, 2)"),
    ({PACKED: torch.zeros(32, 32, dtype=torch.int8)}, f"model.safetensors: {PACKED}", "I8"),
    ({SCALE: torch.ones(32, 2)}, f"model.safetensors: {SCALE}", "F32"),
    ({"lm_head.weight": torch.zeros(264, 32, dtype=torch.int8)}, "model.safetensors: lm_head.weight", "I8"),
    ({"lm_head.weight": torch.zeros(264, 32).to(torch.float8_e4m3fn)}, "model.safetensors: lm_head.weight", "F8_E4M3"),
    ({A_LOG: torch.zeros(1)}, f"model.safetensors: {A_LOG}", "expected (2,)"),
    ({A_LOG: torch.zeros(1, 1, 2, 1)}, f"model.safetensors: {A_LOG}", "expected (2,)"),
    ({"model.embed_tokens.weight": None}, "embed_tokens", "embedding"),
])
def test_a_tensor_that_does_not_fit_is_named_and_none_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, torch.Tensor | None], names: str, says: str,
) -> None:
    changed(packed_checkpoint(tmp_path), change)
    reads = Reads(monkeypatch)
    error = refused(tmp_path)
    assert isinstance(error, IntegrityError)
    assert names in str(error)
    assert says in str(error)
    assert error.value is not None
    assert not reads.names


@pytest.mark.parametrize("form", [None, Quantisation.NONE])
def test_a_nan_scale_is_refused_with_its_place(tmp_path: Path, form: Quantisation | None) -> None:
    """0xFF would make 32 weights NaN, and every answer with them."""
    scale = stored(packed_checkpoint(tmp_path))[SCALE]
    scale[3, 1] = 255
    error = refused(changed(tmp_path, {SCALE: scale}), experts=form)
    assert error.field == f"{tmp_path / 'model.safetensors'}: {SCALE}"
    assert error.value == 255


def test_a_scale_beyond_the_kernels_is_refused_packed_and_loads_unpacked(tmp_path: Path) -> None:
    scale = stored(packed_checkpoint(tmp_path))[SCALE]
    scale[3, 1] = 129
    changed(tmp_path, {SCALE: scale})
    error = refused(tmp_path)
    assert SCALE in error.field
    assert error.value == 129
    assert torch.isfinite(load_checkpoint(str(tmp_path), experts=Quantisation.NONE).model.layers[1].block_sparse_moe.experts.w1).all()
    scale[3, 1] = 128
    load_checkpoint(str(changed(tmp_path, {SCALE: scale})))


def test_a_log_is_cut_where_it_is_padded_and_refused_where_it_has_more_heads(tmp_path: Path) -> None:
    """Stored for 128 heads, used for fewer: a slice that drops heads in use would load without a word."""
    packed_checkpoint(tmp_path)
    values = torch.cat([torch.tensor([0.25, -0.5]), torch.zeros(126)])
    model = load_checkpoint(str(changed(tmp_path, {A_LOG: values})))
    assert model.model.layers[0].self_attn.A_log.tolist() == [0.25, -0.5]
    values[95] = 0.125
    error = refused(changed(tmp_path, {A_LOG: values}))
    assert A_LOG in error.field
    assert error.value == [0.125]


def test_packed_experts_and_their_config_must_say_the_same(tmp_path: Path) -> None:
    packed_checkpoint(tmp_path / "packed")
    save_checkpoint(rounded_model(), tmp_path / "plain")
    packed, plain = config_of(tmp_path / "packed"), config_of(tmp_path / "plain")
    (tmp_path / "packed" / "config.json").write_text(json.dumps(plain))
    (tmp_path / "plain" / "config.json").write_text(json.dumps(packed))
    assert "needs the quantization_config" in refused(tmp_path / "packed").remedy
    assert "must not have a quantization_config" in refused(tmp_path / "plain").remedy


def scheme(**changes: Any) -> dict[str, Any]:
    """The release's, with the format inside the group; `weights__x` and `group__x` change what is below."""
    group: dict[str, Any] = {"format": "mxfp4-pack-quantized", "input_activations": None, "targets": ["Linear"],
                             "weights": {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True, "scale_dtype": "torch.uint8"}}
    body: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    for name, value in changes.items():
        place = {"weights": group["weights"], "group": group}.get(name.split("__")[0], body)
        place[name.split("__")[-1]] = value
    return body


@pytest.mark.parametrize("where", ["text_config", "beside it", "plain"])
def test_a_scheme_is_found_wherever_the_file_has_it(where: str) -> None:
    text = {**PUBLIC, "quantization_config": scheme()} if where != "beside it" else PUBLIC
    body = text if where == "plain" else {"text_config": text} | ({"quantization_config": scheme()} if where == "beside it" else {})
    assert Quantisation.of(body, "config.json") is Quantisation.MXFP4
    assert Quantisation.of({"text_config": PUBLIC, "quantization_config": None}, "config.json") is Quantisation.NONE


def test_what_is_written_is_what_is_read() -> None:
    for form in Quantisation:
        assert Quantisation.of({"quantization_config": form.document()}, "config.json") is form


@pytest.mark.parametrize(("changes", "field"), [
    ({"quant_method": "fp8"}, "quant_method"), ({"config_groups": {}}, "config_groups"), ({"config_groups": [1]}, "config_groups"),
    ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"), ({"group__format": "nvfp4-pack-quantized"}, "format"), ({"group__format": None}, "format"),
    ({"group__weights": None}, "weights"), ({"group__input_activations": {"num_bits": 8}}, "input_activations"), ({"weights__num_bits": 8}, "num_bits"),
    ({"weights__type": "int"}, "type"), ({"weights__group_size": 16}, "group_size"), ({"weights__group_size": None}, "group_size"),
    ({"weights__symmetric": False}, "symmetric"),
])
def test_another_scheme_is_refused_by_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as found:
        Quantisation.of({"quantization_config": scheme(**changes)}, "config.json")
    assert found.value.field.startswith("config.json: quantization_config")
    assert found.value.field.endswith(field)
    assert found.value.remedy


def sharded(tmp_path: Path) -> Path:
    packed_checkpoint(tmp_path, shard_bytes=80_000)
    assert (tmp_path / "model-00002-of-00003.safetensors").exists()
    return tmp_path


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def rewrite(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    body = json.loads((directory / INDEX).read_text())
    change(body)
    (directory / INDEX).write_text(json.dumps(body))


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda d: (d / "model-00002-of-00003.safetensors").unlink(), "model-00002-of-00003.safetensors"),
    (lambda d: ((d / INDEX).unlink(), (d / "model-00002-of-00003.safetensors").unlink()), "model-00002-of-00003.safetensors"),
    (lambda d: shorten(d / "model-00003-of-00003.safetensors"), "model-00003-of-00003.safetensors"),
    (lambda d: (d / "model-00001-of-00003.safetensors").write_bytes(b""), "model-00001-of-00003.safetensors"),
    (lambda d: (d / INDEX).write_text("{"), INDEX),
    (lambda d: (d / INDEX).write_text("[]"), INDEX),
    (lambda d: rewrite(d, lambda body: body.pop("weight_map")), INDEX),
    (lambda d: rewrite(d, lambda body: body.update(weight_map={})), INDEX),
    (lambda d: rewrite(d, lambda body: body["weight_map"].update({"lm_head.weight": "../model.safetensors"})), INDEX),
    (lambda d: rewrite(d, lambda body: body["weight_map"].update({"lm_head.weight": 7})), INDEX),
    (lambda d: rewrite(d, lambda body: body["weight_map"].update({"lm_head.weight": "model-00003-of-00003.safetensors"})), "places in it"),
    (lambda d: rewrite(d, lambda body: body["weight_map"].pop("lm_head.weight")), "lm_head.weight"),
    (lambda d: save_file({"x": torch.zeros(1)}, d / "model.safetensors"), "two checkpoints"),
    (lambda d: ((d / INDEX).unlink(), save_file({"lm_head.weight": torch.zeros(264, 32)}, d / "other.safetensors")), "lm_head.weight"),
    (lambda d: (d / "config.json").unlink(), "config.json"),
    (lambda d: (d / "config.json").write_bytes(b"\xff\xfe"), "config.json"),
    (lambda d: (d / "config.json").write_text('{"text_config": 3}'), "config.json"),
])
def test_files_that_are_missing_cut_short_or_at_odds_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], object], says: str,
) -> None:
    spoil(sharded(tmp_path))
    reads = Reads(monkeypatch)
    error = refused(tmp_path)
    assert says in str(error)
    assert not reads.names


def test_experts_whose_rows_are_no_whole_groups_cannot_be_packed(tmp_path: Path) -> None:
    model = rounded_model(packable(routed_expert_hidden_size=48))
    with pytest.raises(ConfigError, match="32 columns") as found:
        save_checkpoint(model, tmp_path, experts=Quantisation.MXFP4)
    assert found.value.remedy
    assert not list(tmp_path.iterdir())
    save_checkpoint(model, tmp_path)
    with pytest.raises(ConfigError, match="routed_expert_hidden_size = 48"):
        load_checkpoint(str(tmp_path), experts=Quantisation.MXFP4)


def test_several_embeddings_at_no_known_place_are_refused() -> None:
    with pytest.raises(IntegrityError, match="several tensors"):
        Naming.of(["a.embed_tokens.weight", "b.embed_tokens.weight"])


def test_shards_of_no_bytes_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shard size = 0"):
        save_checkpoint(rounded_model(), tmp_path, shard_bytes=0)
    assert not list(tmp_path.iterdir())


def test_other_files_of_a_directory_with_an_index_are_not_part_of_it(tmp_path: Path) -> None:
    reshard(packed_checkpoint(tmp_path), {"model-00001-of-00001.safetensors": stored(tmp_path)})
    (tmp_path / "consolidated.safetensors").write_bytes(b"another format")
    load_checkpoint(str(tmp_path))
