"""The K3 decoder: one function however it is called, and a checkpoint that is what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.attention import KdaAttention, MlaAttention
from driftline.models.cache import Cache
from driftline.models.checkpoint import checkpoint_dir, load_checkpoint, save_checkpoint
from driftline.models.config import K3Config, tiny
from driftline.models.logprob import token_logprobs
from driftline.models.lora import add_lora, merge_lora
from driftline.models.model import K3ForCausalLM
from driftline.models.state import export_state, load_state, round_to_policy_
from driftline.models.tokenizer import ByteTokenizer

torch.set_num_threads(1)


def make(**changes: object) -> K3ForCausalLM:
    torch.manual_seed(0)
    model = K3ForCausalLM(tiny(**changes))
    with torch.no_grad():  # zero queries would make every residual a plain mean
        for name, parameter in model.named_parameters():
            if name.endswith("res.proj.weight"):
                parameter.normal_(std=0.1)
    return model.double()


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return make()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (3, 37), generator=torch.Generator().manual_seed(1))


def test_prefill_then_decode_equals_a_full_forward(model: K3ForCausalLM, tokens: torch.Tensor) -> None:
    full = model(tokens).hidden
    out = model(tokens[:, :20])
    hidden, cache = [out.hidden], out.cache
    for t in range(20, 37):
        out = model(tokens[:, t : t + 1], cache=cache)
        hidden, cache = [*hidden, out.hidden], out.cache
    assert (torch.cat(hidden, 1) - full).abs().max() < 1e-10
    assert cache.lengths.tolist() == [37] * 3


def test_continuation_of_several_tokens_equals_a_full_forward(model: K3ForCausalLM, tokens: torch.Tensor) -> None:
    first = model(tokens[:, :11])
    assert (model(tokens[:, 11:], cache=first.cache).hidden - model(tokens).hidden[:, 11:]).abs().max() < 1e-10


def test_ragged_rows_equal_each_row_alone_and_continue_alike(model: K3ForCausalLM, tokens: torch.Tensor) -> None:
    lengths = torch.tensor([5, 37, 17])
    ragged = model(tokens, lengths=lengths)
    more = torch.randint(0, 256, (3, 4))
    after = model(more, cache=ragged.cache).hidden
    for row, length in enumerate(lengths.tolist()):
        alone = model(torch.cat([tokens[row : row + 1, :length], more[row : row + 1]], 1)).hidden[0]
        assert (ragged.hidden[row, :length] - alone[:length]).abs().max() < 1e-10
        assert (after[row] - alone[length:]).abs().max() < 1e-10


def test_a_forked_cache_equals_a_recomputed_one(model: K3ForCausalLM, tokens: torch.Tensor) -> None:
    fork = model(tokens[:, :12]).cache.repeat(2)
    more = torch.randint(0, 256, (6, 5))
    got = model(more, cache=fork).hidden
    want = model(torch.cat([tokens[:, :12].repeat_interleave(2, 0), more], 1)).hidden[:, 12:]
    assert (got - want).abs().max() < 1e-10


def test_caches_can_be_taken_stacked_and_compacted(model: K3ForCausalLM, tokens: torch.Tensor) -> None:
    short, long = model(tokens[:1, :6]).cache, model(tokens[1:, :15]).cache
    both = Cache.cat([short, long])
    more = torch.randint(0, 256, (3, 1))
    want = torch.cat([model(more[:1], cache=short).hidden, model(more[1:], cache=long).hidden])
    assert (model(more, cache=both).hidden - want).abs().max() < 1e-10
    first = both.take(torch.tensor([0])).compact()
    assert first.columns == 6
    assert (model(more[:1], cache=first).hidden - want[:1]).abs().max() < 1e-10


def test_a_cache_is_a_value(model: K3ForCausalLM, tokens: torch.Tensor) -> None:
    cache = model(tokens[:, :8]).cache
    once = model(tokens[:, 8:9], cache=cache).hidden
    assert torch.equal(model(tokens[:, 8:9], cache=cache).hidden, once)
    assert cache.columns == 8


def test_a_future_token_changes_nothing_before_it(model: K3ForCausalLM, tokens: torch.Tensor) -> None:
    edited = tokens.clone()
    edited[:, 30] = (edited[:, 30] + 1) % 256
    assert torch.equal(model(edited).hidden[:, :30], model(tokens).hidden[:, :30])
    assert not torch.equal(model(edited).hidden[:, 30:], model(tokens).hidden[:, 30:])


def test_router_replay_of_its_own_choice_changes_nothing(model: K3ForCausalLM, tokens: torch.Tensor) -> None:
    out = model(tokens)
    assert out.routes.shape == (3, 37, model.config.moe_layers, 2)
    assert torch.equal(model(tokens, replay=out.routes).hidden, out.hidden)
    other = (out.routes + 1) % model.config.num_experts
    assert not torch.equal(model(tokens, replay=other).hidden, out.hidden)


def test_k3s_own_layer_lists_are_one_indexed() -> None:
    full = [*range(4, 93, 4), 93]
    config = tiny(num_hidden_layers=93, linear_attn_config={
        "num_heads": 96, "head_dim": 128, "full_attn_layers": full, "kda_layers": [i for i in range(1, 94) if i not in full]})
    mla = [i for i in range(93) if not config.is_kda(i)]
    assert len(mla) == 24
    assert mla[-2:] == [91, 92]
    assert config.moe_layers == 92


def test_contradictory_layer_lists_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="full_attn_layers and kda_layers must split layers"):
        tiny(linear_attn_config={"num_heads": 4, "head_dim": 32, "full_attn_layers": [4], "kda_layers": [1, 2, 3]})


def test_every_part_of_the_architecture_is_there(model: K3ForCausalLM) -> None:
    kinds = [type(layer.self_attn) for layer in model.model.layers]
    assert kinds == [KdaAttention, KdaAttention, KdaAttention, MlaAttention, MlaAttention]
    names = export_state(model)
    for name in (
        "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.output_attn_res_proj.weight",
        "model.layers.0.mlp.gate_proj.weight", "model.layers.0.self_attn.q_conv1d.weight", "model.layers.0.self_attn.A_log",
        "model.layers.0.self_attn.dt_bias", "model.layers.0.self_attn.f_b_proj.weight", "model.layers.0.self_attention_res_norm.weight",
        "model.layers.1.block_sparse_moe.experts.15.w2.weight", "model.layers.1.block_sparse_moe.gate.e_score_correction_bias",
        "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight", "model.layers.1.block_sparse_moe.routed_expert_norm.weight",
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "model.layers.3.self_attn.g_proj.weight", "model.layers.4.mlp_res_proj.weight",
    ):
        assert name in names


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = make().float()
    round_to_policy_(model)
    save_checkpoint(model, tmp_path)
    again = load_checkpoint(str(tmp_path))
    ours, theirs = export_state(model), export_state(again)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert again.config == model.config


def test_rounding_to_the_policy_is_idempotent_and_keeps_fp32_parameters() -> None:
    model = make().float()
    round_to_policy_(model)
    once = {n: p.clone() for n, p in model.named_parameters()}
    round_to_policy_(model)
    assert all(torch.equal(once[n], p) for n, p in model.named_parameters())
    state = export_state(model)
    assert state["model.layers.0.self_attn.dt_bias"].dtype == torch.float32
    assert state["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_a_state_that_does_not_fit_changes_nothing(damage: str) -> None:
    model = make().float()
    before = export_state(model, torch.float32)
    state = {name: tensor + 1 for name, tensor in before.items()}
    if damage == "missing":
        del state["lm_head.weight"]
    elif damage == "extra":
        state["lm_head.bias"] = torch.zeros(3)
    else:
        state["lm_head.weight"] = torch.zeros(3, 3)
    with pytest.raises(IntegrityError, match=r"lm_head|missing"):
        load_state(model, state)
    assert all(torch.equal(before[n], t) for n, t in export_state(model, torch.float32).items())


def test_a_padded_a_log_is_accepted() -> None:
    model = make().float()
    state = dict(export_state(model, torch.float32))
    name = "model.layers.0.self_attn.A_log"
    state[name] = torch.cat([torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(12)])
    load_state(model, state)
    assert model.model.layers[0].self_attn.A_log.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_missing_and_broken_checkpoints_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.init.*no such checkpoint"):
        load_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_checkpoint(str(tmp_path))
    tiny().save(tmp_path)
    with pytest.raises(ConfigError, match="safetensors"):
        load_checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        load_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        K3Config.load(tmp_path)


def test_the_shipped_policy_loads_and_is_small() -> None:
    directory = checkpoint_dir("base")
    assert sum(f.stat().st_size for f in directory.iterdir()) <= 8 * 1024 * 1024
    assert sum(p.numel() for p in load_checkpoint("base").parameters()) > 1_000_000
    assert len(load_file(directory / "model.safetensors")) == 320


def test_tied_embeddings_share_one_tensor() -> None:
    model = make(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in export_state(model)


def test_lora_starts_as_the_identity_trains_alone_and_merges(tokens: torch.Tensor) -> None:
    model = make()
    before = model(tokens).hidden
    adapted = add_lora(model, rank=4, alpha=8.0)
    assert any(name.endswith("experts") for name in adapted)
    assert torch.equal(model(tokens).hidden, before)
    assert all(("lora_" in name) == p.requires_grad for name, p in model.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.02)
    changed = model(tokens).hidden
    assert (changed - before).abs().max() > 1e-3
    merge_lora(model)
    assert (model(tokens).hidden - changed).abs().max() < 1e-10
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_an_adapter_on_the_absorbed_projection_takes_effect(tokens: torch.Tensor) -> None:
    model = make()
    before = model(tokens).hidden
    add_lora(model, rank=2, targets=r".*kv_b_proj$")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    assert not torch.equal(model(tokens).hidden, before)


def test_lora_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora_targets.*matches no linear"):
        add_lora(make(), rank=2, targets="nothing")
    with pytest.raises(ConfigError, match="lora_rank"):
        add_lora(make(), rank=0)


@pytest.mark.parametrize(("temperature", "want"), [(0.6, -0.208060405), (1.0, -0.440189699)])
def test_temperature_divides_the_logits_and_not_the_log_probabilities(temperature: float, want: float) -> None:
    logp, entropy = token_logprobs(torch.tensor([[2.0, 1, 0, -1]], dtype=torch.float64), torch.tensor([0]), temperature)
    assert abs(float(logp[0]) - want) < 1e-8
    assert 0 < float(entropy[0]) < 1.3863


def test_any_text_is_encodable_and_any_ids_are_decodable() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("häß \u4f60\n")) == "häß \u4f60\n"
    assert tokenizer.decode([256, 0xFF, 97, 258]) == "\ufffda"
    assert tokenizer.encode_prompt("a") == [256, 97, 10]


def test_safetensors_files_are_merged_across_shards(tmp_path: Path) -> None:
    model = make().float()
    save_checkpoint(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    (tmp_path / "model.safetensors").unlink()
    save_file({n: tensors[n] for n in names[:100]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[100:]}, tmp_path / "model-00002-of-00002.safetensors")
    assert load_checkpoint(str(tmp_path)).config == model.config
