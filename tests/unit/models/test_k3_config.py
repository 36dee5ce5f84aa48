"""The configuration: K3's published fields with their traps, and refusals that name the field, the value and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_cases import PUBLIC, small
from pydantic import ValidationError

from driftline.messages.errors import ConfigError
from driftline.models.config import K3Config, tiny


def written(tmp_path: Path, body: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(body))
    return tmp_path


def test_the_release_has_24_mla_layers_and_its_last_two_are_mla() -> None:
    config = K3Config.model_validate(PUBLIC)
    mla = [i for i in range(93) if not config.is_kda(i)]
    assert len(mla) == 24
    assert mla == [*range(3, 91, 4), 91, 92], "published lists are 1-indexed"
    assert config.moe_layers == 92
    assert not config.is_moe(0)
    assert config.is_moe(1)


def test_bank_rows_and_parameter_count_of_the_release() -> None:
    """8 writes; 2.78 T parameters from the sizes alone."""
    c = K3Config.model_validate(PUBLIC)
    assert [i for i in range(c.num_hidden_layers) if i % c.attn_res_block_size == 0] == [0, 12, 24, 36, 48, 60, 72, 84]
    d, latent, inner = c.hidden_size, c.routed_expert_hidden_size, c.moe_intermediate_size
    assert c.moe_layers * c.num_experts * 3 * inner * latent == pytest.approx(2722.7e9, rel=1e-4)
    wide, linear = c.num_attention_heads * c.v_head_dim, c.linear_attn_config
    inner_kda = linear.num_heads * linear.head_dim
    kda = 5 * d * inner_kda + d * linear.head_dim + linear.head_dim * inner_kda + d * linear.num_heads
    heads = c.num_attention_heads
    mla = (d * c.q_lora_rank + c.q_lora_rank * heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
           + d * (c.kv_lora_rank + c.qk_rope_head_dim) + c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim) + 2 * d * wide)
    assert kda == pytest.approx(443.6e6, rel=1e-3)
    assert mla == pytest.approx(232.2e6, rel=1e-3)


def test_a_multimodal_config_is_read_by_its_text_part(tmp_path: Path) -> None:
    body = {"model_type": "kimi_k3", "text_config": PUBLIC, "vision_config": {"depth": 27}}
    assert K3Config.load(written(tmp_path, body)) == K3Config.model_validate(PUBLIC)


def test_saved_and_loaded_again_is_equal(tmp_path: Path) -> None:
    small().save(tmp_path)
    assert K3Config.load(tmp_path) == small()


def test_the_demo_preset_has_every_part() -> None:
    config = tiny()
    kinds = {config.is_kda(i) for i in range(config.num_hidden_layers)}
    assert kinds == {True, False}
    assert not config.is_moe(0)
    assert config.moe_layers == 4
    assert not config.is_kda(config.num_hidden_layers - 1), "the last layer is MLA, as in the release"


@pytest.mark.parametrize(("change", "says"), [
    ({"hidden_size": 0}, "hidden_size"),
    ({"vocab_size": "many"}, "vocab_size"),
    ({"kv_lora_rank": None}, "kv_lora_rank"),
    ({"num_experts_per_token": 7}, "num_experts_per_token = 7 exceeds num_experts = 6"),
    ({"num_hidden_layers": 6}, "missing [6]"),
    ({"moe_renormalize": False}, "moe_renormalize"),
    ({"mla_use_nope": False}, "mla_use_nope"),
    ({"hidden_act": "silu"}, "hidden_act"),
    ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
    ({"topk_method": "greedy"}, "topk_method"),
    ({"num_expert_group": 8}, "num_expert_group"),
    ({"linear_attn_config": {"num_heads": 2, "head_dim": 8, "full_attn_layers": [4, 5], "kda_layers": [1, 2, 3, 4]}}, "in both [4]"),
    ({"linear_attn_config": {"num_heads": 2, "head_dim": 8, "full_attn_layers": [3, 4], "kda_layers": [0, 1, 2]}}, "1-indexed"),
    ({"linear_attn_config": {"num_heads": 2, "head_dim": 8, "gate_lower_bound": -6.0}}, "gate_lower_bound"),
])
def test_a_wrong_or_unsupported_field_is_refused_by_name_and_remedy(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as refused:
        K3Config.load(written(tmp_path, {**small().model_dump(mode="json"), **change}))
    assert says in str(refused.value)
    assert refused.value.field
    assert refused.value.remedy


@pytest.mark.parametrize(("change", "says"), [
    ({"moe_layer_freq": 2}, "moe_layer_freq"), ({"attention_bias": True}, "attention_bias"), ({"num_key_value_heads": 1}, "num_key_value_heads"),
    ({"activation_situ_linear_beta": None}, "activation_situ_linear_beta"), ({"attn_res_block_size": None}, "attn_res_block_size"),
])
def test_what_the_release_would_compute_otherwise_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        K3Config.load(written(tmp_path, {**small().model_dump(mode="json"), **change}))


@pytest.mark.parametrize("left_out", [
    "attn_res_block_size", "mla_use_output_gate", "latent_moe_use_norm", "activation_situ_beta", "activation_situ_linear_beta", "gate_lower_bound",
    "use_full_rank_gate",
])
def test_a_field_whose_absence_is_another_model_has_to_be_stated(tmp_path: Path, left_out: str) -> None:
    """Kimi-Linear's files are of the same model_type, have none of these, and would run here with K3's bounds on gates that have none."""
    body = small().model_dump(mode="json")
    K3Config.load(written(tmp_path, body))
    (body if left_out in body else body["linear_attn_config"]).pop(left_out)
    with pytest.raises(ConfigError, match=f"{left_out}.*left out|left out.*{left_out}"):
        K3Config.load(written(tmp_path, body))


def test_a_missing_file_and_a_damaged_one_say_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json here"):
        K3Config.load(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 26')
    with pytest.raises(ConfigError, match="not JSON"):
        K3Config.load(tmp_path)
    with pytest.raises(ConfigError, match="not an object"):
        K3Config.load(written(tmp_path, [1, 2]))


def test_a_config_cannot_be_changed_after_the_fact() -> None:
    with pytest.raises(ValidationError):
        small().hidden_size = 64  # type: ignore[misc]
