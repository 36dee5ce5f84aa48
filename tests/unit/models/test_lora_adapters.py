"""LoRA: adding it changes nothing, training it changes only adapters, merging it changes no output."""

from __future__ import annotations

import pytest
import torch
from model_cases import random_model, random_tokens

from driftline.messages.errors import ConfigError
from driftline.models.lora import add_lora, merge_lora
from driftline.models.model import K3ForCausalLM
from driftline.models.state import export_state, load_state


def adapted(seed: int = 0, *, rank: int = 3, targets: str = r".*(proj|experts)$", disturb: bool = True) -> K3ForCausalLM:
    model = random_model(seed=seed)
    add_lora(model, rank, 6.0, targets)
    if disturb:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("lora_B"):
                    parameter.normal_(std=0.2)
    return model


def test_adding_adapters_changes_no_output() -> None:
    plain, with_lora = random_model(), adapted(disturb=False)
    tokens = random_tokens(2, 7)
    assert torch.equal(plain(tokens).hidden, with_lora(tokens).hidden)


def test_adapters_go_to_projections_and_experts_and_not_to_the_router_the_head_or_residual_queries() -> None:
    model = random_model()
    names = add_lora(model, 2)
    leaves = {name.rsplit(".", 1)[1] for name in names}
    assert leaves == {"q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_proj", "o_proj", "q_a_proj", "q_b_proj",
                      "kv_b_proj", "gate_proj", "up_proj", "down_proj", "routed_expert_down_proj", "routed_expert_up_proj", "experts"}
    assert not any("res" in name.split(".")[-2] for name in names)


def test_only_adapters_train_and_all_of_them_get_a_gradient() -> None:
    model = adapted()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(n.endswith(("lora_A", "lora_B")) for n in trained)
    out = model(random_tokens(3, 30))
    model.logits(out.hidden).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        if name in trained:
            assert (parameter.grad != 0).any(), name
        else:
            assert parameter.grad is None, name


@pytest.mark.parametrize("which", ["kv_b_proj", "experts", "q_proj", "routed_expert_up_proj", "shared_experts.down_proj", "f_b_proj"])
def test_each_kind_of_adapter_takes_effect_and_merges_to_the_same_output(which: str) -> None:
    """kv_b_proj is used in halves by the absorbed form, where a wrapped forward would be passed by."""
    plain, model = random_model(), adapted(targets=rf".*{which}$")
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        before = model(tokens).hidden
        assert (before - plain(tokens).hidden).abs().max() > 1e-4
        merge_lora(model)
        torch.testing.assert_close(model(tokens).hidden, before, rtol=0, atol=1e-11)


@torch.no_grad()
def test_merging_everything_gives_plain_modules_with_the_public_names() -> None:
    model = adapted()
    tokens = random_tokens(2, 9)
    want = model(tokens).hidden
    merge_lora(model)
    torch.testing.assert_close(model(tokens).hidden, want, rtol=0, atol=1e-11)
    plain = random_model()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    load_state(plain, export_state(model, torch.float64))


def test_the_base_keeps_its_names_beside_the_adapters() -> None:
    plain, model = export_state(random_model()), export_state(adapted())
    extra = set(model) - set(plain)
    assert set(plain) <= set(model)
    assert all(torch.equal(plain[n], model[n]) for n in plain)
    assert all(n.endswith(("lora_A", "lora_B")) for n in extra)
    assert model["model.layers.1.self_attn.q_proj.lora_A"].shape == (3, 32)
    assert model["model.layers.1.block_sparse_moe.experts.delta.w2.lora_B"].shape == (6, 16, 3)
    other = adapted(seed=5)
    load_state(other, model)
    assert all(torch.equal(model[n], t) for n, t in export_state(other).items())


def test_prefill_and_decode_agree_with_adapters() -> None:
    model = adapted()
    tokens = random_tokens(2, 12)
    with torch.no_grad():
        whole = model(tokens)
        step = model(tokens[:, 11:], cache=model(tokens[:, :11]).cache)
    torch.testing.assert_close(step.hidden[:, 0], whole.hidden[:, 11], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("rank", "targets", "field"), [
    (0, ".*proj$", "learner.lora_rank"), (2, "nothing", "learner.lora_targets"), (2, "(", "learner.lora_targets"),
])
def test_a_setting_that_adapts_nothing_is_refused_and_freezes_nothing(rank: int, targets: str, field: str) -> None:
    model = random_model()
    with pytest.raises(ConfigError) as refused:
        add_lora(model, rank, None, targets)
    assert refused.value.field == field
    assert any(p.requires_grad for p in model.parameters())
