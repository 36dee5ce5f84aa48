"""What a service asks of a language model, whatever its architecture: hidden states from a cache, and log-probabilities from hidden states.

A model computes a row from that row's tokens and cache alone. Prefill, continuation and decode are one function: a prompt in pieces, or a forked cache, gives
what the whole prompt gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from driftline.kernels.logprob import selected_logprobs
from driftline.models.cache import Cache
from driftline.models.logprob import token_logprobs
from driftline.models.packed import Packed
from driftline.models.recompute import Recompute, recomputed

__all__ = ["HEAD_ROWS", "CausalLM", "ModelConfig", "ModelOutput"]

HEAD_ROWS = 1024
"""Rows whose logits are held at once where a gradient goes through an adapted head: 0.7 GB in fp32 at K3's vocabulary."""


class ModelConfig(Protocol):
    """What every model's configuration says."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...


@dataclass(frozen=True)
class ModelOutput:
    """hidden [B, T, D] after the final norm; cache after the real positions; routes [B, T, moe layers, k] int64 (moe layers is 0 without experts)."""

    hidden: torch.Tensor
    cache: Cache
    routes: torch.Tensor


class CausalLM(nn.Module, ABC):
    """`config` and `lm_head` (a Linear, whose weight may be the embedding's) are set by the model; `recompute` by whoever differentiates it."""

    lm_head: nn.Linear
    recompute: Recompute = Recompute.NONE

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def empty_cache(self, batch: int) -> Cache:
        """The cache of `batch` rows that have seen nothing."""

    @abstractmethod
    def forward(
        self, tokens: torch.Tensor, lengths: torch.Tensor | None = None, cache: Cache | None = None, replay: torch.Tensor | None = None,
        packed: Packed | None = None, keep: bool = True,
    ) -> ModelOutput:
        """tokens [B, T] int64, right-padded; lengths [B] real positions per row (None: all T); cache of the B rows (None: empty).

        replay [B, T, moe layers, k] int64: recorded expert ids to use instead of the router's choice. packed: tokens are [1, N], these sequences behind one
        another, the cache has a row for each of them (as the one returned), and lengths is None. keep: False where nothing follows: the cache that comes back is
        the one that was given (None: an empty one), and each layer's columns are free as soon as it is done. Raises ValueError where these do not go together.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., vocab] in at least fp32."""
        out: torch.Tensor = self.lm_head(hidden)
        return out.to(torch.promote_types(out.dtype, torch.float32))

    def logprobs(
        self, hidden: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor | float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`token_logprobs` of the logits of hidden [N, D]: (log-probability of each token, entropy), both [N] in nats, tokens int64 [N].

        Where the kernels run, the logits are not held; of a head with an adapter, those of `HEAD_ROWS` rows at a time are, and again in the backward pass. They are
        rounded to the weights' dtype either way, as `logits` writes them for the sampler.
        """
        if getattr(self.lm_head, "effective_weight", None) is not None:  # an adapter adds its own term, which a merged weight would round away
            return self._by_rows(hidden, tokens, temperature)
        return selected_logprobs(hidden, self.lm_head.weight, tokens, temperature, round_logits=True)

    def _by_rows(self, hidden: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
        def part(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            scale = temperature[rows] if isinstance(temperature, torch.Tensor) else temperature
            return token_logprobs(self.logits(hidden[rows]), tokens[rows], scale)

        if not torch.is_grad_enabled() or len(hidden) <= HEAD_ROWS:
            return part(slice(None))
        parts = [recomputed(partial(part, slice(start, start + HEAD_ROWS))) for start in range(0, len(hidden), HEAD_ROWS)]
        return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])
