"""When a step may be taken without making an open group stale: the rule behind `run.stale_policy = "wait"`.

Guarantees: a batch that `held_back_by` lets through adds no group to those that must end stale. Whenever it holds a batch back,
it names groups that are not complete and whose arrival (or end) lets the batch form: a learner that waits for them, each of which has
a deadline, always goes on.

The argument. A group whose oldest token is of version o can be trained from a head of at most o + max_lag, its `last head`, and every
step trains `per_step` groups and moves the head by one. So the open groups are unit jobs with deadlines on a machine that does
`per_step` of them at each head. The heads a set of jobs can use are nested, hence (Hall) from head h exactly

    shortfall = max(0, max over k >= -1 of  #{last head <= h + k} - (k + 1) * per_step)

of them cannot be trained in time, in whatever order. A batch from head h leaves the other groups to start at h + 1; it may be taken if
the shortfall then is not above what it is now, with everything free to be chosen. The oldest complete groups are the best batch there
is (exchange argument), so if they are held back every batch would be, and if every open group is complete they never are: then they
are the `per_step` earliest deadlines, and taking those keeps each difference above or below zero.

With `(max_lag + 1) * per_step` groups in the loop the shortfall stays zero. A group admitted at head h has a last head of at least
h + max_lag, and the number of all open groups is no more than what the heads up to there can train; arrivals only move a last head
up, ends only take groups away, and steps are checked here. So no group of such a run ends stale. Where the bound was lowered between
two starts there is a shortfall to begin with: it is accepted once, the oldest are trained and nothing waits for what cannot be saved.

What is known of a group that is not complete is in `OpenGroup.last_head`. It is exact about when its members began unless an engine that
has lost its lease on a group goes on and is overtaken: such a group may end stale, counted, and still nothing beyond the bound is trained on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

__all__ = ["held_back_by", "shortfall"]


def shortfall(last_heads: Iterable[int], head: int, per_step: int) -> int:
    """How many of these groups cannot be trained in time from `head` on, at best.

    >>> shortfall([4, 4, 5], head=4, per_step=2), shortfall([4, 4, 4], head=4, per_step=2), shortfall([3], head=4, per_step=2)
    (0, 1, 1)
    """
    worst = 0
    for count, last in enumerate(sorted(last_heads), start=1):
        worst = max(worst, count - _trainable(last, head, per_step))
    return worst


def held_back_by(last_heads: Mapping[str, int], batch: Collection[str], head: int, per_step: int) -> tuple[str, ...]:
    """Which groups the batch has to wait for before it may be trained from `head`, in order of last head; () if it may be.

    `last_heads` are all open groups that may still be trained, the batch included.

    >>> held_back_by({"slow": 4, "a": 5, "b": 6}, {"a", "b"}, head=4, per_step=2)
    ('slow',)
    >>> held_back_by({"slow": 5, "a": 5, "b": 6}, {"a", "b"}, head=4, per_step=2)
    ()
    """
    accepted = shortfall(last_heads.values(), head, per_step)
    left = sorted((last, name) for name, last in last_heads.items() if name not in batch)
    for count, (last, _) in enumerate(left, start=1):
        if count - _trainable(last, head + 1, per_step) > accepted:
            return tuple(name for other, name in left if head <= other <= last)
    return ()


def _trainable(last: int, head: int, per_step: int) -> int:
    """How many groups the steps from `head` to `last` train."""
    return max(0, last - head + 1) * per_step
