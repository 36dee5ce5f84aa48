"""Every tensor of K3 at its own size, but for the number of its experts, by the names and shapes of the release's modules: written down here from its description, made there from its config."""

from __future__ import annotations

import torch
from model_cases import PUBLIC

from driftline.models.architectures import skeleton
from driftline.models.config import K3Config
from driftline.models.quantisation import Quantisation
from driftline.models.stored import public_shapes

D, INNER, LATENT, EXPERT, HEADS, EXPERTS, VOCABULARY = 7168, 12288, 3584, 3072, 96, 24, 163840

KDA = {
    **{f"{x}_proj.weight": (INNER, D) for x in "qkv"}, **{f"{x}_conv1d.weight": (INNER, 1, 4) for x in "qkv"}, "A_log": (HEADS,), "dt_bias": (INNER,),
    "f_a_proj.weight": (128, D), "f_b_proj.weight": (INNER, 128), "b_proj.weight": (HEADS, D), "g_proj.weight": (INNER, D), "o_norm.weight": (128,),
    "o_proj.weight": (D, INNER),
}
MLA = {
    "q_a_proj.weight": (1536, D), "q_a_layernorm.weight": (1536,), "q_b_proj.weight": (HEADS * 192, 1536), "kv_a_proj_with_mqa.weight": (576, D),
    "kv_a_layernorm.weight": (512,), "kv_b_proj.weight": (HEADS * 256, 512), "g_proj.weight": (INNER, D), "o_proj.weight": (D, INNER),
}
NORMS = {
    "input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,), "self_attention_res_proj.weight": (1, D), "self_attention_res_norm.weight": (D,),
    "mlp_res_proj.weight": (1, D), "mlp_res_norm.weight": (D,),
}
DENSE = {"mlp.gate_proj.weight": (33792, D), "mlp.up_proj.weight": (33792, D), "mlp.down_proj.weight": (D, 33792)}
AROUND_EXPERTS = {
    "gate.weight": (EXPERTS, D), "gate.e_score_correction_bias": (EXPERTS,), "routed_expert_down_proj.weight": (LATENT, D), "routed_expert_norm.weight": (LATENT,),
    "routed_expert_up_proj.weight": (D, LATENT), "shared_experts.gate_proj.weight": (6144, D), "shared_experts.up_proj.weight": (6144, D),
    "shared_experts.down_proj.weight": (D, 6144),
}
PACKED = {
    "w1.weight_packed": (EXPERT, LATENT // 2), "w1.weight_scale": (EXPERT, LATENT // 32), "w3.weight_packed": (EXPERT, LATENT // 2),
    "w3.weight_scale": (EXPERT, LATENT // 32), "w2.weight_packed": (LATENT, EXPERT // 2), "w2.weight_scale": (LATENT, EXPERT // 32),
}
LATENT_LAYERS = {*range(3, 91, 4), 91, 92}
"""0-indexed: every fourth, and the last two."""


def release() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, D), "model.norm.weight": (D,), "model.output_attn_res_proj.weight": (1, D),
        "model.output_attn_res_norm.weight": (D,), "lm_head.weight": (VOCABULARY, D),
    }
    for layer in range(93):
        at = f"model.layers.{layer}."
        found |= {f"{at}self_attn.{name}": shape for name, shape in (MLA if layer in LATENT_LAYERS else KDA).items()}
        found |= {f"{at}{name}": shape for name, shape in NORMS.items()}
        if layer == 0:
            found |= {f"{at}{name}": shape for name, shape in DENSE.items()}
            continue
        found |= {f"{at}block_sparse_moe.{name}": shape for name, shape in AROUND_EXPERTS.items()}
        for expert in range(EXPERTS):
            found |= {f"{at}block_sparse_moe.experts.{expert}.{name}": shape for name, shape in PACKED.items()}
    return found


def test_every_tensor_has_the_name_shape_and_dtype_of_the_release() -> None:
    """Of which none is allocated. 896 experts would be as many names more, and no other."""
    config = K3Config.model_validate({**PUBLIC, "num_experts": EXPERTS})
    ours, theirs = public_shapes(skeleton(config, Quantisation.MXFP4)), release()
    assert ours.keys() == theirs.keys()
    assert [name for name, shape in theirs.items() if ours[name].shape != shape] == []
    kinds = {torch.uint8: ("weight_packed", "weight_scale"), torch.float32: ("A_log", "dt_bias", "conv1d.weight", "e_score_correction_bias")}
    for name, held in ours.items():
        assert held.dtype is next((dtype for dtype, ends in kinds.items() if name.endswith(ends)), torch.bfloat16), name
    nbytes = {name: held.nbytes for name, held in ours.items()}
    experts = sum(size for name, size in nbytes.items() if ".experts." in name)
    assert experts * 896 / EXPERTS == 92 * 896 * 3 * EXPERT * LATENT * 17 / 32, "1.446 TB at the release's number"
    gates = sum(size for name, size in nbytes.items() if ".gate." in name)
    rest = sum(nbytes.values()) - experts - gates + gates * 896 / EXPERTS
    assert 113e9 < rest < 115e9, "and 114 GB of everything else"
