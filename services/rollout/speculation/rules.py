"""Which drafts stand. Whatever was drafted, what is sampled has the target's distribution: exactly, at every position, given all before it.

MATCH: every position of a window is drawn from the target with the draw that it would have had without drafts, and drafts stand while they are what was drawn.
The tokens are those of plain decoding. REJECTION (arXiv:2211.17192): a draft x stands with probability min(1, p(x) / q(x)); the first that does not is replaced by
a draw from max(p - q, 0). q is the distribution the draft was drawn from; None: q is certain of the draft, which is exact for any drafter (accept with p(x),
else draw from p without x). A drafter's bf16 logits, another temperature, or a top-k after the fact are not that distribution.

A draw depends on (key, position) and its purpose: acceptance and draft have streams of their own, so that none of the three tells anything about another.
All functions run on the device without reading it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from driftline.models.logprob import scaled_log_softmax

__all__ = ["Purpose", "Verdict", "agreeing", "matching", "rejecting", "stream", "streams"]


class Purpose(IntEnum):
    """What a draw is for; its value is mixed into the key. TOKEN is plain decoding's."""

    TOKEN = 0
    ACCEPTANCE = 0x2545F4914F6CDD1D
    DRAFT = 0x5851F42D4C957F2D


class Verdict(NamedTuple):
    """tokens int64 [B, T]: a row gains the first accepted + 1; logprobs fp32 [B, T] of them under the target at the sampling temperature; accepted int32 [B]:
    the drafts that stand, at most T - 1."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    accepted: torch.Tensor


def stream(keys: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """The keys (int64: the bits of uint64) of another purpose's draws."""
    return keys ^ int(purpose)


def streams(keys: np.ndarray, purpose: Purpose) -> np.ndarray:
    """`stream` of uint64 on the host."""
    other: np.ndarray = keys ^ np.uint64(int(purpose))
    return other


def agreeing(drafts: np.ndarray, counts: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """MATCH on the host: how many of each row's drafts (int64 [B, L], the first `counts` [B]) are the tokens chosen at their positions (int64 [B, >= L])."""
    length = drafts.shape[1]
    same = (drafts == chosen[:, :length]) & (np.arange(length) < counts[:, None])
    stands: np.ndarray = np.logical_and.accumulate(same, axis=1).sum(1).astype(np.int32)
    return stands


def matching(drafts: torch.Tensor, counts: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """`agreeing` on the device: int32 [B]."""
    length = drafts.shape[1]
    same = (drafts == chosen[:, :length]) & (torch.arange(length, device=drafts.device) < counts[:, None])
    return same.cumprod(1).sum(1, dtype=torch.int32)


def rejecting(
    logits: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, temperatures: torch.Tensor, acceptance: torch.Tensor, draws: torch.Tensor,
    probs: torch.Tensor | None = None,
) -> Verdict:
    """REJECTION of a window. logits [B, T, V]: of the positions behind tokens int64 [B, T] (token 0 was sampled before, then drafts, of which `counts` [B] are
    real); temperatures [B]; acceptance and draws fp64 [B, T] in [0, 1): both draws of each position; probs fp32 [B, T - 1, V]: of the drafts, or None.
    Where p and q are the same to the last bit and a draft falls all the same, the replacement is drawn from p."""
    rows, steps, vocabulary = logits.shape
    logp = scaled_log_softmax(logits.flatten(0, 1), temperatures.repeat_interleave(steps)).view(rows, steps, vocabulary)
    drafts = tokens[:, 1:]
    target = logp[:, :-1].gather(2, drafts[..., None]).squeeze(2).double().exp()
    drawn = torch.ones_like(target) if probs is None else probs.gather(2, drafts[..., None]).squeeze(2).double()
    stands = (acceptance[:, :-1] * drawn < target) & (torch.arange(steps - 1, device=tokens.device) < counts[:, None])
    accepted = stands.cumprod(1).sum(1)
    p = logp.gather(1, accepted[:, None, None].expand(-1, 1, vocabulary)).squeeze(1).double().exp()
    fell = accepted < counts
    rest = (p - _proposed(drafts, probs, accepted, vocabulary)).clamp_min(0)
    weight = torch.where((fell & (rest.sum(1) > 0))[:, None], rest, p)
    running = weight.cumsum(1)
    point = draws.gather(1, accepted[:, None]) * running[:, -1:]
    replacement = torch.searchsorted(running, point, right=True).clamp_max(vocabulary - 1)
    taken = torch.cat([drafts, drafts[:, :1] if steps > 1 else tokens], 1).scatter(1, accepted[:, None], replacement)
    return Verdict(taken, logp.gather(2, taken[..., None]).squeeze(2).float(), accepted.to(torch.int32))


def _proposed(drafts: torch.Tensor, probs: torch.Tensor | None, at: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """q fp64 [B, V] of the draft behind position `at` [B]; whatever where there is none."""
    rows, length = drafts.shape
    if not length:
        return torch.zeros(rows, vocabulary, dtype=torch.float64, device=drafts.device)
    place = at.clamp_max(length - 1)[:, None]
    if probs is None:
        certain = torch.zeros(rows, vocabulary, dtype=torch.float64, device=drafts.device)
        return certain.scatter(1, drafts.gather(1, place), 1.0)
    return probs.gather(1, place[..., None].expand(-1, 1, vocabulary)).squeeze(1).double()
