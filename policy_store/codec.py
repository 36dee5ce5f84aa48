"""The shard codec: a shard of new weights as a change of the old ones, exactly.

`apply` after `encode_delta` gives the new bytes bit for bit, whatever they mean: NaN payloads, negative zeros, denormals. Applied to
other weights, or twice, a delta gives garbage, and the codec cannot know. Its callers check the digest of the base before and of the
result after (`applying.py`); nothing else may call `apply`.

    UNCHANGED  nothing changed: no bytes
    RANKED     positions by rank among elements of one exponent, differences as integers (`ranked.py`): the smallest, in nearly all cases
    SPARSE     gaps between changed positions, a byte each (255 continues), and the XOR of each changed element, in byte planes
    DENSE      XOR of the whole shard, in byte planes
    FULL       the new bytes themselves, in planes; needs no base

`DeltaForm.SMALL` takes RANKED, and above `RANKED_WORTH` of the raw size the smallest of RANKED, DENSE and FULL. `DeltaForm.FAST` takes SPARSE
up to `SPARSE_MAX` of the elements changed, and DENSE above, or FULL where that is smaller. The same changes always give the same
bytes, with native kernels or without. Gaps and planes are separate zstd-1 frames, because the planes of a float (exponent, mantissa)
have nothing in common. Malformed payloads raise IntegrityError before anything is allocated from a size they claim.
The bytes, and what was measured: docs/delta_format.md.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from driftline.messages.errors import IntegrityError
from driftline.policy_store import native as kernels
from driftline.policy_store.forms import Changes, Codec, DeltaForm, EncodedShard
from driftline.policy_store.ranked import (
    EXPONENT_MOST,
    NO_EXPONENT,
    ranked_changes,
    ranked_encode,
    ranked_window,
)
from driftline.policy_store.tensor import SHARD_BYTES, Bytes1D

__all__ = [
    "FULL_WORTH",
    "RANKED_WORTH",
    "SPARSE_MAX",
    "Changes",
    "Codec",
    "DeltaForm",
    "EncodedShard",
    "apply",
    "changes",
    "encode_changes",
    "encode_delta",
    "encode_full",
]

SPARSE_MAX = 0.4
"""Sparse is smaller than dense up to about half of the elements and quicker up to about 0.3; at 0.4 they trade evenly."""

COARSER = (1, 2)
"""Bits of the exponent that a small shard may do without."""

COARSE_MOST = 128 * 1024
"""Elements of a shard that is coded by coarser exponents too: with more, the head is a small part, and each try reads the shard again."""

RANKED_WORTH = 0.25
"""A change at random this large is rare, and one that is not at random (a scaled tensor, a counter) may suit the byte planes better."""

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


def encode_delta(base: Bytes1D, new: Bytes1D, width: int, *, exponent: tuple[int, int] | None = None,
                 form: DeltaForm = DeltaForm.SMALL) -> EncodedShard:
    """`new` as a change of `base`; both are whole elements of `width` bytes, equally long and at most a shard.

    `exponent` is the dtype's (lowest bit, bits), see `DType.exponent`: without it the result is as right, but larger.
    """
    _check_shard(base, width)
    if base.size != new.size:
        raise IntegrityError(f"base has {base.size} bytes, new {new.size}", field="shard", value=new.size)
    return _encode(base, _changes(base, new, width), width, exponent, form, whole=lambda: new)


def encode_changes(base: Bytes1D, changes: Changes, width: int, *, exponent: tuple[int, int] | None = None,
                   form: DeltaForm = DeltaForm.SMALL) -> EncodedShard:
    """The same bytes as `encode_delta` of `base` and what `changes` make of it."""
    _check_shard(base, width)
    old_n = base.view(_UINT[width])
    at, xor = changes
    if at.dtype != np.int32 or xor.dtype != old_n.dtype or at.shape != xor.shape or at.ndim != 1:
        raise IntegrityError("changes are int32 positions and as many elements", field="changes", value=(at.dtype, xor.dtype, at.shape, xor.shape))
    if at.size and (at[0] < 0 or at[-1] >= old_n.size or not (at[1:] > at[:-1]).all() or not xor.all()):
        raise IntegrityError(f"positions must ascend within {old_n.size} elements, and no XOR be zero", field="changes", value=at.size)

    def whole() -> Bytes1D:
        new = base.copy()
        new.view(_UINT[width])[at] ^= xor
        return new

    return _encode(base, Changes(np.ascontiguousarray(at), np.ascontiguousarray(xor)), width, exponent, form, whole=whole)


def encode_full(new: Bytes1D, width: int) -> EncodedShard:
    """`new` by itself."""
    _check_shard(new, width)
    return EncodedShard(Codec.FULL, _sections(_planes(new, width)), new.size // width)


def apply(codec: Codec, payload: bytes | memoryview, out: Bytes1D, width: int, *, exponent: tuple[int, int] | None = None) -> None:
    """Turn `out`, which holds the base, into the new shard, in place. For a full `out` may hold anything.

    A payload says by which exponent it was coded; `exponent`, when given, must be the same or a finer one. Raises IntegrityError on a malformed
    payload; `out` is then undefined.
    """
    _check_shard(out, width)
    if not out.flags.writeable:
        raise IntegrityError("a shard that cannot be written", field="shard", value=out.size)
    out_n = out.view(_UINT[width])
    match codec:
        case Codec.UNCHANGED:
            _check_empty(payload)
        case Codec.SPARSE:
            gaps, planes = _sparse_parts(payload, out_n)
            if kernels.native is not None:
                kernels.native.sparse_apply(gaps, planes, out)
            else:
                found = _sparse_changes(gaps, planes, out_n)
                out_n[found.at] ^= found.xor
        case Codec.RANKED:
            _check_window(payload, exponent)
            if kernels.native is not None:
                kernels.native.ranked_apply(payload, out, width)
            else:
                found = ranked_changes(payload, out_n)
                out_n[found.at] ^= found.xor
        case Codec.DENSE:
            _unplane(_frames(payload, [out_n.size] * width), out, xor=True)
        case Codec.FULL:
            _unplane(_frames(payload, [out_n.size] * width), out, xor=False)


def changes(codec: Codec, payload: bytes | memoryview, base: Bytes1D, width: int, *,
            exponent: tuple[int, int] | None = None) -> Changes | None:
    """What a payload does to `base`, which is only read; None when it has the whole shard (DENSE, FULL) and is to be applied instead.

    Raises IntegrityError as `apply` does.
    """
    _check_shard(base, width)
    base_n = base.view(_UINT[width])
    match codec:
        case Codec.UNCHANGED:
            _check_empty(payload)
            return Changes(np.empty(0, np.int32), np.empty(0, _UINT[width]))
        case Codec.SPARSE:
            gaps, planes = _sparse_parts(payload, base_n)
            native = kernels.native
            found = _sparse_changes(gaps, planes, base_n) if native is None else native.sparse_changes(gaps, planes, base)
            if not found.xor.all():
                raise IntegrityError("a change that changes nothing", field="payload", value=found.at.size)
            return found
        case Codec.RANKED:
            _check_window(payload, exponent)
            return ranked_changes(payload, base_n) if kernels.native is None else kernels.native.ranked_changes(payload, base, width)
        case _:
            return None


def _encode(base: Bytes1D, changes: Changes, width: int, exponent: tuple[int, int] | None, form: DeltaForm, *,
            whole: Callable[[], Bytes1D]) -> EncodedShard:
    """`whole` gives the new shard, where it is needed."""
    changed = changes.at.size
    if changed == 0:
        return EncodedShard(Codec.UNCHANGED, b"", 0)
    if form is DeltaForm.FAST and changed <= SPARSE_MAX * (base.size // width):
        return EncodedShard(Codec.SPARSE, _sections(_sparse(changes, base.size // width)), changed)
    low, bits = window = exponent or NO_EXPONENT
    if min(window) < 0 or bits > EXPONENT_MOST or low >= 8 * width or low + bits > 8 * width:
        raise IntegrityError(f"no exponent of elements of {width} bytes", field="exponent", value=exponent)
    ranked = _smallest_ranked(base, changes, window) if form is DeltaForm.SMALL else None
    if ranked is not None and len(ranked) <= RANKED_WORTH * base.size:
        return EncodedShard(Codec.RANKED, ranked, changed)
    new = whole()
    best = EncodedShard(Codec.DENSE, _sections(_planes(new, width, xor=base)), changed)
    if ranked is not None and len(ranked) <= len(best.payload):
        best = EncodedShard(Codec.RANKED, ranked, changed)
    if len(best.payload) > FULL_WORTH * new.size:
        full = _sections(_planes(new, width))
        if len(full) < len(best.payload):
            return EncodedShard(Codec.FULL, full, changed)
    return best


def _changes(base: Bytes1D, new: Bytes1D, width: int) -> Changes:
    if kernels.native is not None:
        return kernels.native.changes(base, new, width)
    xor: _Elements = np.bitwise_xor(base.view(_UINT[width]), new.view(_UINT[width]))
    at = np.flatnonzero(xor)
    return Changes(at.astype(np.int32), xor[at])


def _smallest_ranked(base: Bytes1D, changes: Changes, exponent: tuple[int, int]) -> bytes | None:
    """Of a small shard, by the exponent, or with two or four exponents to a bucket, or in one bucket: a bucket's line in the head is
    worth its bytes only where it tells many elements apart."""
    best = _ranked(base, changes, exponent)
    if base.size > COARSE_MOST * changes.xor.itemsize or exponent == NO_EXPONENT:
        return best
    low, bits = exponent
    for window in (*((low + k, bits - k) for k in COARSER if bits > k), NO_EXPONENT):
        coarse = _ranked(base, changes, window)
        if coarse is not None and (best is None or len(coarse) < len(best)):
            best = coarse
    return best


def _ranked(base: Bytes1D, changes: Changes, exponent: tuple[int, int]) -> bytes | None:
    if kernels.native is not None:
        return kernels.native.ranked_encode(base, changes, exponent)
    return ranked_encode(base.view(changes.xor.dtype), changes, exponent)


def _sparse(changes: Changes, elements: int) -> list[Bytes1D]:
    if kernels.native is not None:
        return kernels.native.sparse_pack(changes, elements)
    return [_gaps(changes.at), *_planes(changes.xor.view(np.uint8), changes.xor.itemsize)]


def _sparse_parts(payload: bytes | memoryview, shard: _Elements) -> tuple[Bytes1D, list[Bytes1D]]:
    """Gap bytes and value planes, each of a size that such a shard can have."""
    parts = _split(payload, 1 + shard.itemsize)
    # A gap's bytes: at most one per changed element plus one per 255 elements skipped.
    gaps = _inflate(parts[0], at_most=shard.size + shard.size // _CONTINUE + 1)
    count = int(np.count_nonzero(gaps != _CONTINUE))
    return gaps, [_inflate(part, exactly=count) for part in parts[1:]]


def _sparse_changes(gaps: Bytes1D, planes: list[Bytes1D], shard: _Elements) -> Changes:
    last = gaps != _CONTINUE
    if gaps.size == 0 or not last[-1]:
        raise IntegrityError("the last gap is cut off", field="gaps", value=gaps.size)
    # Each changed element is one past the previous plus its gap: the sum of the gap bytes so far, plus how many came before.
    at = np.cumsum(gaps, dtype=np.int64)[last]
    at += np.arange(at.size, dtype=np.int64)
    if at[-1] >= shard.size:
        raise IntegrityError(f"{at.size} positions do not fit in {shard.size} elements", field="gaps", value=at.size)
    xor = np.zeros(at.size, shard.dtype)
    _unplane(planes, xor.view(np.uint8), xor=True)
    return Changes(at.astype(np.int32), xor)


def _gaps(at: npt.NDArray[np.int32]) -> Bytes1D:
    """Positions as the count of unchanged elements before each; 255 in a byte says "255 and go on"."""
    gap = np.diff(at, prepend=np.int32(-1)) - 1
    if int(gap.max()) < _CONTINUE:
        return gap.astype(np.uint8)
    more, rest = np.divmod(gap, _CONTINUE)
    ends = np.cumsum(more + 1) - 1
    out = np.full(int(ends[-1]) + 1, _CONTINUE, np.uint8)
    out[ends] = rest
    return out


def _planes(data: Bytes1D, width: int, *, xor: Bytes1D | None = None) -> list[Bytes1D]:
    """Byte k of every element (of `data`, or of it XOR `xor`) together, for each k from the lowest."""
    if kernels.native is not None:
        return kernels.native.split(data, width, xor=xor)
    values = data.view(_UINT[width]) if xor is None else data.view(_UINT[width]) ^ xor.view(_UINT[width])
    return [(values >> np.asarray(8 * k, values.dtype)).astype(np.uint8) for k in range(width)]


def _unplane(planes: list[Bytes1D], out: Bytes1D, *, xor: bool) -> None:
    """Planes back into the elements of `out`, or XORed into them."""
    if kernels.native is not None:
        kernels.native.merge(planes, out, xor=xor)
        return
    dtype = _UINT[len(planes)]
    values: _Elements = planes[-1].astype(dtype)
    for plane in reversed(planes[:-1]):
        values <<= np.asarray(8, dtype)
        values |= plane
    if xor:
        values ^= out.view(dtype)
    out.view(dtype)[:] = values


def _check_shard(shard: Bytes1D, width: int) -> None:
    if width not in _UINT or shard.size > SHARD_BYTES or shard.size % width:
        raise IntegrityError(f"a shard of {shard.size} bytes and width {width}", field="shard", value=shard.size)


def _check_empty(payload: bytes | memoryview) -> None:
    if len(payload):
        raise IntegrityError("an unchanged shard carries no bytes", field="payload", value=len(payload))


def _check_window(payload: bytes | memoryview, exponent: tuple[int, int] | None) -> None:
    found = ranked_window(payload)
    if exponent is None or found == NO_EXPONENT:
        return
    if found not in [(exponent[0] + k, exponent[1] - k) for k in (0, *COARSER)]:
        raise IntegrityError("coded by the exponent of another dtype", field="exponent", value=found, remedy=f"expected {exponent}")


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
