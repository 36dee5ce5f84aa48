"""The K3 hybrid decoder: KDA and MLA layers, LatentMoE, block attention residuals.

One forward serves prefill, continuation from a cache, decode and training, padded and packed: prefill followed by decode equals a full forward, and a forked
cache equals a recomputed one. Under `recompute` a layer keeps its inputs and is run again for its gradient, with the routes and bank rows of the first run. Layer and residual order follow the release: the bank of block sums is written at every `attn_res_block_size`-th layer after
that layer's input was mixed and before its attention output is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from driftline.kernels.attention_residual import Aggregated, Bank, OutputNorm, aggregate
from driftline.models.attention import KdaAttention, MlaAttention, RMSNorm
from driftline.models.cache import Cache, LayerState
from driftline.models.causal_lm import CausalLM, ModelOutput
from driftline.models.config import K3Config
from driftline.models.held import Held
from driftline.models.latent_attention import Columns
from driftline.models.linear import Linear
from driftline.models.mlp import DenseMlp, LatentMoe
from driftline.models.packed import Packed
from driftline.models.packed_layers import PackedColumns
from driftline.models.recompute import Recompute, recomputed
from driftline.models.routes import is_complete

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


class Positions(NamedTuple):
    """Where the tokens of a forward stand: lengths and real of right-padded rows (None: all real), or a pack; columns: what latent attention sees. None of it
    where the layers' states are in a pool."""

    lengths: torch.Tensor | None
    real: torch.Tensor | None
    columns: Columns | PackedColumns | None
    packed: Packed | None


class Stream(NamedTuple):
    """What goes from layer to layer: the bank of block sums, the prefix [B, T, D] of the block so far, and the last sublayer's output, which the next
    aggregation adds to it (None: it is the prefix)."""

    bank: Bank
    prefix: torch.Tensor
    delta: torch.Tensor | None


@dataclass
class Decided:
    """What a layer's first run decided: its experts [B, T, k], and the bank with its row (outside of autograd). A recomputation reads it again. complete: whether
    experts that are given are so for every token (None: ask)."""

    routes: torch.Tensor | None = None
    complete: bool | None = None
    written: Bank | None = None


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

    def forward(self, stream: Stream, held: LayerState | Held, at: Positions, decided: Decided) -> tuple[Stream, LayerState | Held]:
        """One layer over the tokens. `decided.routes` are the experts to use where they are given, and those that were used afterwards."""
        bank, prefix, delta = stream
        normed, prefix = self.self_attention_res(bank, prefix, delta, self.input_layernorm)
        if self.opens_block:
            bank = _written(bank, prefix, decided)
        state: LayerState | Held
        if isinstance(self.self_attn, KdaAttention):
            out, state = self.self_attn(normed, held, at.lengths, at.real, at.packed)
        else:
            out, state = self.self_attn(normed, held, at.columns)
        prefix, delta = (out, None) if self.opens_block else (prefix, out)
        normed, prefix = self.mlp_res(bank, prefix, delta, self.post_attention_layernorm)
        if self.moe:
            delta, decided.routes = self.block_sparse_moe(normed, decided.routes, decided.complete)
            decided.complete = True
        else:
            delta = self.mlp(normed)
        return Stream(bank, prefix, delta), state


def _written(bank: Bank, prefix: torch.Tensor, decided: Decided) -> Bank:
    """The bank with `prefix` in it. A row is written once: recomputed, it is there. What is remembered has no graph, which would hold itself through it."""
    if decided.written is not None:
        return decided.written
    after = bank.write(prefix)
    decided.written = Bank(after.storage, after.rows, after.token.detach())
    return after



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
        layers = tuple(layer.self_attn.initial(batch, like) for layer in self.decoder_layers())
        return Cache(layers, torch.zeros(batch, 0, dtype=torch.bool, device=like.device),
                     torch.zeros(batch, dtype=torch.int64, device=like.device))

    def _nothing(self) -> torch.Tensor:
        like = self.model.embed_tokens.weight
        return like.new_zeros(1, 0, like.shape[1])

    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]

    def forward(
        self, tokens: torch.Tensor, lengths: torch.Tensor | None = None, cache: Cache | None = None, replay: torch.Tensor | None = None,
        packed: Packed | None = None, keep: bool = True,
    ) -> ModelOutput:
        batch, steps = tokens.shape
        if packed is not None:
            packed.checked(tokens, lengths, cache)
        cache = cache if cache is not None else self.empty_cache(batch if packed is None else packed.count)
        if packed is not None and not packed.tokens:
            return ModelOutput(self._nothing(), cache, tokens.new_zeros(1, 0, self.config.moe_layers, self.config.num_experts_per_token))
        at, now = _positions(tokens, lengths, cache, packed, keep=keep)
        hidden, routes, states = self._through(tokens, cache.layers, at, replay, keep=keep)
        grown: torch.Tensor | int = packed.lengths_s if packed is not None else steps if lengths is None else lengths
        after = Cache(tuple(states), torch.cat([cache.valid, now], dim=1), cache.lengths + grown) if keep else cache
        return ModelOutput(hidden, after, routes)

    def over(self, tokens: torch.Tensor, held: Sequence[Held]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [B, T, D] and routes [B, T, moe layers, k] of tokens [B, T] over a state of each layer that is held in a pool, which it changes."""
        hidden, routes, _ = self._through(tokens, held, Positions(None, None, None, None), None, keep=False)
        return hidden, routes

    def _through(
        self, tokens: torch.Tensor, layer_states: Sequence[LayerState | Held], at: Positions, replay: torch.Tensor | None, *, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, list[LayerState]]:
        batch, steps = tokens.shape
        embedded: torch.Tensor = self.model.embed_tokens(tokens)
        layers = self.decoder_layers()
        rows = sum(layer.opens_block for layer in layers)
        stream = Stream(Bank.empty(batch * steps, rows, embedded.shape[-1], dtype=embedded.dtype, device=embedded.device), embedded, None)
        states: list[LayerState] = []
        routes: list[torch.Tensor] = []
        complete = is_complete(replay)
        for layer, held in zip(layers, layer_states, strict=True):
            decided = Decided(replay[:, :, len(routes)] if replay is not None and layer.moe else None, complete)
            run = partial(layer, stream, held, at, decided)
            stream, state = recomputed(run) if self.recompute is Recompute.LAYERS else run()
            if keep:
                states.append(state)
            if decided.routes is not None:
                routes.append(decided.routes)
        hidden = self.model.output_attn_res(stream.bank, stream.prefix, stream.delta, self.model.norm).mixed
        return hidden, torch.stack(routes, dim=2) if routes else tokens.new_zeros(batch, steps, 0, 1), states


def _positions(tokens: torch.Tensor, lengths: torch.Tensor | None, cache: Cache, packed: Packed | None, *, keep: bool) -> tuple[Positions, torch.Tensor]:
    """And the new columns of the cache's mask [rows, T]."""
    if packed is not None:
        return Positions(None, None, PackedColumns(cache.valid, packed, keep), packed), packed.real
    span = torch.arange(tokens.shape[1], device=tokens.device)
    real = None if lengths is None else span < lengths[:, None]
    now = torch.ones(tokens.shape, dtype=torch.bool, device=tokens.device) if real is None else real
    return Positions(lengths, real, Columns(cache.valid, now), None), now
