"""Configurations of dense families: a field left out means what the family means by it, and what is not computed is refused by file, field, value and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model_cases import LLAMA3, SIZES, THEIRS, YARN, saved, written
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import PUBLIC
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from driftline.messages.errors import ConfigError
from driftline.models.architectures import configuration, skeleton
from driftline.models.config import K3Config
from driftline.models.dense.config import Architecture, DenseConfig
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.dense.positions import Rope, RopeType, amplitude, frequencies
from driftline.models.families import model_config
from driftline.models.quantisation import Quantisation


def of(**body: Any) -> DenseConfig:
    return DenseConfig.of({"model_type": "llama", **SIZES, **body}, "config.json")


@pytest.mark.parametrize("kind", list(Architecture))
def test_what_a_file_leaves_out_means_what_transformers_means_by_it(kind: Architecture) -> None:
    """Only the model_type and sizes; a Mistral must say that it has no window."""
    body = {"model_type": str(kind), "vocab_size": 40, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 32,
            "pad_token_id": None}
    body |= {"sliding_window": None} if kind is Architecture.MISTRAL else {}
    theirs = AutoConfig.for_model(**body)
    ours = DenseConfig.of(body, "config.json")
    assert (ours.num_key_value_heads, ours.head_dim) == (theirs.num_key_value_heads, getattr(theirs, "head_dim", None) or 8)
    assert ours.rope.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    shapes = {name: tuple(p.shape) for name, p in AutoModelForCausalLM.from_config(theirs).named_parameters()}
    with torch.device("meta"):
        assert {name: tuple(p.shape) for name, p in DenseForCausalLM(ours).named_parameters()} == shapes


@pytest.mark.parametrize("name", list(THEIRS))
def test_what_is_saved_is_read_back_and_is_transformers_configuration(name: str, tmp_path: Path) -> None:
    ours = DenseConfig.load(saved(name))
    ours.save(tmp_path)
    assert DenseConfig.load(tmp_path) == ours
    assert configuration(tmp_path) == (ours, Quantisation.NONE)
    theirs, read = THEIRS[name], AutoConfig.from_pretrained(tmp_path)
    assert type(read) is type(theirs)
    for field in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "rms_norm_eps", "tie_word_embeddings", "vocab_size",
                  "eos_token_id", "max_position_embeddings", "attention_bias", "mlp_bias", "no_rope_layers"):
        assert getattr(read, field, None) == getattr(theirs, field, None), field
    kept = {key: value for key, value in theirs.rope_parameters.items() if value is not None}
    assert {key: value for key, value in read.rope_parameters.items() if key in kept} == kept


@pytest.mark.parametrize("body", [
    {"rope_theta": 5e5, "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"}},
    {"rope_parameters": LLAMA3},
    {"rope_theta": 5e5, "rope_scaling": {**{key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_type")}, "type": "llama3"}},
    {"rope_theta": 5e5, "rope_scaling": {**{key: value for key, value in LLAMA3.items() if key != "rope_theta"}, "type": "llama3"}},
])
def test_a_rotation_is_read_in_every_form_that_files_have_it(body: dict[str, Any]) -> None:
    assert of(**body).rope == Rope(rope_type=RopeType.LLAMA3, rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["default", "linear", "llama3", "yarn"]), st.sampled_from([16, 64, 96, 128]), st.floats(1.5, 64), st.sampled_from([1e4, 5e5, 1e6]),
       st.sampled_from([32, 4096, 8192]), st.booleans())
def test_frequencies_have_transformers_bits(kind: str, head_dim: int, factor: float, theta: float, original: int, truncate: bool) -> None:
    body: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    body |= {"factor": factor} if kind != "default" else {}
    body |= {"original_max_position_embeddings": original} if kind in ("llama3", "yarn") else {}
    body |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    body |= {"truncate": truncate} if kind == "yarn" else {}
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model("llama", hidden_size=head_dim, num_attention_heads=1, rope_parameters=dict(body)))
    rope = of(rope_parameters=body).rope
    assert torch.equal(frequencies(rope, head_dim), theirs.inv_freq)
    assert amplitude(rope) == theirs.attention_scaling


def test_a_stretch_whose_original_context_is_left_out_takes_the_models() -> None:
    """As transformers has it; a field of the model beside it counts first."""
    body = {"rope_type": "yarn", "factor": 2.0}
    assert of(rope_parameters=body).rope.original_max_position_embeddings == 256
    assert of(rope_parameters={**body, "original_max_position_embeddings": 99}).rope.original_max_position_embeddings == 99
    assert of(rope_parameters={**body, "original_max_position_embeddings": 99}, original_max_position_embeddings=77).rope.original_max_position_embeddings == 77


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"hidden_act": "gelu"}, "hidden_act", "silu"),
    ({"rope_interleaved": True}, "rope_interleaved", "False"),
    ({"use_mrope": True}, "use_mrope", "False"),
    ({"attention_dropout": 0.1}, "attention_dropout", "0.0"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "1.0"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "before it was quantised"),
    ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window", "without a window"),
    ({"model_type": "mistral"}, "sliding_window", "4096"),
    ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window", "without a window"),
    ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types", "sliding_attention"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type", "dynamic"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0], "short_factor": [1.0]}}, "rope_parameters.rope_type", "longrope"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 8, 8]}}, "rope_scaling.rope_type", "mrope"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [8, 8, 8]}}, "rope_scaling.mrope_section", "not a field"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "rope_scaling.partial_rotary_factor", "0.5"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling", "needs factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "rope_scaling.factor", "-1.0"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32.0}}, "rope_scaling.beta_fast", "fields of it are factor"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "rope_scaling", "below high_freq_factor"),
    ({"rope_scaling": "linear"}, "rope_scaling", "not an object"),
    ({"rope_theta": 0.5}, "rope_theta", "0.5"),
    ({"num_key_value_heads": 3}, "config", "must divide num_attention_heads"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads", "set head_dim"),
    ({"head_dim": 13}, "config", "must be even"),
    ({"head_dim": "wide"}, "head_dim", "wide"),
    ({"hidden_size": 0}, "hidden_size", "0"),
    ({"hidden_size": None}, "hidden_size", "required"),
    ({"tie_word_embeddings": "sometimes"}, "tie_word_embeddings", "sometimes"),
    ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers", "for each of 3 layers"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 2, 1]}, "no_rope_layers", "a 0 or a 1"),
    ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval", "whole number"),
    ({"model_type": "smollm3", "num_hidden_layers": "many"}, "num_hidden_layers", "many"),
]


@pytest.mark.parametrize(("change", "field", "says"), REFUSED)
def test_what_is_not_computed_is_refused_by_its_field(change: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        of(**change)
    assert field in str(refused.value)
    assert says in str(refused.value)
    assert "config.json" in str(refused.value)


@pytest.mark.parametrize("change", [
    {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}, {"rope_scaling": None}, {"attention_dropout": 0},
    {"rope_scaling": {"rope_type": "default", "factor": None}}, {"model_type": "qwen3", "layer_types": ["full_attention"] * 3}, {"partial_rotary_factor": 1.0},
    {"pretraining_tp": 1, "torch_dtype": "bfloat16", "some_new_field": 3},
])
def test_what_changes_nothing_is_read(change: dict[str, Any]) -> None:
    assert of(**change).rope == Rope()


@pytest.mark.parametrize("kind", ["gpt2", "gemma3", "kimi_k9", 7, ["llama"]])
def test_a_model_that_no_decoder_computes_is_refused_by_its_type(kind: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no decoder of this model_type.*kimi_linear.*llama.*qwen3"):
        configuration(written(tmp_path, {**SIZES, "model_type": kind}))
    with pytest.raises(ConfigError, match="no dense decoder of this model_type"):
        DenseConfig.of({**SIZES, "model_type": kind}, "config.json")


def test_the_model_type_says_which_family(tmp_path: Path) -> None:
    assert model_config(str(saved("qwen3"))) == DenseConfig.load(saved("qwen3"))
    assert isinstance(model_config(str(written(tmp_path / "a", PUBLIC))), K3Config)
    assert isinstance(model_config(str(written(tmp_path / "b", {key: value for key, value in PUBLIC.items() if key != "model_type"}))), K3Config)
    inner = {"model_type": "kimi_k3", "text_config": PUBLIC}
    assert isinstance(model_config(str(written(tmp_path / "c", inner))), K3Config)
    text = {"model_type": "mistral3", "text_config": {**SIZES, "model_type": "mistral", "sliding_window": None}}
    assert model_config(str(written(tmp_path / "d", text))) == DenseConfig.of(text, "d")
    assert model_config("base") == K3Config.load(Path(__file__).parents[3] / "models" / "base")


@pytest.mark.parametrize("text", ["{", "[]", '{"text_config": 3}', "3"])
def test_a_file_that_is_no_object_is_refused_by_its_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    for read in (configuration, DenseConfig.load):
        with pytest.raises(ConfigError, match=r"config\.json"):
            read(tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json here"):
        DenseConfig.load(tmp_path / "none")


PUBLISHED = [
    pytest.param(6_738_415_616, {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 32000,
    }, id="Llama-2-7b"),
    pytest.param(1_235_814_400, {
        "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
    }, id="Llama-3.2-1B"),
    pytest.param(494_032_768, {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    }, id="Qwen2.5-0.5B"),
    pytest.param(596_049_920, {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936,
    }, id="Qwen3-0.6B"),
    pytest.param(7_248_023_552, {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32768,
    }, id="Mistral-7B-v0.3"),
    pytest.param(1_100_048_384, {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 2048,
        "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
        "vocab_size": 32000,
    }, id="TinyLlama-1.1B"),
    pytest.param(134_515_008, {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
    }, id="SmolLM2-135M"),
    pytest.param(3_075_098_624, {
        "model_type": "smollm3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008,
        "max_position_embeddings": 65536, "mlp_bias": False, "no_rope_layer_interval": 4, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 5000000.0, "use_sliding_window": False, "sliding_window": None,
        "vocab_size": 128256,
    }, id="SmolLM3-3B"),
]
"""Fields of published config.json files that decide shapes or could be refused, and the parameters that their pages count."""


@pytest.mark.parametrize(("parameters", "body"), PUBLISHED)
def test_published_files_are_models_of_the_published_size(parameters: int, body: dict[str, Any]) -> None:
    assert sum(p.numel() for p in skeleton(DenseConfig.of(body, "config.json"), Quantisation.NONE).parameters()) == parameters


def test_yarn_of_a_published_file_is_what_its_authors_state() -> None:
    """Qwen2.5's card: factor 4 over 32768. The slowest column is stretched fourfold, the fastest kept, and cosines are scaled by 0.1 ln 4 + 1."""
    body = {**json.loads(Qwen2Config(num_hidden_layers=2).to_json_string()), "rope_parameters": None, "rope_theta": 1e6,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}}
    config = DenseConfig.of(body, "config.json")
    stretched, plain = frequencies(config.rope, config.head_dim), frequencies(Rope(rope_theta=1e6), config.head_dim)
    assert float(stretched[0]) == float(plain[0]) == 1.0
    assert float(plain[-1] / stretched[-1]) == pytest.approx(4.0)
    assert amplitude(config.rope) == pytest.approx(1.138629436)
    assert {**YARN, "factor": 4.0}["rope_type"] == config.rope.rope_type


ODD = st.one_of(st.none(), st.booleans(), st.sampled_from([-1, 0, 1, 3, 7, 10**30, 0.5, -2.0, float("inf"), float("nan"), "", "x", "default", "yarn"]),
                st.just([]), st.just([[]]), st.just({}), st.just({"a": 1}), st.just([1, None]))


@settings(max_examples=400, deadline=None)
@given(kind=st.sampled_from(sorted(Architecture)), fields=st.dictionaries(st.sampled_from([
    *SIZES, "model_type", "hidden_act", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "tie_word_embeddings",
    "sliding_window", "use_sliding_window", "layer_types", "no_rope_layers", "no_rope_layer_interval", "quantization_config", "partial_rotary_factor", "text_config",
    "attention_dropout", "original_max_position_embeddings",
]), ODD, max_size=3), scheme=st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "truncate", "mscale",
                                                             "original_max_position_embeddings", "partial_rotary_factor"]), ODD, max_size=3))
def test_any_file_is_read_or_refused_by_name(kind: str, fields: dict[str, Any], scheme: dict[str, Any]) -> None:
    body = {"model_type": kind, **SIZES, "sliding_window": None, "rope_scaling": scheme or None, **fields}
    try:
        config = DenseConfig.of(body, "config.json")
    except ConfigError as error:
        said = str(error)
    else:
        said = "config.json"
        assert torch.isfinite(frequencies(config.rope, min(config.head_dim, 512))).all()
        assert DenseConfig.of(config.document(), "again") == config
    assert "config.json" in said
