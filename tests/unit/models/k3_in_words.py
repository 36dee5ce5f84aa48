"""K3's forward written down once more, a token and a head and an expert at a time, from the published description: nothing of the model's code, no batch,
no cache, no chunks, keys and values written out. And the same with one mistake made on purpose, for every mistake that a port of it has made or may make.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import torch

from driftline.models.config import K3Config

__all__ = ["Trap", "hidden_in_words"]


class Trap(enum.Enum):
    """One mistake each."""

    ROTATED_SHARED_KEYS = "the 64 shared dimensions of MLA are rotated by position"
    SCALE_WITHOUT_SHARED = "softmax scale of the unshared dimensions alone"
    OUTER_EPSILON_INSIDE_MLA = "rms_norm_eps in MLA's inner norms"
    SHARED_KEYS_NORMALISED = "MLA's inner norm over latent and shared dimensions"
    UNGATED_MLA = "MLA without its output gate"
    GATE_OF_MLA_BEHIND_PROJECTION = "MLA's gate as a plain factor of one half"
    BIAS_WEIGHS = "the selection bias in the experts' weights"
    BIAS_IGNORED = "experts chosen without the selection bias"
    NOT_RENORMALISED = "experts weighted with raw scores"
    SOFTMAX_ROUTER = "softmax for sigmoid"
    UNSCALED_ROUTES = "routed_scaling_factor left out"
    NORM_BEFORE_SUM = "each expert's output normalised, then summed"
    PARTIAL_SUMS_NORMALISED = "two ranks normalise their partial sums before they add them"
    NO_LATENT_NORM = "no norm behind the experts' sum"
    SHARED_INSIDE_NORM = "shared experts scaled like routed ones"
    GATE_AND_UP_SWAPPED = "w1 taken for w3"
    BETAS_SWAPPED = "SiTU's two bounds exchanged"
    UP_UNBOUNDED = "SiTU without its linear bound"
    SWIGLU = "SiLU for SiTU"
    BLOCKS_OF_SUBLAYERS = "attn_res_block_size counts attention and MLP apart"
    BANK_BEFORE_MIX = "the bank written before the layer's input is mixed"
    PREFIX_NOT_RESTARTED = "the running sum goes on over a block's end"
    VALUES_NORMALISED = "residual sources mixed normalised"
    KEYS_UNNORMALISED = "residual scores of raw sources"
    RESIDUAL_SCORES_SCALED = "residual scores divided by the root of the width"
    PLAIN_RESIDUAL = "an ordinary residual stream"
    L2_EPSILON_LARGE = "q and k normalised with rms_norm_eps"
    KEYS_NOT_NORMALISED = "k as it comes out of the convolution"
    SOFTPLUS_GATE = "Kimi-Linear's unbounded gate"
    BIAS_BEHIND_RATE = "dt_bias added behind the factor exp(A_log)"
    RATE_NOT_EXPONENTIATED = "A_log used as the rate"
    DECAY_BEHIND_WRITE = "the state decays after the token is written"
    READ_BEFORE_WRITE = "a token does not read what it writes"
    QUERY_UNSCALED = "the query without its K^-1/2"
    BETA_RAW = "beta without its sigmoid"
    DECAY_ALONG_VALUES = "the decay on the value axis of the state"
    CONVOLUTION_REVERSED = "taps in the other order"
    CONVOLUTION_WITHOUT_SILU = "no SiLU behind the convolution"
    HEAD_NORM_OVER_ALL_HEADS = "KDA's output normalised over all heads at once"
    HEAD_NORM_INNER_EPSILON = "1e-6 in KDA's output norm"
    OUTPUT_GATE_SILU = "KDA's output gate a SiLU"
    EXPERT_IN_DENSE_LAYER_S_PLACE = "no layer is dense: the first layer's MLP as an expert of weight one half"


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def _situ(gate: torch.Tensor, up: torch.Tensor, config: K3Config, trap: Trap | None) -> torch.Tensor:
    beta, linear = config.activation_situ_beta, config.activation_situ_linear_beta
    if trap is Trap.BETAS_SWAPPED:
        beta, linear = linear, beta
    if trap is Trap.SWIGLU:
        return gate * torch.sigmoid(gate) * up
    bounded = up if trap is Trap.UP_UNBOUNDED else linear * torch.tanh(up / linear)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded


class _Layer:
    """One layer's tensors by their last names, and its functions of a whole sequence x [T, D]."""

    def __init__(self, weights: Mapping[str, torch.Tensor], index: int, config: K3Config, trap: Trap | None) -> None:
        self.w, self.at, self.c, self.trap = weights, f"model.layers.{index}.", config, trap

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.w[self.at + name]

    def kda(self, x: torch.Tensor) -> torch.Tensor:
        linear, trap = self.c.linear_attn_config, self.trap
        heads, dim, width = linear.num_heads, linear.head_dim, linear.short_conv_kernel_size

        def mixed(which: str) -> torch.Tensor:
            raw, taps = x @ self[f"self_attn.{which}_proj.weight"].T, self[f"self_attn.{which}_conv1d.weight"][:, 0]
            if trap is Trap.CONVOLUTION_REVERSED:
                taps = taps.flip(1)
            out = torch.zeros_like(raw)
            for t in range(x.shape[0]):
                for back in range(width):
                    if t - back >= 0:
                        out[t] += raw[t - back] * taps[:, width - 1 - back]
            return out if trap is Trap.CONVOLUTION_WITHOUT_SILU else out * torch.sigmoid(out)

        q, k, v = mixed("q"), mixed("k"), mixed("v")
        raw = x @ self["self_attn.f_a_proj.weight"].T @ self["self_attn.f_b_proj.weight"].T
        beta = x @ self["self_attn.b_proj.weight"].T
        gate = x @ self["self_attn.g_proj.weight"].T
        a_log, bias = self["self_attn.A_log"], self["self_attn.dt_bias"]
        tiny = self.c.rms_norm_eps * 100 if trap is Trap.L2_EPSILON_LARGE else 1e-6
        outs = torch.zeros(x.shape[0], heads * dim, dtype=x.dtype)
        for h in range(heads):
            at = slice(h * dim, (h + 1) * dim)
            rate = a_log[h] if trap is Trap.RATE_NOT_EXPONENTIATED else torch.exp(a_log[h])
            state = torch.zeros(dim, dim, dtype=x.dtype)
            for t in range(x.shape[0]):
                qt = q[t, at] / torch.sqrt((q[t, at] ** 2).sum() + tiny)
                kt = k[t, at] if trap is Trap.KEYS_NOT_NORMALISED else k[t, at] / torch.sqrt((k[t, at] ** 2).sum() + tiny)
                z = rate * raw[t, at] + bias[at] if trap is Trap.BIAS_BEHIND_RATE else rate * (raw[t, at] + bias[at])
                if trap is Trap.SOFTPLUS_GATE:
                    g = -rate * torch.log1p(torch.exp(raw[t, at] + bias[at]))
                else:
                    g = linear.gate_lower_bound * torch.sigmoid(z)
                decay = torch.exp(g)[None, :] if trap is Trap.DECAY_ALONG_VALUES else torch.exp(g)[:, None]
                strength = beta[t, h] if trap is Trap.BETA_RAW else torch.sigmoid(beta[t, h])
                scaled = qt if trap is Trap.QUERY_UNSCALED else qt / math.sqrt(dim)
                if trap is not Trap.DECAY_BEHIND_WRITE:
                    state = decay * state
                before = state
                state = state + torch.outer(kt, strength * (v[t, at] - state.T @ kt))
                outs[t, at] = (before if trap is Trap.READ_BEFORE_WRITE else state).T @ scaled
                if trap is Trap.DECAY_BEHIND_WRITE:
                    state = decay * state
        weight, eps = self["self_attn.o_norm.weight"], 1e-6 if trap is Trap.HEAD_NORM_INNER_EPSILON else self.c.rms_norm_eps
        result = torch.zeros_like(outs)
        for t in range(x.shape[0]):
            if trap is Trap.HEAD_NORM_OVER_ALL_HEADS:
                result[t] = _norm(outs[t], weight.repeat(heads), eps)
            else:
                for h in range(heads):
                    at = slice(h * dim, (h + 1) * dim)
                    result[t, at] = _norm(outs[t, at], weight, eps)
        opened = torch.sigmoid(gate) * (gate if trap is Trap.OUTPUT_GATE_SILU else 1.0)
        return (result * opened) @ self["self_attn.o_proj.weight"].T

    def mla(self, x: torch.Tensor) -> torch.Tensor:
        c, trap = self.c, self.trap
        nope, rope, value, rank = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank
        eps = c.rms_norm_eps if trap is Trap.OUTER_EPSILON_INSIDE_MLA else 1e-6
        low = torch.stack([_norm(row, self["self_attn.q_a_layernorm.weight"], eps) for row in x @ self["self_attn.q_a_proj.weight"].T])
        q = (low @ self["self_attn.q_b_proj.weight"].T).view(len(x), c.num_attention_heads, nope + rope)
        both = x @ self["self_attn.kv_a_proj_with_mqa.weight"].T
        latent, shared = both[:, :rank], both[:, rank:]
        if trap is Trap.SHARED_KEYS_NORMALISED:
            shared = torch.stack([_norm(row, torch.ones(rope, dtype=x.dtype), eps) for row in shared])
        latent = torch.stack([_norm(row, self["self_attn.kv_a_layernorm.weight"], eps) for row in latent])
        kv = (latent @ self["self_attn.kv_b_proj.weight"].T).view(len(x), c.num_attention_heads, nope + value)
        if trap is Trap.ROTATED_SHARED_KEYS:
            angle = torch.arange(len(x), dtype=x.dtype)[:, None] / 10000 ** (torch.arange(rope // 2, dtype=x.dtype) / (rope // 2))

            def turned(y: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
                a, b = y.chunk(2, -1)
                return torch.cat([a * by.cos() - b * by.sin(), a * by.sin() + b * by.cos()], -1)

            shared, q = turned(shared, angle), torch.cat([q[..., :nope], turned(q[..., nope:], angle[:, None])], -1)
        scale = nope**-0.5 if trap is Trap.SCALE_WITHOUT_SHARED else (nope + rope) ** -0.5
        outs = torch.zeros(len(x), c.num_attention_heads, value, dtype=x.dtype)
        for h in range(c.num_attention_heads):
            for t in range(len(x)):
                scores = torch.stack([q[t, h, :nope] @ kv[j, h, :nope] + q[t, h, nope:] @ shared[j] for j in range(t + 1)]) * scale
                outs[t, h] = torch.softmax(scores, 0) @ kv[: t + 1, h, nope:]
        flat = outs.reshape(len(x), -1)
        if trap is Trap.GATE_OF_MLA_BEHIND_PROJECTION:
            return 0.5 * flat @ self["self_attn.o_proj.weight"].T
        opened = torch.ones_like(flat) if trap is Trap.UNGATED_MLA else torch.sigmoid(x @ self["self_attn.g_proj.weight"].T)
        return (flat * opened) @ self["self_attn.o_proj.weight"].T

    def dense(self, x: torch.Tensor, below: str) -> torch.Tensor:
        gate, up, down = (self[f"{below}.{which}_proj.weight"] for which in ("gate", "up", "down"))
        trap = self.trap if self.trap in (Trap.BETAS_SWAPPED, Trap.UP_UNBOUNDED, Trap.SWIGLU) else None
        return _situ(x @ gate.T, x @ up.T, self.c, trap) @ down.T

    def moe(self, x: torch.Tensor, recorded: torch.Tensor | None) -> torch.Tensor:
        c, trap, below = self.c, self.trap, "block_sparse_moe."
        logits = x @ self[below + "gate.weight"].T
        scores = torch.softmax(logits, -1) if trap is Trap.SOFTMAX_ROUTER else torch.sigmoid(logits)
        bias = self[below + "gate.e_score_correction_bias"]
        z = x @ self[below + "routed_expert_down_proj.weight"].T
        w1, w2, w3 = (self[f"{below}experts.{which}"] for which in ("w1", "w2", "w3"))
        if trap is Trap.GATE_AND_UP_SWAPPED:
            w1, w3 = w3, w1
        bare = trap is Trap.NO_LATENT_NORM or not c.latent_moe_use_norm
        weight = torch.ones_like(z[0]) if bare else self[below + "routed_expert_norm.weight"]
        outs = []
        for t in range(len(x)):
            chosen = sorted(range(c.num_experts), key=lambda e: -float(scores[t, e] + (0 if trap is Trap.BIAS_IGNORED else bias[e])))[: c.num_experts_per_token]
            if recorded is not None:
                chosen = recorded[t].tolist()
            gates = torch.stack([scores[t, e] + (bias[e] if trap is Trap.BIAS_WEIGHS else 0) for e in chosen])
            if trap is not Trap.NOT_RENORMALISED:
                gates = gates / (gates.sum() + 1e-20)
            if trap is not Trap.UNSCALED_ROUTES:
                gates = gates * c.routed_scaling_factor
            each = [_situ(w1[e] @ z[t], w3[e] @ z[t], c, trap) @ w2[e].T for e in chosen]
            parts = [p * y for p, y in zip(gates, each, strict=True)]
            if trap is Trap.NORM_BEFORE_SUM:
                total = sum((p * _norm(y, weight, c.rms_norm_eps) for p, y in zip(gates, each, strict=True)), torch.zeros_like(z[t]))
            elif trap is Trap.PARTIAL_SUMS_NORMALISED:
                zero = torch.zeros_like(z[t])
                ranks = [sum((y for e, y in zip(chosen, parts, strict=True) if e % 2 == r), zero) for r in range(2)]
                total = sum((_norm(y, weight, c.rms_norm_eps) for y in ranks), zero)
            else:
                total = sum(parts, torch.zeros_like(z[t]))
                total = total if bare else _norm(total, weight, c.rms_norm_eps)
            outs.append(self[below + "routed_expert_up_proj.weight"] @ total)
        beside = self.dense(x, below + "shared_experts")
        return torch.stack(outs) + beside * (c.num_experts_per_token / c.num_experts if trap is Trap.SHARED_INSIDE_NORM else 1.0)


def _aggregate(sources: list[torch.Tensor], query: torch.Tensor, norm: torch.Tensor, eps: float, trap: Trap | None) -> torch.Tensor:
    """Sources [T, D] each, oldest first; one alone is itself."""
    if trap is Trap.PLAIN_RESIDUAL:
        return sum(sources[1:], sources[0])
    if len(sources) == 1:
        return sources[0]
    rows = []
    for t in range(len(sources[0])):
        keys = [s[t] if trap is Trap.KEYS_UNNORMALISED else s[t] / torch.sqrt((s[t] ** 2).mean() + eps) for s in sources]
        scores = torch.stack([(k * norm * query).sum() for k in keys])
        if trap is Trap.RESIDUAL_SCORES_SCALED:
            scores = scores / math.sqrt(len(query))
        p = torch.softmax(scores, 0)
        values = keys if trap is Trap.VALUES_NORMALISED else [s[t] for s in sources]
        rows.append(sum((pi * v for pi, v in zip(p, values, strict=True)), torch.zeros_like(query)))
    return torch.stack(rows)


def hidden_in_words(
    weights: Mapping[str, torch.Tensor], config: K3Config, tokens: torch.Tensor, trap: Trap | None = None, routes: torch.Tensor | None = None,
) -> torch.Tensor:
    """weights by our names, in one dtype; tokens [T] int64; routes [T, moe layers, k]: experts to use, None for the router's. Returns the hidden states [T, D]
    that the head reads."""
    eps = config.rms_norm_eps

    def mix(sources: list[torch.Tensor], name: str) -> torch.Tensor:
        return _aggregate(sources, weights[f"{name}.proj.weight"][0], weights[f"{name}.norm.weight"], eps, trap)

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.stack([_norm(row, weights[name], eps) for row in x])

    bank: list[torch.Tensor] = []
    prefix: torch.Tensor | None = weights["model.embed_tokens.weight"][tokens]
    for index in range(config.num_hidden_layers):
        layer, name = _Layer(weights, index, config, trap), f"model.layers.{index}"
        assert prefix is not None
        opens = (2 * index if trap is Trap.BLOCKS_OF_SUBLAYERS else index) % config.attn_res_block_size == 0
        early = opens and trap is Trap.BANK_BEFORE_MIX
        h = mix([*bank, prefix, *([prefix] if early else [])], f"{name}.self_attention_res")
        if opens:
            bank.append(prefix)
            prefix = prefix if trap is Trap.PREFIX_NOT_RESTARTED else None
        x = normed(h, f"{name}.input_layernorm.weight")
        a = layer.kda(x) if config.is_kda(index) else layer.mla(x)
        prefix = a if prefix is None else prefix + a
        x = normed(mix([*bank, prefix], f"{name}.mlp_res"), f"{name}.post_attention_layernorm.weight")
        if config.is_moe(index):
            m = layer.moe(x, None if routes is None else routes[:, index - config.first_k_dense_replace])
        else:
            m = layer.dense(x, "mlp") * (0.5 if trap is Trap.EXPERT_IN_DENSE_LAYER_S_PLACE else 1.0)
        prefix = prefix + m
    assert prefix is not None
    return normed(mix([*bank, prefix], "model.output_attn_res"), "model.norm.weight")
