"""Between a batch of the assembler and what is recorded of it: the same groups, members and order, both ways."""

from __future__ import annotations

from collections.abc import Sequence

from driftline.messages.recording import RecordedGroup
from driftline.services.learner.assembler import Batch, BatchGroup

__all__ = ["batch_of", "records_of"]


def records_of(run: str, batch: Batch) -> tuple[RecordedGroup, ...]:
    version = batch.head + 1
    return tuple(
        RecordedGroup(run=run, version=version, group=entry.group, members=entry.members, excluded=entry.excluded)
        for entry in batch.groups
    )


def batch_of(groups: Sequence[RecordedGroup]) -> Batch:
    """The batch whose step made `groups[0].version`."""
    return Batch(groups[0].version - 1, tuple(BatchGroup(entry.group, entry.members, entry.excluded) for entry in groups))
