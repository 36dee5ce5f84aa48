"""A dense decoder, `DenseForCausalLM`: Llama's order of norms and residuals, module for module under Hugging Face's names, so that its tensors are a checkpoint's.

One forward serves prefill, continuation from a cache, decode and training, padded or packed; a forked cache gives what a recomputed one gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from driftline.models.attention import RMSNorm
from driftline.models.cache import Cache, KeyValues, LayerState
from driftline.models.causal_lm import CausalLM, ModelOutput
from driftline.models.dense.attention import Attention, Places, Turns
from driftline.models.dense.config import DenseConfig
from driftline.models.dense.mlp import Mlp
from driftline.models.dense.rope import Tables
from driftline.models.held import Held, HeldKeyValues
from driftline.models.linear import Linear
from driftline.models.packed import Packed
from driftline.models.recompute import Recompute, recomputed

__all__ = ["DenseForCausalLM"]


class Layer(nn.Module):
    def __init__(self, config: DenseConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, held: KeyValues | HeldKeyValues, places: Places | Turns) -> tuple[torch.Tensor, KeyValues | HeldKeyValues]:
        mixed, after = self.self_attn(self.input_layernorm(x), held, places)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), after


class Decoder(nn.Module):
    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DenseForCausalLM(CausalLM):
    config: DenseConfig

    def __init__(self, config: DenseConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._tables = Tables(config.rope, config.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices normal, with K3's deviations; biases zero, norms one."""
        std = self.config.hidden_size**-0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02 if name.endswith("embed_tokens.weight") else min(std, parameter.shape[-1] ** -0.5))
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def decoder_layers(self) -> list[Layer]:
        return [layer for layer in self.model.layers if isinstance(layer, Layer)]

    def empty_cache(self, batch: int) -> Cache:
        like = self.model.embed_tokens.weight
        layers = tuple(layer.self_attn.initial(batch, like) for layer in self.decoder_layers())
        return Cache(layers, torch.zeros(batch, 0, dtype=torch.bool, device=like.device), torch.zeros(batch, dtype=torch.int64, device=like.device))

    def forward(
        self, tokens: torch.Tensor, lengths: torch.Tensor | None = None, cache: Cache | None = None, replay: torch.Tensor | None = None,
        packed: Packed | None = None, keep: bool = True,
    ) -> ModelOutput:
        """`CausalLM.forward`. There are no routes here: `replay` is None, or has no layer in it. Raises ValueError for one that has."""
        if replay is not None and replay.shape[2]:
            raise ValueError(f"replay has routes of {replay.shape[2]} layers: a dense model has no experts, so leave replay out")
        if packed is not None:
            packed.checked(tokens, lengths, cache)
        batch, steps = tokens.shape
        cache = cache if cache is not None else self.empty_cache(batch if packed is None else packed.count)
        routes = tokens.new_zeros(batch, steps, 0, 1)
        x: torch.Tensor = self.model.embed_tokens(tokens)
        if packed is not None and not packed.tokens:
            return ModelOutput(x, cache, routes)
        if packed is None:
            places = Places.padded(cache, steps, lengths, self._tables, x.dtype)
        else:
            places = Places.of_pack(cache, packed, self._tables, x.dtype, keep=keep)
        states: list[LayerState] = []
        for layer, held in zip(self.decoder_layers(), cache.layers, strict=True):
            assert isinstance(held, KeyValues)
            run = partial(layer, x, held, places)
            x, state = recomputed(run) if self.recompute is Recompute.LAYERS else run()
            if keep:
                states.append(state)
        hidden: torch.Tensor = self.model.norm(x)
        grown: torch.Tensor | int = packed.lengths_s if packed is not None else steps if lengths is None else lengths
        return ModelOutput(hidden, Cache(tuple(states), places.valid, cache.lengths + grown) if keep else cache, routes)

    def reserve(self, positions: int) -> None:
        """Make the rotations of the first `positions`, so that no later forward makes the tables anew."""
        like = self.model.embed_tokens.weight
        self._tables.at(torch.zeros(1, dtype=torch.int64, device=like.device), positions, torch.promote_types(like.dtype, torch.float32))

    def over(self, tokens: torch.Tensor, held: Sequence[Held], positions: torch.Tensor, below: int) -> torch.Tensor:
        """Hidden states [B, T, D] of tokens [B, T] at int64 positions [B, T], all under `below`, over each layer's keys and values in a pool, which take theirs."""
        x: torch.Tensor = self.model.embed_tokens(tokens)
        turns = Turns(*self._tables.at(positions, below, torch.promote_types(x.dtype, torch.float32)))
        for layer, state in zip(self.decoder_layers(), held, strict=True):
            x, _ = layer(x, state, turns)
        hidden: torch.Tensor = self.model.norm(x)
        return hidden
