"""What hostile bytes may cost: memory and work are bounded by a constant times the frame, or by the codec's declared limits."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import textwrap
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_samples import note, trajectory
from test_codec import Anything, array_ext

from driftline.messages import (
    MalformedMessage,
    MemoryBus,
    PayloadTooLarge,
    Subjects,
    codec,
    decode,
    encode,
    map_limits,
    topology,
)
from driftline.messages.codec import decoded_bytes
from driftline.messages.map_limits import MAX_DEPTH, MAX_VALUES, WALK_ABOVE, check_map

HEAD = struct.Struct("<2sBBIQ")


def frame(packed: bytes, arrays: bytes = b"") -> bytes:
    body = packed + (bytes(-len(packed) % 16) + arrays if arrays else b"")
    return HEAD.pack(b"DL", 1, 0, len(packed), len(body)) + body


def squeezed(packed: bytes, arrays: bytes = b"") -> bytes:
    body = packed + (bytes(-len(packed) % 16) + arrays if arrays else b"")
    return HEAD.pack(b"DL", 1, 1, len(packed), len(body)) + zstandard.ZstdCompressor(level=1).compress(body)


def envelope(value: bytes, schema: str = "test_anything") -> bytes:
    """The map of a message whose `value` is these msgpack bytes."""
    name = schema.encode()
    return b"\x83\xa1s" + bytes([0xA0 + len(name)]) + name + b"\xa1v\x01\xa1b\x82\xa3run\xa1r\xa5value" + value


def listed(item: bytes, count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + item * count


MANY = 30 << 20

TOO_MUCH: dict[str, bytes] = {
    "a list of small negative integers": squeezed(envelope(listed(b"\xe0", MANY))),
    "a list of empty lists": squeezed(envelope(listed(b"\x90", MANY))),
    "a list of empty maps": squeezed(envelope(listed(b"\x80", MANY))),
    "a list of two-letter texts": squeezed(envelope(listed(b"\xa2ab", MANY // 3))),
    "a list of arrays": squeezed(envelope(listed(b"\xd8\x01" + array_ext(6, ()).ljust(16, b"\0"), MANY // 18)), bytes(16)),
    "maps in a list": squeezed(envelope(listed(b"\x81\xa1a\xc0", MANY // 4))),
    "lists that announce millions, in one another": squeezed(envelope((b"\xdd" + struct.pack(">I", 30 << 20)) * 1000 + bytes(MANY))),
    "a map that announces 2^32": frame(envelope(b"\xdf\xff\xff\xff\xff" + bytes(8000))),
    "a text of 2^32": frame(envelope(b"\xdb\xff\xff\xff\xff" + bytes(8000))),
    "an array of the whole limit that is not there": frame(envelope(b"\xc7\x18\x01" + array_ext(1, (2, 2**26)))),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_small_frame_cannot_fill_the_memory(name: str) -> None:
    """Each decoded in a process of its own under a limit on its address space: beyond it, a MemoryError."""
    code = """
        import json, resource, sys
        from driftline.messages import MalformedMessage, decode
        import test_codec
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20),) * 2)
        try:
            decode(sys.stdin.buffer.read())
        except MalformedMessage as error:
            print(json.dumps(str(error)))
    """
    assert len(TOO_MUCH[name]) < 12_000
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], input=TOO_MUCH[name], capture_output=True, timeout=60,
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert json.loads(done.stdout)


def test_a_million_wrong_values_are_counted_not_listed() -> None:
    values = {str(i): "x" for i in range(100_000)}
    packed = msgpack.packb({"s": "metrics", "v": 1, "b": {"run": "r", "service": "a", "values": values}})
    with pytest.raises(MalformedMessage, match="100000 values are wrong"):
        decode(frame(packed))


@pytest.mark.parametrize("first", [b"\x81", b"\xde\x00\x02", b"\xdf\x00\x00\x00\x02"])
def test_a_key_that_is_there_twice_is_refused(first: bytes) -> None:
    twice = (b"\x82" if first == b"\x81" else first) + b"\xa1a\x01\xa1a\x02"
    with pytest.raises(MalformedMessage, match="twice"):
        decode(frame(envelope(twice)))


def test_a_field_that_is_there_twice_is_refused() -> None:
    packed = b"\x83\xa1s\xa8finished\xa1v\x01\xa1b\x84\xa3run\xa1r\xa6reason\xa1x\xa7version\x01\xa7version\x02"
    with pytest.raises(MalformedMessage, match="twice"):
        decode(frame(packed))


@pytest.mark.parametrize("value", [b"\x81\xc4\x01a\x01", b"\x81\x01\x01", b"\x81\xc0\x01"], ids=["bytes", "integer", "nil"])
def test_a_map_key_that_is_no_text_is_refused(value: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(frame(envelope(value)))


@pytest.mark.parametrize("ext", [b"\xd6\xff\x00\x00\x00\x01", b"\xd7\xff" + bytes(8), b"\xc7\x0c\xff" + bytes(12)])
def test_a_timestamp_is_no_extension_of_ours(ext: bytes) -> None:
    with pytest.raises(MalformedMessage, match="extension"):
        decode(frame(envelope(ext)))


def test_text_with_a_lone_surrogate_is_refused_both_ways() -> None:
    with pytest.raises(MalformedMessage):
        encode(Anything(run="r", value="\ud800"))
    with pytest.raises(MalformedMessage):
        decode(frame(envelope(b"\xa3\xed\xa0\x80")))


@pytest.mark.parametrize("count", [1, 16])
def test_bytes_behind_the_map_that_belong_to_nothing_change_nothing(count: int) -> None:
    packed = envelope(b"\x01")
    with pytest.raises(MalformedMessage):
        decode(HEAD.pack(b"DL", 1, 0, len(packed) + count, len(packed) + count) + packed + bytes(count))


def test_a_large_map_with_bytes_behind_its_value_is_refused() -> None:
    packed = envelope(listed(b"\x01", WALK_ABOVE)) + b"\x01"
    with pytest.raises(MalformedMessage, match="behind"):
        decode(frame(packed))


def test_what_is_not_a_number_is_refused_where_it_would_be_trained_on() -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        good = trajectory("r", 8)
        logprobs = good.logprobs.copy()
        logprobs[-1] = value
        hostile = good.model_construct(**{**dict(good), "logprobs": logprobs})
        with pytest.raises(MalformedMessage, match="non-finite"):
            decode(encode(hostile))


def test_a_cut_zstd_frame_that_wants_a_large_window_keeps_nothing() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=True, enable_ldm=True)
    random = np.random.default_rng(0).bytes(1 << 20)
    packed = zstandard.ZstdCompressor(compression_params=parameters).compress(random * 140)
    cut = HEAD.pack(b"DL", 1, 1, 100, 140 << 20) + packed[: len(packed) // 2]
    with pytest.raises(MalformedMessage, match=r"zstd|memory"):
        decode(cut)
    assert codec._zstd.decompressor.memory_size() < 20 << 20


def test_a_sender_is_told_what_no_receiver_would_take() -> None:
    with pytest.raises(PayloadTooLarge, match="too many values"):
        encode(Anything(run="r", value=[-1] * (MAX_VALUES + 1)))


def test_the_largest_that_is_allowed_arrives() -> None:
    sent = Anything(run="r", value=["x"] * (MAX_VALUES - 100))
    assert decode(encode(sent)).value == sent.value  # type: ignore[attr-defined]


def test_a_frame_says_how_much_work_it_is() -> None:
    bomb = encode(Anything(run="r", value=np.zeros(8 << 20, np.uint8)))
    assert len(bomb) < 10_000
    assert decoded_bytes(bomb) > 8 << 20
    assert decoded_bytes(b"DL") == 0


async def test_a_small_frame_that_is_large_inside_is_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """H11: a message handled inside the loop for seconds stops heartbeats and leases of everybody in the process."""
    import threading

    seen: list[str] = []
    real = codec.decode

    def watched(data: bytes) -> Any:
        seen.append(threading.current_thread().name)
        return real(data)

    monkeypatch.setattr("driftline.messages.frames.decode", watched)
    async with MemoryBus() as bus:
        await bus.declare(topology("r"))
        subject = Subjects("r").metrics("x")
        await bus.publish(subject, note("r", "small"), id="a")
        await bus.last(Subjects("r").stream("METRICS"), subject)
        large = Anything(run="r", value=np.zeros(8 << 20, np.uint8))
        await bus.publish(subject, large, id="b")
        await bus.last(Subjects("r").stream("METRICS"), subject)
    small, large_inside = seen
    assert small == "MainThread"
    assert large_inside != "MainThread"


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)


@given(VALUES)
@settings(max_examples=300, deadline=None)
def test_the_walk_agrees_with_msgpack_on_what_is_whole(value: object) -> None:
    packed = msgpack.packb(value)
    check_map(packed)
    for cut in {len(packed) // 2, len(packed) - 1} - {len(packed)}:
        with pytest.raises(MalformedMessage):
            check_map(packed[:cut])


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_what_the_walk_lets_pass_msgpack_reads_or_refuses_for_its_content(data: bytes) -> None:
    """The walk never reads beyond the data, and passes exactly the bytes that msgpack takes for one value."""
    try:
        msgpack.unpackb(data, raw=True, strict_map_key=False, ext_hook=lambda code, raw: None, object_pairs_hook=list, timestamp=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return
    check_map(data)


def test_the_walk_counts_every_kind() -> None:
    packed = msgpack.packb({"a": [1, 2.5, b"x", None], "b": {"c": msgpack.ExtType(1, b"abc")}})
    needed = 1 + 2 + 1 + 4 + 1 + 1 + map_limits.ARRAY_WEIGHT
    check_map(packed, max_values=needed)
    with pytest.raises(MalformedMessage, match="too many"):
        check_map(packed, max_values=needed - map_limits.ARRAY_WEIGHT - 1)


def test_the_walk_stops_at_its_depth() -> None:
    check_map(b"\x91" * MAX_DEPTH + b"\x01")
    with pytest.raises(MalformedMessage, match="deeply"):
        check_map(b"\x91" * (MAX_DEPTH + 1) + b"\x01")
