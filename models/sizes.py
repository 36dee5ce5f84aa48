"""Models like K3 at other sizes: widths in K3's proportions, rounded to what the kernels take, and the pattern of its layers for any number of them.

At K3's own depth, width and vocabulary the result is K3's configuration exactly. What does not scale in the architecture (head dimensions, gate, betas, shared
experts) is K3's at every size.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from driftline.messages.errors import ConfigError
from driftline.models.config import K3Config

__all__ = ["like_k3"]

_HIDDEN, _LAYERS, _VOCABULARY = 7168, 93, 163840
_WIDTHS = {"intermediate_size": 33792, "q_lora_rank": 1536, "kv_lora_rank": 512, "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584}
_HEADS, _EXPERTS, _PER_TOKEN, _BLOCKS = 96, 896, 16, 8
_STEP = 128
"""Columns in which the kernels go through a row, and a whole number of groups of MXFP4."""

_BYTES = {"vocab_size": 264, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
_PUBLIC = {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}


def like_k3(layers: int, hidden: int, *, heads: int | None = None, kda_head_dim: int = 128, **sizes: int | None) -> K3Config:
    """A configuration of `layers` and `hidden`; every other field of K3Config that is an int may be given, None for its default.

    `heads` and `kda_head_dim` are of both attentions and of KDA. The vocabulary is that of the byte tokenizer unless given; K3's special tokens go with K3's.
    Raises ConfigError naming the field.
    """
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    for name, value in {"layers": layers, "hidden": hidden, "heads": heads, "kda_head_dim": kda_head_dim, **given}.items():
        if value is not None and value < (0 if name in _MAY_BE_ZERO else 1):
            raise ConfigError("a size is positive", field=name, value=value, remedy="give a larger one")
    heads = heads if heads is not None else max(1, round(_HEADS * hidden / _HIDDEN))
    experts = given.get("num_experts", max(8, 8 * round(_EXPERTS * hidden / _HIDDEN / 8)))
    full = [i for i in range(1, layers + 1) if i % 4 == 0 or i == layers]
    body: dict[str, Any] = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_experts": experts,
        "num_experts_per_token": min(experts, max(2, round(_PER_TOKEN * experts / _EXPERTS))), "num_shared_experts": 2,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "attn_res_block_size": -(-layers // _BLOCKS),
        **{name: max(_STEP, _STEP * round(width * hidden / _HIDDEN / _STEP)) for name, width in _WIDTHS.items()}, **_BYTES,
        "linear_attn_config": {
            "num_heads": heads, "head_dim": kda_head_dim, "full_attn_layers": full, "kda_layers": [i for i in range(1, layers + 1) if i not in full],
        },
    }
    if given.get("vocab_size", 0) >= _VOCABULARY:
        body |= _PUBLIC
    try:
        return K3Config.model_validate(body | given)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(first["msg"], field=".".join(str(part) for part in first["loc"]) or "sizes", value=first.get("input"),
                          remedy="change the size, or leave it out for its default") from error


_MAY_BE_ZERO = ("num_shared_experts", "first_k_dense_replace", "qk_rope_head_dim", "bos_token_id", "eos_token_id", "pad_token_id")
