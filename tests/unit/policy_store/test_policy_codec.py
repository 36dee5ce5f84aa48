"""The shard codec is exact for any bytes, and refuses what it did not write."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from codec_cases import Pair, pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.messages.errors import IntegrityError
from driftline.policy_store.codec import (
    Changes,
    Codec,
    DeltaForm,
    apply,
    changes,
    encode_changes,
    encode_delta,
    encode_full,
)
from driftline.policy_store.ranked import ranked_encode
from driftline.policy_store.tensor import (
    DTYPES,
    SHARD_BYTES,
    HostTensor,
    shards_of,
    state_digest,
    tensor_digest,
)

WIDTHS = st.sampled_from([1, 2, 4, 8])
FORMS = st.sampled_from(list(DeltaForm))


@given(pairs(), FORMS)
@settings(max_examples=400, deadline=None)
def test_a_delta_applied_to_its_base_gives_the_new_bytes(pair: Pair, form: DeltaForm) -> None:
    old_n, new_n = pair.elements
    encoded = encode_delta(pair.old, pair.new, pair.width, exponent=pair.exponent, form=form)
    out = pair.old.copy()
    apply(encoded.codec, encoded.payload, out, pair.width, exponent=pair.exponent)
    assert np.array_equal(out, pair.new)
    assert encoded.changed == np.count_nonzero(old_n != new_n)
    assert (encoded.codec is Codec.UNCHANGED) == (encoded.payload == b"") == (encoded.changed == 0)


@given(pairs(), FORMS)
@settings(max_examples=200, deadline=None)
def test_a_payload_needs_nothing_but_the_base_to_be_read(pair: Pair, form: DeltaForm) -> None:
    encoded = encode_delta(pair.old, pair.new, pair.width, exponent=pair.exponent, form=form)
    out = pair.old.copy()
    apply(encoded.codec, encoded.payload, out, pair.width)
    assert np.array_equal(out, pair.new)


@given(pairs())
@settings(max_examples=100, deadline=None)
def test_a_full_needs_no_base(pair: Pair) -> None:
    encoded = encode_full(pair.new, pair.width)
    out = pair.old.copy()
    apply(encoded.codec, encoded.payload, out, pair.width)
    assert np.array_equal(out, pair.new)


@given(pairs())
@settings(max_examples=100, deadline=None)
def test_the_fast_form_applied_twice_reverts_which_is_why_applying_is_guarded(pair: Pair) -> None:
    encoded = encode_delta(pair.old, pair.new, pair.width, form=DeltaForm.FAST)
    if encoded.codec is Codec.FULL:
        return
    out = pair.old.copy()
    for _ in range(2):
        apply(encoded.codec, encoded.payload, out, pair.width)
    assert np.array_equal(out, pair.old)


@given(pairs(), FORMS)
@settings(max_examples=300, deadline=None)
def test_the_changes_of_a_payload_are_what_it_does_to_the_base(pair: Pair, form: DeltaForm) -> None:
    old_n, new_n = pair.elements
    encoded = encode_delta(pair.old, pair.new, pair.width, exponent=pair.exponent, form=form)
    before = pair.old.copy()
    before.flags.writeable = False
    found = changes(encoded.codec, encoded.payload, before, pair.width, exponent=pair.exponent)
    if encoded.codec in (Codec.DENSE, Codec.FULL):
        assert found is None
        return
    assert found is not None
    assert found.at.dtype == np.int32
    assert found.at.tolist() == np.flatnonzero(old_n != new_n).tolist()
    assert np.array_equal(found.xor, (old_n ^ new_n)[found.at])
    assert found.xor.dtype == old_n.dtype


@given(pairs(), FORMS)
@settings(max_examples=300, deadline=None)
def test_changes_found_elsewhere_give_the_bytes_of_the_whole_shards(pair: Pair, form: DeltaForm) -> None:
    old_n, new_n = pair.elements
    at = np.flatnonzero(old_n != new_n).astype(np.int32)
    found = Changes(at, (old_n ^ new_n)[at])
    before = pair.old.copy()
    encoded = encode_changes(before, found, pair.width, exponent=pair.exponent, form=form)
    assert encoded == encode_delta(pair.old, pair.new, pair.width, exponent=pair.exponent, form=form)
    assert np.array_equal(before, pair.old)


BASE = np.arange(400, dtype=np.uint8)


@pytest.mark.parametrize(
    ("at", "xor"),
    [
        ([3, 3], [1, 1]),
        ([5, 4], [1, 1]),
        ([-1, 4], [1, 1]),
        ([4, 200], [1, 1]),
        ([4, 5], [1, 0]),
        ([4, 5], [1]),
    ],
    ids=["repeated", "descending", "negative", "beyond the shard", "changes nothing", "fewer values"],
)
def test_changes_that_are_no_changes_are_refused_before_anything_is_read(at: list[int], xor: list[int]) -> None:
    with pytest.raises(IntegrityError) as caught:
        encode_changes(BASE, Changes(np.asarray(at, np.int32), np.asarray(xor, np.uint16)), 2)
    assert caught.value.field == "changes"


@pytest.mark.parametrize(("at", "xor"), [(np.int64, np.uint16), (np.int32, np.uint32), (np.int32, np.int16)])
def test_changes_of_another_type_are_refused(at: type, xor: type) -> None:
    with pytest.raises(IntegrityError) as caught:
        encode_changes(BASE, Changes(np.asarray([3], at), np.asarray([1], xor)), 2)
    assert caught.value.field == "changes"


def adam_step(count: int, share: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """bfloat16 weights N(0, 0.02) and what an optimizer's step leaves: small weights move, large ones seldom."""
    old = (rng.standard_normal(count).astype(np.float32) * np.float32(0.02)).view(np.uint32)
    values = old.view(np.float32)
    moved = values + (rng.standard_normal(count) * share).astype(np.float32)
    bits = [(np.asarray(x, np.float32).view(np.uint32) + 0x8000 >> 16).astype(np.uint16) for x in (values, moved)]
    return bits[0], bits[1]


def entropy_percent(old: np.ndarray, new: np.ndarray) -> float:
    """What an ideal coder of positions and XOR values that knows nothing of the weights needs, in percent of the raw size."""
    changed = old != new
    p = np.count_nonzero(changed) / changed.size
    _, counts = np.unique((old ^ new)[changed], return_counts=True)
    q = counts / counts.sum()
    return float(100 / 16 * (-p * np.log2(p) - (1 - p) * np.log2(1 - p) - p * (q * np.log2(q)).sum()))


@pytest.mark.parametrize(("step", "share_of_bound"), [(2.3e-7, 0.7), (1e-6, 0.75), (1e-5, 0.8)])
def test_the_small_form_is_well_below_what_entropy_allows_a_coder_blind_to_the_weights(step: float, share_of_bound: float) -> None:
    old, new = adam_step(SHARD_BYTES // 2, step, np.random.default_rng(3))
    encoded = encode_delta(old.view(np.uint8), new.view(np.uint8), 2, exponent=(7, 8))
    assert encoded.codec is Codec.RANKED
    assert 100 * len(encoded.payload) / old.nbytes < share_of_bound * entropy_percent(old, new)


@pytest.mark.parametrize("count", [1, 2, 8, 33, 1000, 100_000])
def test_the_small_form_is_the_smaller_one_from_a_scalar_up(count: int) -> None:
    old, new = adam_step(count, 1e-3, np.random.default_rng(count))
    small, fast = (encode_delta(old.view(np.uint8), new.view(np.uint8), 2, exponent=(7, 8), form=form) for form in (DeltaForm.SMALL, DeltaForm.FAST))
    assert len(small.payload) < len(fast.payload)


def test_a_few_infinities_do_not_empty_the_buckets() -> None:
    old, new = adam_step(SHARD_BYTES // 2, 2.3e-7, np.random.default_rng(4))
    clean = len(encode_delta(old.view(np.uint8), new.view(np.uint8), 2, exponent=(7, 8)).payload)
    for bits in (old, new):
        bits[1000::5000] = 0x7F80
    spoiled = len(encode_delta(old.view(np.uint8), new.view(np.uint8), 2, exponent=(7, 8)).payload)
    assert spoiled < 1.02 * clean


def test_a_tensor_scaled_as_a_whole_takes_the_planes_where_they_are_smaller() -> None:
    rng = np.random.default_rng(5)
    old = (rng.standard_normal(100_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old ^ np.uint16(0x8000)
    encoded = encode_delta(old.view(np.uint8), new.view(np.uint8), 2, exponent=(7, 8))
    assert encoded.codec is Codec.DENSE
    assert len(encoded.payload) < 0.01 * old.nbytes


def test_a_payload_of_another_dtype_is_refused_by_name() -> None:
    old, new = adam_step(4096, 1e-5, np.random.default_rng(6))
    encoded = encode_delta(old.view(np.uint8), new.view(np.uint8), 2, exponent=(7, 8))
    with pytest.raises(IntegrityError, match="another dtype"):
        apply(encoded.codec, encoded.payload, old.view(np.uint8), 2, exponent=(10, 5))


@pytest.mark.parametrize("exponent", [(7, 12), (10, 8), (-1, 8), (70, 8)])
def test_an_exponent_that_the_elements_cannot_have_is_refused(exponent: tuple[int, int]) -> None:
    with pytest.raises(IntegrityError) as caught:
        encode_delta(np.zeros(8, np.uint8), np.ones(8, np.uint8), 2, exponent=exponent)
    assert caught.value.field == "exponent"


def test_a_ranked_delta_on_other_weights_raises_or_gives_bytes_a_digest_refuses() -> None:
    old, new = adam_step(100_000, 1e-6, np.random.default_rng(7))
    other, _ = adam_step(100_000, 1e-6, np.random.default_rng(8))
    encoded = encode_delta(old.view(np.uint8), new.view(np.uint8), 2, exponent=(7, 8))
    out = other.copy()
    with suppress(IntegrityError):
        apply(encoded.codec, encoded.payload, out.view(np.uint8), 2)
    assert not np.array_equal(out, new)


def test_weights_that_cannot_be_written_are_left_alone() -> None:
    out = np.zeros(4, np.uint8)
    out.flags.writeable = False
    with pytest.raises(IntegrityError, match="cannot be written"):
        apply(Codec.FULL, encode_full(np.ones(4, np.uint8), 2).payload, out, 2)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_whole_shard_round_trips_at_every_density(share: float, width: int) -> None:
    rng = np.random.default_rng(width)
    old = rng.integers(0, 256, SHARD_BYTES, dtype=np.uint8)
    new = old.copy()
    elements = new.view(f"<u{width}")
    elements[rng.random(elements.size) < share] ^= elements.dtype.type(3)
    for form in DeltaForm:
        encoded = encode_delta(old, new, width, form=form)
        out = old.copy()
        apply(encoded.codec, encoded.payload, out, width)
        assert np.array_equal(out, new)
        if form is DeltaForm.FAST and 0 < share < 0.39:
            assert encoded.codec is Codec.SPARSE
        if form is DeltaForm.FAST and share in (0.5, 0.8):
            assert encoded.codec is Codec.DENSE
        if form is DeltaForm.SMALL and 0 < share < 0.2:
            assert encoded.codec is Codec.RANKED


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 100_000])
def test_gaps_around_the_escape_are_exact(gap: int) -> None:
    old = np.zeros(800_000, np.uint8)
    new = old.copy()
    positions = [gap, gap + 1 + gap, min(gap + 1 + gap + 1, old.size // 2 - 1)]
    new.view("<u2")[positions] = 7
    for form, codec in ((DeltaForm.FAST, Codec.SPARSE), (DeltaForm.SMALL, Codec.RANKED)):
        encoded = encode_delta(old, new, 2, form=form)
        out = old.copy()
        apply(encoded.codec, encoded.payload, out, 2)
        assert encoded.codec is codec
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


@given(pairs(), FORMS, st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_payload_is_refused_or_gives_bytes_a_digest_refuses(pair: Pair, form: DeltaForm, data: st.DataObject) -> None:
    """The codec never crashes, hangs or writes outside the shard; that the bytes are right is the digest's to say."""
    encoded = encode_delta(pair.old, pair.new, pair.width, exponent=pair.exponent, form=form)
    if not encoded.payload:
        return
    payload = bytearray(encoded.payload)
    bit = data.draw(st.integers(0, len(payload) * 8 - 1))
    payload[bit // 8] ^= 1 << bit % 8
    cut = data.draw(st.sampled_from([len(payload), len(payload) - 1, len(payload) // 2]))
    around = np.full(pair.old.size + 256, 0xA5, np.uint8)
    out = around[128:-128]
    out[:] = pair.old
    with suppress(IntegrityError):
        apply(encoded.codec, bytes(payload[:cut]), out, pair.width)
    assert (around[:128] == 0xA5).all()
    assert (around[-128:] == 0xA5).all()


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


def test_a_small_shard_is_coded_by_as_coarse_an_exponent_as_pays() -> None:
    """A line in the head for each exponent would cost more than the changes of a tensor of a few thousand elements."""
    rng = np.random.default_rng(3)
    for elements, least in ((1024, 0.85), (4096, 0.9), (16384, 0.95)):
        weights = (rng.standard_normal(elements).astype(np.float32) * np.float32(0.05)).view(np.uint32)
        old = (weights >> 16).astype(np.uint16)
        new = old.copy()
        moved = rng.random(elements) < 0.002 * 2.0 ** np.clip(0x7B - (old >> 7 & 0xFF).astype(np.int64), -2, 6)
        new[moved] += 1
        changes = Changes(np.flatnonzero(moved).astype(np.int32), (old ^ new)[moved])
        coded = encode_delta(old.view(np.uint8), new.view(np.uint8), 2, exponent=(7, 8))
        finest = ranked_encode(old, changes, (7, 8))
        assert finest is not None
        assert len(coded.payload) < least * len(finest)
        out = old.copy()
        apply(coded.codec, coded.payload, out.view(np.uint8), 2, exponent=(7, 8))
        assert np.array_equal(out, new)
        with pytest.raises(IntegrityError, match="exponent of another dtype"):
            apply(coded.codec, finest, old.copy().view(np.uint8), 2, exponent=(10, 5))
