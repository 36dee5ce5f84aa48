"""Named tensors: the public names, exact round trips, refusals before anything is copied, one rounding rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_cases import random_model, random_tokens, small
from safetensors.torch import load_file, save_file

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.checkpoint import checkpoint_dir, load_checkpoint, read_tensors, save_checkpoint
from driftline.models.model import K3ForCausalLM
from driftline.models.state import export_state, load_state, policy_dtype, round_to_policy_

KDA = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "A_log", "dt_bias",
       "f_a_proj.weight", "f_b_proj.weight", "b_proj.weight", "g_proj.weight", "o_norm.weight", "o_proj.weight"}
MLA = {"q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight",
       "kv_b_proj.weight", "g_proj.weight", "o_proj.weight"}
DENSE = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
MOE = {"gate.weight", "gate.e_score_correction_bias", "routed_expert_down_proj.weight", "routed_expert_norm.weight",
       "routed_expert_up_proj.weight"} | {f"shared_experts.{n}" for n in DENSE} | {f"experts.{i}.w{j}.weight" for i in range(6) for j in (1, 2, 3)}
RESIDUALS = {"self_attention_res_proj.weight", "self_attention_res_norm.weight", "mlp_res_proj.weight", "mlp_res_norm.weight"}


def public_names() -> set[str]:
    """What the release calls the tensors of the small model."""
    names = {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "model.output_attn_res_proj.weight",
             "model.output_attn_res_norm.weight"}
    for i in range(5):
        layer = {"input_layernorm.weight", "post_attention_layernorm.weight"} | RESIDUALS
        layer |= {f"self_attn.{n}" for n in (KDA if i < 3 else MLA)}
        layer |= {f"mlp.{n}" for n in DENSE} if i == 0 else {f"block_sparse_moe.{n}" for n in MOE}
        names |= {f"model.layers.{i}.{n}" for n in layer}
    return names


def test_tensors_have_the_names_of_the_release() -> None:
    state = export_state(random_model())
    assert set(state) == public_names()
    assert list(state) == sorted(state)
    assert state["model.layers.1.block_sparse_moe.experts.5.w2.weight"].shape == (16, 16)
    assert state["model.layers.0.self_attn.q_conv1d.weight"].shape == (16, 1, 4)
    assert state["model.layers.0.mlp_res_proj.weight"].shape == (1, 32)


def test_what_the_release_keeps_in_fp32_stays_fp32() -> None:
    wide = {n.rsplit(".", 1)[1] if n.endswith(("A_log", "dt_bias", "bias")) else n.split(".")[-2]
            for n, t in export_state(random_model()).items() if t.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", "e_score_correction_bias"}
    assert policy_dtype("model.layers.0.self_attn.A_log", torch.bfloat16) == torch.float32
    assert policy_dtype("model.layers.1.block_sparse_moe.gate.weight", torch.bfloat16) == torch.bfloat16


def test_an_export_is_a_copy() -> None:
    model = random_model(dtype=torch.float32)
    state = export_state(model, torch.float32)
    kept = {n: t.clone() for n, t in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert all(torch.equal(state[n], kept[n]) for n in kept)


def test_rounding_to_the_policy_is_idempotent_and_is_what_is_exported() -> None:
    model = random_model(dtype=torch.float32)
    exported = export_state(model)
    round_to_policy_(model)
    once = {n: p.detach().clone() for n, p in model.named_parameters()}
    again = export_state(model)
    round_to_policy_(model)
    assert all(torch.equal(once[n], p) for n, p in model.named_parameters())
    assert all(torch.equal(exported[n], again[n]) for n in exported)


def test_loading_an_export_gives_the_same_function() -> None:
    source, target = random_model(seed=1), random_model(seed=2)
    load_state(target, export_state(source, torch.float64))
    for name in ("A_log", "dt_bias"):  # these travel in fp32
        with torch.no_grad():
            for module in source.modules():
                if hasattr(module, name):
                    getattr(module, name).copy_(getattr(module, name).float())
    round_to_policy_(source, torch.float64)
    tokens = random_tokens(2, 9)
    assert torch.equal(source(tokens).hidden, target(tokens).hidden)


@pytest.mark.parametrize("spoil", ["missing", "extra", "misshapen"])
def test_a_state_that_does_not_fit_is_refused_before_anything_is_copied(spoil: str) -> None:
    state = export_state(random_model(seed=1))
    match spoil:
        case "missing":
            del state["model.norm.weight"]
        case "extra":
            state["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
        case "misshapen":
            state["model.norm.weight"] = torch.zeros(31)
    model = random_model(seed=2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(IntegrityError) as refused:
        load_state(model, state)
    assert {"missing": "model.norm.weight", "extra": "model.layers.9", "misshapen": "model.norm.weight"}[spoil] in str(refused.value)
    assert refused.value.remedy
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_a_log_padded_to_128_heads_is_cut_and_a_short_one_refused() -> None:
    model = random_model()
    state = export_state(model)
    name = "model.layers.0.self_attn.A_log"
    state[name] = torch.cat([torch.tensor([0.25, -0.5]), torch.zeros(126)])
    load_state(model, state)
    assert model.model.layers[0].self_attn.A_log.tolist() == [0.25, -0.5]
    state[name] = torch.zeros(1)
    with pytest.raises(IntegrityError, match="A_log"):
        load_state(model, state)


def test_tied_embeddings_are_stored_once() -> None:
    model = random_model(small(tie_word_embeddings=True))
    state = export_state(model)
    assert "lm_head.weight" not in state
    load_state(model, state)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_checkpoint_round_trip_is_bitwise(tmp_path: Path) -> None:
    model = random_model(dtype=torch.float32)
    round_to_policy_(model)
    save_checkpoint(model, tmp_path / "out")
    back = load_checkpoint(str(tmp_path / "out"))
    assert back.config == model.config
    assert {n: p.dtype for n, p in back.named_parameters()} == {n: torch.float32 for n, _ in model.named_parameters()}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_a_checkpoint_in_several_files_is_one_checkpoint(tmp_path: Path) -> None:
    model = random_model(dtype=torch.float32)
    save_checkpoint(model, tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(whole)
    for i, part in enumerate((names[:40], names[40:])):
        save_file({n: whole[n] for n in part}, tmp_path / f"model-{i + 1:05d}-of-00002.safetensors")
    back = export_state(load_checkpoint(str(tmp_path)))
    assert all(torch.equal(back[n], whole[n]) for n in whole)


def test_a_damaged_or_absent_checkpoint_is_refused_with_a_remedy(tmp_path: Path) -> None:
    for damage in ("no directory", "no tensors", "cut tensors"):
        target = tmp_path / damage.replace(" ", "_")
        if damage != "no directory":
            save_checkpoint(random_model(), target)
        if damage == "no tensors":
            (target / "model.safetensors").unlink()
        if damage == "cut tensors":
            file = target / "model.safetensors"
            file.write_bytes(file.read_bytes()[:5000])
        with pytest.raises(ConfigError) as refused:
            load_checkpoint(str(target))
        assert refused.value.field == "policy.init", damage
        assert refused.value.remedy, damage


def test_the_shipped_checkpoint_loads_and_is_already_rounded() -> None:
    model = load_checkpoint("base")
    assert sum(f.stat().st_size for f in checkpoint_dir("base").iterdir()) <= 8 * 1024 * 1024, "it ships with the package"
    stored = read_tensors(checkpoint_dir("base"))
    exported = export_state(model)
    assert set(stored) == set(exported)
    assert all(torch.equal(stored[n], exported[n]) for n in stored)
    before = [p.detach().clone() for p in model.parameters()]
    round_to_policy_(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_half_precision_checkpoints_keep_the_fp32_parameters(tmp_path: Path) -> None:
    """A_log times 16 tokens of decay in bfloat16 would be another model."""
    save_checkpoint(random_model(dtype=torch.float32), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    half = load_checkpoint(str(tmp_path), dtype=torch.bfloat16)
    exported = export_state(half)
    assert all(torch.equal(exported[n], stored[n]) for n in stored)
    assert torch.isfinite(half(random_tokens(1, 4)).hidden).all()


def test_a_fresh_model_starts_as_the_release_does() -> None:
    torch.manual_seed(0)
    model = K3ForCausalLM(small())
    for name, parameter in model.named_parameters():
        if name.endswith(("res.proj.weight", "A_log", "e_score_correction_bias")):
            assert (parameter == 0).all(), name
        if name.endswith("dt_bias"):
            dt = torch.nn.functional.softplus(parameter.detach())
            assert ((dt > 0.00099) & (dt < 0.1001)).all()
        assert torch.isfinite(parameter).all()
