"""Which numbers the operators promise: the fastest, or those in which a token's bits depend on that token's own context and on nothing else.

FAST chooses a form of an operator by shape: a chunk for many tokens and a recurrence for one, a wider product for more rows. DETERMINISTIC has one order of
operations for every number of tokens, rows and neighbours, so that prefill, decode and a learner's forward compute the same bits; what a gradient is made
of is free. Operators and models read the mode when they are called, never when they are built. Depends on nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum

__all__ = ["KERNEL_SET", "Numerics", "deterministic", "numerics", "set_numerics", "using"]

KERNEL_SET = 1
"""Raised when any operator's deterministic bits change: log-probabilities of two kernel sets are not to be compared as equal."""


class Numerics(StrEnum):
    """A run's `run.numerics`."""

    FAST = "fast"
    DETERMINISTIC = "deterministic"


class _Process:
    """The default of every thread and task of this process."""

    default = Numerics.FAST


_chosen: ContextVar[Numerics | None] = ContextVar("driftline_numerics", default=None)


def numerics() -> Numerics:
    """The mode that an operator called here and now follows: that of the innermost `using`, else the process's."""
    return _chosen.get() or _Process.default


def deterministic() -> bool:
    """Whether `numerics()` is DETERMINISTIC."""
    return numerics() is Numerics.DETERMINISTIC


def set_numerics(mode: Numerics) -> None:
    """Make `mode` the default of the whole process, its threads included. A service does so once, as it starts. Raises ValueError for another name."""
    _Process.default = Numerics(mode)


@contextmanager
def using(mode: Numerics) -> Iterator[None]:
    """`mode` for the calls within, of this thread and of the tasks begun in it: a thread or an autograd worker elsewhere keeps the process's default."""
    token = _chosen.set(Numerics(mode))
    try:
        yield
    finally:
        _chosen.reset(token)
