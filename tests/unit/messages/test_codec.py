"""Golden bytes of every schema, exact round trips, and refusal of everything else."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from messages_samples import TASK, group, note, trajectory
from pydantic import BaseModel, ConfigDict

from driftline.messages import (
    Admitted,
    ConfigError,
    Divergence,
    DivergenceLevel,
    DivergenceSignal,
    EvalResult,
    Graded,
    LearnerOwner,
    MalformedMessage,
    Message,
    Metrics,
    Outcome,
    OutcomeEvent,
    PayloadTooLarge,
    RecordedGroup,
    RecordedVersion,
    RelayPeer,
    Retried,
    RunFinished,
    Taken,
    UnknownSchema,
    codec,
    decode,
    encode,
    register,
)
from driftline.messages.blobs import Claim
from driftline.messages.registry import registered
from driftline.policy_store.location import StoreLocated
from driftline.policy_store.manifest import Encoding, Link, Pack
from driftline.policy_store.pins import Pin, Pins
from driftline.policy_store.shortcuts import Shortcut

HEAD = struct.Struct("<2sBBIQ")


@register
class Anything(Message):
    """Holds one value of any shape, to carry what no real message should."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)
    schema_name: ClassVar[str] = "test_anything"
    value: Any = None


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, BaseModel):
        return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in type(a).model_fields)
    return a == b


SAMPLES: dict[str, Message] = {
    "group": group("r"),
    "admitted": Admitted(run="r", group=group("r"), at=1.5),
    "trajectory": trajectory("r"),
    "trajectory_with_routes": trajectory("r", routes=True),
    "graded": Graded(run="r", trajectory=trajectory("r"), reward=0.5, components={"exact": 1.0}, grade_s=0.1),
    "graded_failed": Graded(run="r", trajectory=trajectory("r"), reward=None, cause="timeout"),
    "outcome": OutcomeEvent(run="r", group="g0", outcome=Outcome.STALE, reason="lag 3", version=7, lag=3, at=2.0),
    "retried": Retried(run="r", group=group("r").model_copy(update={"attempt": 1, "wanted": (1,)}), at=2.5),
    "owner": LearnerOwner(run="r", epoch=2, beat=3, host="h", pid=4, boot="b", at=5.0),
    "relay_peer": RelayPeer(run="r", peer="h-0", host="10.0.0.7", port=4711, token="0" * 32, certificate="0" * 64, beat=3, at=5.0),
    "recorded": RecordedGroup(
        run="r", version=1, group=group("r"), members=(Graded(run="r", trajectory=trajectory("r"), reward=0.5),)
    ),
    "recorded_version": RecordedVersion(
        run="r", version=1, digest="d", seal="s", learner_step=1, consumed=("r/g0/0",), batch_digest="0" * 32, batch_size=9,
        batch_chunks=1, numerics={"device": "cpu"}, at=6.0,
    ),
    "taken": Taken(run="r", group="g0", version=3, epoch=2, at=7.0),
    "divergence": Divergence(
        run="r", version=4, signal=DivergenceSignal.NUMERICS, level=DivergenceLevel.ALARM, value=0.25, limit=0.002, tokens=512, steps=3, at=9.0,
    ),
    "finished": RunFinished(run="r", version=40, reason="steps", at=3.0),
    "metrics": Metrics(run="r", service="learner", step=2, values={"loss": -0.25}, series={"lag": [0.0, 1.0]}),
    "eval": EvalResult(run="r", version=5, tasks=128, samples=2, reward_sampled=0.5, reward_greedy=0.75),
    "store_located": StoreLocated(run="r", store="s3://bucket/prefix", endpoint="https://host:9000", region="eu-central-1", at=8.0),
    "shortcut": Shortcut(
        run="r", target=Link(version=4, seal="4" * 32), base=Link(version=0, seal="0" * 32), replaces=200, at=8.0,
        encoding=Encoding(
            packs=(Pack(digest="5" * 32, size=100, chunks=1),), codec=np.asarray([0, 4], np.uint8), pack=np.asarray([-1, 0], np.int32),
            offset=np.asarray([0, 20], np.int64), length=np.asarray([0, 80], np.int64), changed=3,
        ),
    ).with_seal(),
    "pins": Pins(
        run="r", revision=3, pins=(Pin(link=Link(version=4, seal="4" * 32), owner="joiner", at=8.0, until=68.0),),
        condemned=(Link(version=0, seal="0" * 32),),
    ),
    "claim": Claim(run="r", schema_of="graded", digest="0" * 32, size=600_000, chunks=2),
}


GOLDEN: dict[str, str] = json.loads(Path(__file__).with_name("golden_frames.json").read_text())


@pytest.mark.parametrize("name", SAMPLES)
def test_the_bytes_of_a_schema_never_change(name: str) -> None:
    """An added field with a default needs new golden bytes; any other change breaks stored runs: raise the version instead."""
    golden = base64.b64decode(GOLDEN[name])
    assert same(decode(golden), SAMPLES[name])
    assert encode(SAMPLES[name]) == golden


def test_every_schema_of_the_vocabulary_has_golden_bytes() -> None:
    ours = {name for (name, _), cls in registered().items() if cls.__module__.startswith("driftline.messages")}
    assert ours <= {message.schema_name for message in SAMPLES.values()}


def test_the_layout_is_as_documented() -> None:
    frame = encode(note("r", "hi", size=3, seed=1))
    magic, form, flags, map_length, body_length = HEAD.unpack_from(frame)
    assert (magic, form, flags) == (b"DL", 1, 0)
    assert len(frame) == HEAD.size + body_length
    top = msgpack.unpackb(frame[HEAD.size : HEAD.size + map_length], raw=False)
    assert (top["s"], top["v"]) == ("test_note", 1)
    assert top["b"]["run"] == "r"
    ext = top["b"]["array"]
    assert ext.code == 1
    assert struct.unpack("<BB6xQQ", ext.data) == (6, 1, 0, 3)
    start = HEAD.size + map_length + -map_length % 16
    assert frame[start : start + 12] == note("r", "hi", size=3, seed=1).array.tobytes()


def test_arrays_are_read_only_aligned_views_of_what_was_received() -> None:
    frame = encode(trajectory("r", 9, routes=True))
    received = decode(frame)
    base = np.frombuffer(frame, np.uint8)
    for name in ("tokens", "action_mask", "logprobs", "versions", "routes"):
        array = getattr(received, name)
        assert np.shares_memory(array, base)
        assert array.ctypes.data % 16 == 0
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_large_message_is_compressed_and_comes_back() -> None:
    sent = trajectory("r", 20_000, routes=True)
    frame = encode(sent)
    assert frame[3] == 1
    assert len(frame) < 250_000
    assert same(decode(frame), sent)


def test_what_does_not_compress_is_not() -> None:
    assert encode(note("r", size=50_000))[3] == 0


def test_unknown_fields_are_ignored() -> None:
    frame = pack({"s": "finished", "v": 1, "b": {"run": "r", "version": 1, "reason": "x", "later": {"a": [1]}}})
    assert same(decode(frame), RunFinished(run="r", version=1, reason="x"))


@pytest.mark.parametrize(("name", "version", "says"), [("finished", 2, "versions \\[1\\]"), ("nothing", 1, "no message")])
def test_an_unknown_schema_is_named(name: str, version: int, says: str) -> None:
    with pytest.raises(UnknownSchema, match=says):
        decode(pack({"s": name, "v": version, "b": {"run": "r"}}))


def test_a_schema_name_belongs_to_one_class() -> None:
    with pytest.raises(ConfigError, match="already"):

        @register
        class Impostor(Message):
            schema_name: ClassVar[str] = "group"


def pack(top: object, arrays: bytes = b"", **head: int) -> bytes:
    packed: bytes = msgpack.packb(top, use_bin_type=True)
    body = packed + (bytes(-len(packed) % 16) + arrays if arrays else b"")
    return HEAD.pack(b"DL", 1, 0, head.get("map_length", len(packed)), head.get("body_length", len(body))) + body


def holding(ext: bytes, arrays: bytes = b"", code: int = 1) -> bytes:
    return pack({"s": "test_anything", "v": 1, "b": {"run": "r", "value": msgpack.ExtType(code, ext)}}, arrays)


def array_ext(code: int, shape: tuple[int, ...], offset: int = 0, dimensions: int | None = None) -> bytes:
    return struct.pack(f"<BB6xQ{len(shape)}Q", code, len(shape) if dimensions is None else dimensions, offset, *shape)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


BAD: dict[str, bytes] = {
    "empty": b"",
    "short": b"DL\x01",
    "pickle": b"\x80\x04\x95" + bytes(40),
    "other format": HEAD.pack(b"DL", 2, 0, 0, 0),
    "unknown flag": HEAD.pack(b"DL", 1, 2, 0, 0),
    "map beyond body": pack({}, map_length=99),
    "body shorter than promised": pack({"s": "x", "v": 1, "b": {}}, body_length=1000),
    "not msgpack": HEAD.pack(b"DL", 1, 0, 4, 4) + b"\xc1\xc1\xc1\xc1",
    "not a map": pack([1, 2]),
    "version a string": pack({"s": "finished", "v": "1", "b": {}}),
    "version a bool": pack({"s": "finished", "v": True, "b": {}}),
    "body a list": pack({"s": "finished", "v": 1, "b": []}),
    "missing fields": pack({"s": "finished", "v": 1, "b": {}}),
    "run with a dot": pack({"s": "finished", "v": 1, "b": {"run": "a.b", "version": 1, "reason": ""}}),
    "map key not text": HEAD.pack(b"DL", 1, 0, 3, 3) + b"\x81\x01\x01",
    "promised array of 2^60": HEAD.pack(b"DL", 1, 0, 5, 5) + b"\xdd\xff\xff\xff\xff",
    "deep": pack({"s": "test_anything", "v": 1, "b": {"run": "r", "value": nested(60)}}),
    "very deep": HEAD.pack(b"DL", 1, 0, 100_000, 100_000) + b"\x91" * 100_000,
    "unknown extension": holding(b"abc", code=5),
    "timestamp of three bytes": HEAD.pack(b"DL", 1, 0, 8, 8) + b"\x81\xa1s\xc7\x03\xffab",
    "array head cut": holding(b"\x06\x01"),
    "array dtype": holding(array_ext(77, (1,)), bytes(16)),
    "array object dtype": holding(b"O" + array_ext(6, (1,))[1:], bytes(16)),
    "array too many dimensions": holding(array_ext(6, (1,) * 9), bytes(16)),
    "array dimensions lie": holding(array_ext(6, (1,), dimensions=2), bytes(16)),
    "array longer than its bytes": holding(array_ext(6, (5,)), bytes(16)),
    "array of overflowing shape": holding(array_ext(6, (2**32, 2**32)), bytes(16)),
    "array of zero times huge": holding(array_ext(6, (0, 2**63)), bytes(16)),
    "array behind the end": holding(array_ext(6, (1,), offset=32), bytes(16)),
    "array off alignment": holding(array_ext(6, (1,), offset=4), bytes(16)),
    "array of booleans that are not": holding(array_ext(1, (4,)), b"\x02" * 16),
    "tokens a list of maps": pack({"s": "test_note", "v": 1, "b": {"run": "r", "array": [{}]}}),
    "tokens a list beyond int32": pack({"s": "test_note", "v": 1, "b": {"run": "r", "array": [2**40]}}),
    "array of another dtype": pack(
        {"s": "test_note", "v": 1, "b": {"run": "r", "array": msgpack.ExtType(1, array_ext(8, (1,)))}}, bytes(16)
    ),
    "zstd garbage": HEAD.pack(b"DL", 1, 1, 10, 10) + b"garbage!!",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bytes_are_malformed(name: str) -> None:
    with pytest.raises(MalformedMessage):
        decode(BAD[name])


def test_a_decompression_bomb_is_refused_before_it_is_opened() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(300 << 20))
    assert len(bomb) < 100_000
    for promised in (100, 300 << 20, 2**63):
        with pytest.raises(MalformedMessage, match=r"promises|limit"):
            decode(HEAD.pack(b"DL", 1, 1, 10, promised) + bomb)


def test_a_zstd_frame_without_its_size_is_refused() -> None:
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    with pytest.raises(MalformedMessage, match="content size"):
        decode(HEAD.pack(b"DL", 1, 1, 10, 1000) + unsized)


def test_bytes_behind_the_zstd_frame_are_refused() -> None:
    frame = encode(trajectory("r", 20_000))
    with pytest.raises(MalformedMessage):
        decode(frame + b"x")


def test_a_receiver_may_set_a_lower_limit() -> None:
    with pytest.raises(MalformedMessage, match="limit of 100"):
        decode(encode(trajectory("r")), max_bytes=100)


def test_a_message_cannot_be_sent_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_DECODED_BYTES", 1000)
    with pytest.raises(PayloadTooLarge):
        encode(note("r", size=1000))


@pytest.mark.parametrize(
    "value",
    [object(), np.array([object()]), np.array(["a"]), 2**70, np.zeros(1, complex), {1.5: 1}, nested(60), np.zeros((1,) * 9)],
    ids=["object", "object array", "string array", "huge int", "complex", "float key", "deep", "nine dimensions"],
)
def test_what_has_no_place_on_the_wire_is_refused_by_the_sender(value: object) -> None:
    with pytest.raises(MalformedMessage):
        encode(Anything(run="r", value=value))


def test_big_endian_and_strided_arrays_arrive_as_equal_little_endian_ones() -> None:
    source = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    received = decode(encode(Anything(run="r", value=source)))
    assert received.value.dtype == np.dtype("<i4")  # type: ignore[attr-defined]
    assert np.array_equal(received.value, source)  # type: ignore[attr-defined]


DTYPES = st.sampled_from(["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7)
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, SHAPES)))
@settings(max_examples=200, deadline=None)
def test_every_array_comes_back_bit_for_bit(array: np.ndarray) -> None:
    assert same(decode(encode(Anything(run="r", value=array))).value, array)  # type: ignore[attr-defined]


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_every_plain_value_comes_back(value: object) -> None:
    try:
        frame = encode(Anything(run="r", value=value))
    except MalformedMessage:  # a surrogate in a string has no UTF-8
        return
    assert decode(frame).value == value  # type: ignore[attr-defined]


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_flipped_bytes_are_a_message_or_malformed_and_nothing_else(data: st.DataObject) -> None:
    frame = bytearray(encode(data.draw(st.sampled_from([trajectory("r", 8, routes=True), trajectory("r", 4000), group("r")]))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, min(len(frame) - 1, 600)))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedMessage):
        decode(bytes(frame))


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    for candidate in (data, HEAD.pack(b"DL", 1, 0, len(data), len(data)) + data):
        with contextlib.suppress(MalformedMessage):
            decode(candidate)


def test_the_task_arrives_with_its_metadata() -> None:
    assert decode(encode(group("r"))).task == TASK  # type: ignore[attr-defined]
