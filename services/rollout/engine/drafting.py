"""Between an engine's rows and its speculator: what a row has, how many of a window's tokens it keeps, and what was computed of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from driftline.messages.types import Group
from driftline.services.rollout.engine.row import Row
from driftline.services.rollout.runner import Sampled
from driftline.services.rollout.speculation import Drafts, Seen, Speculator, agreeing
from driftline.services.rollout.speculation import Row as Drafted

__all__ = ["Drafting"]


class Drafting:
    """Keeps each row's history in one array, so that a step adds to it what is new."""

    def __init__(self, speculator: Speculator) -> None:
        self.speculator = speculator
        self._histories: dict[Row, array[int]] = {}

    @property
    def window(self) -> int:
        return self.speculator.window

    def begin(self, rows: Sequence[Row]) -> tuple[list[Drafted], Drafts | None]:
        """The rows as the speculator knows them, and its drafts: None for a plain step."""
        known = [self._drafted(row) for row in rows]
        return known, self.speculator.begin_step(known)

    def kept(self, rows: Sequence[Row], drafts: Drafts, sampled: Sampled) -> tuple[np.ndarray, np.ndarray]:
        """Of a window int32 [B] each: the drafts that stand, and how many of the tokens behind the window's places each row keeps, up to its end."""
        stood = sampled.accepted if sampled.accepted is not None else agreeing(drafts.tokens, drafts.counts, sampled.tokens)
        kept = np.asarray(stood, dtype=np.int32) + 1
        for i, row in enumerate(rows):
            if kept[i] > 1:
                tokens = sampled.tokens[i, : kept[i]].tolist()
                kept[i] = min(next((j + 1 for j, token in enumerate(tokens) if token in row.ends), len(tokens)), row.max_tokens - len(row.tokens))
        return np.asarray(stood), kept

    def saw(self, rows: Sequence[Row], sampled: Sampled, kept: Sequence[int]) -> None:
        """Show it what was computed of the first `kept` places of each row, whose tokens they have by now."""
        if self.speculator.taps and sampled.taps is not None and rows:
            self._show(rows, Seen(torch.cat([sampled.taps[i, :count] for i, count in enumerate(kept)]), list(kept)))

    def saw_prompts(self, rows: Sequence[Row], sampled: Sampled, spans: Sequence[tuple[int, int]]) -> None:
        """As `saw`, of a prefill: row i's last positions are `spans[i]` of what was computed."""
        if self.speculator.taps and sampled.taps is not None and rows:
            self._show(rows, Seen(torch.cat([sampled.taps[begin:end] for begin, end in spans]), [end - begin for begin, end in spans]))

    def _show(self, rows: Sequence[Row], seen: Seen) -> None:
        self.speculator.saw([self._drafted(row) for row in rows], seen)

    def retire(self, row: Row) -> None:
        if self._histories.pop(row, None) is not None:
            self.speculator.retire(_name(row))

    def clear(self) -> None:
        for row in list(self._histories):
            self.retire(row)

    def _drafted(self, row: Row) -> Drafted:
        history = self._histories.get(row)
        if history is None:
            history = self._histories[row] = row.prompt + row.tokens
        else:
            history.extend(row.tokens[len(history) - len(row.prompt) :])
        family = row.owner.group if isinstance(row.owner, Group) else None
        return Drafted(_name(row), history, row.max_tokens - len(row.tokens), family, row.key, row.first_draw + len(row.tokens), row.temperature)


def _name(row: Row) -> tuple[str, int]:
    return row.name, row.member
