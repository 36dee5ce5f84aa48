"""A model whose routed experts stay packed: the function of the unpacked ones to the bit, frozen, under the public names, in versions as in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from k3_checkpoint_cases import EXPERTS, packable, packed_checkpoint, rounded_model, same_state, stored
from model_cases import random_tokens

from driftline.kernels.mxfp4 import Mxfp4Weight, pack, unpack
from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.checkpoint import load_checkpoint, save_checkpoint
from driftline.models.lora import add_lora, merge_lora
from driftline.models.mlp import PackedExperts
from driftline.models.model import K3ForCausalLM
from driftline.models.quantisation import Quantisation
from driftline.models.state import export_state, load_state, policy_dtype, public_tensors, round_to_policy_
from driftline.services.config import LearnerConfig, load
from driftline.services.learner.trainer import Trainer
from driftline.services.policy_model import build_model
from driftline.services.rollout.weights import parameters_of
from driftline.services.starting import starting_place
from driftline.services.tensors import from_host, to_host


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return packed_checkpoint(tmp_path)


def packed_model(directory: Path) -> K3ForCausalLM:
    return load_checkpoint(str(directory))


def plain_model(directory: Path) -> K3ForCausalLM:
    return load_checkpoint(str(directory), experts=Quantisation.NONE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_packed_and_unpacked_experts_compute_the_same_bits(directory: Path, dtype: torch.dtype) -> None:
    """In prefill with many tokens an expert and in decode with few: both schedules."""
    packed = load_checkpoint(str(directory), dtype=dtype)
    plain = load_checkpoint(str(directory), dtype=dtype, experts=Quantisation.NONE)
    assert isinstance(packed.model.layers[1].block_sparse_moe.experts.w1, Mxfp4Weight)
    tokens = random_tokens(3, 20)
    a, b = packed(tokens), plain(tokens)
    assert torch.equal(a.hidden, b.hidden)
    assert torch.equal(a.routes, b.routes)
    assert torch.equal(packed(tokens[:, :1], cache=a.cache).hidden, plain(tokens[:, :1], cache=b.cache).hidden)


@torch.no_grad()
def test_one_changed_code_changes_the_function(directory: Path) -> None:
    model, tokens = packed_model(directory), random_tokens(2, 9)
    before = model(tokens)
    expert = int(before.routes[0, 0, 0, 0])
    model.model.layers[1].block_sparse_moe.experts.w2.packed[expert, 0, 0] ^= 0x88  # the signs of two weights
    assert not torch.equal(before.hidden, model(tokens).hidden)


def test_packed_experts_are_no_parameters_and_no_cast_changes_them(directory: Path) -> None:
    model = packed_model(directory)
    before = {name: tensor for name, tensor in export_state(model).items() if name.startswith(EXPERTS)}
    assert len(before) == 36
    assert not [name for name, _ in model.named_parameters() if ".experts." in name]
    model.double().to(torch.bfloat16)
    round_to_policy_(model)
    assert same_state({name: tensor for name, tensor in export_state(model).items() if name in before}, before)
    assert "experts.w1_packed" in "".join(model.state_dict())


def test_gradients_reach_everything_around_packed_experts_as_they_would_around_unpacked(directory: Path) -> None:
    tokens = random_tokens(1, 9)
    grads = []
    for model in (packed_model(directory), plain_model(directory)):
        model(tokens).hidden.square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if ".experts." not in name and p.grad is not None})
    assert same_state(grads[0], grads[1])
    assert "model.layers.1.block_sparse_moe.routed_expert_down_proj.weight" in grads[0]
    assert "model.layers.1.block_sparse_moe.gate.weight" in grads[0]


def test_a_version_names_packed_experts_publicly_and_as_uint8(directory: Path) -> None:
    model = packed_model(directory)
    state = export_state(model)
    assert same_state(state, stored(directory))
    assert all((tensor.dtype == torch.uint8) == name.endswith(("weight_packed", "weight_scale")) for name, tensor in state.items())
    for name, tensor in model.named_buffers():
        for public, view in public_tensors(name, tensor):
            assert policy_dtype(name, torch.bfloat16) == policy_dtype(public, torch.bfloat16) == torch.uint8
            assert view.data_ptr() >= tensor.data_ptr(), "a view, not a copy"


def test_another_version_is_loaded_into_packed_experts_in_place_and_through_the_store_s_bytes(directory: Path, tmp_path: Path) -> None:
    other = load_checkpoint(str(packed_checkpoint(tmp_path / "other", seed=5)))
    model = packed_model(directory)
    held = model.model.layers[2].block_sparse_moe.experts.w3.packed
    load_state(model, from_host(to_host(export_state(other))))
    assert held.data_ptr() == model.model.layers[2].block_sparse_moe.experts.w3.packed.data_ptr()
    assert same_state(export_state(model), export_state(other))
    tokens = random_tokens(1, 7)
    assert torch.equal(model(tokens).hidden, other(tokens).hidden)


@pytest.mark.parametrize("name", [f"{EXPERTS}.0.w1.weight_packed", f"{EXPERTS}.0.w1.weight_scale", "lm_head.weight"])
def test_codes_are_not_loaded_as_numbers_nor_numbers_as_codes(directory: Path, name: str) -> None:
    model = packed_model(directory)
    state = export_state(model)
    state[name] = state[name].float() if state[name].dtype == torch.uint8 else state[name].to(torch.uint8)
    before = export_state(model)
    with pytest.raises(IntegrityError) as refused:
        load_state(model, state)
    assert refused.value.field == name
    assert refused.value.remedy
    assert same_state(export_state(model), before)


def test_a_policy_of_the_other_form_is_refused(directory: Path) -> None:
    packed, plain = packed_model(directory), plain_model(directory)
    with pytest.raises(IntegrityError, match="missing"):
        load_state(packed, export_state(plain))
    with pytest.raises(IntegrityError, match="missing"):
        load_state(plain, export_state(packed))


def test_learner_and_engine_name_the_tensors_of_a_version(directory: Path) -> None:
    """A version whose layouts leave out what its state has, or the other way round, could not be assembled."""
    model = packed_model(directory)
    add_lora(model, 2)
    trainer = Trainer(model, LearnerConfig())
    state = trainer.state()
    assert set(trainer.layouts()) == set(parameters_of(model)) == set(state)
    for name, layout in trainer.layouts().items():
        assert (layout.dtype, layout.shape) == (str(state[name].dtype).removeprefix("torch."), tuple(state[name].shape))
    assert all("lora" in name for name in trainer.names)


def disturbed(model: K3ForCausalLM) -> K3ForCausalLM:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.1)
    return model


def test_targets_without_experts_leave_them_packed_and_plain(directory: Path) -> None:
    model = packed_model(directory)
    tokens = random_tokens(1, 9)
    before = model(tokens).hidden.detach()
    adapted = add_lora(model, 2, targets=r".*proj$")
    assert "model.layers.1.block_sparse_moe.shared_experts.up_proj" in adapted
    assert "model.layers.3.self_attn.kv_b_proj" in adapted
    assert not [name for name in adapted if name.endswith(".experts")]
    assert torch.equal(model(tokens).hidden, before), "B starts at zero"
    model(tokens).hidden.square().sum().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rsplit(".", 1)[1] for name in trained} == {"lora_A", "lora_B"}
    assert all(p.grad is not None for name, p in model.named_parameters() if name in trained)
    changed = disturbed(model)(tokens).hidden.detach()
    assert not torch.equal(changed, before)
    merge_lora(model)
    torch.testing.assert_close(model(tokens).hidden, changed, rtol=0, atol=2e-4)
    assert set(export_state(model)) == set(stored(directory))
    assert isinstance(model.model.layers[1].block_sparse_moe.experts, PackedExperts)


def test_packed_experts_take_adapters_and_stay_packed_beside_them(directory: Path) -> None:
    packed, plain, tokens = packed_model(directory), plain_model(directory), random_tokens(2, 13)
    before = packed(tokens).hidden.detach()
    for model in (packed, plain):
        torch.manual_seed(4)
        assert "model.layers.1.block_sparse_moe.experts" in add_lora(model, 2)
        assert torch.equal(model(tokens).hidden, before), "B starts at zero"
        torch.manual_seed(5)
        disturbed(model)
    with torch.no_grad():
        assert not torch.equal(packed(tokens).hidden, before)
        assert torch.equal(packed(tokens).hidden, plain(tokens).hidden)
    for model in (packed, plain):
        model(tokens).hidden.square().sum().backward()
    grads = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    assert any(".experts.delta.w2.lora_A" in name for name in grads)
    for name, parameter in packed.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, grads[name], msg=name)
    state = export_state(packed)
    assert f"{EXPERTS}.0.w1.weight_packed" in state, "the codes are still part of a version"


@torch.no_grad()
def test_merging_into_packed_experts_packs_again_by_the_released_rule(directory: Path) -> None:
    packed, plain, tokens = packed_model(directory), plain_model(directory), random_tokens(2, 13)
    codes = {name: tensor for name, tensor in export_state(packed).items() if name.startswith(EXPERTS)}
    for model in (packed, plain):
        torch.manual_seed(4)
        add_lora(model, 2, targets=r".*\.experts$")
        for number in (1, 3):
            torch.manual_seed(number)
            model.get_parameter(f"model.layers.1.block_sparse_moe.experts.delta.w{number}.lora_B")[2].normal_(std=0.3)
    adapted = packed(tokens).hidden
    merged = merge_lora(packed)
    merge_lora(plain)
    after = {name: tensor for name, tensor in export_state(packed).items() if name in codes}
    changed = {name for name in codes if not torch.equal(codes[name], after[name])}
    assert changed
    assert all(name.startswith((f"{EXPERTS}.2.w1.", f"{EXPERTS}.2.w3.")) for name in changed), "what no update touches keeps its codes"
    weight = plain.model.layers[1].block_sparse_moe.experts.w3.detach()
    found = packed.model.layers[1].block_sparse_moe.experts.w3
    assert torch.equal(unpack(*found, torch.float32), unpack(*pack(weight), torch.float32))
    merged.undo()
    assert torch.equal(packed(tokens).hidden, adapted)


def test_a_model_of_unpacked_experts_still_adapts_them(tmp_path: Path) -> None:
    save_checkpoint(rounded_model(), tmp_path)
    assert "model.layers.1.block_sparse_moe.experts" in add_lora(load_checkpoint(str(tmp_path)), 2)


def test_sizes_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="moe_intermediate_size = 24"):
        PackedExperts(packable(moe_intermediate_size=24))


def test_a_run_may_start_from_sharded_and_packed_experts(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "demo.toml"
    config = load(example, [f'policy.init="{packed_checkpoint(tmp_path, shard_bytes=80_000)}"', "learner.lora_rank=2"])
    assert not (tmp_path / "model.safetensors").exists()
    assert starting_place(config) == tmp_path
    model = build_model(config, device="cpu", threads=1)
    assert isinstance(model.model.layers[1].block_sparse_moe.experts.base, PackedExperts)
    assert {name.rsplit(".", 1)[1] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
