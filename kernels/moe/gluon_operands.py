# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined,assignment"
"""MXFP4 in Gluon as the matrix unit's first operand: from shared memory to registers that it reads, each nibble its exact value in bfloat16.

A register of that operand holds two neighbours of the sum in one row. Where a product sums over the packed axis (`along`), they are nibbles i and i + 4 of a
word: the sum's order within 32 columns is then 8 q + 4 h + i at 8 i + 2 q + h (q, i < 4; h < 2), and the other operand's columns lie in that order too
(`triton_backward.sorted_rows`). Where it sums across (`across`), they are nibbles of two rows of the matrix: the transposing load of 8 x 8 elements of 16
bits leaves four nibbles of each of the two in one word. Either way a word gives four registers by one shift, mask and product each, at scales of its two
halves. The factor is 2^(scale - 1), for a nibble's bits are read as 2^-126 of its value; it ends at 128, and a larger scale gives infinity.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["FACTORS", "PAIRS", "WORDS", "across", "along", "fetch", "reinterpret", "rows_along", "wait_for_all"]

wait_for_all = getattr(gl, "barrier", None) or gl.thread_barrier
fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

_TEXT = """
{
.reg .b32 m, s;
and.b32 m, WORD, 0x000F000F;
mul.lo.u32 m, m, 0x1040;
and.b32 m, m, 0x81C081C0;
%s
and.b32 m, WORD, 0x00F000F0;
mul.lo.u32 m, m, 0x104;
and.b32 m, m, 0x81C081C0;
%s
shr.b32 m, WORD, 2;
shl.b32 s, WORD, 4;
and.b32 s, s, 0x80008000;
and.b32 m, m, 0x01C001C0;
or.b32 m, m, s;
%s
shr.b32 m, WORD, 6;
and.b32 s, WORD, 0x80008000;
and.b32 m, m, 0x01C001C0;
or.b32 m, m, s;
%s
}
"""
PAIRS = gl.constexpr((_TEXT % tuple(f"mul.rn.bf16x2 ${i}, m, $5;" for i in range(4))).replace("WORD", "$4"))
"""Two words of 16 bits in one, and two factors: the four nibbles of both as bfloat16, nibble i of both in word i."""

WORDS = gl.constexpr((_TEXT % tuple(f"mul.rn.bf16x2 m, m, $9;\nmov.b32 {{${2 * i}, ${2 * i + 1}}}, m;" for i in range(4))).replace("WORD", "$8"))
"""A word, and its factor twice: nibbles 0, 4, 1, 5, 2, 6, 3, 7 as bfloat16."""

FACTORS = gl.constexpr("""
{
.reg .b32 m;
mov.b32 m, 0x00810081;
min.u16x2 m, $1, m;
mad.lo.u32 $0, m, 128, 0x3F003F00;
}
""")
"""Two scales, 16 bits each, as bfloat16 factors."""

_ALONG = gl.constexpr(gl.DistributedLinearLayout([[1, 0]], [[0, 1], [0, 2], [2, 0], [4, 0], [8, 0]], [[16, 0], [32, 0], [64, 0]], [], [128, 4]))
_ACROSS = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 8], [0, 16]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0], [32, 0]], [], [64, 32]))
_GROUPS = gl.constexpr(gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 8], [0, 0, 16]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
                                                  [[1, 0, 0], [2, 0, 0], [4, 0, 0]], [], [8, 8, 32]))
"""Which thread of eight warps has what, so that nothing moves between threads on the way to the operand."""


@gluon.jit
def rows_along():
    """Numbers of the 128 rows of `along`, as its scales lie."""
    return gl.arange(0, 128, gl.SliceLayout(1, _ALONG))


@gluon.jit
def along(words, scales):
    """words int32 [128, 4] in shared memory, 32 columns of the sum; scales int32 [128], the low byte: bfloat16 [128, 32], row 16 w + 2 l + h of them at
    16 w + 8 h + l."""
    factors = ((gl.minimum(scales & 0xFF, 129) + 126) * 0x00800080)[:, None].broadcast_to((128, 4))
    a, a4, b, b4, c, c4, d, d4 = gl.inline_asm_elementwise(
        WORDS, "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r", [words.load(_ALONG), gl.convert_layout(factors, _ALONG, assert_trivial=True)],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=1)
    both = gl.join(gl.join(gl.join(a, a4), gl.join(b, b4)), gl.join(gl.join(c, c4), gl.join(d, d4)))
    both = gl.reshape(gl.permute(both, (0, 4, 3, 1, 2)), (8, 8, 2, 32))
    return gl.reshape(gl.permute(both, (0, 2, 1, 3)), (128, 32))


@gluon.jit
def across(words, scales):
    """words [32, 64] int16 and scales [32, 8] uint8 in shared memory, 32 rows of the sum and 256 columns: bfloat16 [256, 32], column 32 w + 4 l + 2 r + h at
    128 r + 16 w + 8 h + l."""
    factors = gl.inline_asm_elementwise(FACTORS, "=r,r", [scales.permute((1, 0)).load(gl.SliceLayout(1, _GROUPS)).to(gl.int16)], dtype=gl.bfloat16,
                                        is_pure=True, pack=2)
    factors = gl.reshape(gl.expand_dims(factors, 1).broadcast_to((8, 8, 32)), (64, 32))
    a, b, c, d = gl.inline_asm_elementwise(PAIRS, "=&r,=&r,=&r,=&r,r,r", [words.permute((1, 0)).load(_ACROSS), gl.convert_layout(factors, _ACROSS, assert_trivial=True)],
                                           dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
    both = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), (8, 8, 32, 2, 2))
    return gl.reshape(gl.permute(both, (3, 0, 4, 1, 2)), (256, 32))
