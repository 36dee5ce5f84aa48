"""GGUF's forms of weights, beside a second reading of them: one weight at a time, bits picked by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from gguf_cases import HALVES, blocks

from driftline.messages.errors import IntegrityError
from driftline.models.gguf import blocks as forms
from driftline.models.gguf.blocks import BLOCKS, Kind, dequantised


def half(block: bytes, at: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def k_scales(packed: bytes, group: int) -> tuple[int, int]:
    """ggml's get_scale_min_k4, in words: the first four pairs have 6 bits in one byte, the last four their upper two bits in the first ones' spare bits."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    return packed[group + 4] & 15 | packed[group - 4] >> 6 << 4, packed[group + 4] >> 4 | packed[group] >> 6 << 4


def one(kind: Kind, block: bytes, i: int) -> np.float32:
    """Weight i of a block."""
    match kind:
        case Kind.F32:
            return np.float32(struct.unpack("<f", block)[0])
        case Kind.F16:
            return half(block, 0)
        case Kind.BF16:
            return np.float32(struct.unpack("<f", b"\0\0" + block)[0])
        case Kind.Q8_0:
            return half(block, 0) * np.float32(signed(block[2 + i]))
    if kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1):
        fives, minima = kind in (Kind.Q5_0, Kind.Q5_1), kind in (Kind.Q4_1, Kind.Q5_1)
        head = 4 if minima else 2
        packed = block[head + (4 if fives else 0) + i % 16]
        code = packed & 15 if i < 16 else packed >> 4
        if fives:
            code |= (struct.unpack_from("<I", block, head)[0] >> i & 1) << 4
        if minima:
            return half(block, 0) * np.float32(code) + half(block, 2)
        return half(block, 0) * np.float32(code - (16 if fives else 8))
    if kind is Kind.Q6_K:
        part, rest = divmod(i, 128)
        row, column = divmod(rest, 32)
        low = block[part * 64 + (row % 2) * 32 + column]
        high = block[128 + part * 32 + column] >> 2 * row & 3
        code = (low & 15 if row < 2 else low >> 4) | high << 4
        return (half(block, 208) * np.float32(signed(block[192 + i // 16]))) * np.float32(code - 32)
    group, column = divmod(i, 32)
    scale, minimum = k_scales(block[4:16], group)
    at = 48 if kind is Kind.Q5_K else 16
    byte = block[at + group // 2 * 32 + column]
    code = byte & 15 if group % 2 == 0 else byte >> 4
    if kind is Kind.Q5_K:
        code |= (block[16 + column] >> group & 1) << 4
    return (half(block, 0) * np.float32(scale)) * np.float32(code) - half(block, 2) * np.float32(minimum)


@pytest.mark.parametrize("kind", list(Kind))
def test_every_form_has_the_values_of_a_second_reading_to_the_bit(kind: Kind) -> None:
    block = BLOCKS[kind]
    raw = blocks(kind, (6, block.weights), np.random.default_rng(3))
    got = dequantised(np.frombuffer(raw, np.uint8), kind, (6, block.weights))
    want = [[one(kind, raw[b * block.nbytes : (b + 1) * block.nbytes], i) for i in range(block.weights)] for b in range(6)]
    assert got.dtype == np.float32
    assert np.array_equal(got.view(np.uint32), np.array(want, np.float32).view(np.uint32))


@pytest.mark.parametrize("kind", list(HALVES))
def test_another_bit_is_another_weight(kind: Kind) -> None:
    """The comparison above must be able to fail: every byte of a block is read."""
    block = BLOCKS[kind]
    raw = np.frombuffer(blocks(kind, (1, block.weights), np.random.default_rng(4), scale=0.5), np.uint8)
    base = dequantised(raw, kind, (block.weights,))
    for at in range(block.nbytes):
        changed = raw.copy()
        changed[at] ^= 0x40
        assert not np.array_equal(dequantised(changed, kind, (block.weights,)), base), at


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.frombuffer(blocks(Kind.Q4_K, (40, 512), np.random.default_rng(5)), np.uint8)
    whole = dequantised(raw, Kind.Q4_K, (40, 512))
    monkeypatch.setattr(forms, "_PIECE", 3 * 256)
    assert np.array_equal(dequantised(raw, Kind.Q4_K, (40, 512)), whole)


@pytest.mark.parametrize("size", [17, 19, 36])
def test_bytes_that_are_not_the_shapes_are_refused(size: int) -> None:
    with pytest.raises(IntegrityError, match="18 bytes hold 32 weights"):
        dequantised(np.zeros(size, np.uint8), Kind.Q4_0, (1, 32))
