"""One stream and one consumer in memory: pure state, told the time, so each rule of the broker can be read and tested alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from driftline.messages.bus import Depth, PubAck
from driftline.messages.dead_letters import Raw
from driftline.messages.errors import BrokerFull, HeadConflict
from driftline.messages.subjects import ConsumerSpec, Discard, Retention, StreamSpec

__all__ = ["MemoryConsumer", "MemoryStream", "matches"]

_OVERHEAD = 64  # what JetStream adds to a stored message, roughly: limits hold the same number of messages in both


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject is under a pattern with NATS wildcards: `*` one token, `>` one or more at the end."""
    want, have = pattern.split("."), subject.split(".")
    for i, token in enumerate(want):
        if token == ">":
            return len(have) > i
        if i >= len(have) or token not in ("*", have[i]):
            return False
    return len(want) == len(have)


class _Entry(NamedTuple):
    raw: Raw
    size: int
    at: float


@dataclass
class MemoryStream:
    spec: StreamSpec
    last_seq: int = 0
    _entries: dict[int, _Entry] = field(default_factory=dict)
    _subjects: dict[str, list[int]] = field(default_factory=dict)
    _ids: dict[str, tuple[int, float]] = field(default_factory=dict)
    _bytes: int = 0

    def store(
        self, subject: str, data: bytes, headers: dict[str, str], id: str, expect_last: int | None, now: float
    ) -> PubAck:
        self._forget_old(now)
        known = self._ids.get(id)
        if known is not None:
            return PubAck(known[0], True)
        held = self._subjects.get(subject, [])
        last = held[-1] if held else 0
        if expect_last is not None and expect_last != last:
            raise HeadConflict(f"wrong last sequence: {last}", field="subject", value=subject, remedy="read the last message again")
        headers = {**headers, "Nats-Msg-Id": id}
        size = len(data) + len(subject) + sum(len(k) + len(v) + 4 for k, v in headers.items()) + _OVERHEAD
        self._make_room(subject, size)
        self.last_seq += 1
        self._entries[self.last_seq] = _Entry(Raw(self.last_seq, subject, headers, data), size, now)
        self._subjects.setdefault(subject, []).append(self.last_seq)
        self._ids[id] = (self.last_seq, now)
        self._bytes += size
        return PubAck(self.last_seq, False)

    def get(self, seq: int) -> Raw | None:
        entry = self._entries.get(seq)
        return None if entry is None else entry.raw

    def next_on(self, pattern: str, start: int) -> Raw | None:
        for seq in self._from(start):
            raw = self._entries[seq].raw
            if matches(pattern, raw.subject):
                return raw
        return None

    def last_on(self, pattern: str) -> Raw | None:
        held = [seqs[-1] for subject, seqs in self._subjects.items() if seqs and matches(pattern, subject)]
        return self._entries[max(held)].raw if held else None

    def count_on(self, pattern: str, start: int) -> int:
        return sum(matches(pattern, self._entries[seq].raw.subject) for seq in self._from(start))

    def subjects(self, pattern: str) -> dict[str, int]:
        return {subject: len(held) for subject, held in self._subjects.items() if held and matches(pattern, subject)}

    def remove(self, seq: int) -> None:
        entry = self._entries.pop(seq, None)
        if entry is None:
            return
        self._bytes -= entry.size
        held = self._subjects[entry.raw.subject]
        held.remove(seq)
        if not held:
            del self._subjects[entry.raw.subject]

    def purge(self, pattern: str) -> None:
        for subject in [s for s in self._subjects if matches(pattern, s)]:
            for seq in list(self._subjects[subject]):
                self.remove(seq)

    def _from(self, start: int) -> list[int]:
        if len(self._entries) > self.last_seq - start + 1:  # few left: do not walk all that is stored
            return [seq for seq in range(max(start, 1), self.last_seq + 1) if seq in self._entries]
        return [seq for seq in self._entries if seq >= start]

    def _make_room(self, subject: str, size: int) -> None:
        spec = self.spec

        def full() -> bool:
            count = 0 <= spec.max_msgs < len(self._entries) + 1
            return count or 0 <= spec.max_bytes < self._bytes + size

        if full() and spec.discard is Discard.NEW:
            raise BrokerFull("maximum bytes or messages exceeded", field="stream", value=spec.name,
                             remedy="wait for consumers, or raise the stream's limit")  # fmt: skip
        while self._entries and full():
            self.remove(next(iter(self._entries)))
        held = self._subjects.get(subject, [])
        while 0 < spec.max_msgs_per_subject <= len(held):
            self.remove(held[0])

    def _forget_old(self, now: float) -> None:
        while self._ids:
            id, (_, at) = next(iter(self._ids.items()))
            if now - at <= self.spec.duplicate_window_s:
                break
            del self._ids[id]
        while self.spec.max_age_s and self._entries:
            seq, entry = next(iter(self._entries.items()))
            if now - entry.at <= self.spec.max_age_s:
                break
            self.remove(seq)


@dataclass
class _Lease:
    expires: float
    count: int


@dataclass
class MemoryConsumer:
    """A durable pull consumer: a cursor, and a lease for each delivered message that is not acknowledged."""

    spec: ConsumerSpec
    stream: MemoryStream
    _cursor: int = 0
    _leases: dict[int, _Lease] = field(default_factory=dict)

    def take(self, batch: int, now: float) -> list[tuple[Raw, int]]:
        """Up to `batch` messages with their delivery counts: expired leases first, then new ones."""
        taken: list[tuple[Raw, int]] = []
        for seq, lease in list(self._leases.items()):
            if len(taken) == batch:
                return taken
            if lease.expires > now:
                continue
            raw = self.stream.get(seq)
            if raw is None:  # purged while it was out
                del self._leases[seq]
                continue
            lease.expires, lease.count = now + self.spec.ack_wait_s, lease.count + 1
            taken.append((raw, lease.count))
        while len(taken) < batch and len(self._leases) < self.spec.max_ack_pending:
            raw = self.stream.next_on(self.spec.subject, self._cursor + 1)
            if raw is None:
                break
            self._cursor = raw.seq
            self._leases[raw.seq] = _Lease(now + self.spec.ack_wait_s, 1)
            taken.append((raw, 1))
        return taken

    def next_expiry(self, now: float, default: float) -> float:
        return min((max(lease.expires, now) for lease in self._leases.values()), default=default)

    def ack(self, seq: int) -> None:
        if self._leases.pop(seq, None) is not None and self.stream.spec.retention is Retention.WORK_QUEUE:
            self.stream.remove(seq)

    def expire_at(self, seq: int, at: float) -> None:
        if (lease := self._leases.get(seq)) is not None:
            lease.expires = at

    def depth(self) -> Depth:
        pending = self.stream.count_on(self.spec.subject, self._cursor + 1)
        return Depth(pending, len(self._leases), sum(lease.count > 1 for lease in self._leases.values()))
