"""Router replay inside a model: a recorded choice of experts is used as it was recorded, weighed by the scores of now.

A row is replayed as a whole or not at all. Its ids keep their recorded order, in which the experts' outputs are added; its gates are the current scores at those ids,
renormalised, so gradients reach the router through them and never through the selection (Routing Replay, arXiv:2510.11370). A row that holds -1 has no
record: it chooses for itself, as without replay. What the router would have chosen is counted in the same pass when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from driftline.kernels.moe import route
from driftline.models.flips import Flips

__all__ = ["FlipCount", "RouteShape", "counting_flips", "is_complete", "routed"]


@dataclass(frozen=True)
class RouteShape:
    """What a model's routes look like: `layers` MoE layers, `top_k` ids of 0..experts-1 in each. Dense layers have no place in them."""

    layers: int
    top_k: int
    experts: int


@dataclass
class FlipCount:
    """What was counted so far, kept on the device: reading it is what waits."""

    _parts: list[torch.Tensor] = field(default_factory=list)

    def add(self, recorded: torch.Tensor, own: torch.Tensor, present: torch.Tensor) -> None:
        """Compare ids [N, k] with the model's own [N, k] in the rows that are `present` bool [N]."""
        orders = (recorded != own).any(-1) & present
        sets = (recorded.sort(-1).values != own.sort(-1).values).any(-1) & present
        self._parts.append(torch.stack([present.sum(), sets.sum(), orders.sum()]))

    def total(self) -> Flips:
        if not self._parts:
            return Flips()
        rows, sets, orders = torch.stack(self._parts).sum(0).tolist()
        return Flips(rows, sets, orders)


_counting: ContextVar[FlipCount | None] = ContextVar("driftline_flips", default=None)


@contextmanager
def counting_flips() -> Iterator[FlipCount]:
    """Count, in the replayed forwards of this thread within, how often a router would have chosen otherwise.

    It costs a second product with the router's weight in each layer. What a backward pass computes again, after the block or in a thread of its own, is not counted twice.
    """
    count = FlipCount()
    token = _counting.set(count)
    try:
        yield count
    finally:
        _counting.reset(token)


def is_complete(replay: torch.Tensor | None) -> bool | None:
    """Whether every row of a table of recorded ids [..., k] has a record; None of no table. Waits for the device."""
    return None if replay is None else bool((replay >= 0).all())


def routed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, scaling: float, replay: torch.Tensor | None = None, complete: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of x [N, D] and their gates: ids int64 [N, k] and gates [N, k] in at least fp32, of router weight [E, D] and selection bias [E].

    replay [N, k], integers: recorded ids, distinct within a row; a row with a negative one has none. complete: whether there is no such row, as `is_complete` of
    all layers' table says once for a forward; None: it is read on the host here. Raises ValueError where shapes do not fit.
    """
    if replay is None:
        return route(x, weight, bias, top_k, scaling)
    if replay.shape != (x.shape[0], top_k):
        raise ValueError(f"replay: {tuple(replay.shape)}; give one list of {top_k} recorded ids for each of the {x.shape[0]} rows, of -1 where there is no record")
    recorded = replay.long()
    count = _counting.get()
    if complete is None:
        complete = is_complete(recorded)
    if count is None and complete:
        return route(x, weight, bias, top_k, scaling, recorded)
    present = (recorded >= 0).all(-1)
    with torch.no_grad():
        own, _ = route(x.detach(), weight.detach(), bias, top_k, scaling)
    if count is not None:
        count.add(recorded, own, present)
    ids = recorded if complete else torch.where(present[:, None], recorded, own)
    return route(x, weight, bias, top_k, scaling, ids)
