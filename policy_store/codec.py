"""The shard codec: a shard of new weights as a change of the old ones, exactly.

`apply` after `encode` gives the new bytes bit for bit, whatever they mean: NaN payloads, negative zeros, denormals. The algebra is
XOR, so a delta applied twice reverts and a delta applied to other weights gives garbage; the codec cannot know. Its callers check the
digest of the base before and of the result after (`apply.py`); nothing else may call `apply`.

Four forms, chosen per shard by the measured share p of elements that changed (an element is as wide as its dtype):

    UNCHANGED  p = 0             no bytes
    SPARSE     p <= SPARSE_MAX   gaps between changed positions, one byte each (255 continues), and the XOR of each changed
                                 element, in byte planes
    DENSE      p >  SPARSE_MAX   XOR of the whole shard, in byte planes
    FULL       no base, or DENSE came out above FULL_WORTH of the raw size and FULL is smaller: the bytes themselves, in planes

Planes and gaps are separate zstd-1 frames, because the planes of a float (exponent, mantissa) have nothing in common.
Malformed payloads raise IntegrityError before anything is allocated from a size they claim.
"""

from __future__ import annotations

import struct
import threading
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from driftline.messages.errors import IntegrityError
from driftline.policy_store.forms import Changes, Codec, DeltaForm, EncodedShard
from driftline.policy_store.tensor import SHARD_BYTES, Bytes1D

__all__ = ["FULL_WORTH", "SPARSE_MAX", "Codec", "EncodedShard", "apply", "encode_changes", "encode_delta", "encode_full"]

SPARSE_MAX = 0.4
"""Sparse is smaller up to about half of the elements and quicker up to about 0.3; at 0.4 they trade evenly."""

FULL_WORTH = 0.6
"""bf16 weights never compress below about 0.66 of their size: a dense delta below this share cannot lose to a full."""

ZSTD_LEVEL = 1
"""Levels 1 to 3 are within 3 % of each other in size on deltas; level 9 gains 5-10 % for 6-8 times the time."""

_CONTINUE = 255
_LENGTH = struct.Struct("<I")
_Elements: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
_UINT: dict[int, np.dtype[np.unsignedinteger[Any]]] = {
    1: np.dtype(np.uint8), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8"),
}
_local = threading.local()


def encode_delta(
    base: Bytes1D, new: Bytes1D, width: int, *, exponent: tuple[int, int] | None = None, form: DeltaForm = DeltaForm.SMALL
) -> EncodedShard:
    """`new` as a change of `base`; both are whole elements of `width` bytes and equally long."""
    if base.size != new.size or new.size % width:
        raise IntegrityError(f"base has {base.size} bytes, new {new.size}, width {width}", field="shard", value=new.size)
    old_n, new_n = base.view(_UINT[width]), new.view(_UINT[width])
    differs = old_n != new_n
    changed = int(np.count_nonzero(differs))
    if changed == 0:
        return EncodedShard(Codec.UNCHANGED, b"", 0)
    if changed <= SPARSE_MAX * new_n.size:
        at = np.flatnonzero(differs)
        return EncodedShard(Codec.SPARSE, _sections([_gaps(at), *_planes(old_n[at] ^ new_n[at])]), changed)
    dense = _sections(_planes(old_n ^ new_n))
    if len(dense) > FULL_WORTH * new.size:
        full = encode_full(new, width)
        if len(full.payload) < len(dense):
            return EncodedShard(Codec.FULL, full.payload, changed)
    return EncodedShard(Codec.DENSE, dense, changed)


def encode_full(new: Bytes1D, width: int) -> EncodedShard:
    """`new` by itself."""
    elements = new.view(_UINT[width])
    return EncodedShard(Codec.FULL, _sections(_planes(elements)), elements.size)


def apply(
    codec: Codec, payload: bytes | memoryview, out: Bytes1D, width: int, *, exponent: tuple[int, int] | None = None
) -> None:
    """Turn `out`, which holds the base, into the new shard, in place. For a full `out` may hold anything.

    Raises IntegrityError on a malformed payload; `out` is then undefined.
    """
    if out.size > SHARD_BYTES or out.size % width:
        raise IntegrityError(f"a shard of {out.size} bytes and width {width}", field="shard", value=out.size)
    out_n = out.view(_UINT[width])
    match codec:
        case Codec.UNCHANGED:
            if len(payload):
                raise IntegrityError("an unchanged shard carries no bytes", field="payload", value=len(payload))
        case Codec.SPARSE:
            _apply_sparse(payload, out_n)
        case Codec.DENSE:
            out_n ^= _unplane(_frames(payload, [out_n.size] * width), out_n.size, width)
        case Codec.FULL:
            out_n[:] = _unplane(_frames(payload, [out_n.size] * width), out_n.size, width)


def _apply_sparse(payload: bytes | memoryview, out_n: _Elements) -> None:
    width = out_n.itemsize
    parts = _split(payload, 1 + width)
    # A gap's bytes: at most one per changed element plus one per 255 elements skipped.
    gaps = _inflate(parts[0], at_most=out_n.size + out_n.size // _CONTINUE + 1)
    last = gaps != _CONTINUE
    # Each changed element is one past the previous plus its gap: the sum of the gap bytes so far, plus how many came before.
    reach = np.cumsum(gaps, dtype=np.int64)
    if last.all():
        at = reach
    else:
        at = reach[last]
        if not last[-1]:
            raise IntegrityError("the last gap is cut off", field="gaps", value=gaps.size)
    at += np.arange(at.size, dtype=np.int64)
    if at.size == 0 or at[-1] >= out_n.size:
        raise IntegrityError(f"{at.size} positions do not fit in {out_n.size} elements", field="gaps", value=at.size)
    values = _unplane([_inflate(part, exactly=at.size) for part in parts[1:]], at.size, width)
    out_n[at] ^= values


def _gaps(at: npt.NDArray[np.int64]) -> Bytes1D:
    """Positions as the count of unchanged elements before each; 255 in a byte says "255 and go on"."""
    gap = np.diff(at, prepend=-1) - 1
    if int(gap.max()) < _CONTINUE:
        return gap.astype(np.uint8)
    more, rest = np.divmod(gap, _CONTINUE)
    ends = np.cumsum(more + 1) - 1
    out = np.full(int(ends[-1]) + 1, _CONTINUE, np.uint8)
    out[ends] = rest
    return out


def _planes(values: npt.NDArray[Any]) -> list[Bytes1D]:
    """Byte k of every element together, for each k from the lowest."""
    if values.itemsize == 1:
        return [values.view(np.uint8)]
    return [(values >> np.asarray(8 * k, values.dtype)).astype(np.uint8) for k in range(values.itemsize)]


def _unplane(planes: list[Bytes1D], count: int, width: int) -> _Elements:
    if width == 1:
        return planes[0]
    out: _Elements = planes[width - 1].astype(_UINT[width])
    for plane in reversed(planes[:-1]):
        out <<= np.asarray(8, out.dtype)
        out |= plane
    return out


def _sections(parts: list[Bytes1D]) -> bytes:
    frames = [_compressor().compress(part.data) for part in parts]
    return b"".join([*(_LENGTH.pack(len(frame)) for frame in frames), *frames])


def _split(payload: bytes | memoryview, count: int) -> list[memoryview]:
    view = memoryview(payload)
    offset = _LENGTH.size * count
    if len(view) < offset:
        raise IntegrityError(f"too short for {count} lengths", field="payload", value=len(view))
    parts = []
    for k in range(count):
        (length,) = _LENGTH.unpack_from(view, _LENGTH.size * k)
        parts.append(view[offset : offset + length])
        offset += length
    if offset != len(view):
        raise IntegrityError(f"its sections need {offset} bytes", field="payload", value=len(view))
    return parts


def _frames(payload: bytes | memoryview, sizes: list[int]) -> list[Bytes1D]:
    parts = _split(payload, len(sizes))
    return [_inflate(part, exactly=size) for part, size in zip(parts, sizes, strict=True)]


def _inflate(frame: memoryview, *, exactly: int | None = None, at_most: int = SHARD_BYTES) -> Bytes1D:
    """A zstd frame's bytes, of a size that is known before anything is allocated."""
    try:
        claimed = zstandard.frame_content_size(frame)
        if claimed < 0 or claimed > at_most or (exactly is not None and claimed != exactly):
            raise IntegrityError(f"the frame claims {claimed} bytes", field="payload", value=claimed,
                                 remedy=f"expected {at_most if exactly is None else exactly}")
        data = _decompressor().decompress(frame, max_output_size=max(claimed, 1)) if claimed else b""
    except zstandard.ZstdError as error:
        raise IntegrityError(f"not a zstd frame: {error}", field="payload", value=len(frame)) from error
    if len(data) != claimed:
        raise IntegrityError(f"the frame holds {len(data)} of {claimed} bytes", field="payload", value=len(data))
    return np.frombuffer(data, np.uint8)


def _compressor() -> zstandard.ZstdCompressor:
    """One per thread: the contexts are not safe to share, and building one costs more than coding a small shard."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor(max_window_size=4 * SHARD_BYTES)
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor


def encode_changes(
    base: Bytes1D, changes: Changes, width: int, *, exponent: tuple[int, int] | None = None, form: DeltaForm = DeltaForm.SMALL
) -> EncodedShard:
    """What `encode_delta` gives for `base` with `changes` made."""
    new = base.copy()
    new.view(_UINT[width])[changes.at] ^= changes.xor
    return encode_delta(base, new, width, exponent=exponent, form=form)
