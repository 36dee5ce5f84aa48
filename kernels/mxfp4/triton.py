# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""MXFP4 in registers: what a matrix kernel's tile of weights becomes on its way to the matrix unit, and kernels that rewrite whole stacks.

A tile is words of a checkpoint's bytes: [BM, 16] int32, 128 of K a row, with one word of four scales a row. A thread that holds four neighbouring words of a
row holds one group of 32, so it needs one scale; and the matrix unit wants from a thread two (bfloat16) or four (E4M3) neighbouring columns at a time. Both
are had by renaming columns, at no cost, because K may be summed in any order that the activations share:

    bfloat16, column 32 i + 2 (4 a + q) + j   is k = 32 q + 8 a + 4 j + i      (q, a, i < 4; j < 2)
    E4M3,     column 64 h + 4 (4 a + q) + b   is k = 32 q + 8 a + 4 h + b      (q, a, b < 4; h < 2)

Rows are renamed too, so that the order in which warps read rows is the order in which the matrix unit has them: `matrix_rows`, undone by `memory_rows`.

To bfloat16: a nibble's sign moves to bit 15 and its three other bits to bits 8..6, which is the value times 2^-126 (a subnormal for 0.5); one product with
2^(scale - 1) then is exact. To E4M3: the value times 2^(6 - d), d binades below the largest scale of the 128, is a table of eight bytes that a byte
permutation looks up four at a time; d > 14 gives zeros, as `reference.to_fp8` counts them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from driftline.kernels.mxfp4.weights import Fp8Weight, Mxfp4Weight

__all__ = ["bfloat16_chunk", "bfloat16_words", "fp8_tile", "matrix_rows", "memory_rows", "to_fp8", "unpack"]

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter knows no assembly; there the same values are made by arithmetic, and a test runs the assembly's text."""

WORDS, WARPS = 512, 4

_TO_BFLOAT16 = """
{
.reg .b32 m, s;
%s
mul.rn.bf16x2 m, m, $3;
mov.b32 {$0, $1}, m;
}
"""
_LEFT = """and.b32 m, $2, %s;
mul.lo.u32 m, m, %s;
and.b32 m, m, 0x81C081C0;"""
_RIGHT = """shr.b32 m, $2, %s;
shl.b32 s, $2, %s;
and.b32 s, s, 0x80008000;
and.b32 m, m, 0x01C001C0;
or.b32 m, m, s;"""
TO_BFLOAT16_0 = tl.constexpr(_TO_BFLOAT16 % (_LEFT % ("0x000F000F", "0x1040")))
TO_BFLOAT16_1 = tl.constexpr(_TO_BFLOAT16 % (_LEFT % ("0x00F000F0", "0x104")))
TO_BFLOAT16_2 = tl.constexpr(_TO_BFLOAT16 % (_RIGHT % ("2", "4")))
TO_BFLOAT16_3 = tl.constexpr(_TO_BFLOAT16 % (_RIGHT % ("6", "0")))
"""One word, and 2^(scale - 1) in both halves: nibbles i and i + 4 as bfloat16. A product shifts sign and rest to their two places at once, where both go left."""

TO_FP8 = tl.constexpr("""
{
.reg .b32 m, t, s, r0, r1;
and.b32 m, $2, 0x77777777;
shl.b32 t, $2, 4;
prmt.b32 r0, $3, $7, m;
prmt.b32 s, t, $2, 0xD9C8;
and.b32 s, s, 0x80808080;
or.b32 r0, r0, s;
shr.b32 m, m, 16;
prmt.b32 r1, $3, $7, m;
prmt.b32 s, t, $2, 0xFBEA;
and.b32 s, s, 0x80808080;
or.b32 r1, r1, s;
mov.b32 $0, r0;
mov.b32 $1, r1;
}
""")
"""One word as four bytes, and the table of eight bytes in two words (four times each, one a byte): nibbles 0..3 and 4..7."""


@triton.jit
def matrix_rows(tile, WARPS: tl.constexpr):
    """[BM, C] in memory's order to the order in which the matrix unit has the rows: within 16 WARPS rows, bits 3..: (warp, half) from (half, warp)."""
    BM: tl.constexpr = tile.shape[0]
    C: tl.constexpr = tile.shape[1]
    grouped = tl.reshape(tile, (BM // (16 * WARPS), 2, WARPS, 8, C))
    return tl.reshape(tl.permute(grouped, (0, 2, 1, 3, 4)), (BM, C))


@triton.jit
def memory_rows(tile, WARPS: tl.constexpr):
    """The inverse of `matrix_rows`."""
    BM: tl.constexpr = tile.shape[0]
    C: tl.constexpr = tile.shape[1]
    grouped = tl.reshape(tile, (BM // (16 * WARPS), WARPS, 2, 8, C))
    return tl.reshape(tl.permute(grouped, (0, 2, 1, 3, 4)), (BM, C))


@triton.jit
def _value(code):
    """A nibble's value, fp32, by arithmetic; a zero keeps its sign, which a subtraction would lose."""
    magnitude = code & 7
    power = magnitude >> 1
    half = (magnitude & 1).to(tl.float32) * 0.5
    wide = tl.where(power == 0, half, (1.0 + half) * (1 << tl.maximum(power - 1, 0)).to(tl.float32))
    return wide * tl.where(code >= 8, -1.0, 1.0)


@triton.jit
def _scales(scale_word, WARPS: tl.constexpr):
    """[BM] words to [BM, 4] scales as the matrix unit has the rows, 0..255."""
    rows = tl.reshape(matrix_rows(scale_word[:, None], WARPS), (scale_word.shape[0],))
    return (rows[:, None] >> (8 * tl.arange(0, 4)[None, :])) & 0xFF


@triton.jit
def bfloat16_words(words, scale_word, WARPS: tl.constexpr):
    """words int32 [BM, 16], scale_word int32 [BM] to (words, 2^(scale - 1) twice) int32 [BM, 16], rows and columns renamed, for `bfloat16_chunk`."""
    BM: tl.constexpr = words.shape[0]
    w = matrix_rows(words, WARPS)
    w = tl.reshape(tl.permute(tl.reshape(w, (BM, 4, 4)), (0, 2, 1)), (BM, 16))
    factor = (tl.minimum(_scales(scale_word, WARPS), 129) + 126) * 0x00800080
    return w, tl.reshape(tl.broadcast_to(factor[:, None, :], (BM, 4, 4)), (BM, 16))


@triton.jit
def bfloat16_chunk(words, factor, PAIR: tl.constexpr):
    """bfloat16 [BM, 32]: columns 32 PAIR.. of the 128. A chunk at a time, so that few decoded weights are held while the matrix unit reads them."""
    if INTERPRETED:
        scale = ((factor & 0x7F80) << 16).to(tl.float32, bitcast=True) * 1.1754943508222875e-38
        low = (_value((words >> (4 * PAIR)) & 15) * scale).to(tl.bfloat16)
        high = (_value((words >> (4 * PAIR + 16)) & 15) * scale).to(tl.bfloat16)
    else:
        if PAIR == 0:
            low, high = tl.inline_asm_elementwise(TO_BFLOAT16_0, "=h,=h,r,r", [words, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1)
        elif PAIR == 1:
            low, high = tl.inline_asm_elementwise(TO_BFLOAT16_1, "=h,=h,r,r", [words, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1)
        elif PAIR == 2:
            low, high = tl.inline_asm_elementwise(TO_BFLOAT16_2, "=h,=h,r,r", [words, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1)
        else:
            low, high = tl.inline_asm_elementwise(TO_BFLOAT16_3, "=h,=h,r,r", [words, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1)
    return tl.reshape(tl.join(low, high), (words.shape[0], 32))


@triton.jit
def fp8_table(below):
    """(first, second) words of the eight bytes that the codes 0..7 become at `below` binades under the largest scale."""
    shift = tl.minimum(below, 12) * 0x08080808
    first = tl.where(below < 12, 0x6C686000 - (shift & 0x7F7F7F00), tl.where(below == 12, 0x0C080400, tl.where(below == 13, 0x06040200, 0x03020100)))
    second = tl.where(below < 14, 0x7C787470 - tl.minimum(below, 13) * 0x08080808, 0x0C080604)
    return tl.where(below > 14, 0, first), tl.where(below > 14, 0, second)


@triton.jit
def fp8_tile(bytes_, scale_word, WARPS: tl.constexpr):
    """bytes_ uint8 [BM, 64], scale_word int32 [BM] to (E4M3 [BM, 128], rows and columns renamed; fp32 [BM], the row's factor)."""
    BM: tl.constexpr = bytes_.shape[0]
    w = matrix_rows(bytes_, WARPS)
    w = tl.reshape(tl.permute(tl.reshape(w, (BM, 4, 4, 4)), (0, 2, 1, 3)), (BM, 64))
    rows = tl.reshape(matrix_rows(scale_word[:, None], WARPS), (BM,))
    largest = tl.maximum(tl.maximum(rows & 0xFF, (rows >> 8) & 0xFF), tl.maximum((rows >> 16) & 0xFF, (rows >> 24) & 0xFF))
    below = largest[:, None] - ((rows[:, None] >> (8 * tl.arange(0, 4)[None, :])) & 0xFF)
    first, second = fp8_table(below)
    first = tl.reshape(tl.broadcast_to(first[:, None, :, None], (BM, 4, 4, 4)), (BM, 64))
    second = tl.reshape(tl.broadcast_to(second[:, None, :, None], (BM, 4, 4, 4)), (BM, 64))
    if INTERPRETED:
        words = tl.reshape(w, (BM, 16, 4)).to(tl.int32)
        word = tl.sum(words << (8 * tl.arange(0, 4)[None, None, :]), axis=2)
        word = tl.reshape(tl.broadcast_to(word[:, :, None], (BM, 16, 4)), (BM, 64))
        number = tl.arange(0, 64)[None, :] % 4
        low = _fp8_byte(word >> (4 * number), first, second)
        high = _fp8_byte(word >> (4 * number + 16), first, second)
    else:
        low, high = tl.inline_asm_elementwise(TO_FP8, "=r,=r,r,r,r,r,r,r,r,r,r", [w, first, second], dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True,
                                              pack=4)
    tile = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (BM, 128))
    factor = (tl.maximum(largest - 6, 0) << 23).to(tl.float32, bitcast=True)
    return tile, tl.where(largest == 255, float("nan"), factor)


@triton.jit
def _fp8_byte(code, first, second):
    """The table's byte for the low three bits of `code`, with bit 3 as its sign."""
    word = tl.where((code & 4) != 0, second, first)
    byte = ((word >> (8 * (code & 3))) & 0x7F) | ((code & 8) << 4)
    return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _unpack(words, scale, out, count, WORDS: tl.constexpr):
    """Eight values a word; the least scale, 2^-127, is a subnormal fp32."""
    at = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = at < count
    w = tl.load(words + at, mask=inside, other=0)
    s = tl.load(scale + at // 4, mask=inside, other=0).to(tl.int32)
    factor = tl.where(s == 0, 0x00400000, s << 23).to(tl.float32, bitcast=True)
    code = (w[:, None] >> (4 * tl.arange(0, 8)[None, :])) & 15
    value = _value(code) * factor[:, None]
    value = tl.where((s == 255)[:, None], float("nan"), value)
    tl.store(out + at[:, None] * 8 + tl.arange(0, 8)[None, :], value.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _to_fp8(words, scale_words, values, scale, flushed, count, BLOCK: tl.constexpr):
    """BLOCK stretches of 128, 16 words each; `flushed` int32 [programs]."""
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = block < count
    s = tl.load(scale_words + block, mask=inside, other=0)
    largest = tl.maximum(tl.maximum(s & 0xFF, (s >> 8) & 0xFF), tl.maximum((s >> 16) & 0xFF, (s >> 24) & 0xFF))
    number = tl.arange(0, 16)[None, :]
    w = tl.load(words + block[:, None] * 16 + number, mask=inside[:, None], other=0)
    below = largest[:, None] - ((s[:, None] >> (8 * (number // 4))) & 0xFF)
    first, second = fp8_table(below)
    lost = tl.reshape(tl.where(below > 14, w & 0x77777777, 0), (BLOCK, 4, 4))
    tl.store(flushed + tl.program_id(0), tl.sum(tl.sum((tl.max((lost != 0).to(tl.int32), axis=2)), axis=1), axis=0))
    nibble = tl.arange(0, 8)[None, None, :]
    value = _fp8_byte((w[:, :, None] >> (4 * nibble)), first[:, :, None], second[:, :, None])
    tl.store(values + (block[:, None] * 16 + number)[:, :, None] * 8 + nibble, value, mask=inside[:, None, None])
    factor = (tl.maximum(largest - 6, 0) << 23).to(tl.float32, bitcast=True)
    tl.store(scale + block, tl.where(largest == 255, float("nan"), factor), mask=inside)


def unpack(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `reference.unpack`, contiguous arguments; 0.53 bytes read an element."""
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype, device=packed.device)
    words = packed.view(torch.int32)
    if words.numel():
        _unpack[(triton.cdiv(words.numel(), WORDS),)](words, scale, out, words.numel(), WORDS=WORDS, num_warps=WARPS, enable_fp_fusion=False)
    return out


def to_fp8(weight: Mxfp4Weight) -> tuple[Fp8Weight, torch.Tensor]:
    """As `reference.to_fp8`, contiguous arguments; the kernels take a factor below 2^-126 for zero."""
    experts, out, width = weight.shape
    device = weight.device
    values = torch.empty(experts, out, width, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(experts, out, width // 128, dtype=torch.float32, device=device)
    block, count = 32, experts * out * (width // 128)
    flushed = torch.zeros(max(triton.cdiv(count, block), 1), dtype=torch.int32, device=device)
    if count:
        _to_fp8[(triton.cdiv(count, block),)](weight.packed.view(torch.int32), weight.scale.view(torch.int32), values, scale, flushed, count, BLOCK=block,
                                              num_warps=WARPS, enable_fp_fusion=False)
    return Fp8Weight(values, scale), flushed.sum(dtype=torch.int64)
