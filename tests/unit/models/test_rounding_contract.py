"""K3's rounding, bit for bit where the release fixes it, each beside the other order that ports take: the two differ, so the test can tell."""

from __future__ import annotations

import pytest
import torch
from k3_checkpoint_cases import packable, rounded_model
from model_cases import random_tokens

from driftline.models.attention import MlaAttention, RMSNorm
from driftline.models.latent_attention import Columns
from driftline.models.mlp import LatentMoe
from driftline.models.model import K3ForCausalLM
from driftline.models.state import policy_dtype

HALF = torch.bfloat16


@pytest.fixture
def half() -> K3ForCausalLM:
    """A bfloat16 model that keeps in fp32 what the release does."""
    model = rounded_model(packable(), seed=4)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(policy_dtype(name, HALF))
    return model


@torch.no_grad()
def test_a_norm_is_cast_before_its_weight_multiplies() -> None:
    torch.manual_seed(1)
    norm = RMSNorm(256, 1e-5).to(HALF)
    norm.weight.copy_(1 + 0.3 * torch.randn(256))
    x = torch.randn(64, 256).to(HALF)
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), exact.to(HALF) * norm.weight)
    fused = (exact * norm.weight.float()).to(HALF)
    assert 0.2 < (norm(x) != fused).float().mean() < 0.8, "one bfloat16 step on about half of the elements"


@torch.no_grad()
def test_small_rows_tell_the_epsilon_of_mla_s_inner_norms() -> None:
    """At a scale of 1e-3 the mean square is of the size of epsilon, where 1e-5 for 1e-6 is a factor and not a rounding."""
    layer = MlaAttention(packable()).double()
    for norm, size in ((layer.q_a_layernorm, 16), (layer.kv_a_layernorm, 12)):
        x = 1e-3 * torch.randn(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        square = x.square().mean(-1, keepdim=True)
        torch.testing.assert_close(norm(x), x * torch.rsqrt(square + 1e-6) * norm.weight, rtol=1e-12, atol=0)
        assert (norm(x) / (x * torch.rsqrt(square + 1e-5) * norm.weight)).min() > 1.5


@torch.no_grad()
def test_the_output_gate_of_mla_is_rounded_before_it_multiplies(half: K3ForCausalLM) -> None:
    layer = half.model.layers[3].self_attn
    assert isinstance(layer, MlaAttention)
    seen: dict[str, torch.Tensor] = {}
    gate = layer.g_proj.register_forward_hook(lambda _m, _a, out: seen.__setitem__("gate", out))
    gated = layer.o_proj.register_forward_pre_hook(lambda _m, args: seen.__setitem__("gated", args[0]))
    torch.manual_seed(5)
    x = torch.randn(2, 9, 32).to(HALF)
    columns = Columns(torch.ones(2, 0, dtype=torch.bool), torch.ones(2, 9, dtype=torch.bool))
    layer(x, layer.initial(2, x), columns)
    gated_out = seen["gated"]
    layer.gated = False
    layer(x, layer.initial(2, x), columns)
    o = seen["gated"]
    layer.gated = True
    gate.remove()
    gated.remove()
    assert torch.equal(gated_out, o * torch.sigmoid(seen["gate"].float()).to(HALF))
    fused = (o.float() * torch.sigmoid(seen["gate"].float())).to(HALF)
    assert (gated_out != fused).any()


@torch.no_grad()
def test_the_router_multiplies_in_fp32_and_a_bfloat16_product_would_choose_others(half: K3ForCausalLM) -> None:
    moe = half.model.layers[1].block_sparse_moe
    assert isinstance(moe, LatentMoe)
    moe.gate.e_score_correction_bias.zero_()
    torch.manual_seed(6)
    x = torch.randn(4000, 32).to(HALF)
    _, ids = moe(x)
    wide = torch.sigmoid(x.float() @ moe.gate.weight.float().t())
    assert torch.equal(ids, wide.topk(2, -1).indices)
    narrow = torch.sigmoid((x @ moe.gate.weight.t()).float())
    flipped = (narrow.topk(2, -1).indices != ids).any(-1)
    assert flipped.any()


@torch.no_grad()
def test_the_selection_bias_chooses_and_does_not_weigh(half: K3ForCausalLM) -> None:
    """With the bias, the gates of what it chose are renormalised scores without it."""
    moe = half.model.layers[2].block_sparse_moe
    torch.manual_seed(7)
    x = torch.randn(50, 32).to(HALF)
    moe.gate.e_score_correction_bias.zero_()
    _, free = moe(x)
    moe.gate.e_score_correction_bias[3] = 5.0
    out, ids = moe(x)
    assert (ids == 3).any(-1).all()
    assert not torch.equal(ids, free)
    moe.gate.e_score_correction_bias.zero_()
    replayed, _ = moe(x, ids)
    assert torch.equal(out, replayed)


@torch.no_grad()
def test_expert_outputs_are_summed_in_fp32_in_the_order_of_the_slots(half: K3ForCausalLM) -> None:
    """The sum is normalised after its one cast; an order changed changes only what fp32 rounds, a bfloat16 sum far more."""
    moe = half.model.layers[1].block_sparse_moe
    seen: list[torch.Tensor] = []
    handle = moe.routed_expert_norm.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    torch.manual_seed(8)
    x = torch.randn(30, 32).to(HALF)
    _, ids = moe(x)
    scores = torch.sigmoid(x.float() @ moe.gate.weight.float().t()).gather(-1, ids)
    gates = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    z, experts = moe.routed_expert_down_proj(x), moe.experts

    def one(token: int, expert: int) -> torch.Tensor:
        g, u = (z[token] @ experts.w1[expert].t()).float(), (z[token] @ experts.w3[expert].t()).float()
        h = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
        return h.to(HALF) @ experts.w2[expert].t()

    outs = torch.stack([torch.stack([one(t, int(e)) for e in ids[t]]) for t in range(30)])
    want = (outs.float() * gates[..., None]).sum(1).to(HALF)
    handle.remove()
    assert (seen[0] != want).float().mean() < 0.02, "products of other shapes may round another way here and there"
    narrow = (outs * gates[..., None].to(HALF)).sum(1)
    assert (narrow != want).float().mean() > 0.1


@torch.no_grad()
def test_what_feeds_the_state_stays_fp32_in_a_bfloat16_model(half: K3ForCausalLM) -> None:
    wide = {name.split(".")[-1] if "conv" not in name else "conv1d" for name, p in half.named_parameters() if p.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias", "conv1d", "e_score_correction_bias"}
    out = half(random_tokens(1, 6))
    assert out.hidden.dtype == HALF
    assert {layer.state.dtype for layer in out.cache.layers if hasattr(layer, "state")} == {torch.float32}
    assert half.logits(out.hidden).dtype == torch.float32


@torch.no_grad()
def test_a_fresh_residual_query_is_the_plain_mean_of_its_sources() -> None:
    """Zero queries at the start: at the first layer's feed-forward the sources are the embedding and the attention's output."""
    torch.manual_seed(9)
    model = K3ForCausalLM(packable()).double()
    seen: dict[str, torch.Tensor] = {}
    layer = model.model.layers[0]
    hooks = [layer.self_attn.register_forward_hook(lambda _m, _a, out: seen.__setitem__("attention", out[0])),
             layer.mlp_res.register_forward_hook(lambda _m, _a, out: seen.__setitem__("mixed", out.mixed))]
    tokens = random_tokens(1, 5)
    model(tokens)
    for hook in hooks:
        hook.remove()
    mean = (model.model.embed_tokens(tokens) + seen["attention"]) / 2
    torch.testing.assert_close(seen["mixed"].view_as(mean), layer.post_attention_layernorm(mean), rtol=0, atol=1e-12)
