"""Manifests and shards that another process made up: refused, at a cost bounded by what they are allowed to hold."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import zstandard
from pydantic import ValidationError

from driftline.messages import IntegrityError, MalformedMessage, decode, encode
from driftline.policy_store import codec as shard_codec
from driftline.policy_store.codec import Codec, apply
from driftline.policy_store.manifest import Encoding, Manifest, Pack, TensorEntry
from driftline.policy_store.tensor import SHARD_BYTES, Layout, state_digest_of, tensor_digest_of


def encoding(**changed: Any) -> Encoding:
    columns = {"pack": np.zeros(1, np.int32), "offset": np.full(1, 40, np.int64), "length": np.full(1, 60, np.int64)} | changed
    return Encoding(packs=(Pack(digest="0" * 32, size=100, chunks=1),), codec=np.full(1, Codec.FULL, np.uint8), changed=1, **columns)


def manifest(full: Encoding, **changed: Any) -> Manifest:
    digests = np.zeros((1, 16), np.uint8)
    layout = Layout("float32", (3, 5))
    entry = TensorEntry(name="a", dtype=layout.dtype, shape=layout.shape, digest=tensor_digest_of("a", layout, digests.tobytes()))
    fields = {"shard_digests": digests, "tensors": (entry,), "digest": state_digest_of([entry.digest])} | changed
    return Manifest(run="r", version=0, parent=None, chain=(), shard_bytes=SHARD_BYTES, delta=None, full=full, learner_step=0,
                    consumed=(), numerics={}, at=0.0, **fields)  # fmt: skip


def test_a_shard_inside_its_pack_to_the_last_byte_is_taken() -> None:
    assert decode(encode(manifest(encoding()))).full.length.tolist() == [60]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("offset", "length"),
    [(41, 60), (100, 1), (2**63 - 1, 2), (2, 2**63 - 1), (2**63 - 1, 2**63 - 1), (-1, 1), (0, -1)],
)
def test_a_shard_outside_its_pack_is_refused_even_when_its_end_wraps_round(offset: int, length: int) -> None:
    full = encoding(offset=np.full(1, offset, np.int64), length=np.full(1, length, np.int64))
    with pytest.raises(ValidationError, match="outside its pack"):
        manifest(full)


@pytest.mark.parametrize("shape", [[2**62] * 33, [2**63], [-1], [1] * 100_000], ids=["huge product", "huge", "negative", "many"])
def test_a_shape_that_is_none_is_refused_before_its_product_is_taken(shape: list[int]) -> None:
    good = manifest(encoding())
    entry = good.tensors[0].model_construct(**{**dict(good.tensors[0]), "shape": tuple(shape)})
    with pytest.raises(MalformedMessage, match=r"shape|values are wrong"):
        decode(encode(good.model_copy(update={"tensors": (entry,)})))


def test_a_shape_of_more_than_the_message_holds_is_refused() -> None:
    good = manifest(encoding())
    entry = good.tensors[0].model_copy(update={"shape": (2**62,)})
    with pytest.raises(MalformedMessage, match="shards"):
        decode(encode(good.model_copy(update={"tensors": (entry,)})))


def sections(*parts: bytes) -> bytes:
    frames = [zstandard.ZstdCompressor(level=1).compress(part) for part in parts]
    return b"".join([*(struct.pack("<I", len(frame)) for frame in frames), *frames])


HOSTILE: dict[str, tuple[Codec, bytes]] = {
    "gaps beyond the shard": (Codec.SPARSE, sections(bytes([250, 250]), b"xy", b"xy")),
    "more positions than elements": (Codec.SPARSE, sections(bytes(101), bytes(101), bytes(101))),
    "fewer values than positions": (Codec.SPARSE, sections(bytes(3), b"xy", b"xyz")),
    "more values than positions": (Codec.SPARSE, sections(bytes(3), b"xyzz", b"xyz")),
    "a gap cut off": (Codec.SPARSE, sections(bytes([255]), b"x", b"x")),
    "no positions": (Codec.SPARSE, sections(b"", b"", b"")),
    "a bomb of gaps": (Codec.SPARSE, sections(bytes(64 << 20), b"x", b"x")),
    "a bomb of values": (Codec.SPARSE, sections(bytes(3), bytes(64 << 20), b"xyz")),
    "a dense bomb": (Codec.DENSE, sections(bytes(64 << 20), bytes(100))),
    "a full bomb": (Codec.FULL, sections(bytes(100), bytes(64 << 20))),
    "a full too short": (Codec.FULL, sections(bytes(100), bytes(99))),
    "lengths that lie": (Codec.FULL, struct.pack("<II", 2**32 - 1, 2**32 - 1) + bytes(50)),
    "no lengths": (Codec.DENSE, b"\x01"),
    "bytes for an unchanged shard": (Codec.UNCHANGED, b"x"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_shard_is_refused_and_touches_nothing_around_it(name: str) -> None:
    codec, payload = HOSTILE[name]
    around = np.full(200 + 32, 7, np.uint8)
    with pytest.raises(IntegrityError):
        apply(codec, payload, around[16:-16], 2)
    assert (around[:16] == 7).all()
    assert (around[-16:] == 7).all()


def test_a_cut_frame_that_wants_a_large_window_keeps_no_memory() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=True, enable_ldm=True)
    packed = zstandard.ZstdCompressor(compression_params=parameters).compress(np.random.default_rng(0).bytes(1 << 20) * 140)
    head = zstandard.get_frame_parameters(packed)
    assert head.window_size > 100 << 20
    cut = memoryview(packed[: len(packed) // 2])
    with pytest.raises(IntegrityError):
        shard_codec._inflate(cut, at_most=1 << 30)
    assert shard_codec._decompressor().memory_size() < 16 << 20
