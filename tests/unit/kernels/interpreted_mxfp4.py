"""MXFP4's kernels in Triton's interpreter, and the assembly that the interpreter does not run, executed from its text: every byte, every scale."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from driftline.kernels.mxfp4 import reference
from driftline.kernels.mxfp4 import triton as kernels
from driftline.kernels.mxfp4.weights import Mxfp4Weight

torch.set_num_threads(1)

CASES = torch.arange(256, dtype=torch.uint8)
BM, WARPS = 64, 4


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 2), (torch.float32, 0)])
def test_every_byte_under_every_scale_unpacks_to_its_value(dtype: torch.dtype, least: int) -> None:
    """(The interpreter's bfloat16 has no subnormals.)"""
    packed = CASES.repeat(256 - least, 1)
    scale = CASES[least:, None].expand(256 - least, 16).contiguous()
    assert same(kernels.unpack(packed, scale, dtype).float(), reference.unpack(packed, scale, dtype).float())


@pytest.mark.parametrize("span", [0, 3, 14, 15, 40])
def test_the_transcode_is_the_references_and_counts_what_it_loses(span: int) -> None:
    scale = 100 + (noise(2, 3, 8, seed=1) % (span + 1))
    weight = Mxfp4Weight(noise(2, 3, 128), scale)
    found, flushed = kernels.to_fp8(weight)
    expected = reference.to_fp8(weight)
    assert torch.equal(found.values.float(), expected.weight.values.float())
    assert torch.equal(found.scale, expected.weight.scale)
    assert flushed == expected.flushed
    assert (flushed > 0) == (span > 14)


@triton.jit
def _bfloat16(words, scale, out, BM: tl.constexpr, WARPS: tl.constexpr):
    row = tl.arange(0, BM)
    w, factor = kernels.bfloat16_words(tl.load(words + row[:, None] * 16 + tl.arange(0, 16)[None, :]), tl.load(scale + row), WARPS)
    for i in tl.static_range(4):
        chunk = kernels.memory_rows(kernels.bfloat16_chunk(w, factor, i), WARPS)
        tl.store(out + row[:, None] * 128 + i * 32 + tl.arange(0, 32)[None, :], chunk)


@triton.jit
def _fp8(bytes_, scale, out, factors, BM: tl.constexpr, WARPS: tl.constexpr):
    row = tl.arange(0, BM)
    tile, factor = kernels.fp8_tile(tl.load(bytes_ + row[:, None] * 64 + tl.arange(0, 64)[None, :]), tl.load(scale + row), WARPS)
    tl.store(out + row[:, None] * 128 + tl.arange(0, 128)[None, :], kernels.memory_rows(tile, WARPS))
    tl.store(factors + row, tl.reshape(kernels.memory_rows(factor[:, None], WARPS), (BM,)))


def columns(fp8: bool) -> torch.Tensor:
    """k of each column of a tile, by the formulas of the kernels' docstring."""
    where = torch.empty(128, dtype=torch.int64)
    for k in range(128):
        q, a, rest = k // 32, k // 8 % 4, k % 8
        where[64 * (rest // 4) + 4 * (4 * a + q) + rest % 4 if fp8 else 32 * (rest % 4) + 2 * (4 * a + q) + rest // 4] = k
    return where


@pytest.mark.parametrize("warps", [4, 8])
def test_a_tile_for_bfloat16_holds_the_values_in_the_order_it_says(warps: int) -> None:
    packed, scale = noise(128, 64), 110 + noise(128, 4) % 19
    out = torch.full((128, 128), torch.nan, dtype=torch.bfloat16)
    _bfloat16[(1,)](packed.view(torch.int32), scale.view(torch.int32), out, BM=128, WARPS=warps)
    assert torch.equal(out, reference.unpack(packed, scale)[:, columns(False)])


def test_a_scale_that_the_kernels_do_not_take_gives_no_number() -> None:
    packed, scale = torch.full((BM, 64), 0x22, dtype=torch.uint8), torch.full((BM, 4), reference.LARGEST_SCALE, dtype=torch.uint8)
    scale[3] += 1
    scale[5] = 255
    out = torch.zeros(BM, 128, dtype=torch.bfloat16)
    _bfloat16[(1,)](packed.view(torch.int32), scale.view(torch.int32), out, BM=BM, WARPS=WARPS)
    finite = out.isfinite().all(1)
    assert finite.sum() == BM - 2
    assert not finite[3]
    assert not finite[5]


@pytest.mark.parametrize("span", [0, 14, 20])
def test_a_tile_for_fp8_is_the_transcoded_weight(span: int) -> None:
    packed, scale = noise(BM, 64), 110 + noise(BM, 4) % (span + 1)
    out, factors = torch.zeros(BM, 128, dtype=torch.float8_e4m3fn), torch.zeros(BM)
    _fp8[(1,)](packed, scale.view(torch.int32), out, factors, BM=BM, WARPS=WARPS)
    expected = reference.to_fp8(Mxfp4Weight(packed[None], scale[None])).weight
    assert torch.equal(out.float(), expected.values[0].float()[:, columns(True)])
    assert torch.equal(factors, expected.scale[0, :, 0])


def executed(text: str, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The registers after the assembly: the few instructions it uses, as the PTX manual defines them."""
    held: dict[str, np.ndarray] = dict(operands)

    def value(name: str) -> np.ndarray:
        return held[name] if name in held else np.uint32(int(name, 0))

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        halves = [torch.from_numpy((x >> s & 0xFFFF).astype(np.uint16).view(np.int16).copy()).view(torch.bfloat16) for x in (a, b) for s in (0, 16)]
        low, high = ((halves[i] * halves[i + 2]).view(torch.int16).numpy().view(np.uint16).astype(np.uint32) for i in (0, 1))
        return low | high << np.uint32(16)

    def permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        pool = [x >> np.uint32(8 * i) & 0xFF for x in (a, b) for i in range(4)]
        out = np.zeros_like(a)
        for i in range(4):
            which = selector >> np.uint32(4 * i) & 0xF
            byte = np.choose(np.broadcast_to(which & 7, a.shape), pool)
            out |= np.where(which & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint32) << np.uint32(8 * i)
        return out

    for name, rest in re.findall(r"^([a-z][\w.]*)\s+(.*);$", text.replace("\n.reg", "\n#"), re.MULTILINE):
        if halves := re.match(r"\{(\S+), (\S+)\}, (\S+)", rest):
            held[halves[1]], held[halves[2]] = value(halves[3]) & 0xFFFF, value(halves[3]) >> np.uint32(16)
            continue
        to, *given = (part.strip() for part in rest.split(","))
        a = [value(g) for g in given]
        held[to] = {"shl.b32": lambda a=a: a[0] << a[1], "shr.b32": lambda a=a: a[0] >> a[1], "and.b32": lambda a=a: a[0] & a[1], "or.b32": lambda a=a: a[0] | a[1],
                    "mul.lo.u32": lambda a=a: a[0] * a[1],
                    "mov.b32": lambda a=a: a[0], "mul.rn.bf16x2": lambda a=a: product(*a), "prmt.b32": lambda a=a: permuted(*a)}[name]()
    return held


WORDS = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)


@pytest.mark.parametrize("pair", range(4))
def test_the_assembly_decodes_two_nibbles_of_every_word(pair: int) -> None:
    text = (kernels.TO_BFLOAT16_0, kernels.TO_BFLOAT16_1, kernels.TO_BFLOAT16_2, kernels.TO_BFLOAT16_3)[pair].value
    table = np.array([*reference.MAGNITUDES, *(-m for m in reference.MAGNITUDES)])
    for scale in (0, 1, 60, 127, 128):
        factor = np.full_like(WORDS, (scale + 126) * 0x00800080)
        held = executed(text, {"$2": WORDS, "$3": factor})
        for register, nibble in (("$0", pair), ("$1", pair + 4)):
            found = torch.from_numpy(held[register].astype(np.uint16).view(np.int16)).view(torch.bfloat16)
            expected = torch.from_numpy(table[WORDS >> np.uint32(4 * nibble) & 15] * 2.0 ** (scale - 127)).bfloat16()
            assert torch.equal(found, expected)


@pytest.mark.parametrize("below", [0, 5, 12, 13, 14])
def test_the_assembly_looks_up_eight_nibbles_of_every_word(below: int) -> None:
    table = torch.tensor([m * 2.0 ** (6 - below) for m in reference.MAGNITUDES]).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint32)
    first, second = (np.full_like(WORDS, sum(int(table[4 * j + i]) << 8 * i for i in range(4))) for j in range(2))
    held = executed(kernels.TO_FP8.value, {"$2": WORDS, "$3": first, "$7": second})
    for nibble in range(8):
        byte = held["$0" if nibble < 4 else "$1"] >> np.uint32(8 * (nibble % 4)) & 0xFF
        code = WORDS >> np.uint32(4 * nibble) & 15
        assert np.array_equal(byte, table[code & 7] | (code & 8) << np.uint32(4))
