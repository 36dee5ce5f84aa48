"""Sequences in a pool whose memory was full of NaN, their pages and slots in no order, and the ways to bring them forward; for any model and device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from driftline.models.causal_lm import CausalLM
from driftline.models.packed import Packed
from driftline.models.paged import PAGE, PagedOutput, Pool, decode, prefill
from driftline.models.paged.states import KdaStates

Rows = list[torch.Tensor]


def soil(pool: Pool) -> None:
    """NaN wherever a row or a state may come to lie."""
    for layer in pool.layers:
        for tensor in layer.everything() if isinstance(layer, KdaStates) else layer.tensors():
            tensor[:-1] = torch.nan


class Pooled:
    """rows: token ids of each sequence, int64, which are fed in order; hidden[i]: what was computed of row i's tokens so far, piece by piece."""

    def __init__(self, model: CausalLM, rows: Rows, *, window: int = 1, seed: int = 0, spare: int = 2) -> None:
        self.model, self.rows, self.window = model, rows, window
        self.device = next(model.parameters()).device
        rng = torch.Generator().manual_seed(seed)
        each = max(-(-len(row) // PAGE) for row in rows)
        pages = 1 + torch.randperm((len(rows) + spare) * each, generator=rng)
        self.tables = pages[: len(rows) * each].view(len(rows), each).to(torch.int32).to(self.device)
        self.slots = torch.randperm(len(rows) + spare, generator=rng)[: len(rows)].to(torch.int32).to(self.device)
        self.pool = Pool.make(model, pages=1 + len(pages), slots=len(rows) + spare, window=window)
        soil(self.pool)
        self.pool.clear_states(self.slots.tolist())
        self.done = [0] * len(rows)
        self.accepted = [0] * len(rows)
        self.hidden: list[Rows] = [[] for _ in rows]
        self.routes: list[Rows] = [[] for _ in rows]

    def found(self) -> Rows:
        return [torch.cat(parts) for parts in self.hidden]

    def _int32(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def fill(self, ends: Sequence[int]) -> None:
        """Prefill every row that is not there yet up to its end."""
        which = [i for i, end in enumerate(ends) if end > self.done[i]]
        if not which:
            return
        packed = Packed.of([ends[i] - self.done[i] for i in which], self.device)
        tokens = torch.cat([self.rows[i][self.done[i] : ends[i]] for i in which])
        context, index = [self.done[i] for i in which], torch.tensor(which, device=self.device)
        out = prefill(self.model, self.pool, tokens, packed, self.slots[index], self.tables[index], self._int32(context), context)
        for i, hidden, routes in zip(which, out.hidden.split(packed.lengths), out.routes.split(packed.lengths), strict=True):
            self._keep(i, hidden, routes)

    def step(self, which: Sequence[int] | None = None, *, padding: int = 1) -> PagedOutput:
        """Decode the next token of some rows, with rows of padding behind them."""
        which = range(len(self.rows)) if which is None else which
        tokens = torch.stack([self.rows[i][self.done[i] : self.done[i] + 1] for i in which])
        out = self.decode(which, tokens, padding=padding)
        for place, i in enumerate(which):
            self._keep(i, out.hidden[place], out.routes[place])
        return out

    def score(self, stand: Sequence[int], *, padding: int = 1, wrong: int = 7) -> None:
        """A window of each row's next tokens, of which the first stand[i] are its own and count; the others are drafts that are not taken."""
        tokens = []
        for i, row in enumerate(self.rows):
            true = row[self.done[i] : self.done[i] + stand[i]]
            drafts = torch.full((self.window - len(true),), wrong, dtype=torch.int64, device=self.device)
            tokens.append(torch.cat([true, drafts]))
        out = self.decode(range(len(self.rows)), torch.stack(tokens), accepted=self.accepted, padding=padding)
        for i, count in enumerate(stand):
            self._keep(i, out.hidden[i, :count], out.routes[i, :count])
        self.accepted = list(stand)

    def fold(self) -> None:
        self.pool.fold(self.slots, self._int32(self.accepted))
        self.accepted = [0] * len(self.rows)

    def decode(self, which: Sequence[int], tokens: torch.Tensor, *, accepted: Sequence[int] | None = None, padding: int = 0) -> PagedOutput:
        index = torch.tensor(list(which), device=self.device)
        rows = torch.nn.functional.pad
        given = None if accepted is None else self._int32([*(accepted[i] for i in which), *[0] * padding])
        return decode(self.model, self.pool, rows(tokens, (0, 0, 0, padding)), rows(self.slots[index], (0, padding), value=-1),
                      rows(self.tables[index], (0, 0, 0, padding)), self._int32([*(self.done[i] for i in which), *[0] * padding]), given)

    def _keep(self, i: int, hidden: torch.Tensor, routes: torch.Tensor) -> None:
        self.hidden[i].append(hidden)
        self.routes[i].append(routes)
        self.done[i] += len(hidden)


def whole(model: CausalLM, rows: Rows) -> tuple[Rows, Rows]:
    """(hidden, routes) of the rows in one packed forward without a pool, as a learner computes them."""
    lengths = [len(row) for row in rows]
    with torch.no_grad():
        out = model(torch.cat(rows)[None], packed=Packed.of(lengths, rows[0].device), keep=False)
    return list(out.hidden[0].split(lengths)), list(out.routes[0].split(lengths))


def prompts(rows: Rows, tail: int) -> list[int]:
    """Where each row's prompt ends when `tail` tokens are decoded."""
    return [len(row) - tail for row in rows]


def decoded(model: CausalLM, rows: Rows, *, tail: int = 9) -> Pooled:
    """Prompts in three pieces, one of which ends inside a page, then token by token."""
    run = Pooled(model, rows)
    ends = prompts(rows, tail)
    for share in (3, 2, 1):
        run.fill([-(-end // share) for end in ends])
    for _ in range(tail):
        run.step()
    return run


def drafted(model: CausalLM, rows: Rows, *, tail: int = 9, window: int = 4, folds: bool = False) -> Pooled:
    """Prompts whole, then windows of which between one and all tokens stand."""
    run = Pooled(model, rows, window=window, seed=3)
    run.fill(prompts(rows, tail))
    turn = 0
    while any(done < len(row) for done, row in zip(run.done, rows, strict=True)):
        run.score([min(1 + (i + turn) % window, len(row) - run.done[i]) for i, row in enumerate(rows)])
        if folds and turn % 2:
            run.fold()
        turn += 1
    return run
