"""The forms in which GGUF stores weights, and the numbers they stand for.

Guarantees: `dequantised` computes in fp32 in the order in which ggml's reference does (scale times code, then the offset), so its values are that reference's to
the bit; beside its result it needs the memory of one piece. Sizes and bit positions: ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.messages.errors import IntegrityError

__all__ = ["BLOCKS", "Block", "Kind", "dequantised"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Kind(IntEnum):
    """ggml's numbers of the types of tensors that are read."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


class Block(NamedTuple):
    """How many weights a block of a form holds, and its bytes."""

    weights: int
    nbytes: int


BLOCKS: Mapping[Kind, Block] = {
    Kind.F32: Block(1, 4), Kind.F16: Block(1, 2), Kind.BF16: Block(1, 2),
    Kind.Q4_0: Block(32, 18), Kind.Q4_1: Block(32, 20), Kind.Q5_0: Block(32, 22), Kind.Q5_1: Block(32, 24), Kind.Q8_0: Block(32, 34),
    Kind.Q4_K: Block(256, 144), Kind.Q5_K: Block(256, 176), Kind.Q6_K: Block(256, 210),
}

_PIECE = 1 << 20
"""Weights that are expanded at a time: temporaries stay some megabytes."""


def dequantised(raw: Bytes, kind: Kind, shape: tuple[int, ...]) -> Floats:
    """The weights of a tensor's stored bytes, uint8 [nbytes], as float32 [shape]. IntegrityError when there are more or fewer bytes than the shape's."""
    block = BLOCKS[kind]
    count = int(np.prod(shape, dtype=np.int64))
    if count % block.weights or raw.size != count // block.weights * block.nbytes:
        raise IntegrityError(f"not the bytes of {kind.name} weights of this shape", field="tensor", value=(raw.size, shape),
                             remedy=f"{block.nbytes} bytes hold {block.weights} weights")
    blocks = raw.reshape(-1, block.nbytes)
    out = np.empty((len(blocks), block.weights), np.float32)
    step = max(1, _PIECE // block.weights)
    for start in range(0, len(blocks), step):
        out[start : start + step] = _EXPAND[kind](blocks[start : start + step])
    return out.reshape(shape)


def _half(blocks: Bytes, at: int) -> Floats:
    """The half-precision number at a byte of each block, as fp32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """uint8 [n, 16] -> [n, 32]: the low nibbles, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], 1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Bit i of the 32-bit number at a byte of each block, as uint8 [n, 32]."""
    return np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), axis=1, bitorder="little")


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4")


def _f16(blocks: Bytes) -> Floats:
    return _half(blocks, 0)


def _bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 6:]) | (_fifth_bits(blocks, 2) << 4)
    return _half(blocks, 0) * (codes.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 8:]) | (_fifth_bits(blocks, 4) << 4)
    return _half(blocks, 0) * codes.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _six_bit_pairs(packed: Bytes) -> tuple[Floats, Floats]:
    """The eight scales and eight minima, 6 bits each, that 12 bytes of a block hold: uint8 [n, 12] -> two of [n, 8, 1]."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], 1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
    return scales[:, :, None].astype(np.float32), minima[:, :, None].astype(np.float32)


def _groups_of_64(packed: Bytes) -> Bytes:
    """uint8 [n, 128] -> [n, 8, 32]: 32 bytes hold 32 low nibbles and then the next 32 weights' in the high ones."""
    pairs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], 2).reshape(-1, 8, 32)


def _k_form(blocks: Bytes, codes: Bytes) -> Floats:
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    scale, minimum = _half(blocks, 0)[:, :, None] * scales, _half(blocks, 2)[:, :, None] * minima
    return (scale * codes.astype(np.float32) - minimum).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Floats:
    return _k_form(blocks, _groups_of_64(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Floats:
    fifth: Bytes = blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & np.uint8(1)  # bit g of byte i belongs to weight i of group g
    return _k_form(blocks, _groups_of_64(blocks[:, 48:]) | (fifth.swapaxes(1, 2) << np.uint8(4)))


def _q6_k(blocks: Bytes) -> Floats:
    low, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], 2).reshape(-1, 2, 4, 32)
    upper = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], 2)
    codes = (nibbles | (upper << 4)).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    made: Floats = ((_half(blocks, 208) * scales)[:, :, None] * codes.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)
    return made


_EXPAND: Mapping[Kind, Callable[[Bytes], Floats]] = {
    Kind.F32: _f32, Kind.F16: _f16, Kind.BF16: _bf16, Kind.Q4_0: _q4_0, Kind.Q4_1: _q4_1, Kind.Q5_0: _q5_0, Kind.Q5_1: _q5_1, Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k, Kind.Q5_K: _q5_k, Kind.Q6_K: _q6_k,
}
