"""Keeping a drafter on a policy that moves: its recent texts are learned from under the weights there are, and the change is kept if it drafts them better.

The monitor is the acceptance length. While the text of one policy keeps the length it had after the last refresh there is nothing to do; when it falls by `loss`, or
`every` texts have come, a refresh is due. It runs between two steps, on a copy; what the engine drafts with changes at once and whole, and a
change that does not help the newest texts, which it has not learned from, is dropped. Speculation is exact with any drafter: nothing here can change a sample.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, replace

import torch

from driftline.messages.errors import ConfigError
from driftline.models.causal_lm import CausalLM
from driftline.models.drafter.model import Drafter
from driftline.models.drafter.taps import Taps
from driftline.models.drafter.text import Text, observed
from driftline.models.drafter.training import Schedule, losses, train

__all__ = ["Refreshed", "Refresher"]


@dataclass(frozen=True)
class Refreshed:
    """Cross-entropy in nats a draft on texts that were not learned from, before and after; `kept`: whether the drafter changed."""

    before: float
    after: float
    kept: bool


class Refresher:
    """Of `drafter`, which drafts for `model`. `recent` texts are remembered, the newest `judged` of them to judge by.

    `schedule`: of one refresh. Raises ConfigError where nothing would be left to learn from.
    """

    def __init__(
        self, drafter: Drafter, model: CausalLM, *, recent: int = 256, judged: int = 16, every: int = 2048, loss: float = 0.1, schedule: Schedule | None = None,
    ) -> None:
        if not 1 <= judged < recent:
            raise ConfigError(f"of {recent} texts, all are to judge by", field="judged", value=judged, remedy=f"1 to {recent - 1}")
        self._drafter, self._model = drafter, model
        self._texts: deque[Text] = deque(maxlen=recent)
        self._judged, self._every, self._loss = judged, every, loss
        self._schedule = replace(schedule or Schedule(steps=20, lr=3e-4, warmup=2), remember=False)
        self._since = 0
        self._best: float | None = None

    def add(self, text: Text) -> None:
        """A text that the policy finished. Those without a sampled token that could have been drafted are not kept."""
        if text.sampled >= 1 and len(text.tokens) >= 3:
            self._texts.append(text)
            self._since += 1

    def due(self, length: float) -> bool:
        """Whether to refresh, at an acceptance length of `length` tokens a step since the last one."""
        if len(self._texts) <= self._judged:
            return False
        self._best = length if self._best is None else max(self._best, length)
        return self._since >= self._every or (self._since >= len(self._texts) // 4 and length < self._best * (1 - self._loss))

    def refresh(self) -> Refreshed:
        """Learn, judge, and keep or drop. Leaves the texts that there are; ConfigError where there are too few."""
        texts = list(self._texts)
        if len(texts) <= self._judged:
            raise ConfigError("too few texts to learn from and to judge by", field="texts", value=len(texts), remedy=f"more than {self._judged}")
        fresh, old = texts[-self._judged :], texts[: -self._judged]
        with torch.inference_mode(False), torch.enable_grad(), Taps(self._model, self._drafter.config.taps) as taps:
            candidate = copy.deepcopy(self._drafter).requires_grad_(True).float()
            before = self._loss_of(candidate, taps, fresh)
            train(candidate, self._model, taps, old, replace(self._schedule, seed=self._schedule.seed + self._since))
            after = self._loss_of(candidate, taps, fresh)
        kept = after < before
        if kept:
            with torch.inference_mode():
                for own, new in zip(self._drafter.parameters(), candidate.parameters(), strict=True):
                    own.copy_(new)
            self._best = None  # what it does from now on is the measure; a drop that nothing helped is still one
        self._since = 0
        return Refreshed(before, after, kept)

    def _loss_of(self, drafter: Drafter, taps: Taps, texts: list[Text]) -> float:
        with torch.no_grad():
            parts = losses(drafter, self._model, observed(self._model, taps, texts), self._schedule.unrolled)
        return float(torch.stack(parts).mean())
