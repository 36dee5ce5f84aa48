"""Messages and streams the tests of this folder share."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from driftline.messages import (
    ConsumerSpec,
    Discard,
    Finish,
    Group,
    Message,
    Retention,
    StreamSpec,
    Subjects,
    Task,
    Topology,
    Trajectory,
    register,
    stream_name,
)
from driftline.messages.types import Int32

TASK = Task(id="spell-1", source="test", family="spell", prompt="abc", answer="c b a", metadata={"k": [1, {"z": None}]})


@register
class Note(Message):
    """A message with an array of any size."""

    schema_name: ClassVar[str] = "test_note"

    text: str = ""
    array: Int32 = np.zeros(0, np.int32)


def note(run: str, text: str = "", size: int = 0, seed: int = 0) -> Note:
    """`size` int32 that do not compress."""
    array = np.random.default_rng(seed).integers(0, 2**31 - 1, size, dtype=np.int32)
    return Note(run=run, text=text, array=array)


def group(run: str, name: str = "g0") -> Group:
    return Group(run=run, group=name, index=0, task=TASK, members=2)


def trajectory(run: str, length: int = 6, routes: bool = False) -> Trajectory:
    mask = np.arange(length) >= 2
    return Trajectory(
        run=run,
        group="g0",
        member=1,
        members=2,
        index=0,
        task=TASK,
        prompt_tokens=2,
        tokens=np.arange(length, dtype=np.int32),
        action_mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        routes=np.arange(length * 4, dtype=np.int16).reshape(length, 2, 2) if routes else None,
        text="ok",
        finish=Finish.STOP,
        engine="e0",
        started_at=1.5,
        finished_at=2.5,
    )


def small_topology(run: str, *, ack_wait_s: float = 30.0, max_deliver: int = 5, work_bytes: int = 64 << 20) -> Topology:
    """A work queue with one consumer, a log, a head, blobs and dead letters, on subjects of `run`."""
    root = Subjects(run).root

    def stream(plane: str, retention: Retention, discard: Discard, max_bytes: int) -> StreamSpec:
        return StreamSpec(stream_name(run, plane), (f"{root}.{plane.lower()}.>",), retention, discard, max_bytes)

    work = stream("WORK", Retention.WORK_QUEUE, Discard.NEW, work_bytes)
    streams = (
        work,
        stream("LOG", Retention.LIMITS, Discard.NEW, 64 << 20),
        stream("BLOB", Retention.LIMITS, Discard.NEW, 256 << 20),
        stream("CLAIM", Retention.LIMITS, Discard.NEW, 256 << 20),
        stream("DEAD", Retention.LIMITS, Discard.OLD, 64 << 20),
        replace(stream("TELEMETRY", Retention.LIMITS, Discard.OLD, 1 << 20), max_msgs=3),
    )
    consumer = ConsumerSpec(work.name, "workers", f"{root}.work.>", ack_wait_s=ack_wait_s, max_deliver=max_deliver)
    return Topology(run, streams, (consumer,))
