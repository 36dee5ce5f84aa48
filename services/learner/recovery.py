"""From the newest head back to a trainer in exactly the state that made it.

The newest whole checkpoint at or below the head, then the recorded batches after it, stepped through again; every version on the
way must come out with the digest that was published. Nothing is skipped: a crash costs time, not steps. Where the bits cannot be
had (the run folder is gone and the record has lost its beginning, or the device computes otherwise) the published weights are
taken with the optimizer state there is, and `how` says so, in the log and in the next version's numerics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import structlog
import torch

from driftline.messages.bus import Bus
from driftline.messages.errors import IntegrityError, MalformedMessage
from driftline.messages.recording import RecordedVersion, load_batch, load_version
from driftline.policy_store.digests import digest_state
from driftline.policy_store.manifest import Manifest
from driftline.services.learner.checkpoints import CheckpointFiles, Label
from driftline.services.learner.records import batch_of
from driftline.services.learner.trainer import Trainer
from driftline.services.tensors import to_host

__all__ = ["How", "Recovered", "recover"]

log = structlog.get_logger("learner")


class How(StrEnum):
    RESTORED = "restored"  # from the head's own checkpoint
    RECOMPUTED = "recomputed"  # from an earlier one, and the steps after it
    INEXACT = "inexact"  # the moments are those of earlier or other bits than the weights
    FRESH = "fresh"  # the head's weights, an optimizer that remembers nothing


@dataclass(frozen=True)
class Recovered:
    how: How
    start: int
    steps: int
    cause: str = ""


async def recover(
    trainer: Trainer, head: Manifest, weights: Mapping[str, torch.Tensor], bus: Bus, files: CheckpointFiles
) -> Recovered:
    """`trainer` is as built from the starting checkpoint; `weights` are the head's. On return it is at the head."""
    start = await _start(trainer, head, bus, files)
    if start is None:
        await asyncio.to_thread(trainer.load_policy, weights)
        return Recovered(How.FRESH, head.version, 0, f"no checkpoint of an earlier version in {files.root}, and no record from the start")
    version = start
    try:
        while version < head.version:
            await _again(trainer, version + 1, head, bus)
            version += 1
    except (IntegrityError, MalformedMessage) as error:
        differed = await asyncio.to_thread(trainer.adopt, weights)
        return Recovered(How.INEXACT, start, version - start, f"{error}; {differed} elements taken from the published weights")
    return Recovered(How.RESTORED if start == head.version else How.RECOMPUTED, start, head.version - start)


async def _start(trainer: Trainer, head: Manifest, bus: Bus, files: CheckpointFiles) -> int | None:
    for label in files.found(head.version):
        if (cause := await _restored(trainer, label, head, bus, files)) is None:
            return label.version
        log.warning("checkpoint not used", version=label.version, cause=cause)
    # Nothing written yet, or the run folder is lost: the starting checkpoint is the state of version 0.
    first = await _recorded(0, head, bus)
    if first is not None and head.version > 0 and await _recorded(1, head, bus) is None:
        return None
    return 0 if first is not None and first.digest == await _digest(trainer) else None


async def _restored(trainer: Trainer, label: Label, head: Manifest, bus: Bus, files: CheckpointFiles) -> str | None:
    """Loads it; why not, otherwise."""
    recorded = await _recorded(label.version, head, bus)
    if recorded is None or recorded.digest != label.digest:
        return "it is of another policy than the version's" if recorded else "nothing is recorded of its version"
    try:
        tensors = await asyncio.to_thread(files.load, label)
        await asyncio.to_thread(trainer.restore, tensors)
    except IntegrityError as error:
        return str(error)
    found = await _digest(trainer)
    return None if found == label.digest else f"its policy has the digest {found}"


async def _again(trainer: Trainer, version: int, head: Manifest, bus: Bus) -> None:
    recorded = await _recorded(version, head, bus)
    if recorded is None or recorded.batch is None:
        raise IntegrityError("what it was trained on is not recorded", field="version", value=version, remedy="raise broker.record_bytes")
    batch = batch_of(await load_batch(bus, head.run, version, recorded.batch))
    await asyncio.to_thread(trainer.step, batch)
    found = await _digest(trainer)
    if found != recorded.digest:
        raise IntegrityError(f"computed again it has the digest {found}, published was {recorded.digest}", field="version", value=version,
                             remedy="use the same device, threads and torch as before")
    log.info("step computed again", version=version)


async def _recorded(version: int, head: Manifest, bus: Bus) -> RecordedVersion | None:
    return head.recorded if version == head.version else await load_version(bus, head.run, version)


async def _digest(trainer: Trainer) -> str:
    return await digest_state(await asyncio.to_thread(lambda: to_host(trainer.state())))
