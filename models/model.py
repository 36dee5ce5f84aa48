"""The K3 hybrid decoder: KDA and MLA layers, LatentMoE, block attention residuals.

One forward serves prefill, continuation from a cache, decode and training: prefill followed by decode equals a full forward, and a forked cache
equals a recomputed one. Layer and residual order follow the release: the bank of block sums is written at every `attn_res_block_size`-th layer after
that layer's input was mixed and before its attention output is added.
"""

from __future__ import annotations

import torch
from torch import nn

from driftline.kernels.attention_residual import Aggregated, Bank, OutputNorm, aggregate
from driftline.models.attention import KdaAttention, MlaAttention, RMSNorm
from driftline.models.cache import Cache, KdaState, LayerState, MlaRows
from driftline.models.causal_lm import CausalLM, ModelOutput
from driftline.models.config import K3Config
from driftline.models.latent_attention import Columns
from driftline.models.linear import Linear
from driftline.models.mlp import DenseMlp, LatentMoe

__all__ = ["K3ForCausalLM"]


class Residual(nn.Module):
    """The pseudo-query (`proj` [1, D], zero at the start: a plain mean) and key norm of one aggregation."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, bank: Bank, prefix: torch.Tensor, delta: torch.Tensor | None, norm: RMSNorm) -> Aggregated:
        """The mix of the bank and prefix + delta, normalised by the sublayer's own `norm`; and that prefix."""
        return aggregate(bank, prefix, self.proj.weight[0], self.norm.weight, self.norm.eps, delta=delta, output_norm=OutputNorm(norm.weight, norm.eps))


class DecoderLayer(nn.Module):
    def __init__(self, config: K3Config, index: int) -> None:
        super().__init__()
        self.opens_block = index % config.attn_res_block_size == 0
        self.self_attn: KdaAttention | MlaAttention = KdaAttention(config) if config.is_kda(index) else MlaAttention(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attention_res = Residual(config)
        self.mlp_res = Residual(config)
        if config.is_moe(index):
            self.block_sparse_moe = LatentMoe(config)
        else:
            self.mlp = DenseMlp(config.hidden_size, config.intermediate_size, config)
        self.moe = config.is_moe(index)


class Decoder(nn.Module):
    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.output_attn_res = Residual(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class K3ForCausalLM(CausalLM):
    config: K3Config

    def __init__(self, config: K3Config) -> None:
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        std = self.config.hidden_size**-0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2 and "conv1d" not in name:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else min(std, parameter.shape[-1] ** -0.5))
            if name.endswith("res.proj.weight"):
                nn.init.zeros_(parameter)
        for module in self.modules():
            if isinstance(module, KdaAttention):
                module.reset_parameters()

    def empty_cache(self, batch: int) -> Cache:
        like = self.model.embed_tokens.weight
        layers = tuple(layer.self_attn.initial(batch, like) for layer in self._layers())
        return Cache(layers, torch.zeros(batch, 0, dtype=torch.bool, device=like.device),
                     torch.zeros(batch, dtype=torch.int64, device=like.device))

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]

    def forward(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor | None = None,
        cache: Cache | None = None,
        replay: torch.Tensor | None = None,
    ) -> ModelOutput:
        """tokens [B, T] int64, right-padded; lengths [B] real positions per row (None: all T); cache of the B rows (None: empty).

        replay [B, T, moe layers, k] int64: recorded expert ids to use instead of the router's choice.
        """
        batch, steps = tokens.shape
        cache = cache if cache is not None else self.empty_cache(batch)
        span = torch.arange(steps, device=tokens.device)
        real = None if lengths is None else span < lengths[:, None]
        now = torch.ones(batch, steps, dtype=torch.bool, device=tokens.device) if real is None else real
        columns = Columns(cache.valid, now)

        prefix: torch.Tensor = self.model.embed_tokens(tokens)
        delta: torch.Tensor | None = None  # the last sublayer's output, which the next aggregation adds to the prefix
        layers = self._layers()
        bank = Bank.empty(batch * steps, sum(layer.opens_block for layer in layers), prefix.shape[-1], dtype=prefix.dtype, device=prefix.device)
        states: list[LayerState] = []
        routes: list[torch.Tensor] = []
        for layer, held in zip(layers, cache.layers, strict=True):
            normed, prefix = layer.self_attention_res(bank, prefix, delta, layer.input_layernorm)
            if layer.opens_block:
                bank = bank.write(prefix)
            state: LayerState
            if isinstance(layer.self_attn, KdaAttention):
                assert isinstance(held, KdaState)
                out, state = layer.self_attn(normed, held, lengths, real)
            else:
                assert isinstance(held, MlaRows)
                out, state = layer.self_attn(normed, held, columns)
            states.append(state)
            prefix, delta = (out, None) if layer.opens_block else (prefix, out)
            normed, prefix = layer.mlp_res(bank, prefix, delta, layer.post_attention_layernorm)
            if layer.moe:
                ids = None if replay is None else replay[:, :, len(routes)]
                delta, used = layer.block_sparse_moe(normed, ids)
                routes.append(used)
            else:
                delta = layer.mlp(normed)
        hidden = self.model.output_attn_res(bank, prefix, delta, self.model.norm).mixed
        grown = steps if lengths is None else lengths
        after = Cache(tuple(states), torch.cat([cache.valid, now], dim=1), cache.lengths + grown)
        stacked = torch.stack(routes, dim=2) if routes else tokens.new_zeros(batch, steps, 0, 1)
        return ModelOutput(hidden, after, stacked)
