"""What an engine is asked for one by one, and what it answers: a request of token ids, its completion, and its tokens as they come."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from driftline.messages.types import Finish, Sampling

__all__ = ["Completion", "Progress", "Request"]


@dataclass(frozen=True)
class Request:
    """One sequence to go on with. `id` is the caller's and unlike any other in the engine. `key` (64 bits) and `first_draw` give the randomness: token i is
    drawn with the uniform of (key, first_draw + i). `adapter`: by name, empty for the base. What a `session` computed stays until memory is short, so a next
    turn that begins with all of its tokens computes only what is new. `stop_ids`: where it ends, None for the tokenizer's own. `tenant` shares the engine
    equally with the others; higher `priority` goes first."""

    id: str
    tokens: Sequence[int] | array[int] | np.ndarray
    sampling: Sampling
    key: int
    first_draw: int = 0
    adapter: str = ""
    session: str = ""
    priority: int = 0
    stop_ids: tuple[int, ...] | None = None
    tenant: str = ""


@dataclass(frozen=True)
class Completion:
    """What was sampled: tokens int32 [T], logprobs float32 [T] in nats at the sampling temperature, versions int32 [T] of the policies that made them; routes
    int16 [prompt_tokens + T, layers, k] where they are recorded, -1 for the last token, which was not fed.

    Of the prompt's `prompt_tokens`, `cached_tokens` were not computed for it. `cache_versions`: the policies that wrote what the last token attended to."""

    id: str
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    routes: np.ndarray | None
    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    cache_versions: tuple[int, ...]


class Progress(NamedTuple):
    """What a request has sampled since it was last asked for."""

    id: str
    tokens: list[int]
    logprobs: list[float]
