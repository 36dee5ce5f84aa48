"""The rules of the stream and consumer in memory, and of subjects, one by one."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline.messages import (
    BrokerFull,
    ConfigError,
    ConsumerSpec,
    Discard,
    Retention,
    StreamSpec,
    Subjects,
    topology,
)
from driftline.messages.dead_letters import dead_headers, dead_subject, run_of
from driftline.messages.memory_stream import MemoryConsumer, MemoryStream, matches
from driftline.messages.nats_bus import _Window

PATTERNS = [
    ("a.b", "a.b", True),
    ("a.b", "a.c", False),
    ("a.*", "a.b", True),
    ("a.*", "a.b.c", False),
    ("a.*.c", "a.b.c", True),
    ("a.>", "a.b.c", True),
    ("a.>", "a", False),
    (">", "a", True),
    ("a.b", "a", False),
    ("a", "a.b", False),
]


@pytest.mark.parametrize(("pattern", "subject", "want"), PATTERNS)
def test_wildcards_match_as_in_nats(pattern: str, subject: str, want: bool) -> None:
    assert matches(pattern, subject) is want


def stream(**limits: float) -> MemoryStream:
    spec = {"max_bytes": 10_000, **limits}
    return MemoryStream(StreamSpec("s", (">",), Retention.WORK_QUEUE, Discard.NEW, **spec))  # type: ignore[arg-type]


def test_an_id_is_forgotten_after_the_duplicate_window() -> None:
    s = stream(duplicate_window_s=10)
    assert not s.store("a", b"", {}, "1", None, 0.0).duplicate
    assert s.store("a", b"", {}, "1", None, 10.0).duplicate
    assert not s.store("a", b"", {}, "1", None, 10.1).duplicate


def test_a_refused_message_leaves_no_trace() -> None:
    s = stream()
    with pytest.raises(BrokerFull):
        s.store("a", bytes(20_000), {}, "1", None, 0.0)
    assert s.last_seq == 0
    assert not s.store("a", b"", {}, "1", None, 0.0).duplicate


def test_messages_beyond_their_age_are_gone() -> None:
    s = stream(max_age_s=5)
    s.store("a", b"", {}, "1", None, 0.0)
    s.store("a", b"", {}, "2", None, 6.0)
    assert s.get(1) is None


def test_a_subject_keeps_its_newest() -> None:
    s = stream(max_msgs_per_subject=2)
    for i in range(4):
        s.store("a", b"", {}, str(i), None, 0.0)
    s.store("b", b"", {}, "b", None, 0.0)
    assert [s.get(i) is not None for i in range(1, 6)] == [False, False, True, True, True]


def test_unacknowledged_messages_are_bounded() -> None:
    s = stream()
    for i in range(5):
        s.store("a", b"", {}, str(i), None, 0.0)
    c = MemoryConsumer(ConsumerSpec("s", "d", ">", max_ack_pending=2), s)
    assert len(c.take(5, 0.0)) == 2
    assert c.take(5, 1.0) == []
    c.ack(1)
    assert [raw.seq for raw, _ in c.take(5, 1.0)] == [3]


@given(st.lists(st.tuples(st.sampled_from("pullackexpire"), st.integers(0, 9)), max_size=60))
def test_every_message_ends_acknowledged_once_whatever_the_order(steps: list[tuple[str, int]]) -> None:
    s = stream()
    for i in range(10):
        s.store("a", b"", {}, str(i), None, 0.0)
    c = MemoryConsumer(ConsumerSpec("s", "d", ">", ack_wait_s=5), s)
    now, out, acked = 0.0, set(), set()
    for step, n in steps:
        if step in "pull":
            for raw, _ in c.take(n + 1, now):
                assert raw.seq not in acked
                out.add(raw.seq)
        elif step in "ack" and out:
            seq = sorted(out)[n % len(out)]
            c.ack(seq)
            out.discard(seq)
            acked.add(seq)
        else:
            now += n
    for raw, _ in c.take(10, now + 100):
        acked.add(raw.seq)
    assert acked == set(range(1, 11))


async def test_the_window_admits_in_order_and_frees_what_a_cancelled_waiter_held() -> None:
    window = _Window(100, 10)
    order: list[str] = []

    async def enter(name: str, size: int, held: asyncio.Event) -> None:
        async with window.hold(size):
            order.append(name)
            await held.wait()

    gates = {name: asyncio.Event() for name in "abcd"}
    tasks = {
        name: asyncio.create_task(enter(name, size, gates[name]))
        for name, size in (("a", 90), ("b", 90), ("c", 5), ("d", 500))
    }
    await asyncio.sleep(0)
    assert order == ["a"]
    tasks["b"].cancel()
    gates["a"].set()
    await asyncio.wait({tasks["a"], tasks["b"]})
    await asyncio.sleep(0)
    assert order == ["a", "c"]  # the larger one behind it waits its turn; nothing is lost to the cancelled
    gates["c"].set()
    gates["d"].set()
    async with asyncio.timeout(5):
        await tasks["d"]
    assert order == ["a", "c", "d"]


def test_dead_letters_of_a_subject_go_to_its_run() -> None:
    assert dead_subject("dl.v1.r7.graded.g1") == ("DL-r7-DEAD", "dl.v1.r7.dead.graded")
    assert run_of("dl.v1.r7.groups") == ("r7", "groups")
    for bad in ("dl.v2.r.groups", "x", "dl.v1.r"):
        with pytest.raises(ConfigError):
            run_of(bad)


@given(st.text())
def test_a_reason_of_any_text_makes_one_safe_header(reason: str) -> None:
    value = dead_headers(reason=reason, subject="s", stream="t", seq=1, deliveries=1)["x-dead-letter-reason"]
    assert value
    assert value.isascii()
    assert not {"\r", "\n"} & set(value)
    assert len(value) <= 1000


def test_every_subject_of_a_run_has_exactly_one_stream() -> None:
    s, streams = Subjects("r"), topology("r").streams
    subjects = [s.groups, s.trajectory("g"), s.graded("g"), s.admitted("g"), s.outcome("g"), s.head, s.manifest(3)]
    subjects += [s.chunk("blob", "d", 0), s.chunk("claim", "d", 0), s.chunk("record.3", "d", 0), s.learner, s.retried("g", 1), s.finished, s.metrics("learner"), s.evaluation(1), s.dead("graded")]
    for subject in subjects:
        assert sum(any(matches(p, subject) for p in spec.subjects) for spec in streams) == 1


def test_importing_the_wire_imports_no_torch() -> None:
    code = "import sys, driftline.messages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
