"""What a drafter learns from: sequences that the target sampled, and what the target computed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from driftline.models.causal_lm import CausalLM
from driftline.models.drafter.taps import Taps

__all__ = ["Observed", "Text", "embedding", "frequent", "observed"]


@dataclass(frozen=True)
class Text:
    """tokens int32 [T], of which the first `prompt` were not sampled; at which temperature the others were, and the key of their draws (0: not known)."""

    tokens: np.ndarray
    prompt: int
    temperature: float = 1.0
    key: int = 0

    @property
    def sampled(self) -> int:
        return len(self.tokens) - self.prompt


@dataclass(frozen=True)
class Observed:
    """Of right-padded texts [S, T + 1]: features [S, T, F] of every position but the last; tokens int64 [S, T + 1]; hidden [S, T, D] (the final one); judged bool
    [S, T]: position p may be asked for token p + 2, which was sampled; temperatures [S]."""

    features: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor
    judged: torch.Tensor
    temperatures: torch.Tensor


def embedding(model: CausalLM) -> torch.nn.Module:
    """The target's own, which its drafters share."""
    found = model.get_submodule("model.embed_tokens")
    assert isinstance(found, torch.nn.Embedding)
    return found


@torch.no_grad()
def observed(model: CausalLM, taps: Taps, texts: Sequence[Text]) -> Observed:
    """One forward of the target over the texts, each of at least 2 tokens (ValueError)."""
    if not texts or min(len(text.tokens) for text in texts) < 2:
        raise ValueError("a text of fewer than 2 tokens, or none at all: there is nothing to draft in it")
    device = model.lm_head.weight.device
    width = max(len(text.tokens) for text in texts)
    padded = np.zeros((len(texts), width), dtype=np.int64)
    judged = np.zeros((len(texts), width - 1), dtype=bool)
    for i, text in enumerate(texts):
        padded[i, : len(text.tokens)] = text.tokens
        judged[i, max(0, text.prompt - 2) : len(text.tokens) - 2] = True
    tokens = torch.from_numpy(padded).to(device)
    lengths = torch.tensor([len(text.tokens) - 1 for text in texts], device=device)
    out = model(tokens[:, :-1], lengths=lengths, keep=False)
    temperatures = torch.tensor([text.temperature for text in texts], device=device)
    return Observed(taps.take(), tokens, out.hidden, torch.from_numpy(judged).to(device), temperatures)


def frequent(texts: Sequence[Text], vocabulary: int, count: int) -> torch.Tensor:
    """The `count` tokens that were sampled most, int64 ascending; of equally frequent ones the smaller."""
    seen = np.zeros(vocabulary, dtype=np.int64)
    for text in texts:
        np.add.at(seen, text.tokens[text.prompt :], 1)
    order = np.lexsort((np.arange(vocabulary), -seen))[:count]
    return torch.from_numpy(np.sort(order))
