"""The speculator: who drafts, by which rule drafts stand, and whether it pays, as an engine's steps see it.

    drafts = speculator.begin_step(rows)          # None: a plain step
    ... the runner scores [last token, drafts] of every row and says how many stand ...
    speculator.finish_step(rows, drafts, accepted, seconds)

It decides nothing about what is sampled, so an engine may drop it between any two steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from driftline.messages.errors import ConfigError
from driftline.models.drafter.text import Text
from driftline.services.rollout.speculation.drafts import Drafter, Drafts, Row, Seen
from driftline.services.rollout.speculation.pays import Pays
from driftline.services.rollout.speculation.refresh import Refreshed, Refresher
from driftline.services.rollout_config import SpeculationRule

__all__ = ["LONGEST_DRAFT", "Acceptance", "Speculator"]

LONGEST_DRAFT = 15
"""A window is the last token and its drafts, and holds 16 at most."""

MONITORED = 512
"""Row-steps with drafts over which the acceptance length is taken as the monitor of a refresh."""


@dataclass
class Acceptance:
    """Counts since `reset`. `reached[j]`, `stood[j]`: how often draft j was judged (all before it stood) and stood. `rows`: row-steps that had drafts, `without`:
    that had none."""

    reached: list[int] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)
    rows: int = 0
    without: int = 0

    @property
    def length(self) -> float:
        """Tokens a row-step gains: 1 and the drafts that stand, over all row-steps, those without drafts included; 1 before the first."""
        steps = self.rows + self.without
        return 1 + sum(self.stood) / steps if steps else 1.0

    @property
    def drafted_length(self) -> float:
        """As `length`, over the row-steps that had drafts."""
        return 1 + sum(self.stood) / self.rows if self.rows else 1.0

    def count(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """int [B] each: of one step's rows."""
        self.rows += int((drafted > 0).sum())
        self.without += int((drafted == 0).sum())
        for place in range(int(drafted.max(initial=0))):
            if place == len(self.reached):
                self.reached.append(0)
                self.stood.append(0)
            self.reached[place] += int(((drafted > place) & (accepted >= place)).sum())
            self.stood[place] += int((accepted > place).sum())

    def reset(self) -> None:
        self.reached, self.stood, self.rows, self.without = [], [], 0, 0


class Speculator:
    """`length`: drafts a row at most, 1 to LONGEST_DRAFT. `pays` None: always on. `refresher`: keeps a trained drafter on its policy, at the beginning of a step in
    which it is due; `refreshes` has what came of it. Raises ConfigError."""

    def __init__(
        self, drafter: Drafter, *, length: int = 3, rule: SpeculationRule = SpeculationRule.MATCH, pays: Pays | None = None, refresher: Refresher | None = None,
    ) -> None:
        if not 1 <= length <= LONGEST_DRAFT:
            raise ConfigError("drafts a row", field="rollout.draft_tokens", value=length, remedy=f"1 to {LONGEST_DRAFT}")
        self.drafter, self.length, self.rule, self.pays = drafter, length, rule, pays
        self.acceptance = Acceptance()
        self.refreshes: list[Refreshed] = []
        self._refresher = refresher
        self._monitor = Acceptance()
        self._rows: dict[Hashable, Row] = {}
        self._asked = False

    @property
    def window(self) -> int:
        """Tokens that a step scores of a row, at most: what the pool's windows must hold."""
        return self.length + 1

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states that must be shown to `saw`; none for most drafters."""
        return self.drafter.taps

    def begin_step(self, rows: Sequence[Row]) -> Drafts | None:
        """Drafts for these rows, `length` wide, or None for a plain step: nobody has a draft, or it does not pay. A row's counts are at most room - 1."""
        if self._refresher is not None:
            self._refreshed(self._refresher, rows)
        self._asked = False
        if not rows or (self.pays is not None and not self.pays.wants(len(rows))):
            return None
        limits = [max(0, min(self.length, row.room - 1)) for row in rows]
        if not any(limits):
            return None
        self._asked = True
        drafts = self.drafter.propose(rows, limits, probs=self.rule is SpeculationRule.REJECTION)
        if not drafts.counts.any():
            return None
        return _widened(drafts, self.length)

    def finish_step(self, rows: Sequence[Row], drafts: Drafts | None, accepted: np.ndarray | None, seconds: float) -> None:
        """What a step gave: accepted int [B] drafts that stood (of a plain step both None), in `seconds` of the caller's clock (0: not told)."""
        if not rows:
            return
        stood = np.zeros(len(rows), dtype=np.int32) if accepted is None else np.asarray(accepted)
        drafted = np.zeros(len(rows), dtype=np.int32) if drafts is None else drafts.counts
        if (stood > drafted).any():
            raise ValueError(f"accepted {stood.tolist()} of {drafted.tolist()} drafts: count drafts alone, without the token behind them")
        self.acceptance.count(drafted, stood)
        self._monitor.count(drafted, stood)
        if self.pays is not None:
            self.pays.stepped(len(rows), len(rows) + int(stood.sum()), seconds, drafted=self._asked)

    def saw(self, rows: Sequence[Row], seen: Seen) -> None:
        """Tap rows that the target computed of these rows; only where `taps` names any."""
        self.drafter.saw(rows, seen)

    def retire(self, row: Hashable) -> None:
        """The row is over, cancelled, or parked."""
        self.drafter.retire(row)
        last = self._rows.pop(row, None)
        if self._refresher is not None and last is not None:
            tokens = np.array(last.history, dtype=np.int32)
            self._refresher.add(Text(tokens, len(tokens) - last.position, last.temperature, last.key))

    def _refreshed(self, refresher: Refresher, rows: Sequence[Row]) -> None:
        """Remember the rows, and refresh where the monitor asks for it."""
        self._rows.update((row.id, row) for row in rows)
        if self._monitor.rows < MONITORED:
            return
        if refresher.due(self._monitor.drafted_length):
            self.refreshes.append(refresher.refresh())
        self._monitor.reset()


def _widened(drafts: Drafts, width: int) -> Drafts:
    """One width of window whatever was found, so that a runner needs two graphs a batch and not many."""
    short = width - drafts.tokens.shape[1]
    if not short:
        return drafts
    tokens = np.concatenate([drafts.tokens, np.repeat(drafts.tokens[:, -1:], short, axis=1)], axis=1)
    probs = drafts.probs
    if probs is not None:
        probs = probs.new_zeros(len(tokens), width, probs.shape[2]).index_copy(1, probs.new_tensor(range(width - short)).long(), probs)
    return Drafts(tokens, drafts.counts, probs)
