"""What a drafter would have been worth on texts that were sampled without it: under MATCH the path is plain decoding's, so which drafts stand is there to be read.

Rows of a group advance together, one window a step, as in an engine; nothing is sampled and no target runs. For the trained drafter the target's tap rows of the texts
are handed in.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from driftline.models.drafter.text import Text
from driftline.services.rollout.speculation.drafts import Row, Seen
from driftline.services.rollout.speculation.rules import agreeing
from driftline.services.rollout.speculation.speculator import Speculator

__all__ = ["Rehearsed", "rehearse"]


@dataclass(frozen=True)
class Rehearsed:
    """One entry for every row-step: the tokens before it, and how many drafts it had and stood, int64 [N] each."""

    context: np.ndarray
    drafted: np.ndarray
    stood: np.ndarray

    def length(self, shortest: int = 0, longest: int | None = None) -> float:
        """Tokens that a row-step gained, of those with a context in [shortest, longest); nan where there is none."""
        chosen = self.context >= shortest
        if longest is not None:
            chosen &= self.context < longest
        return float(1 + self.stood[chosen].mean()) if chosen.any() else float("nan")


def rehearse(speculator: Speculator, texts: Sequence[Text], families: Sequence[Hashable], features: Sequence[torch.Tensor] | None = None) -> Rehearsed:
    """All texts together. `features`: tap rows [>= T - 1, F] of each text's positions; needed where the drafter has taps (ValueError)."""
    if speculator.taps and features is None:
        raise ValueError("this drafter reads hidden states: hand in the tap rows of every text")
    at = [text.prompt for text in texts]
    histories = [array("i", text.tokens[: text.prompt].tolist()) for text in texts]
    said: list[tuple[int, int, int]] = []
    fresh = [text.prompt for text in texts]  # positions that the target has just computed
    for i, text in enumerate(texts):  # the prompt's last position gives the first token, without drafts
        if text.sampled:
            histories[i].append(int(text.tokens[text.prompt]))
            at[i] += 1
    while running := [i for i, text in enumerate(texts) if at[i] < len(text.tokens)]:
        rows = [Row(i, histories[i], len(texts[i].tokens) - at[i], families[i], texts[i].key, at[i] - texts[i].prompt, texts[i].temperature) for i in running]
        if features is not None:
            counts = [fresh[i] for i in running]
            speculator.saw(rows, Seen(torch.cat([features[i][at[i] - 1 - fresh[i] : at[i] - 1] for i in running]), counts))
        drafts = speculator.begin_step(rows)
        stood = np.zeros(len(running), dtype=np.int32)
        if drafts is not None:
            stood = agreeing(drafts.tokens, drafts.counts, np.stack([_ahead(texts[i].tokens, at[i], drafts.tokens.shape[1]) for i in running]))
        speculator.finish_step(rows, drafts, None if drafts is None else stood, 0.0)
        for line, i in enumerate(running):
            said.append((len(histories[i]), 0 if drafts is None else int(drafts.counts[line]), int(stood[line])))
            fresh[i] = int(stood[line]) + 1
            histories[i].extend(texts[i].tokens[at[i] : at[i] + fresh[i]].tolist())
            at[i] += fresh[i]
            if at[i] >= len(texts[i].tokens):
                speculator.retire(i)
    context, drafted, gained = (np.array(column, dtype=np.int64) for column in zip(*said, strict=True)) if said else (np.zeros(0, np.int64),) * 3
    return Rehearsed(context, drafted, gained)


def _ahead(tokens: np.ndarray, at: int, width: int) -> np.ndarray:
    """`width` tokens from `at`; behind the end, a token that no draft is."""
    found = np.full(width, -1, dtype=np.int64)
    part = tokens[at : at + width]
    found[: len(part)] = part
    return found
