"""Every subject, stream and durable consumer, and their limits, in one place.

Subjects are `dl.v1.<run>.<plane>...`; ids in tokens are ours, never user text. Work queues discard new messages when full, so a
full broker is back-pressure and never silent loss; telemetry discards old ones. One set of streams per run: deleting a run is
deleting its streams.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["ConsumerSpec", "Discard", "Retention", "StreamSpec", "Subjects", "Topology", "stream_name", "topology"]

MIB = 1024 * 1024


class Retention(StrEnum):
    WORK_QUEUE = "workqueue"
    LIMITS = "limits"


class Discard(StrEnum):
    NEW = "new"
    OLD = "old"


@dataclass(frozen=True)
class StreamSpec:
    name: str
    subjects: tuple[str, ...]
    retention: Retention
    discard: Discard
    max_bytes: int
    max_msgs: int = -1
    max_msgs_per_subject: int = -1
    max_age_s: float = 0.0
    duplicate_window_s: float = 3600.0


@dataclass(frozen=True)
class ConsumerSpec:
    """A durable pull consumer. A delivery not renewed within `ack_wait_s` is delivered again, at most `max_deliver` times."""

    stream: str
    durable: str
    subject: str
    ack_wait_s: float = 30.0
    max_deliver: int = 5
    max_ack_pending: int = 1024


@dataclass(frozen=True)
class Topology:
    run: str
    streams: tuple[StreamSpec, ...]
    consumers: tuple[ConsumerSpec, ...]

    def stream(self, plane: str) -> str:
        return stream_name(self.run, plane)


def stream_name(run: str, plane: str) -> str:
    return f"DL-{run}-{plane}"


@dataclass(frozen=True)
class Subjects:
    """Subjects and stream names of one run."""

    run: str
    root: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", f"dl.v1.{self.run}")

    @property
    def groups(self) -> str:
        return f"{self.root}.groups"

    def trajectory(self, group: str) -> str:
        return f"{self.root}.trajectories.{group}"

    def graded(self, group: str) -> str:
        return f"{self.root}.graded.{group}"

    def admitted(self, group: str) -> str:
        return f"{self.root}.ledger.admitted.{group}"

    def outcome(self, group: str) -> str:
        return f"{self.root}.ledger.outcome.{group}"

    def retried(self, group: str, attempt: int) -> str:
        return f"{self.root}.ledger.retried.{group}.{attempt}"

    def divergence(self, version: int, signal: str) -> str:
        """What the divergence watch said at the step that was to make a version."""
        return f"{self.root}.ledger.divergence.{version}.{signal}"

    @property
    def ledger(self) -> str:
        return f"{self.root}.ledger.>"

    @property
    def head(self) -> str:
        return f"{self.root}.policy.head"

    def manifest(self, version: int) -> str:
        return f"{self.root}.policy.manifest.{version}"

    def chunk(self, space: str, digest: str, index: int | str) -> str:
        """A chunk of a blob. `space` is where blobs of its kind live: `blob` (policies), `claim` (large messages), `record.<n>`."""
        return f"{self.root}.{space}.{digest}.{index}"

    @property
    def finished(self) -> str:
        return f"{self.root}.control.finished"

    def recorded(self, version: int) -> str:
        """What a version was made of; in the record stream, beside its batch."""
        return f"{self.root}.record.{version}.version.0"

    @property
    def learner(self) -> str:
        """Which process is the learner."""
        return f"{self.root}.control.learner"

    def relay(self, peer: str) -> str:
        """Where an engine says that it passes packs on; `*` for all of them."""
        return f"{self.root}.control.relay.{peer}"

    def metrics(self, service: str) -> str:
        return f"{self.root}.metrics.{service}"

    def evaluation(self, version: int) -> str:
        return f"{self.root}.eval.{version}"

    def dead(self, kind: str) -> str:
        return f"{self.root}.dead.{kind}"

    def stream(self, plane: str) -> str:
        """Stream name of a plane: GROUPS, TRAJECTORIES, GRADED, LEDGER, POLICY, BLOB, CLAIM, RECORD, CONTROL, METRICS, EVAL, DEAD."""
        return stream_name(self.run, plane)


def topology(
    run: str, *, queue_bytes: int = 256 * MIB, blob_bytes: int = 4096 * MIB, record_bytes: int = 1024 * MIB,
    ledger_bytes: int = 4096 * MIB,
) -> Topology:
    """The streams and consumers of `run`."""
    s = Subjects(run)
    work, limits, new, old = Retention.WORK_QUEUE, Retention.LIMITS, Discard.NEW, Discard.OLD

    def stream(plane: str, subjects: tuple[str, ...], retention: Retention, discard: Discard, max_bytes: int,
               **more: float) -> StreamSpec:
        return StreamSpec(s.stream(plane), subjects, retention, discard, max_bytes, **more)  # type: ignore[arg-type]

    r = s.root
    streams = (
        stream("GROUPS", (f"{r}.groups",), work, new, queue_bytes),
        stream("TRAJECTORIES", (f"{r}.trajectories.>",), work, new, queue_bytes),
        stream("GRADED", (f"{r}.graded.>",), work, new, queue_bytes),
        # Grows with every group and is never cut: half a kilobyte and the prompt, for each.
        stream("LEDGER", (f"{r}.ledger.>",), limits, new, ledger_bytes),
        # Of the subjects that are written again, the head and the pins, only the last is ever read: all of them would be one message
        # a version for ever, and history for every reader that starts.
        stream("POLICY", (f"{r}.policy.>",), limits, new, queue_bytes, max_msgs_per_subject=16),
        stream("BLOB", (f"{r}.blob.>",), limits, new, blob_bytes),
        stream("CLAIM", (f"{r}.claim.>",), limits, new, 4 * queue_bytes),
        # What was trained, for replay and for a learner's recovery: the oldest goes when it is full, the run never stops for it.
        stream("RECORD", (f"{r}.record.>",), limits, old, record_bytes),
        stream("CONTROL", (f"{r}.control.>",), limits, old, MIB, max_msgs_per_subject=8),
        stream("METRICS", (f"{r}.metrics.>",), limits, old, 64 * MIB),
        stream("EVAL", (f"{r}.eval.>",), limits, new, 16 * MIB),
        stream("DEAD", (f"{r}.dead.>",), limits, old, queue_bytes),
    )
    # Deliveries count processes that died with the work in hand, innocent or not: a large budget. Work that fails by itself is given
    # up by its worker much sooner (rollout.data_failures, the grader's verdicts).
    consumers = (
        ConsumerSpec(s.stream("GROUPS"), "rollout", f"{r}.groups", ack_wait_s=15, max_deliver=20, max_ack_pending=4096),
        ConsumerSpec(s.stream("TRAJECTORIES"), "grader", f"{r}.trajectories.>", ack_wait_s=15, max_deliver=20,
                     max_ack_pending=4096),
        # The learner holds graded members until their batch is committed: leases are renewed, the count bounds memory.
        ConsumerSpec(s.stream("GRADED"), "learner", f"{r}.graded.>", ack_wait_s=20, max_deliver=1000,
                     max_ack_pending=65536),
    )
    return Topology(run, streams, consumers)
