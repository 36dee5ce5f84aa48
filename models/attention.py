"""K3's two attention layers, each one function for prefill, continuation and decode: new tokens against a cache, a new cache out.

Both take right-padded rows with `lengths` real positions, or one row of packed sequences; padding neither changes a state nor is seen by a real token, and no
sequence of a pack sees another.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from driftline.kernels.fixed import sigmoid
from driftline.kernels.gated_norm import gated_norm
from driftline.kernels.kda import PADDING, kda
from driftline.kernels.rmsnorm import rmsnorm
from driftline.kernels.short_conv import short_conv
from driftline.models.cache import KdaState, MlaRows
from driftline.models.config import K3Config
from driftline.models.held import Decay, HeldKda, HeldLatents
from driftline.models.latent_attention import Columns, Heads, attend
from driftline.models.linear import Linear
from driftline.models.packed import Packed
from driftline.models.packed_layers import PackedColumns, attend_packed, convolve_packed

__all__ = ["KdaAttention", "MlaAttention", "RMSNorm"]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rmsnorm(x, self.weight, self.eps)


class ShortConv(nn.Module):
    """Depthwise convolution weights, [C, 1, W] as published."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class KdaAttention(nn.Module):
    """Kimi Delta Attention with short convolutions, bounded gate and full-rank output gate."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        linear = config.linear_attn_config
        self.heads, self.dim, self.width = linear.num_heads, linear.head_dim, linear.short_conv_kernel_size
        self.lower_bound = linear.gate_lower_bound
        inner, hidden = self.heads * self.dim, config.hidden_size
        self.q_proj, self.k_proj, self.v_proj = Linear(hidden, inner), Linear(hidden, inner), Linear(hidden, inner)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(inner, self.width) for _ in range(3))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.f_a_proj, self.f_b_proj = Linear(hidden, self.dim), Linear(self.dim, inner)
        self.dt_bias = nn.Parameter(torch.zeros(inner))
        self.b_proj = Linear(hidden, self.heads)
        self.full_rank_gate = linear.use_full_rank_gate
        if self.full_rank_gate:
            self.g_proj = Linear(hidden, inner)
        else:
            self.g_a_proj, self.g_b_proj = Linear(hidden, self.dim), Linear(self.dim, inner)
        self.o_norm = RMSNorm(self.dim, config.rms_norm_eps)
        self.o_proj = Linear(inner, hidden)

    def initial(self, batch: int, like: torch.Tensor) -> KdaState:
        tail = like.new_zeros(batch, self.width - 1, 3 * self.heads * self.dim)
        wide = torch.promote_types(like.dtype, torch.float32)
        return KdaState(tail, torch.zeros(batch, self.heads, self.dim, self.dim, dtype=wide, device=like.device))

    def reset_parameters(self) -> None:
        """Gate bias as FLA initialises it: dt log-uniform in [1e-3, 1e-1], stored as softplus^-1(dt) so early decays are slow."""
        nn.init.zeros_(self.A_log)
        with torch.no_grad():
            dt = torch.exp(torch.rand_like(self.dt_bias) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
            for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d):
                nn.init.uniform_(conv.weight, -0.5, 0.5)

    def forward(
        self, x: torch.Tensor, cache: KdaState | HeldKda, lengths: torch.Tensor | None = None, real: torch.Tensor | None = None, packed: Packed | None = None,
    ) -> tuple[torch.Tensor, KdaState | HeldKda]:
        """x [B, T, D]; real [B, T] bool or None when every position is real. Returns [B, T, D] and the state after the real positions.

        packed: x is [1, N, D] and the states are of its sequences. States in a pool know whose the tokens are: nothing but x is given with them.
        """
        batch, steps, _ = x.shape
        raw = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        weight = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)
        z, beta = self.f_b_proj(self.f_a_proj(x)).view(batch, steps, self.heads, self.dim), self.b_proj(x)
        after: KdaState | HeldKda = cache
        if isinstance(cache, KdaState):
            mixed, tail = short_conv(raw, weight, cache.tail, lengths) if packed is None else convolve_packed(raw, weight, cache.tail, packed)
            q, k, v = mixed.view(batch, steps, 3, self.heads, self.dim).unbind(2)
            if real is not None:
                z, beta = z.masked_fill(~real[..., None, None], PADDING), beta.masked_fill(~real[..., None], PADDING)
            bounds = None if packed is None else packed.bounds32
            o, state = kda(q, k, v, z, beta, self.A_log, self.dt_bias, lower_bound=self.lower_bound, initial_state=cache.state, cu_seqlens=bounds)
            after = KdaState(tail, state)
        else:
            o = cache.advanced(raw, weight, z, beta, self.decay)
        gate = (self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))).view_as(o)
        gated = gated_norm(o, self.o_norm.weight, gate, self.o_norm.eps)
        return self.o_proj(gated.reshape(batch, steps, self.heads * self.dim)), after

    @property
    def decay(self) -> Decay:
        """What the gate's decay is made of."""
        return Decay(self.A_log, self.dt_bias, self.lower_bound)


class MlaAttention(nn.Module):
    """Multi-head latent attention without positions: the shared key dimensions are cached and used, never rotated."""

    Q_KV_NORM_EPS = 1e-6  # the release's class default, not rms_norm_eps

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.heads, hidden = config.num_attention_heads, config.hidden_size
        self.nope, self.rope, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank = config.kv_lora_rank
        self.scale = (self.nope + self.rope) ** -0.5
        self.q_a_proj = Linear(hidden, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, self.Q_KV_NORM_EPS)
        self.q_b_proj = Linear(config.q_lora_rank, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = Linear(hidden, self.rank + self.rope)
        self.kv_a_layernorm = RMSNorm(self.rank, self.Q_KV_NORM_EPS)
        self.kv_b_proj = Linear(self.rank, self.heads * (self.nope + self.v_dim))
        self.gated = config.mla_use_output_gate
        if self.gated:
            self.g_proj = Linear(hidden, self.heads * self.v_dim)
        self.o_proj = Linear(self.heads * self.v_dim, hidden)

    def initial(self, batch: int, like: torch.Tensor) -> MlaRows:
        return MlaRows(like.new_zeros(batch, 0, self.rank + self.rope))

    def forward(
        self, x: torch.Tensor, cache: MlaRows | HeldLatents, columns: Columns | PackedColumns | None
    ) -> tuple[torch.Tensor, MlaRows | HeldLatents]:
        """x [B, T, D]; columns: of the cache's rows and of x's, which are there; of a pack, x is [1, N, D]. Returns [B, T, D] and the rows, the new ones behind
        the cached. Rows in a pool take the new ones in place and know whose they are: columns is None."""
        batch, steps, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, steps, self.heads, self.nope + self.rope)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
        new = torch.cat([self.kv_a_layernorm(latent), shared], dim=-1)
        # The absorbed form uses kv_b_proj's halves apart, and its adapter beside them.
        adapted = getattr(self.kv_b_proj, "latent_update", None)
        heads = Heads(self.kv_b_proj.weight.view(self.heads, -1, self.rank), self.kv_b_proj, self.nope, self.scale,
                      None if adapted is None else adapted(self.heads, self.nope))
        after: MlaRows | HeldLatents = cache
        if not isinstance(cache, MlaRows):
            o = cache.attended(q, new, heads)
        elif isinstance(columns, PackedColumns):
            o, rows = attend_packed(q[0], cache.rows, new[0], heads, columns)
            after = MlaRows(rows)
        else:
            assert columns is not None
            rows = torch.cat([cache.rows, new], dim=1)
            o = attend(q, rows, heads, columns)
            after = MlaRows(rows)
        o = o.reshape(batch, steps, self.heads * self.v_dim)
        if self.gated:
            o = o * sigmoid(self.g_proj(x))
        return self.o_proj(o), after
