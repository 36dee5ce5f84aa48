"""A GGUF llama is the Hugging Face model it was made of: fields, names, rows of q and k, logits; and what it cannot be is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_cases import SIZES, blocks, metadata, shapes, small_llama, weights, write
from transformers import LlamaConfig, LlamaForCausalLM

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.families import open_model
from driftline.models.gguf.blocks import Kind
from driftline.models.gguf.llama import GgufModel
from driftline.models.gguf.shards import GgufShards

torch.set_num_threads(1)

ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def reference(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(**{
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.2, **changes})
    return LlamaForCausalLM(config).eval()


def converted(model: LlamaForCausalLM) -> dict[str, tuple[Kind, tuple[int, ...], bytes]]:
    """As llama.cpp's converter writes a llama: its names, and each head's rows so that a rotated pair lies together."""
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    inside = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
              "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    made = {}
    for name, value in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem == "lm_head" and model.config.tie_word_embeddings:
            continue
        rows = value.numpy()
        if stem in outside:
            new = outside[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            new = f"blk.{layer}.{inside[part]}"
            for short, count in heads.items():
                if new.endswith(short):
                    rows = rows.reshape(count, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        made[f"{new}.weight"] = (Kind.F32, tuple(value.shape), np.ascontiguousarray(rows).tobytes())
    return made


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_comes_back_bit_for_bit_and_has_its_logits(tmp_path: Path, tied: bool) -> None:
    theirs = reference(tie_word_embeddings=tied)
    path = write(tmp_path / "m.gguf", metadata(), converted(theirs))
    shards = GgufShards.open(path)
    state = {name: tensor for name, tensor in theirs.state_dict().items() if not (tied and name == "lm_head.weight")}
    assert shards.files.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(shards.read(name), tensor), name
    ours = open_model(str(path))
    tokens = torch.randint(0, 300, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(tokens).hidden), theirs(tokens).logits, atol=1e-5, rtol=0)
        wrong = theirs.model.layers[0].self_attn.k_proj.weight
        wrong.copy_(wrong.reshape(2, 2, 8, 64).swapaxes(1, 2).reshape(32, 64))
        assert (ours.logits(ours(tokens).hidden) - theirs(tokens).logits).abs().max() > 1e-2, "rows in pairs must show"


def test_the_fields_are_those_of_config_json(tmp_path: Path) -> None:
    model = GgufModel.open(small_llama(tmp_path))
    config = LlamaConfig(**{k: v for k, v in json.loads(model.files()["config.json"]).items() if k not in ("model_type", "architectures")})
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (64, 96, 2, 4, 2)
    assert (config.vocab_size, config.max_position_embeddings, config.head_dim, config.tie_word_embeddings) == (300, 64, 16, True)
    assert model.config["rms_norm_eps"] == 1e-5, "the shortest decimal of the fp32, not 9.99999974e-06"
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 4)
    assert model.kinds["model.layers.1.mlp.up_proj.weight"] == "Q8_0"
    assert model.stored_bytes["model.layers.1.mlp.up_proj.weight"] == 96 * 64 // 32 * 34


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_rotation_is_known_by_the_factors_in_the_file(tmp_path: Path, factor: float) -> None:
    scaled = reference(rope_parameters={**ROPE, "factor": factor, "rope_theta": 500000.0}, max_position_embeddings=64)
    plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    rates = (plain / scaled.model.rotary_emb.inv_freq.double().numpy()).astype("<f4")
    tensors = {**weights(Kind.F32), "rope_freqs.weight": (Kind.F32, (8,), rates.tobytes())}
    config = GgufModel.open(write(tmp_path / "m.gguf", metadata(llama__rope__freq_base=500000.0), tensors)).config
    assert config["rope_scaling"] == {**ROPE, "factor": factor}
    tensors["rope_freqs.weight"] = (Kind.F32, (8,), (rates * 1.5).tobytes())
    with pytest.raises(ConfigError, match="of no scaling that is known"):
        GgufModel.open(write(tmp_path / "m.gguf", metadata(llama__rope__freq_base=500000.0), tensors))


def test_linear_scaling_is_read_and_another_refused(tmp_path: Path) -> None:
    config = GgufModel.open(small_llama(tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(ConfigError, match=r"rope\.scaling\.type"):
        GgufModel.open(small_llama(tmp_path, llama__rope__scaling__type="longrope"))


@pytest.mark.parametrize(("change", "error", "match"), [
    ({"general__architecture": "mamba"}, ConfigError, "general.architecture"),
    ({"llama__expert_count": 8}, ConfigError, "mixtures of experts"),
    ({"llama__attention__sliding_window": 32}, ConfigError, "sliding windows"),
    ({"llama__rope__dimension_count": 8}, ConfigError, "a part of each head"),
    ({"llama__attention__value_length": 8}, ConfigError, "different widths"),
    ({"llama__attention__head_count_kv": 3}, ConfigError, "cannot be grouped"),
    ({"llama__block_count": 10**9}, IntegrityError, "block_count"),
    ({"llama__block_count": 3}, IntegrityError, "9 tensors missing"),
    ({"llama__block_count": 1}, IntegrityError, "9 that a llama"),
    ({"llama__vocab_size": 299}, IntegrityError, r"token_embd.weight"),
    ({"llama__feed_forward_length": None}, IntegrityError, "does not say it"),
    ({"llama__embedding_length": "64"}, IntegrityError, "positive integer"),
    ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, IntegrityError, "positive number"),
])
def test_what_is_another_model_is_refused_by_its_field(tmp_path: Path, change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        GgufModel.open(small_llama(tmp_path, **change))


def test_a_weight_that_is_not_finite_is_refused_when_it_is_read(tmp_path: Path) -> None:
    tensors = weights(Kind.F32)
    kind, shape, raw = tensors["output_norm.weight"]
    tensors["output_norm.weight"] = (kind, shape, np.full(shape, np.inf, "<f4").tobytes())
    model = GgufModel.open(write(tmp_path / "m.gguf", metadata(), tensors))
    assert len(raw) == model.stored_bytes["model.norm.weight"]
    with pytest.raises(IntegrityError, match=r"output_norm\.weight"):
        model.read("model.norm.weight")


def test_names_that_the_file_has_not_are_refused(tmp_path: Path) -> None:
    shards = GgufShards.open(small_llama(tmp_path))
    assert shards.layouts(["model.norm.weight"])["model.norm.weight"].shape == (64,)
    assert shards.layouts(["model.norm.weight"])["model.norm.weight"].dtype_name == "F32"
    with pytest.raises(IntegrityError, match="lm_head"):
        shards.layouts(["lm_head.weight"])


@pytest.mark.parametrize("kind", list(Kind))
def test_a_model_of_any_form_loads(tmp_path: Path, kind: Kind) -> None:
    if shapes()["token_embd.weight"][1] % (256 if "K" in kind.name else 32):
        sizes = {**SIZES, "embedding_length": 256, "feed_forward_length": 256, "rope.dimension_count": 64}
        body = metadata(**{f"llama__{k.replace('.', '__')}": v for k, v in sizes.items()})
        tensors = {}
        rng = np.random.default_rng(0)
        for name, shape in shapes(sizes).items():
            form = Kind.F32 if len(shape) == 1 else kind
            tensors[name] = (form, shape, blocks(form, shape, rng))
        path = write(tmp_path / "m.gguf", body, tensors)
    else:
        path = small_llama(tmp_path, kind)
    model = open_model(str(path))
    with torch.no_grad():
        assert model.logits(model(torch.arange(9)[None]).hidden).isfinite().all()
