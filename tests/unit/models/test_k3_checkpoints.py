"""K3-format checkpoints: both forms of experts in any number of files, bit for bit there and back, and no byte read or held that is not needed."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_checkpoint_cases import (
    EXPERTS,
    Reads,
    config_of,
    packable,
    packed_checkpoint,
    reshard,
    rounded_model,
    same_state,
    stored,
)
from model_cases import random_tokens
from safetensors import safe_open
from safetensors.torch import load_file

from driftline.kernels.mxfp4 import pack, unpack
from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models import shard_files
from driftline.models.checkpoint import load_checkpoint, save_checkpoint
from driftline.models.config import K3Config
from driftline.models.naming import Naming
from driftline.models.quantisation import Quantisation
from driftline.models.shard_files import Shape, write_shards
from driftline.models.shards import INDEX
from driftline.models.state import export_state

BOTH = pytest.mark.parametrize("form", list(Quantisation))


@BOTH
@pytest.mark.parametrize("shard_bytes", [4_000, 20_000, 10**9])
def test_saved_loaded_saved_and_loaded_again_is_the_same_bits(tmp_path: Path, form: Quantisation, shard_bytes: int) -> None:
    save_checkpoint(rounded_model(), tmp_path / "a", experts=form, shard_bytes=shard_bytes)
    once = load_checkpoint(str(tmp_path / "a"))
    save_checkpoint(once, tmp_path / "b", shard_bytes=shard_bytes)
    assert same_state(export_state(once), export_state(load_checkpoint(str(tmp_path / "b"))))
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}


def test_packed_experts_have_the_names_shapes_and_bytes_of_the_release(tmp_path: Path) -> None:
    """w1 and w3 [I, Z / 2] and [I, Z / 32], w2 [Z, I / 2] and [Z, I / 32], uint8, and nothing else is packed."""
    tensors = stored(packed_checkpoint(tmp_path))
    packed = {name for name, tensor in tensors.items() if tensor.dtype == torch.uint8}
    assert packed == {f"model.layers.{i}.block_sparse_moe.experts.{e}.w{j}.weight_{part}" for i in range(1, 5) for e in range(6) for j in (1, 2, 3)
                      for part in ("packed", "scale")}
    shapes = {name.removeprefix(f"{EXPERTS}.3."): tuple(tensors[name].shape) for name in packed if name.startswith(f"{EXPERTS}.3.")}
    assert shapes == {"w1.weight_packed": (32, 32), "w1.weight_scale": (32, 2), "w3.weight_packed": (32, 32), "w3.weight_scale": (32, 2),
                      "w2.weight_packed": (64, 16), "w2.weight_scale": (64, 1)}
    plain = export_state(rounded_model())
    for which in ("w1", "w3", "w2"):
        want = pack(plain[f"{EXPERTS}.5.{which}.weight"])
        assert torch.equal(tensors[f"{EXPERTS}.5.{which}.weight_packed"], want[0])
        assert torch.equal(tensors[f"{EXPERTS}.5.{which}.weight_scale"], want[1])
    weights = config_of(tmp_path)["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["type"], weights["group_size"]) == (4, "float", 32)


def test_the_low_nibble_is_the_even_column_and_swapping_them_shows_in_the_function_alone(tmp_path: Path) -> None:
    """Swapped nibbles keep every statistic of a matrix, so only a product with it tells."""
    right = load_checkpoint(str(packed_checkpoint(tmp_path / "right")), experts=Quantisation.NONE)
    tensors = stored(tmp_path / "right")
    swapped = {name: (t >> 4 | t << 4) if name.endswith("weight_packed") else t for name, t in tensors.items()}
    save_checkpoint(right, tmp_path / "wrong", experts=Quantisation.MXFP4)
    reshard(tmp_path / "wrong", {"model-00001-of-00001.safetensors": swapped})
    wrong = load_checkpoint(str(tmp_path / "wrong"), experts=Quantisation.NONE)
    a, b = right.model.layers[1].block_sparse_moe.experts.w1, wrong.model.layers[1].block_sparse_moe.experts.w1
    assert torch.equal(a.flatten().sort().values, b.flatten().sort().values)
    tokens = random_tokens(1, 5)
    assert (right(tokens).hidden - wrong(tokens).hidden).abs().max() > 1e-2
    low, high = tensors[f"{EXPERTS}.0.w1.weight_packed"][0, 0] & 15, tensors[f"{EXPERTS}.0.w1.weight_packed"][0, 0] >> 4
    value = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    factor = 2.0 ** (int(tensors[f"{EXPERTS}.0.w1.weight_scale"][0, 0]) - 127)
    assert [abs(x) for x in a[0, 0, :2].tolist()] == [value[int(low) & 7] * factor, value[int(high) & 7] * factor]


@BOTH
def test_experts_are_loaded_into_the_form_that_is_asked_for(tmp_path: Path, form: Quantisation) -> None:
    save_checkpoint(rounded_model(), tmp_path, experts=form)
    packed, plain = load_checkpoint(str(tmp_path), experts=Quantisation.MXFP4), load_checkpoint(str(tmp_path), experts=Quantisation.NONE)
    names = [n for n in export_state(plain) if n.startswith(EXPERTS)]
    assert len(names) == 18
    state, wide = export_state(packed), export_state(plain)
    for name in names:
        want = (state[f"{name}_packed"], state[f"{name}_scale"])
        if form is Quantisation.MXFP4:
            assert torch.equal(unpack(*want), wide[name]), "unpacking is exact"
        else:
            assert all(torch.equal(got, held) for got, held in zip(pack(wide[name]), want, strict=True))


def test_a_packed_model_is_saved_unpacked_exactly(tmp_path: Path) -> None:
    packed = load_checkpoint(str(packed_checkpoint(tmp_path / "packed")))
    save_checkpoint(packed, tmp_path / "plain", experts=Quantisation.NONE)
    assert "quantization_config" not in config_of(tmp_path / "plain")
    assert same_state(export_state(load_checkpoint(str(tmp_path / "plain"))),
                      export_state(load_checkpoint(str(tmp_path / "packed"), experts=Quantisation.NONE)))


@BOTH
def test_a_multimodal_checkpoint_loads_by_its_text_part_and_nothing_else_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Quantisation,
) -> None:
    """Prefixed names, text_config, a vision tower in a file of its own and in one with text."""
    model = rounded_model()
    save_checkpoint(model, tmp_path, experts=form)
    text = {f"language_model.{name}": tensor for name, tensor in stored(tmp_path).items()}
    names = sorted(text)
    seen = {"vision_tower.patch_embed.proj.weight": torch.ones(3, 5), "mm_projector.0.weight": torch.ones(2, 2)}
    reshard(tmp_path, {"model-00001-of-00003.safetensors": {n: text[n] for n in names[:50]},
                       "model-00002-of-00003.safetensors": {n: text[n] for n in names[50:]} | {"mm_projector.0.bias": torch.ones(2)},
                       "model-00003-of-00003.safetensors": seen})
    body = config_of(tmp_path)
    scheme = body.pop("quantization_config", None)
    outer = {"model_type": "kimi_k3", "text_config": body, "vision_config": {}} | ({} if scheme is None else {"quantization_config": scheme})
    (tmp_path / "config.json").write_text(json.dumps(outer))
    reads = Reads(monkeypatch)
    back = load_checkpoint(str(tmp_path))
    want = model if form is Quantisation.NONE else load_checkpoint(str(packed_checkpoint(tmp_path / "own")))
    assert same_state(export_state(back), export_state(want))
    assert sorted(reads.names[: len(names)]) == names, "each tensor of the text model once"
    assert "model-00003-of-00003.safetensors" not in reads.opened


@pytest.mark.parametrize(("stored_names", "body", "head"), [
    (["model.embed_tokens.weight", "lm_head.weight"], "model.", "lm_head."),
    (["language_model.model.embed_tokens.weight", "language_model.lm_head.weight"], "language_model.model.", "language_model.lm_head."),
    (["model.language_model.embed_tokens.weight", "lm_head.weight", "model.visual.embed_tokens.weight"], "model.language_model.", "lm_head."),
    (["text.decoder.model.embed_tokens.weight", "text.decoder.lm_head.weight"], "text.decoder.model.", "text.decoder.lm_head."),
    (["language_model.model.embed_tokens.weight"], "language_model.model.", "language_model.lm_head."),
])
def test_a_prefix_is_read_off_the_embedding(stored_names: list[str], body: str, head: str) -> None:
    naming = Naming.of(stored_names)
    assert (naming.body, naming.head) == (body, head)
    assert naming.stored("model.layers.3.mlp_res_proj.weight") == f"{body}layers.3.mlp_res_proj.weight"
    assert naming.stored("lm_head.weight") == f"{head}weight"
    assert naming.owns("vision_tower.x") is (body == "model."), "without a prefix an unknown tensor is one too many"


@pytest.mark.parametrize("unpacked", [False, True])
def test_loading_reads_every_byte_once_and_holds_one_matrix_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unpacked: bool) -> None:
    packed_checkpoint(tmp_path, shard_bytes=20_000)
    tensors = stored(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    reads = Reads(monkeypatch)
    load_checkpoint(str(tmp_path), experts=Quantisation.NONE if unpacked else None)
    assert sorted(reads.names) == sorted(tensors)
    assert reads.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    pair = max(t.nbytes for n, t in tensors.items() if n.endswith("_packed")) + max(t.nbytes for n, t in tensors.items() if n.endswith("_scale"))
    assert reads.most <= max(pair, *(tensor.nbytes for tensor in tensors.values()))
    assert reads.held == 0


def test_values_and_scales_in_files_of_their_own_are_not_opened_over_and_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = stored(packed_checkpoint(tmp_path))
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale")}
    files = {"model-00001-of-00002.safetensors": {n: t for n, t in tensors.items() if n not in scales}, "model-00002-of-00002.safetensors": scales}
    reshard(tmp_path, files)
    reads = Reads(monkeypatch)
    load_checkpoint(str(tmp_path), experts=Quantisation.NONE)
    assert sorted(reads.opened) == sorted(files)


def test_packing_while_loading_reads_each_matrix_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(rounded_model(), tmp_path)
    reads = Reads(monkeypatch)
    load_checkpoint(str(tmp_path), experts=Quantisation.MXFP4)
    assert sorted(reads.names) == sorted(stored(tmp_path))


def test_tied_embeddings_stay_one_tensor_through_a_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(rounded_model(packable(tie_word_embeddings=True)), tmp_path, shard_bytes=20_000)
    back = load_checkpoint(str(tmp_path))
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert "lm_head.weight" not in stored(tmp_path)


def test_the_selection_bias_stays_frozen_and_everything_else_trains(tmp_path: Path) -> None:
    save_checkpoint(rounded_model(), tmp_path)
    frozen = {name.rsplit(".", 1)[1] for name, parameter in load_checkpoint(str(tmp_path)).named_parameters() if not parameter.requires_grad}
    assert frozen == {"e_score_correction_bias"}


def test_files_are_those_of_the_public_format(tmp_path: Path) -> None:
    """Read by safetensors itself: format, alignment, and an index that names every tensor's file and the bytes of all."""
    save_checkpoint(rounded_model(), tmp_path, shard_bytes=60_000)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 1
    total = 0
    for file in files:
        with safe_open(tmp_path / file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            assert {name for name, place in index["weight_map"].items() if place == file} == set(handle.keys())
        data = (tmp_path / file).read_bytes()
        size = int.from_bytes(data[:8], "little")
        offsets = [entry for name, entry in json.loads(data[8 : 8 + size]).items() if name != "__metadata__"]
        assert all((8 + size + entry["data_offsets"][0]) % {"F32": 4, "BF16": 2}[entry["dtype"]] == 0 for entry in offsets)
        total += sum(tensor.nbytes for tensor in load_file(tmp_path / file).values())
    assert index["metadata"]["total_size"] == total


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=12),
       st.integers(1, 200))
def test_any_tensors_come_back_from_shards_within_the_limit(kinds: list[tuple[torch.dtype, list[int]]], limit: int) -> None:
    tensors = {f"t{i}": (torch.arange(int(torch.tensor(shape).prod()) if shape else 1) % 200).to(dtype).reshape(shape) for i, (dtype, shape) in enumerate(kinds)}
    with tempfile.TemporaryDirectory() as folder:
        files = write_shards(Path(folder), {name: Shape(t.dtype, tuple(t.shape)) for name, t in tensors.items()}, tensors.__getitem__, limit)
        assert same_state(stored(Path(folder)), tensors)
        for file in files:
            held = load_file(file)
            assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= limit
        assert sorted(path.name for path in Path(folder).iterdir()) == sorted([file.name for file in files] + ([INDEX] if len(files) > 1 else []))


@pytest.mark.parametrize(("before", "after"), [(10**9, 20_000), (20_000, 10**9), (20_000, 40_000)])
def test_a_checkpoint_takes_the_place_of_one_in_other_files(tmp_path: Path, before: int, after: int) -> None:
    save_checkpoint(rounded_model(seed=1), tmp_path, shard_bytes=before)
    new = rounded_model(seed=2)
    files = save_checkpoint(new, tmp_path, shard_bytes=after)
    assert sorted(tmp_path.glob("*.safetensors")) == sorted(files)
    assert same_state(export_state(load_checkpoint(str(tmp_path))), export_state(new))


@pytest.mark.parametrize("shard_bytes", [20_000, 10**9])
def test_a_save_that_fails_leaves_the_checkpoint_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int) -> None:
    old = rounded_model(seed=1)
    save_checkpoint(old, tmp_path, shard_bytes=shard_bytes)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    append = shard_files._append

    def full(file: object, tensor: torch.Tensor, name: str, shape: Shape) -> None:
        if name.startswith("model.layers.4"):
            raise OSError(28, "No space left on device")
        append(file, tensor, name, shape)  # type: ignore[arg-type]

    monkeypatch.setattr(shard_files, "_append", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(rounded_model(seed=2), tmp_path, shard_bytes=shard_bytes)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept


@pytest.mark.parametrize("shard_bytes", [60_000, 10**9])
@pytest.mark.parametrize("eps", [1e-5, 1e-3])
@pytest.mark.parametrize("stop", range(6))
def test_a_save_killed_anywhere_leaves_the_old_one_the_new_one_or_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int, eps: float, shard_bytes: int,
) -> None:
    """The same names and shapes in the same files, under the same and under another config: a mixture would load without a word."""
    old, new = rounded_model(seed=1), rounded_model(packable(rms_norm_eps=eps), seed=2)
    save_checkpoint(old, tmp_path, shard_bytes=shard_bytes)
    replace, left = shard_files.os.replace, stop

    def replaced(source: object, target: object) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        replace(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(shard_files.os, "replace", replaced)
    with contextlib.suppress(KeyboardInterrupt):
        save_checkpoint(new, tmp_path, shard_bytes=shard_bytes)
    monkeypatch.undo()
    try:
        found = load_checkpoint(str(tmp_path))
    except (ConfigError, IntegrityError):
        assert stop > 0 or eps != 1e-5 or shard_bytes < 10**9, "before anything was replaced, the old one is there where that is safe"
        return
    assert any(found.config == model.config and same_state(export_state(found), export_state(model)) for model in (old, new))


def test_the_config_says_what_a_reader_of_the_release_looks_for(tmp_path: Path) -> None:
    save_checkpoint(rounded_model(), tmp_path)
    body = config_of(tmp_path)
    assert body["architectures"] == ["KimiLinearForCausalLM"]
    assert (body["hidden_act"], body["mla_use_nope"], body["topk_method"]) == ("situ", True, "noaux_tc")
    assert body["num_key_value_heads"] == body["num_attention_heads"]
    assert K3Config.load(tmp_path) == packable()
