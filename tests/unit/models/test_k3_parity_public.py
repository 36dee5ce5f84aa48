"""K3 beside transformers' ports of its relatives, on our weights in fp32: the bounded-gate KDA of `glm5_next`, the attention, router and experts of
`kimi_linear`, and a whole decoder of both. Each comparison is tried with one thing off, which has to show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers.models.glm5_next", reason="the public ports are in transformers 5.24 and later")

import torch
from model_cases import random_model, random_tokens, small
from public_forwards import (
    as_public,
    configured_alike,
    public_config,
    public_kda,
    public_mla,
    public_model,
    public_moe,
)
from transformers import DynamicCache

from driftline.kernels.mode import Numerics, using
from driftline.models.attention import KdaAttention, MlaAttention, RMSNorm
from driftline.models.config import K3Config, LinearAttention
from driftline.models.latent_attention import Columns
from driftline.models.mlp import LatentMoe
from driftline.models.model import K3ForCausalLM

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
FAR = 1e-3


@pytest.fixture(params=Numerics, autouse=True)
def mode(request: pytest.FixtureRequest) -> Iterator[Numerics]:
    """Both orders of operations are the model."""
    numerics: Numerics = request.param
    with using(numerics):
        yield numerics


def seen(batch: int, held: int, new: int) -> Columns:
    return Columns(torch.ones(batch, held, dtype=torch.bool), torch.ones(batch, new, dtype=torch.bool))


def one_layer(config: K3Config, *, kda: bool) -> K3Config:
    """`config` for the ports' caches, which ask what kind of layer 0 is."""
    linear = config.linear_attn_config.model_copy(update={"full_attn_layers": () if kda else (1,), "kda_layers": (1,) if kda else ()})
    return config.model_copy(update={"num_hidden_layers": 1, "linear_attn_config": linear})


def layer_of(model: K3ForCausalLM, index: int) -> KdaAttention | MlaAttention:
    layer = model.model.layers[index].self_attn
    assert isinstance(layer, KdaAttention | MlaAttention)
    return layer


def inputs(batch: int, steps: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, steps, 32, generator=torch.Generator().manual_seed(seed))


def kda_layer(**changes: object) -> tuple[KdaAttention, K3Config]:
    linear = LinearAttention.model_validate({**small().linear_attn_config.model_dump(), **changes})
    config = small(linear_attn_config=linear.model_dump())
    layer = layer_of(random_model(config, seed=3, dtype=torch.float32), 1)
    assert isinstance(layer, KdaAttention)
    with torch.no_grad():
        layer.dt_bias.normal_(std=2.0, generator=torch.Generator().manual_seed(1))  # slow and fast channels, so that the state matters
        layer.A_log.normal_(std=0.5, generator=torch.Generator().manual_seed(2))
    return layer, config


@torch.no_grad()
@pytest.mark.parametrize("full_rank", [True, False])
@pytest.mark.parametrize("lower_bound", [-5.0, -2.5])
@pytest.mark.parametrize("steps", [1, 16, 75, 130])
def test_kda_is_that_of_the_port_with_the_bounded_gate(steps: int, lower_bound: float, full_rank: bool) -> None:
    layer, config = kda_layer(use_full_rank_gate=full_rank, gate_lower_bound=lower_bound)
    theirs, x = public_kda(layer, config), inputs(2, steps)
    ours, _ = layer(x, layer.initial(2, x), None, None)
    torch.testing.assert_close(ours, theirs(x), **CLOSE)
    theirs.forget_gate.safe_gate_lower_bound *= 0.9
    assert steps == 1 or (ours - theirs(x)).abs().max() > FAR / 10, "one token from an empty state decays nothing"


@torch.no_grad()
@pytest.mark.parametrize("pieces", [(9, 1, 1, 1), (70, 3, 1), (1, 1, 1, 64)])
def test_kda_goes_on_from_a_state_as_the_port_does(pieces: tuple[int, ...]) -> None:
    """Through its convolution's tail too; and the two states are one, although the port keeps its tail a step longer."""
    layer, config = kda_layer()
    theirs, x = public_kda(layer, config), inputs(2, sum(pieces), seed=4)
    cache, state = DynamicCache(config=public_config(one_layer(config, kda=True))), layer.initial(2, x)
    for piece in x.split(list(pieces), dim=1):
        want = theirs(piece, cache=cache)
        got, state = layer(piece, state, None, None)
        torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(state.state, cache.get_recurrent_state(0, state_idx=0), **CLOSE)
    torch.testing.assert_close(state.tail, cache.get_conv_state(0, state_idx=0)[..., -3:].mT, **CLOSE)


@torch.no_grad()
def test_kda_leaves_padding_out_as_the_port_does() -> None:
    layer, config = kda_layer()
    theirs, x = public_kda(layer, config), inputs(3, 40, seed=5)
    lengths = torch.tensor([40, 17, 1])
    real = torch.arange(40) < lengths[:, None]
    want = theirs(x, attention_mask=real)
    got, _ = layer(x.masked_fill(~real[..., None], 7.0), layer.initial(3, x), lengths, real)
    torch.testing.assert_close(got[real], want[real], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("pieces", [(1,), (23,), (9, 1, 1), (5, 8)])
def test_mla_is_that_of_the_port_which_expands_keys_and_values(pieces: tuple[int, ...], gated: bool) -> None:
    config = small(mla_use_output_gate=gated)
    layer = layer_of(random_model(config, seed=6, dtype=torch.float32), 3)
    assert isinstance(layer, MlaAttention)
    theirs, x = public_mla(layer, one_layer(config, kda=False)), inputs(2, sum(pieces), seed=7)
    cache, rows, at = DynamicCache(config=public_config(one_layer(config, kda=False))), layer.initial(2, x), 0
    for piece in x.split(list(pieces), dim=1):
        new = piece.shape[1]
        mask = torch.full((new, at + new), -torch.inf).triu(at + 1)[None, None]
        want, _ = theirs(hidden_states=piece, attention_mask=mask, cache=cache)
        got, rows = layer(piece, rows, seen(2, at, new))
        torch.testing.assert_close(got, want, **CLOSE)
        at += new
    theirs.scaling *= 1.2
    last, _ = theirs(hidden_states=x, attention_mask=torch.full((at, at), -torch.inf).triu(1)[None, None])
    assert at == 1 or (got - last[:, -got.shape[1]:]).abs().max() > FAR / 10


@torch.no_grad()
@pytest.mark.parametrize(("top_k", "scaling"), [(1, 1.0), (2, 1.0), (2, 2.446), (6, 1.0)])
def test_experts_and_their_router_are_those_of_the_port(top_k: int, scaling: float) -> None:
    """Sigmoid scores, a bias that only chooses, weights renormalised and scaled, shared experts beside."""
    config = configured_alike(small(num_experts_per_token=top_k, routed_scaling_factor=scaling))
    moe = as_public(random_model(config, seed=8, dtype=torch.float32)).model.layers[2].block_sparse_moe
    assert isinstance(moe, LatentMoe)
    theirs, x = public_moe(moe, config), inputs(3, 50, seed=9)
    got, ids = moe(x)
    _, weights, wanted = theirs.gate(x)
    assert torch.equal(ids.flatten(0, 1).sort(-1).values, wanted.sort(-1).values)
    assert (weights.sum(-1) - scaling).abs().max() < 1e-5
    torch.testing.assert_close(got, theirs(x), **CLOSE)
    theirs.gate.e_score_correction_bias.mul_(-1)
    assert top_k == 6 or (got - theirs(x)).abs().max() > FAR


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_that_of_the_port_to_the_bit(dtype: torch.dtype, mode: Numerics) -> None:
    """In deterministic mode squares are summed in another order, which fp32's last bit shows."""
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNorm

    ours, theirs = RMSNorm(96, 1e-5), KimiLinearRMSNorm(96, 1e-5)
    ours.weight.copy_(1 + 0.3 * torch.randn(96, generator=torch.Generator().manual_seed(1)))
    theirs.weight.copy_(ours.weight)
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    got, want = ours.to(dtype)(x), theirs.to(dtype)(x)
    if mode is Numerics.DETERMINISTIC and dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=5e-7, atol=0)
    else:
        assert torch.equal(got, want)


@pytest.fixture(scope="module")
def alike() -> K3ForCausalLM:
    return as_public(random_model(configured_alike(small(routed_scaling_factor=1.3)), seed=10, dtype=torch.float32))


@torch.no_grad()
def test_a_whole_decoder_is_the_ports_one(alike: K3ForCausalLM) -> None:
    theirs, tokens = public_model(alike), random_tokens(3, 75, seed=11)
    got, want = alike.logits(alike(tokens).hidden), theirs(tokens).logits
    torch.testing.assert_close(got, want, **CLOSE)
    flipped = theirs.model.layers[1].self_attn.forget_gate.dt_bias.data
    flipped[0] = (flipped[0].view(torch.int32) ^ (1 << 22)).view(torch.float32)
    assert (theirs(tokens).logits - want).abs().max() > 1e-4, "one bit of one weight"


@torch.no_grad()
def test_a_whole_decoder_decodes_as_the_ports_one(alike: K3ForCausalLM) -> None:
    theirs, tokens = public_model(alike), random_tokens(2, 40, seed=12)
    cache, held = DynamicCache(config=theirs.config), None
    for piece in tokens.split([33, 1, 1, 1, 4], dim=1):
        want = theirs(piece, cache=cache, use_cache=True).logits
        out = alike(piece, cache=held)
        held = out.cache
        torch.testing.assert_close(alike.logits(out.hidden), want, **CLOSE)


@torch.no_grad()
def test_a_whole_decoder_leaves_padding_out_as_the_ports_one(alike: K3ForCausalLM) -> None:
    theirs, tokens = public_model(alike), random_tokens(3, 30, seed=13)
    lengths = torch.tensor([30, 11, 2])
    real = torch.arange(30) < lengths[:, None]
    want = theirs(tokens, attention_mask=real.long()).logits
    got = alike.logits(alike(tokens, lengths=lengths).hidden)
    torch.testing.assert_close(got[real], want[real], **CLOSE)


def test_gradients_of_a_whole_decoder_are_the_ports_ones(alike: K3ForCausalLM) -> None:
    """To every parameter that both have; of experts through the router too."""
    theirs, tokens = public_model(alike).requires_grad_(), random_tokens(1, 20, seed=14)
    aim = torch.randn(1, 20, alike.config.vocab_size, generator=torch.Generator().manual_seed(15))
    alike.zero_grad()
    (alike.logits(alike(tokens).hidden) * aim).sum().backward()
    (theirs(tokens).logits * aim).sum().backward()
    pairs = {
        "model.layers.0.self_attn.forget_gate.dt_bias": "model.layers.0.self_attn.dt_bias",
        "model.layers.1.self_attn.forget_gate.f_a_proj.weight": "model.layers.1.self_attn.f_a_proj.weight",
        "model.layers.2.self_attn.k_proj.weight": "model.layers.2.self_attn.k_proj.weight",
        "model.layers.3.self_attn.kv_b_proj.weight": "model.layers.3.self_attn.kv_b_proj.weight",
        "model.layers.4.self_attn.q_a_proj.weight": "model.layers.4.self_attn.q_a_proj.weight",
        "model.layers.1.mlp.gate.weight": "model.layers.1.block_sparse_moe.gate.weight",
        "model.layers.4.mlp.experts.down_proj": "model.layers.4.block_sparse_moe.experts.w2",
        "model.layers.2.input_layernorm.weight": "model.layers.2.input_layernorm.weight",
    }
    for name, ours in pairs.items():
        want, got = theirs.get_parameter(name).grad, alike.get_parameter(ours).grad
        assert want is not None
        assert got is not None
        assert want.abs().max() > 0
        torch.testing.assert_close(got, want.view_as(got), rtol=1e-4, atol=1e-4 * float(want.abs().max()), msg=lambda text, name=name: f"{name}: {text}")
