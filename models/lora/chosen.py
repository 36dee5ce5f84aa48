"""Which adapter each row of a batch has, as the layers of one forward need it: by token, sorted by adapter, made once for every count of tokens that is asked for.

A layer sees tokens, not rows: `[B, T, in]`, the same flattened, one a row, or sequences behind one another. The number of its tokens says which of these it is, and a
number that fits none is refused rather than guessed at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from driftline.kernels.grouped_linear import groups_of
from driftline.kernels.moe.plan import Plan

__all__ = ["Chosen", "Tokens"]


@dataclass(frozen=True)
class Tokens:
    """index int64 [N] on the device, -1 for none; rows: the tokens sorted by adapter; spans: (adapter, first, last) of the sorted tokens that have one, on the host;
    slots: index on the host."""

    index: torch.Tensor
    rows: Plan
    spans: tuple[tuple[int, int, int], ...]
    slots: tuple[int, ...]
    _parted: dict[frozenset[int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, compare=False)

    def parted(self, some: frozenset[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens have one of these adapters, and which have another or none: int64, on the device."""
        if some not in self._parted:
            both = [[at for at, slot in enumerate(self.slots) if (slot in some) is wanted] for wanted in (True, False)]
            having, others = (torch.tensor(places, dtype=torch.int64, device=self.index.device) for places in both)
            self._parted[some] = having, others
        return self._parted[some]


@dataclass(frozen=True)
class Chosen:
    """index: each row's adapter, -1 for none; lengths: of packed sequences, None for rows of one length; slots: how many adapters there may be."""

    index: tuple[int, ...]
    lengths: tuple[int, ...] | None
    slots: int
    _made: dict[tuple[int, torch.device], Tokens] = field(default_factory=dict, compare=False)

    @property
    def present(self) -> tuple[int, ...]:
        """The adapters that some row has, ascending."""
        return tuple(sorted({slot for slot in self.index if slot >= 0}))

    def tokens(self, count: int, device: torch.device) -> Tokens:
        """The adapters of `count` tokens. Raises ValueError when they cannot be these rows'."""
        if (count, device) not in self._made:
            self._made[count, device] = tokens_of(self._spread(count), self.slots, device)
        return self._made[count, device]

    def _spread(self, count: int) -> list[int]:
        rows = len(self.index)
        if self.lengths is not None and count == sum(self.lengths):
            return [slot for slot, length in zip(self.index, self.lengths, strict=True) for _ in range(length)]
        if count % rows == 0 and (self.lengths is None or count // rows in (1, max(self.lengths))):  # the last of each sequence, or all padded to the longest
            return [slot for slot in self.index for _ in range(count // rows)]
        raise ValueError(f"a layer got {count} tokens, and the adapters were chosen for {rows} rows"
                         f"{'' if self.lengths is None else f' packed to {sum(self.lengths)} tokens'}: choose them for the rows of this very forward")


def tokens_of(index: Sequence[int], count: int, device: torch.device) -> Tokens:
    """Of tokens with these adapters, of a bank of `count` slots."""
    on_device = torch.tensor(index, dtype=torch.int64, device=device)
    return Tokens(on_device, groups_of(on_device[:, None], count), _spans(index), tuple(index))


def _spans(index: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    found, at = [], 0
    for slot, members in groupby(sorted(slot for slot in index if slot >= 0)):
        end = at + len(list(members))
        found.append((slot, at, end))
        at = end
    return tuple(found)
