"""K3's roundings in bfloat16 beside transformers' ports, to the bit, and beside the order that must not be taken: the two differ, so the tests can tell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers.models.glm5_next", reason="the public ports are in transformers 5.24 and later")

import torch
from model_cases import random_model
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextRMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNorm, causal_conv1d_fn

from driftline.kernels.attention_residual import Bank, OutputNorm, aggregate
from driftline.kernels.gated_norm import gated_norm
from driftline.kernels.kda import kda
from driftline.kernels.mode import Numerics, using
from driftline.kernels.moe import expert_mlp, route
from driftline.kernels.rmsnorm import rmsnorm
from driftline.kernels.short_conv import short_conv
from driftline.kernels.situ_glu import situ_glu
from driftline.models.attention import KdaAttention
from driftline.models.state import policy_dtype

HALF = torch.bfloat16


@pytest.fixture(params=Numerics, autouse=True)
def mode(request: pytest.FixtureRequest) -> Iterator[Numerics]:
    """Both orders of operations are the model."""
    numerics: Numerics = request.param
    with using(numerics):
        yield numerics


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def differing(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a != b).float().mean())


@torch.no_grad()
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_norms_round_before_the_weight(eps: float, scale: float) -> None:
    x, weight = noise(64, 192, scale=scale).to(HALF), (1 + 0.3 * noise(192, seed=1)).to(HALF)
    theirs = KimiLinearRMSNorm(192, eps).to(HALF)
    theirs.weight.copy_(weight)
    got = rmsnorm(x, weight, eps)
    assert torch.equal(got, theirs(x))
    wide = x.float()
    once = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(HALF)
    assert 0.1 < differing(got, once) < 0.9


@torch.no_grad()
def test_kda_s_output_norm_and_gate_round_once() -> None:
    """The fused norm that K3 takes here multiplies by weight and sigmoid in fp32, unlike every other norm of the model."""
    o, gate, weight = noise(5, 40, 2, 128).to(HALF), noise(5, 40, 2, 128, seed=1, scale=2.0).to(HALF), (1 + 0.3 * noise(128, seed=2)).to(HALF)
    theirs = Glm5NextTextRMSNormGated(128, 1e-5).to(HALF)
    theirs.weight.copy_(weight)
    got = gated_norm(o, weight, gate, 1e-5)
    assert torch.equal(got, theirs(o, gate))
    stepwise = rmsnorm(o, weight, 1e-5) * torch.sigmoid(gate.float()).to(HALF)
    assert differing(got, stepwise) > 0.1


@torch.no_grad()
def test_the_convolution_takes_fp32_weights_and_rounds_once_behind_silu() -> None:
    x, weight = noise(2, 50, 24).to(HALF), noise(24, 4, seed=1, scale=0.5)
    got, _ = short_conv(x, weight, x.new_zeros(2, 3, 24))
    theirs = causal_conv1d_fn(x.mT, weight, activation="silu").mT
    assert differing(got, theirs) < 0.01, "torch's convolution adds its four products in an order of its own"
    torch.testing.assert_close(got, theirs, rtol=2**-7, atol=0)
    narrow, _ = short_conv(x, weight.to(HALF), x.new_zeros(2, 3, 24))
    assert differing(got, narrow) > 0.2
    raw = torch.nn.functional.conv1d(x.float().mT, weight[:, None], padding=3, groups=24)[..., :50].mT
    assert differing(got, torch.nn.functional.silu(raw.to(HALF).float()).to(HALF)) > 0.1, "a rounding before SiLU would show"


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 33])
def test_what_decays_and_weighs_the_state_is_fp32(steps: int) -> None:
    """beta's sigmoid, the gate and the norms of q and k from bfloat16 inputs without a rounding on the way: the state is that of the inputs in fp32."""
    q, k, v, z = (noise(1, steps, 2, 16, seed=s).to(HALF) for s in range(4))
    beta, a_log, bias = noise(1, steps, 2, seed=5).to(HALF), noise(2, seed=6, scale=0.3), noise(32, seed=7)
    got, state = kda(q, k, v, z, beta, a_log, bias)
    wide, exact = kda(q.float(), k.float(), v.float(), z.float(), beta.float(), a_log, bias)
    assert torch.equal(state, exact)
    assert torch.equal(got, wide.to(HALF))
    rounded = torch.logit(torch.sigmoid(beta).double()).float()
    _, other = kda(q, k, v, z, rounded, a_log, bias)
    assert (other - exact).abs().max() > 1e-4, "beta rounded behind its sigmoid"
    _, other = kda(q, k, v, (z.float() + bias.view(2, 16)).to(HALF), beta, a_log, torch.zeros_like(bias))
    assert steps == 1 or (other - exact).abs().max() > 1e-4, "the gate's input rounded behind its bias"
    _, other = kda(q, k, v, z, beta, a_log.to(HALF), bias.to(HALF))
    assert steps == 1 or (other - exact).abs().max() > 1e-5, "A_log and dt_bias rounded"


@torch.no_grad()
def test_situ_is_fp32_with_one_cast() -> None:
    gate, up = noise(64, 96, scale=4.0).to(HALF), noise(64, 96, seed=1, scale=20.0).to(HALF)
    wide_gate, wide_up = gate.float(), up.float()
    want = (4 * torch.tanh(wide_gate / 4) * torch.sigmoid(wide_gate) * (25 * torch.tanh(wide_up / 25))).to(HALF)
    got = situ_glu(gate, up, 4.0, 25.0)
    assert differing(got, want) < 0.005
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
    stepwise = (4 * torch.tanh(gate / 4)) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))
    assert differing(got, stepwise) > 0.3


@torch.no_grad()
def test_residual_sources_are_mixed_in_fp32_and_cast_before_the_next_norm() -> None:
    bank = Bank.empty(30, 2, 64, dtype=HALF, device="cpu").write(noise(30, 64).to(HALF)).write(noise(30, 64, seed=1).to(HALF))
    prefix, delta, query = noise(30, 64, seed=2).to(HALF), noise(30, 64, seed=3, scale=0.1).to(HALF), noise(64, seed=4).to(HALF)
    norm, after = (1 + 0.3 * noise(64, seed=5)).to(HALF), (1 + 0.3 * noise(64, seed=6)).to(HALF)
    got = aggregate(bank, prefix, query, norm, 1e-5, delta=delta, output_norm=OutputNorm(after, 1e-5))
    moved = prefix + delta
    assert torch.equal(got.prefix, moved)
    assert differing(moved, (prefix.float() + delta.float())) > 0.3, "the running sum is bfloat16"
    v = torch.cat([bank.values[:, :2], moved[:, None]], 1).float()
    k = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-5)
    p = torch.softmax((k * (norm.float() * query.float())).sum(-1), -1)
    mixed = (p[..., None] * v).sum(1)
    want = rmsnorm(mixed.to(HALF), after, 1e-5)
    assert differing(got.mixed, want) < 0.01
    torch.testing.assert_close(got.mixed, want, rtol=2**-6, atol=1e-6)
    assert differing(got.mixed, rmsnorm(mixed, after.float(), 1e-5).to(HALF)) > 0.1, "a norm of what was not cast"
    narrow = (torch.softmax((k.to(HALF) * norm * query).sum(-1), -1)[..., None] * v.to(HALF)).sum(1)
    assert differing(got.mixed, rmsnorm(narrow, after, 1e-5)) > 0.1


@torch.no_grad()
def test_sixteen_experts_are_added_in_fp32_in_the_order_of_their_slots() -> None:
    """K3's sixteen of a token, one row at a time and whole: the same order of the same products gives the same bits, a reversed order or bfloat16 others."""
    experts, top_k, width = 24, 16, 64
    z, weight, bias = noise(40, width).to(HALF), noise(experts, width, seed=1).to(HALF), noise(experts, seed=2, scale=0.1)
    w1, w3, w2 = (noise(experts, width, width, seed=s, scale=0.2).to(HALF) for s in (3, 4, 5))
    ids, gates = route(z, weight, bias, top_k, 1.0)
    got = expert_mlp(z, ids, gates, w1, w3, w2, 4.0, 25.0)
    every = z.expand(experts, -1, -1)
    outs = (situ_glu(every @ w1.mT, every @ w3.mT, 4.0, 25.0) @ w2.mT).transpose(0, 1)
    each = outs.gather(1, ids[..., None].expand(-1, -1, width))
    total = torch.zeros(40, width)
    for slot in range(top_k):
        total = total + each[:, slot].float() * gates[:, slot, None]
    assert torch.equal(got, total.to(HALF))
    narrow = torch.zeros(40, width, dtype=HALF)
    for slot in range(top_k):
        narrow = narrow + (each[:, slot].float() * gates[:, slot, None]).to(HALF)
    assert differing(got, narrow) > 0.2
    exact = [expert_mlp(z.float(), i, g, w1.float(), w3.float(), w2.float(), 4.0, 25.0) for i, g in ((ids, gates), (ids.flip(1), gates.flip(1)))]
    assert (exact[0] != exact[1]).any(), "in fp32 the order is part of the result"
    assert torch.equal(exact[0], expert_mlp(z.float(), ids.clone(), gates.clone(), w1.float(), w3.float(), w2.float(), 4.0, 25.0))


@torch.no_grad()
def test_gates_are_fp32_of_the_unrounded_scores() -> None:
    x, weight = noise(200, 64).to(HALF), noise(24, 64, seed=1, scale=0.3).to(HALF)
    ids, gates = route(x, weight, torch.zeros(24), 4, 2.5)
    scores = torch.sigmoid(x.float() @ weight.float().t()).gather(-1, ids)
    assert gates.dtype == torch.float32
    torch.testing.assert_close(gates, scores / (scores.sum(-1, keepdim=True) + 1e-20) * 2.5, rtol=5e-7, atol=0)
    assert (gates != gates.to(HALF)).float().mean() > 0.9
    narrow = torch.sigmoid((x @ weight.t()).float())
    assert (narrow.topk(4, -1).indices != ids).any(-1).float().mean() > 0.01, "a bfloat16 product chooses others for some"


def test_what_the_release_keeps_in_fp32_a_bfloat16_model_keeps() -> None:
    kept = {name.split(".")[-2 if "conv" in name else -1] for name, p in random_model(dtype=torch.float32).named_parameters() if policy_dtype(name, HALF) == p.dtype}
    assert kept == {"A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", "e_score_correction_bias"}
    layer = random_model().model.layers[0].self_attn
    assert isinstance(layer, KdaAttention)
    assert layer.initial(1, torch.zeros(1, dtype=HALF)).state.dtype == torch.float32
