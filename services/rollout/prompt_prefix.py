"""What prompts have in common at their beginning: a template's first turn, solved examples. Computed once, its cache is forked to all of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from driftline.models.cache import Cache

__all__ = ["Prefix", "common_beginning"]


@dataclass(frozen=True)
class Prefix:
    """`cache` of one row after `tokens`, and their routes int16 [tokens, layers, k], where they are recorded. Of one version's weights."""

    tokens: array[int]
    cache: Cache
    routes: np.ndarray | None

    def begins(self, prompts: Sequence[array[int]]) -> bool:
        """Whether all of them begin so and go on."""
        return all(len(prompt) > len(self.tokens) and prompt[: len(self.tokens)] == self.tokens for prompt in prompts)


def common_beginning(prompts: Sequence[array[int]]) -> array[int]:
    """The longest beginning of all, at least one prompt."""
    first, last = min(prompts), max(prompts)  # in order, so that whatever lies between them begins as both do
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]
