"""Our weights in other people's code: transformers' modules, configured with ours to be one function of the same parameters.

Where K3 has what no module there has (residual mixing, an output gate on MLA, SiTU, a latent expert space), a setting makes it the identity or the
ordinary form: one residual block and zero queries mix to half the usual residual stream, large betas make SiTU-GLU a SwiGLU, unit projections make the
latent space the model's. What is left is compared as it stands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import (
    Glm5NextTextForgetGate,
    Glm5NextTextLinearAttention,
)
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearAttention,
    KimiLinearForCausalLM,
    KimiLinearMLP,
    KimiLinearMoE,
)

from driftline.models.attention import KdaAttention, MlaAttention
from driftline.models.config import K3Config
from driftline.models.mlp import DenseMlp, Experts, LatentMoe
from driftline.models.model import K3ForCausalLM

__all__ = ["as_public", "configured_alike", "public_config", "public_kda", "public_mla", "public_model", "public_moe"]

WIDE_BETA = 1e4
"""tanh(x / beta) beta is x to 1e-7 for the activations of these tests."""


def configured_alike(config: K3Config, **changes: Any) -> K3Config:
    """`config` where the public decoder has the same function: no gate on MLA, low-rank gates on KDA, SwiGLU, experts on the model's own width, one block."""
    linear = config.linear_attn_config.model_copy(update={"use_full_rank_gate": False})
    return config.model_copy(update={
        "linear_attn_config": linear, "mla_use_output_gate": False, "activation_situ_beta": WIDE_BETA, "activation_situ_linear_beta": WIDE_BETA,
        "routed_expert_hidden_size": config.hidden_size, "latent_moe_use_norm": False, "attn_res_block_size": 10**6, **changes,
    })


def as_public(model: K3ForCausalLM) -> K3ForCausalLM:
    """`model` of such a configuration with the values that make it that function, in place: zero residual queries, unit latent projections."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("res.proj.weight"):
                parameter.zero_()
            if "routed_expert_" in name:
                parameter.copy_(torch.eye(parameter.shape[0]))
    return model


def public_config(config: K3Config) -> KimiLinearConfig:
    linear = config.linear_attn_config
    return KimiLinearConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        moe_intermediate_size=config.moe_intermediate_size, num_hidden_layers=config.num_hidden_layers, num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads, n_shared_experts=config.num_shared_experts, routed_scaling_factor=config.routed_scaling_factor,
        kv_lora_rank=config.kv_lora_rank, q_lora_rank=config.q_lora_rank, qk_rope_head_dim=config.qk_rope_head_dim, v_head_dim=config.v_head_dim,
        qk_nope_head_dim=config.qk_nope_head_dim, num_experts_per_tok=config.num_experts_per_token, num_local_experts=config.num_experts,
        rms_norm_eps=config.rms_norm_eps, pad_token_id=config.pad_token_id, bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
        first_k_dense_replace=config.first_k_dense_replace, attn_implementation="eager",
        linear_attn_config={
            "head_dim": linear.head_dim, "num_heads": linear.num_heads, "short_conv_kernel_size": linear.short_conv_kernel_size,
            "full_attn_layers": list(linear.full_attn_layers), "kda_layers": list(linear.kda_layers),
        },
    )


def _gate_config(config: K3Config) -> Glm5NextTextConfig:
    linear = config.linear_attn_config
    return Glm5NextTextConfig(
        hidden_size=config.hidden_size, num_hidden_layers=config.num_hidden_layers, hidden_act="silu", rms_norm_eps=config.rms_norm_eps,
        linear_head_dim=linear.head_dim, linear_num_heads=linear.num_heads, linear_conv_kernel_dim=linear.short_conv_kernel_size,
        linear_lower_bound=linear.gate_lower_bound,
    )


def _copy(theirs: nn.Module, ours: nn.Module, *names: str) -> None:
    for name in names:
        target = theirs.get_parameter(f"{name}.weight")
        source = ours.get_parameter(f"{name}.weight")
        assert target.shape == source.shape, name
        target.data = source.detach().clone()


def _copy_kda(theirs: nn.Module, ours: KdaAttention) -> None:
    """Into either port's KDA: they differ in the class of their forget gate alone."""
    _copy(theirs, ours, "q_proj", "k_proj", "v_proj", "b_proj", "o_norm", "o_proj")
    gate = theirs.get_submodule("forget_gate")
    _copy(gate, ours, "f_a_proj", "f_b_proj")
    for name in ("A_log", "dt_bias"):
        gate.get_parameter(name).data = ours.get_parameter(name).detach().clone().view(gate.get_parameter(name).shape)
    convolutions = [ours.q_conv1d.weight, ours.k_conv1d.weight, ours.v_conv1d.weight]
    theirs.get_parameter("conv1d.weight").data = torch.cat([w.detach() for w in convolutions])
    if ours.full_rank_gate:  # the ports have a low-rank gate: its two halves are the identity and ours
        theirs.g_a_proj, theirs.g_b_proj = nn.Identity(), ours.g_proj
    else:
        _copy(theirs, ours, "g_a_proj", "g_b_proj")


def public_kda(ours: KdaAttention, config: K3Config) -> Glm5NextTextLinearAttention:
    """The port with K3's bounded gate."""
    theirs = Glm5NextTextLinearAttention(_gate_config(config), 0)
    _copy_kda(theirs, ours)
    return theirs.eval()


class _Gated(nn.Module):
    """K3's gate on MLA before the projection, which no port has: of the layer's input, kept by a hook."""

    def __init__(self, layer: nn.Module, gate: nn.Module, project: nn.Module) -> None:
        super().__init__()
        self.gate, self.project = gate, project
        self.seen: list[torch.Tensor] = []
        layer.register_forward_pre_hook(lambda _m, args, kwargs: self.seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True)

    def forward(self, o: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.project(o * torch.sigmoid(self.gate(self.seen.pop())))
        return out


def public_mla(ours: MlaAttention, config: K3Config) -> KimiLinearAttention:
    theirs = KimiLinearAttention(public_config(config), 0)
    _copy_mla(theirs, ours)
    return theirs.eval()


def _copy_mla(theirs: nn.Module, ours: MlaAttention) -> None:
    _copy(theirs, ours, "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    if ours.gated:
        theirs.o_proj = _Gated(theirs, ours.g_proj, theirs.get_submodule("o_proj"))


def _copy_mlp(theirs: nn.Module, ours: DenseMlp) -> None:
    _copy(theirs, ours, "gate_proj", "up_proj", "down_proj")


def public_moe(ours: LatentMoe, config: K3Config) -> KimiLinearMoE:
    theirs = KimiLinearMoE(public_config(config))
    _copy_moe(theirs, ours)
    return theirs.eval()


def _copy_moe(theirs: nn.Module, ours: LatentMoe) -> None:
    assert isinstance(ours.experts, Experts)
    theirs.get_parameter("experts.gate_up_proj").data = torch.cat([ours.experts.w1.detach(), ours.experts.w3.detach()], dim=1)
    theirs.get_parameter("experts.down_proj").data = ours.experts.w2.detach().clone()
    theirs.get_parameter("gate.weight").data = ours.gate.weight.detach().clone()
    theirs.get_buffer("gate.e_score_correction_bias").copy_(ours.gate.e_score_correction_bias.detach())
    assert ours.shared_experts is not None
    _copy_mlp(theirs.get_submodule("shared_experts"), ours.shared_experts)


def public_model(ours: K3ForCausalLM) -> KimiLinearForCausalLM:
    """The whole decoder, of an `as_public` model. Half a residual stream is normalised with eps as the whole one with four times it; layer 0 has no bank."""
    config = ours.config
    theirs = KimiLinearForCausalLM(public_config(config))
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        _copy(theirs, ours, name)
    theirs.model.norm.variance_epsilon = 4 * config.rms_norm_eps
    for index in range(config.num_hidden_layers):
        layer, mine = theirs.model.layers[index], ours.model.layers[index]
        _copy(layer, mine, "input_layernorm", "post_attention_layernorm")
        layer.input_layernorm.variance_epsilon = config.rms_norm_eps * (4 if index else 1)
        layer.post_attention_layernorm.variance_epsilon = 4 * config.rms_norm_eps
        if isinstance(mine.self_attn, KdaAttention):
            layer.self_attn.forget_gate = Glm5NextTextForgetGate(_gate_config(config))
            _copy_kda(layer.self_attn, mine.self_attn)
        else:
            _copy_mla(layer.self_attn, mine.self_attn)
        if mine.moe:
            _copy_moe(layer.mlp, mine.block_sparse_moe)
        else:
            assert isinstance(layer.mlp, KimiLinearMLP)
            _copy_mlp(layer.mlp, mine.mlp)
    return theirs.eval()
