"""The drafter: one decoder layer over (hidden states of the target at a position, the token behind it), which guesses the token behind that one.

Where the target has not been yet, the drafter reads its own output in place of the target's hidden states, so a chain of drafts costs the target nothing. It shares the
target's embedding, and has a head of its own over the tokens that can be drafted (`drafted`, ascending). EAGLE-3 (arXiv:2503.01840), with a window of attention:
what it keeps of a sequence is bounded, and a sequence it has seen only the end of is one it can draft for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from driftline.models.drafter.config import DrafterConfig

__all__ = ["Drafter", "Keys", "turned"]


class Keys(NamedTuple):
    """k and v [..., Hkv, D] of some positions, k turned to them."""

    k: torch.Tensor
    v: torch.Tensor


class Drafter(nn.Module):
    """Parameters in fp32 unless moved. `drafted` int64 [draft vocabulary]: the target's ids, ascending."""

    drafted: torch.Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        width, heads, groups, dim = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False)
        self.embed_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.feature_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.q_proj = nn.Linear(2 * width, heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * width, groups * dim, bias=False)
        self.v_proj = nn.Linear(2 * width, groups * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.gate_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.register_buffer("drafted", torch.arange(config.draft_vocab_size))

    @torch.no_grad()
    def begin(self, head: torch.Tensor, drafted: torch.Tensor) -> None:
        """Start with the target's head [vocab, D], of the tokens that can be drafted int64 [draft vocabulary], ascending."""
        self.drafted.copy_(drafted)
        self.lm_head.weight.copy_(head[drafted.to(head.device)])
        self.o_proj.weight.zero_()  # the first guesses are the features' own
        self.down_proj.weight.zero_()
        if self.config.taps[-1] == self.config.target_layers:  # what the last layer leaves is what the head reads
            self.fc.weight.zero_()
            width = self.config.hidden_size
            self.fc.weight[:, -width:].copy_(torch.eye(width))

    def projected(self, features: torch.Tensor) -> torch.Tensor:
        """Tap rows [..., taps * D] to what the layer reads [..., D]."""
        out: torch.Tensor = self.fc(features.to(self.fc.weight.dtype))
        return out

    def inputs(self, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """states [..., D] (projected features, or the drafter's own output), embedded [..., D] of the tokens behind them: [..., 2 D]."""
        return torch.cat([self.embed_norm(embedded.to(states.dtype)), self.feature_norm(states)], -1)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [..., 2 D], positions [...]: [..., H, D], turned and scaled."""
        q = turned(self.q_proj(x).unflatten(-1, (-1, self.config.head_dim)), positions, self.config.rope_theta)
        scaled: torch.Tensor = q * self.config.head_dim**-0.5
        return scaled

    def keys(self, x: torch.Tensor, positions: torch.Tensor) -> Keys:
        """Of the same rows: [..., Hkv, D]."""
        k = turned(self.k_proj(x).unflatten(-1, (-1, self.config.head_dim)), positions, self.config.rope_theta)
        return Keys(k, self.v_proj(x).unflatten(-1, (-1, self.config.head_dim)))

    def out(self, states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output [..., D] behind its attention [..., H, D]: what the head reads after a norm, and the next position's state."""
        x = states + self.o_proj(attended.flatten(-2))
        normed = self.mlp_norm(x)
        after: torch.Tensor = x + self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return after

    def logits(self, after: torch.Tensor) -> torch.Tensor:
        """[..., D] to fp32 [..., draft vocabulary]."""
        scores: torch.Tensor = self.lm_head(self.norm(after))
        return scores.float()

    def attend(self, q: torch.Tensor, held: Keys, seen: torch.Tensor) -> torch.Tensor:
        """q [B, T, H, D] over held [B, N, Hkv, D] where seen bool [B, T, N] (at least one): [B, T, H, D]."""
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = (x.repeat_interleave(group, 2) if group > 1 else x for x in held)
        scores = torch.einsum("bthd,bnhd->bhtn", q, k).float().masked_fill(~seen[:, None], -torch.inf)
        return torch.einsum("bhtn,bnhd->bthd", scores.softmax(-1).to(v.dtype), v)


def turned(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x [..., H, D] rotated to positions [...], its two halves as pairs."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[..., None].float() * rates
    cos, sin = angles.cos()[..., None, :].to(x.dtype), angles.sin()[..., None, :].to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
