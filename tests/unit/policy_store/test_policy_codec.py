"""The shard codec is exact for any bytes, and refuses what it did not write."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.messages.errors import IntegrityError
from driftline.policy_store.codec import Codec, apply, encode_delta, encode_full
from driftline.policy_store.tensor import (
    DTYPES,
    SHARD_BYTES,
    HostTensor,
    shards_of,
    state_digest,
    tensor_digest,
)

WIDTHS = st.sampled_from([1, 2, 4, 8])


@st.composite
def changes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Old and new bytes of a shard: any width, any count, any share of changed elements, any bits."""
    width = draw(WIDTHS)
    count = draw(st.one_of(st.integers(1, 40), st.integers(1, 6000)))
    share = draw(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.integers(0, 256, count * width, dtype=np.uint8)
    new = old.copy()
    elements = new.view(f"<u{width}")
    moved = rng.random(count) < share
    values = rng.integers(0, 256, count * width, dtype=np.uint8).view(f"<u{width}")
    if draw(st.booleans()):
        values = elements ^ elements.dtype.type(1)
    elements[moved] = values[moved]
    return old, new, width


@given(changes())
@settings(max_examples=300, deadline=None)
def test_a_delta_applied_to_its_base_gives_the_new_bytes(change: tuple[np.ndarray, np.ndarray, int]) -> None:
    old, new, width = change
    encoded = encode_delta(old, new, width)
    out = old.copy()
    apply(encoded.codec, encoded.payload, out, width)
    assert np.array_equal(out, new)
    assert encoded.changed == np.count_nonzero(old.view(f"<u{width}") != new.view(f"<u{width}"))
    assert (encoded.codec is Codec.UNCHANGED) == (encoded.payload == b"") == (encoded.changed == 0)


@given(changes())
@settings(max_examples=100, deadline=None)
def test_a_full_needs_no_base(change: tuple[np.ndarray, np.ndarray, int]) -> None:
    garbage, new, width = change
    encoded = encode_full(new, width)
    out = garbage.copy()
    apply(encoded.codec, encoded.payload, out, width)
    assert np.array_equal(out, new)


@given(changes())
@settings(max_examples=100, deadline=None)
def test_a_delta_applied_twice_reverts_which_is_why_applying_is_guarded(
    change: tuple[np.ndarray, np.ndarray, int],
) -> None:
    old, new, width = change
    encoded = encode_delta(old, new, width)
    if encoded.codec is Codec.FULL:
        return
    out = old.copy()
    for _ in range(2):
        apply(encoded.codec, encoded.payload, out, width)
    assert np.array_equal(out, old)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_whole_shard_round_trips_at_every_density(share: float, width: int) -> None:
    rng = np.random.default_rng(width)
    old = rng.integers(0, 256, SHARD_BYTES, dtype=np.uint8)
    new = old.copy()
    elements = new.view(f"<u{width}")
    elements[rng.random(elements.size) < share] ^= elements.dtype.type(3)
    encoded = encode_delta(old, new, width)
    out = old.copy()
    apply(encoded.codec, encoded.payload, out, width)
    assert np.array_equal(out, new)
    if 0 < share < 0.39:
        assert encoded.codec is Codec.SPARSE
    if share in (0.5, 0.8):
        assert encoded.codec is Codec.DENSE


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 100_000])
def test_gaps_around_the_escape_are_exact(gap: int) -> None:
    old = np.zeros(800_000, np.uint8)
    new = old.copy()
    positions = [gap, gap + 1 + gap, min(gap + 1 + gap + 1, old.size // 2 - 1)]
    new.view("<u2")[positions] = 7
    encoded = encode_delta(old, new, 2)
    out = old.copy()
    apply(encoded.codec, encoded.payload, out, 2)
    assert encoded.codec is Codec.SPARSE
    assert np.array_equal(out, new)


def test_nan_payloads_and_signed_zeros_survive() -> None:
    bits = np.asarray([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000000, 0x00000001], np.uint32)
    old, new = np.zeros(6, np.uint32), bits
    for encoded in (encode_delta(old.view(np.uint8), new.view(np.uint8), 4), encode_full(new.view(np.uint8), 4)):
        out = old.copy().view(np.uint8)
        apply(encoded.codec, encoded.payload, out, 4)
        assert np.array_equal(out.view(np.uint32), bits)


def test_a_change_of_the_high_byte_alone_is_seen() -> None:
    old = np.zeros(1000, np.uint16)
    new = old.copy()
    new[[3, 700]] = 0x0100
    encoded = encode_delta(old.view(np.uint8), new.view(np.uint8), 2)
    assert encoded.changed == 2


@given(changes(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_payload_is_refused_or_gives_bytes_a_digest_refuses(
    change: tuple[np.ndarray, np.ndarray, int], data: st.DataObject
) -> None:
    """The codec never crashes, hangs or writes outside the shard; that the bytes are right is the digest's to say."""
    old, new, width = change
    encoded = encode_delta(old, new, width)
    if not encoded.payload:
        return
    payload = bytearray(encoded.payload)
    bit = data.draw(st.integers(0, len(payload) * 8 - 1))
    payload[bit // 8] ^= 1 << bit % 8
    cut = data.draw(st.sampled_from([len(payload), len(payload) - 1, len(payload) // 2]))
    out = old.copy()
    with suppress(IntegrityError):
        apply(encoded.codec, bytes(payload[:cut]), out, width)
    assert out.size == new.size


@given(st.binary(max_size=200), st.sampled_from(list(Codec)), WIDTHS)
@settings(max_examples=300, deadline=None)
def test_random_bytes_never_raise_anything_but_integrity_error(payload: bytes, codec: Codec, width: int) -> None:
    out = np.zeros(64 * width, np.uint8)
    with suppress(IntegrityError):
        apply(codec, payload, out, width)


def test_a_frame_that_claims_more_than_a_shard_is_refused_before_it_is_opened() -> None:
    bomb = zstandard.compress(bytes(64 * SHARD_BYTES))
    payload = struct.pack("<II", len(bomb), len(bomb)) + bomb + bomb
    with pytest.raises(IntegrityError, match="claims"):
        apply(Codec.FULL, payload, np.zeros(SHARD_BYTES, np.uint8), 2)


def test_base_and_new_of_different_length_are_refused() -> None:
    with pytest.raises(IntegrityError):
        encode_delta(np.zeros(4, np.uint8), np.zeros(6, np.uint8), 2)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3)])
def test_every_dtype_and_shape_has_exact_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape)) * DTYPES[dtype].width
    tensor = HostTensor(dtype, shape, np.arange(size, dtype=np.uint8) % 2)
    assert tensor.numpy().shape == shape
    assert HostTensor.from_numpy(tensor.numpy(), dtype).data.tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "field"),
    [("float12", (2,), 4, "dtype"), ("float32", (2,), 4, "data"), ("float32", (-1,), 4, "shape")],
)
def test_a_tensor_whose_parts_disagree_cannot_exist(dtype: str, shape: tuple[int, ...], size: int, field: str) -> None:
    with pytest.raises(IntegrityError) as caught:
        HostTensor(dtype, shape, np.zeros(size, np.uint8))
    assert caught.value.field == field


def test_the_digest_sees_name_dtype_shape_and_every_bit() -> None:
    data = np.zeros(16, np.uint8)
    flipped = data.copy()
    flipped[15] = 0x80
    tensors = [
        ("w", HostTensor("float32", (4,), data)),
        ("v", HostTensor("float32", (4,), data)),
        ("w", HostTensor("int32", (4,), data)),
        ("w", HostTensor("float32", (2, 2), data)),
        ("w", HostTensor("float32", (4,), flipped)),
    ]
    assert len({tensor_digest(name, tensor) for name, tensor in tensors}) == len(tensors)
    assert len({state_digest({name: tensor}) for name, tensor in tensors}) == len(tensors)
    assert state_digest({"a": tensors[0][1], "b": tensors[4][1]}) == state_digest({"b": tensors[4][1], "a": tensors[0][1]})


@given(st.lists(st.integers(0, 3 * SHARD_BYTES // 2), max_size=6))
def test_shards_tile_every_tensor_once_and_in_order(sizes: list[int]) -> None:
    layouts = [(f"t{k}", HostTensor.from_numpy(np.zeros(size, np.uint8)).layout) for k, size in enumerate(sizes)]
    shards = list(shards_of(layouts))
    assert [shard.number for shard in shards] == list(range(len(shards)))
    for name, layout in layouts:
        own = [shard for shard in shards if shard.name == name]
        assert sum(shard.stop - shard.start for shard in own) == layout.nbytes
        assert all(0 < shard.stop - shard.start <= SHARD_BYTES for shard in own)
