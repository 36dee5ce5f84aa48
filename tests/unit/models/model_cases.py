"""A small K3 with every part in it and nothing at its initial value, so that a part left out shows."""

from __future__ import annotations

from typing import Any

import torch

from driftline.models.config import K3Config, tiny
from driftline.models.model import K3ForCausalLM

torch.set_num_threads(1)

PUBLIC: dict[str, Any] = {
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 93, "num_attention_heads": 96,
    "num_key_value_heads": 96, "intermediate_size": 33792, "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True,
    "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc",
    "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5,
    "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12,
    "tie_word_embeddings": False, "max_position_embeddings": 1048576, "num_nextn_predict_layers": 0,
    "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
    "linear_attn_config": {
        "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True,
        "full_attn_layers": [*range(4, 92, 4), 92, 93],
        "kda_layers": [i for i in range(1, 93) if i % 4],
    },
}
"""`text_config` of the K3 release; the layer lists are 1-indexed."""


def small(**changes: Any) -> K3Config:
    """Five layers (KDA KDA KDA MLA MLA), three residual blocks, one dense and four MoE layers."""
    full = (4, 5)
    body: dict[str, Any] = {
        "vocab_size": 264, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "q_lora_rank": 16, "kv_lora_rank": 12,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "linear_attn_config": {"num_heads": 2, "head_dim": 8, "full_attn_layers": full, "kda_layers": (1, 2, 3)},
        "num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 16, "routed_expert_hidden_size": 16,
    }
    return tiny(**{**body, **changes})


def random_model(config: K3Config | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> K3ForCausalLM:
    """A model whose norms, gates, biases and residual queries are random too."""
    torch.manual_seed(seed)
    model = K3ForCausalLM(config or small()).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if name.endswith(("res.proj.weight", "e_score_correction_bias", "A_log")):
                parameter.normal_(std=0.3)
            if name.endswith("embed_tokens.weight"):
                parameter.normal_(std=1.0)
    return model


def random_tokens(batch: int, steps: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (batch, steps), generator=torch.Generator().manual_seed(seed))
