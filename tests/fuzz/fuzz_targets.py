"""Every reader of bytes that another process wrote, as a function of bytes that either returns or lets a fault out.

A target swallows the errors its reader declares and nothing else. What does decode is used: it is encoded again and must come back,
so a message that passes one process cannot break the next. Shared by the short tests, the replayed corpus and the long fuzzing.
"""

from __future__ import annotations

import asyncio
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash
import zstandard

from driftline.messages import (
    BrokerUnavailable,
    IntegrityError,
    MalformedMessage,
    Message,
    PayloadTooLarge,
    Subjects,
    decode,
    encode,
)
from driftline.messages.blobs import Claim, blob_digest
from driftline.messages.bus import PubAck
from driftline.messages.frames import claim_in, open_frame
from driftline.messages.map_limits import check_map
from driftline.messages.recording import pack_batch, unpack_batch
from driftline.policy_store.codec import Codec, DeltaForm, apply, encode_delta, encode_full
from driftline.policy_store.manifest import Encoding, Link, Manifest, Pack, TensorEntry
from driftline.policy_store.tensor import (
    SHARD_BYTES,
    HostTensor,
    Layout,
    state_digest,
    state_digest_of,
    tensor_digest_of,
)
from driftline.policy_store.tensor_file import TensorFile, write_tensors
from driftline.services.replay.format import Header, Kind, Step, StepFacts, preamble, section_head
from driftline.services.replay.reader import Recording
from driftline.services.replay.writer import RecordingWriter

__all__ = ["TARGETS", "seeds"]

_HEAD = struct.Struct("<2sBBIQ")
_compressor = zstandard.ZstdCompressor(level=1)


def frame(data: bytes) -> None:
    """`decode` of the bytes as they are."""
    try:
        message = decode(data)
    except MalformedMessage:
        return
    _use(message)


def body(data: bytes) -> None:
    """`decode` of a well-formed head around any map and arrays: u16 length of the map, the map, the arrays."""
    length = int.from_bytes(data[:2], "little") % (len(data) + 1)
    packed, arrays = data[2 : 2 + length], data[2 + length :]
    whole = packed + (bytes(-len(packed) % 16) + arrays if arrays else b"")
    frame(_HEAD.pack(b"DL", 1, 0, len(packed), len(whole)) + whole)
    frame(_HEAD.pack(b"DL", 1, 1, len(packed), len(whole)) + _compressor.compress(whole))


def msgpack_map(data: bytes) -> None:
    """The walk and the decoder agree: what the walk passes, msgpack takes as one value, up to its content."""
    try:
        check_map(data)
    except MalformedMessage:
        return
    try:
        msgpack.unpackb(data, raw=True, strict_map_key=False, object_pairs_hook=list, ext_hook=lambda code, raw: None, timestamp=0)
    except ValueError as error:
        if "Extra" in str(error) or "incomplete" in str(error):
            raise


def claim(data: bytes) -> None:
    """Opening stored bytes whose blob is what follows them: u16 length of the frame, the frame, the blob."""
    length = int.from_bytes(data[:2], "little") % (len(data) + 1)
    stored, blob = data[2 : 2 + length], data[2 + length :]
    claim_in(stored)
    for candidate in (stored, encode(Claim(run="r", schema_of="group", digest=blob_digest(blob), size=len(blob), chunks=1))):
        try:
            message = asyncio.run(open_frame(_OneBlob(blob), f"{Subjects('r').root}.graded.g", candidate))
        except (MalformedMessage, IntegrityError, BrokerUnavailable):
            continue
        _use(message)


def record(data: bytes) -> None:
    """`unpack_batch` of the bytes as they are, and of well-formed lengths around frames split at a marker."""
    framed = b"".join(struct.pack("<Q", len(part)) + part for part in data.split(b"|||"))
    for candidate in (data, framed):
        try:
            groups = unpack_batch(candidate)
        except MalformedMessage:
            continue
        again = unpack_batch(pack_batch(groups))
        assert [entry.group.group for entry in again] == [entry.group.group for entry in groups]


def shard(data: bytes) -> None:
    """Any payload applied to a small shard, by each codec: u8 codec, u8 width, u16 elements, payload. What lies around it stays."""
    if len(data) < 4:
        return
    codec = Codec(data[0] % len(Codec))
    width = 1 << data[1] % 4
    count = 1 + int.from_bytes(data[2:4], "little") % 5000
    around = np.full(count * width + 128, 0xA5, np.uint8)
    payloads = [data[4:]]
    if codec is Codec.SPARSE:  # the sections as the codec makes them, around any gaps and values
        gaps, values = data[4 : 4 + len(data) // 2], data[4 + len(data) // 2 :]
        frames = [_compressor.compress(gaps), *(_compressor.compress(values[k::width]) for k in range(width))]
        payloads.append(b"".join([*(struct.pack("<I", len(part)) for part in frames), *frames]))
    for payload in payloads:
        try:
            apply(codec, payload, around[64:-64], width)
        except IntegrityError:
            continue
    assert (around[:64] == 0xA5).all()
    assert (around[-64:] == 0xA5).all()


def recording(data: bytes) -> None:
    """A recording file of these bytes, and one whose sections have these payloads (split at a marker) under heads that are right."""
    parts = data.split(b"|||")
    kinds = [Kind.HEAD, Kind.START, Kind.TENSOR, *[Kind.STEP] * len(parts)]
    sections = [section_head(kind, number, (part,))[0] + part for number, (kind, part) in enumerate(zip(kinds, parts, strict=False))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.dlr"
        for whole, opened in ((data, Recording.open), (preamble() + b"".join(sections), Recording.salvage)):
            path.write_bytes(whole)
            try:
                found = opened(path)
                if found is not None:
                    found.start()
                    for step in found.steps():
                        found.groups(step)
            except IntegrityError:
                continue


def weights(data: bytes) -> None:
    """A safetensors file of these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(data)
        try:
            file = TensorFile.open(path)
        except IntegrityError:
            return
        state = {name: file.tensor(name) for name in file.layouts}
        write_tensors(path.with_name("again"), file.layouts, state.__getitem__, file.metadata)
        again = TensorFile.open(path.with_name("again"))
        assert (again.layouts, again.metadata) == (file.layouts, file.metadata)
        assert all(np.array_equal(again.tensor(name).data, tensor.data) for name, tensor in state.items())


TARGETS: dict[str, Callable[[bytes], None]] = {
    "frame": frame,
    "body": body,
    "map": msgpack_map,
    "claim": claim,
    "record": record,
    "shard": shard,
    "recording": recording,
    "weights": weights,
}


class _OneBlob:
    """A broker that answers every chunk with the same bytes."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob

    async def publish_bytes(self, subject: str, data: bytes, *, id: str) -> PubAck:
        raise AssertionError("reading stores nothing")

    async def get_bytes(self, stream: str, subject: str) -> bytes | None:
        return self._blob

    async def purge(self, stream: str, subject: str) -> None:
        raise AssertionError("reading deletes nothing")


def _use(message: Message) -> None:
    try:
        again = decode(encode(message))
    except PayloadTooLarge:
        return
    assert type(again) is type(message)
    if isinstance(message, Manifest):
        for encoding in (message.delta, message.full):
            for place in message.placements(encoding) if encoding is not None else ():
                assert place.pack < 0 or 0 <= place.offset <= place.offset + place.length <= encoding.packs[place.pack].size  # type: ignore[union-attr]


def seeds(target: str, frames: dict[str, bytes]) -> dict[str, bytes]:
    """Inputs that decode, by name, from the frames of every schema."""
    if target in ("frame", "body", "map"):
        frames = {**frames, "manifest": encode(_manifest())}
    match target:
        case "frame":
            return frames
        case "body" | "map":
            maps = {name: _opened(data) for name, data in frames.items()}
            if target == "map":
                return {name: packed for name, (packed, _) in maps.items()}
            return {name: len(packed).to_bytes(2, "little") + packed + rest for name, (packed, rest) in maps.items()}
        case "claim":
            return {name: b"\x00\x00" + data for name, data in frames.items()} | {
                "claimed": len(frames["claim"]).to_bytes(2, "little") + frames["claim"] + frames["graded"]
            }
        case "record":
            return {name: data for name, data in frames.items() if name in ("recorded", "group")}
        case "recording":
            whole, sections = _recording(frames["recorded"])
            return {"whole": whole, "sections": b"|||".join(sections)}
        case "weights":
            return {"plain": _safetensors({}), "described": _safetensors({"format": "pt"})}
        case _:
            return {f"{codec.name.lower()}_{width}": _shard_seed(codec, width) for codec in Codec for width in (0, 1, 2)}


def _opened(data: bytes) -> tuple[bytes, bytes]:
    _, _, flags, length, size = _HEAD.unpack_from(data)
    raw: Any = data[_HEAD.size :]
    if flags:
        raw = zstandard.ZstdDecompressor().decompress(raw, max_output_size=size)
    return raw[:length], raw[length + -length % 16 :]


def _recording(group: bytes) -> tuple[bytes, list[bytes]]:
    """A recording of one step, as a file and as the payloads of its sections."""
    batch = struct.pack("<Q", len(group)) + group
    state = {"a": HostTensor.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3))}
    header = Header(run="r", driftline="0", created_at=1.0, start_version=0, start_digest=state_digest(state), config="[run]\n", model="{}",
                    numerics={"device": "cpu"})  # fmt: skip
    facts = StepFacts(version=1, digest="1" * 32, seal="", learner_step=1, batch=xxhash.xxh3_128_hexdigest(batch), groups=1, trajectories=1,
                      numerics={"device": "cpu"}, at=1.0)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.dlr"
        writer = RecordingWriter.create(path, header, state)
        writer.add(Step(facts, batch))
        writer.close()
        whole = path.read_bytes()
        sections = Recording.open(path).sections
    return whole, [whole[section.payload : section.payload + section.length] for section in sections]


def _safetensors(metadata: dict[str, str]) -> bytes:
    """A file of three tensors of unlike widths, one of them empty."""
    layouts = {"a": Layout("float32", (2, 3)), "b": Layout("float8_e4m3fn", (5,)), "c": Layout("bfloat16", (0, 4))}
    state = {name: HostTensor(layout.dtype, layout.shape, np.arange(layout.nbytes, dtype=np.uint8)) for name, layout in layouts.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write_tensors(path, layouts, state.__getitem__, metadata)
        return path.read_bytes()


def _manifest() -> Manifest:
    """A version with a full and a delta of two tensors, unsealed: a mutant's content is then not refused by its seal alone."""
    layouts = {"a": Layout("float32", (3, 5)), "b": Layout("bfloat16", (SHARD_BYTES // 2 + 1,))}
    digests, entries, first = np.arange(48, dtype=np.uint8).reshape(3, 16), [], 0
    for name, layout in layouts.items():
        own = digests[first : first + layout.shard_count].tobytes()
        first += layout.shard_count
        entries.append(TensorEntry(name=name, dtype=layout.dtype, shape=layout.shape, digest=tensor_digest_of(name, layout, own)))
    pack = Pack(digest="0" * 32, size=100, chunks=1)
    columns = {"pack": np.zeros(3, np.int32), "offset": np.arange(0, 90, 30), "length": np.full(3, 30)}
    parent = Link(version=0, seal="1" * 32)
    return Manifest(
        run="r", version=1, parent=parent, chain=(parent,), shard_bytes=SHARD_BYTES, tensors=tuple(entries), shard_digests=digests,
        digest=state_digest_of(entry.digest for entry in entries), learner_step=1, consumed=("r/g0/0",), numerics={"k": [1.5]}, at=1.0,
        full=Encoding(packs=(pack,), codec=np.full(3, Codec.FULL, np.uint8), changed=3, **columns),
        delta=Encoding(packs=(pack,), codec=np.full(3, Codec.SPARSE, np.uint8), changed=3, **columns),
    )  # fmt: skip


def _shard_seed(codec: Codec, width: int) -> bytes:
    size = 1 << width
    base = np.arange(600 * size, dtype=np.uint64).astype(np.uint8)
    new = base.copy()
    new[:: 290 if codec in (Codec.SPARSE, Codec.RANKED) else 2] ^= 3
    made = encode_full(new, size) if codec is Codec.FULL else encode_delta(
        base, base if codec is Codec.UNCHANGED else new, size, form=DeltaForm.SMALL if codec is Codec.RANKED else DeltaForm.FAST
    )
    return bytes([made.codec, width]) + (599).to_bytes(2, "little") + made.payload
