"""Where a step's new tokens go in a pool, and which rows each of them sees: made once for all layers, on the device.

A step of decoding has B rows of T tokens, a prefill packed sequences. Position p of row b lies in page tables[b, p // PAGE], at its row p % PAGE; page 0 is nobody's,
and takes what is written for padding rows and behind a table's end. A row sees what lies in its pages up to its own position. Behind that a page may hold anything, and
a weight of zero does not silence a NaN: where a form reads all rows of a table, those come from a page of zeros that is never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from driftline.kernels.gqa import Layout
from driftline.models.packed import Packed

__all__ = ["PAGE", "Part", "Places", "View"]

PAGE = 64
"""Tokens of a page."""


@dataclass(frozen=True)
class View:
    """What B rows see whose last `steps` tokens look: table int32 [B, P]; last int [B]: how many tokens each row has; width: rows that are read of a table; blank: the
    page of zeros. A row of fewer tokens than `steps` has queries that see nothing in front of its own."""

    table: torch.Tensor
    last: torch.Tensor
    steps: int
    width: int
    blank: int

    @cached_property
    def named(self) -> torch.Tensor:
        """int64 [B, width]: the pool's row of each position of a table."""
        at = torch.arange(self.width, device=self.table.device)
        return self.table[:, at // PAGE].long() * PAGE + at % PAGE

    @cached_property
    def rows(self) -> torch.Tensor:
        """int64 [B, width]: `named`, and of positions behind a row's last token one of zeros."""
        behind = torch.arange(self.width, device=self.last.device) >= self.last[:, None]
        return self.named.masked_fill(behind, self.blank * PAGE)

    @cached_property
    def seen(self) -> torch.Tensor:
        """int64 [B, T]: how many rows a token sees, its own included, and no more than there are."""
        return (self.last[:, None].long() + torch.arange(1 - self.steps, 1, device=self.last.device)).clamp(0, self.width)

    @cached_property
    def hidden(self) -> torch.Tensor:
        """bool [B, T, width]: which rows a token does not see."""
        return torch.arange(self.width, device=self.last.device) >= self.seen[..., None]

    def grouped(self, groups: int) -> torch.Tensor:
        """int64 [B * groups * width]: `rows` of each head of keys, of rows that are `groups` heads behind one another."""
        if groups not in self._grouped:
            self._grouped[groups] = (self.rows[:, None] * groups + torch.arange(groups, device=self.last.device)[:, None]).flatten()
        return self._grouped[groups]

    @cached_property
    def _grouped(self) -> dict[int, torch.Tensor]:
        return {}


class Part(NamedTuple):
    """Sequences of a pack of about one length beside one another: their view; at int64 [B * steps]: the pack's token of each place, padded in front with any; real int64
    [tokens]: the places of tokens."""

    view: View
    at: torch.Tensor
    real: torch.Tensor


@dataclass(frozen=True)
class Places:
    """table int32 [B, P], wide enough for every position; held int32 [B]: tokens of each row that are there already; slots int32 [B] and accepted int32 [B] or None,
    as `decode` is given them; steps: T, of packed sequences the longest's; blank, width: as in `View`; idle: the slot behind a pool's last; packed, totals: of a prefill, its sequences and each one's
    tokens with the new ones."""

    table: torch.Tensor
    held: torch.Tensor
    slots: torch.Tensor
    steps: int
    blank: int
    width: int
    idle: int
    accepted: torch.Tensor | None = None
    packed: Packed | None = None
    totals: tuple[int, ...] = ()

    @classmethod
    def of_rows(
        cls, tables: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor, steps: int, accepted: torch.Tensor | None, blank: int, idle: int,
        longest: int | None,
    ) -> Places:
        """Of B rows with `steps` new tokens each, none of which comes to more than `longest`. Nothing is read on the host."""
        # A window may reach past the table: what it computes there is nobody's, and neither is the page that takes it.
        table = pad(tables, (0, 1)) if steps > 1 else tables
        room = table.shape[1] * PAGE
        return cls(table, lengths, slots, steps, blank, room if longest is None else min(room, longest), idle, accepted)

    @classmethod
    def of_pack(
        cls, tables: torch.Tensor, context: torch.Tensor, contexts: Sequence[int], slots: torch.Tensor, packed: Packed, blank: int, idle: int
    ) -> Places:
        """Of packed sequences, each behind its context."""
        totals = tuple(before + new for before, new in zip(contexts, packed.lengths, strict=True))
        return cls(tables[:, : -(-max(totals) // PAGE)].contiguous(), context, slots, packed.longest, blank, max(totals), idle, None, packed, totals)

    @cached_property
    def slot(self) -> torch.Tensor:
        """int64 [B]: the slots, and `idle`, which is nobody's, for padding rows."""
        return self.slots.long().masked_fill(self.slots < 0, self.idle)

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [B, T], or [1, N] of a pack."""
        if self.packed is not None:
            return (self.held[self.packed.sequence] + self.packed.offset)[None].long()
        return self.held[:, None].long() + torch.arange(self.steps, device=self.held.device)

    @cached_property
    def new(self) -> torch.Tensor:
        """int64 [tokens]: the row of the pool, its pages behind one another, that each new token is written to."""
        at = self.positions
        if self.packed is not None:
            return self.table[self.packed.sequence, at[0] // PAGE].long() * PAGE + at[0] % PAGE
        return (self.table.gather(1, at // PAGE).long() * PAGE + at % PAGE).flatten()

    @cached_property
    def last(self) -> torch.Tensor:
        """int32 or int64 [B]: tokens of each row with the new ones."""
        return self.held + (self.steps if self.packed is None else self.packed.lengths_s)

    @cached_property
    def view(self) -> View:
        """Of all rows, of a step of decoding."""
        return View(self.table, self.last, self.steps, self.width, self.blank)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Of a pack: its sequences beside one another, those of about one length together, so that less than half of the places are padding."""
        assert self.packed is not None
        sizes: dict[int, list[int]] = {}
        for number, length in enumerate(self.packed.lengths):
            sizes.setdefault((length - 1).bit_length(), []).append(number)
        return tuple(self._part(numbers) for numbers in sizes.values())

    def _part(self, numbers: Sequence[int]) -> Part:
        packed, device = self.packed, self.held.device
        assert packed is not None
        chosen = torch.tensor(numbers).to(device)
        lengths, steps, width = packed.lengths_s[chosen][:, None], max(packed.lengths[n] for n in numbers), max(self.totals[n] for n in numbers)
        offset = torch.arange(steps, device=device) - (steps - lengths)
        real = torch.cat([torch.arange((row + 1) * steps - packed.lengths[n], (row + 1) * steps) for row, n in enumerate(numbers)]).to(device)
        view = View(self.table[chosen, : -(-width // PAGE)].contiguous(), self.last[chosen], steps, width, self.blank)
        return Part(view, (packed.bounds[:-1][chosen][:, None] + offset.clamp(min=0)).flatten(), real)

    @cached_property
    def layout(self) -> Layout:
        """What the tokens see for `kernels.gqa`, of keys that are the pool's rows."""
        if self.packed is not None:
            return Layout.packed(self.packed.bounds32, self.key_bounds, self.packed.tokens, sum(self.totals), longest_q=self.packed.longest,
                                 longest_k=max(self.totals), rows=self.keys.to(torch.int32))
        batch, view = self.held.shape[0], self.view
        each = torch.arange(batch + 1, dtype=torch.int32, device=self.held.device)
        return Layout(each * self.steps, each * self.width, view.named.flatten(), self.last, view.seen.flatten(), self.steps, self.width)

    @cached_property
    def key_bounds(self) -> torch.Tensor:
        """int32 [S + 1], of a pack: where each sequence's rows begin among `keys`."""
        return pad(self.last.cumsum(0, dtype=torch.int32), (1, 0))

    @cached_property
    def keys(self) -> torch.Tensor:
        """int64 [K], of a pack: the pool's rows of every sequence, in their order, behind one another."""
        ends = self.key_bounds.long()
        at = torch.arange(sum(self.totals), device=self.held.device)
        owner = torch.searchsorted(ends[1:].contiguous(), at, right=True)
        position = at - ends[owner]
        return self.table[owner, position // PAGE].long() * PAGE + position % PAGE
