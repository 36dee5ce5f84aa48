"""What a step computes, as arrays of the host: which tokens of which rows go in, and what was sampled behind them.

A batch that does not fit together is refused before anything runs. Arrays are the caller's; none is changed or kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["DecodeBatch", "PrefillBatch", "Sampled"]


@dataclass(frozen=True)
class DecodeBatch:
    """The newest tokens of B rows: tokens int64 [B, T], of each row the last one sampled and then its drafts.

    slots int32 [B]: the row's state. tables int32 [B, P]: its pages. lengths int32 [B]: tokens in the pool before these. accepted int32 [B] (None: plain decoding, T
    is 1): how many of the row's last window stand. keys uint64 [B] and positions int64 [B]: the draw of the token behind tokens[:, 0]; the next ones take the
    positions after it. temperatures float32 [B]; 0 asks for the likeliest token, whose log-probability is that at temperature 1. counts int32 [B]: real drafts of each
    row (None: T - 1). probs [B, T - 1, V] on the device: what the drafts were sampled from, where a rule asks for it. adapters: each row's slot of the bank, -1
    for none (None: no row has one). Raises ValueError.
    """

    tokens: np.ndarray
    slots: np.ndarray
    tables: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray
    positions: np.ndarray
    temperatures: np.ndarray
    accepted: np.ndarray | None = None
    counts: np.ndarray | None = None
    probs: torch.Tensor | None = None
    adapters: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or not self.tokens.size:
            raise ValueError(f"tokens is {self.tokens.shape}; give at least one row of at least one token, [B, T]")
        _checked(self, self.tokens.shape[0], (*_ROWS, ("accepted", np.int32), ("counts", np.int32)))
        if self.tokens.dtype != np.int64:
            raise ValueError(f"tokens is {self.tokens.dtype}; give int64")
        if self.accepted is None and self.window > 1:
            raise ValueError(f"tokens has {self.window} tokens a row and accepted is None; a window needs the count of what stands of the last one, 0 at first")
        if self.probs is not None and tuple(self.probs.shape[:2]) != (self.rows, self.window - 1):
            raise ValueError(f"probs is {tuple(self.probs.shape)}; give one distribution a draft, [{self.rows}, {self.window - 1}, V]")

    @property
    def rows(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def window(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def pages(self) -> int:
        return int(self.tables.shape[1])


@dataclass(frozen=True)
class PrefillBatch:
    """The next tokens of S sequences behind one another: tokens int64 [N], of which counts[s] are sequence s's.

    context int32 [S]: tokens of it that are in the pool. slots, tables and adapters as in a `DecodeBatch`. What is drawn, M tokens: keys uint64 [M], positions
    int64 [M], temperatures float32 [M]; behind int64 [M]: of which sequence's last token here (None: one behind each), for members of a group begin alike. sample:
    False where no sequence ends its prompt, and nothing is drawn. Raises ValueError.
    """

    tokens: np.ndarray
    counts: Sequence[int]
    slots: np.ndarray
    tables: np.ndarray
    context: np.ndarray
    keys: np.ndarray
    positions: np.ndarray
    temperatures: np.ndarray
    sample: bool = True
    adapters: Sequence[int] | None = None
    behind: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.dtype != np.int64:
            raise ValueError(f"tokens is {self.tokens.dtype} {self.tokens.shape}; give int64 [N]")
        if not len(self.counts) or min(self.counts) < 1 or sum(self.counts) != self.tokens.size:
            raise ValueError(f"counts is {list(self.counts)} for {self.tokens.size} tokens; give at least one token to each sequence, and all of them")
        _checked(self, len(self.counts), (("slots", np.int32), ("context", np.int32)))
        if self.behind is None:
            _checked(self, len(self.counts), _DRAWS)
            return
        if self.behind.ndim != 1 or self.behind.dtype != np.int64 or (self.behind.size and not 0 <= self.behind.min() <= self.behind.max() < self.rows):
            raise ValueError(f"behind is {self.behind.dtype} {self.behind.tolist()}; give int64 [M], a sequence 0..{self.rows - 1} for each token to draw")
        _checked(self, self.behind.size, _DRAWS, tables=False)

    @property
    def rows(self) -> int:
        return len(self.counts)


@dataclass(frozen=True)
class Sampled:
    """tokens int64 and logprobs float32 [B, T]: behind each of the batch's tokens, whether it stands or not; of a prefill [M, 1], empty [0, 1] where nothing was drawn.

    routes int16 [B, T, layers, k], of a prefill [N, layers, k]. accepted int32 [B]: how many drafts stand, where a rule said so on the device. On the device, and overwritten by
    the next step: hidden [B, T, D] ([S, 1, D]), what the tokens were sampled from; taps [B, T, ...] (of a prefill [N, ...]), what a drafter asked for.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    routes: np.ndarray
    hidden: torch.Tensor
    accepted: np.ndarray | None = None
    taps: torch.Tensor | None = None


_DRAWS: tuple[tuple[str, Any], ...] = (("keys", np.uint64), ("positions", np.int64), ("temperatures", np.float32))
_ROWS: tuple[tuple[str, Any], ...] = (("slots", np.int32), ("lengths", np.int32), *_DRAWS)


def _checked(batch: DecodeBatch | PrefillBatch, rows: int, fields: Sequence[tuple[str, Any]], *, tables: bool = True) -> None:
    for name, dtype in fields:
        array = getattr(batch, name)
        if array is not None and (array.shape != (rows,) or array.dtype != dtype):
            raise ValueError(f"{name} is {array.dtype} {array.shape}; give {np.dtype(dtype)} ({rows},), one for each")
    if not tables:
        return
    if batch.tables.ndim != 2 or batch.tables.shape[0] != rows or batch.tables.dtype != np.int32:
        raise ValueError(f"tables is {batch.tables.dtype} {batch.tables.shape}; give int32 [{rows}, P]")
    if batch.adapters is not None and len(batch.adapters) != rows:
        raise ValueError(f"adapters names {len(batch.adapters)} rows; give one slot for each of {rows}, -1 for none")
