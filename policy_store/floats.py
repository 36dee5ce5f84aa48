"""Floats: what the bits of a tensor mean as numbers, for dtypes numpy has no name for.

bfloat16 is the upper half of a float32. float8 values are looked up: e4m3fn and e5m2 as in "FP8 Formats for Deep Learning"
(arXiv:2209.05433), e8m0fnu, the scales of MXFP4, as in the OCP Microscaling specification 1.0 (2 to the power of bits - 127, 255 is
NaN). Integers and bool are no floats: asking for them here is an error, not a conversion.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from driftline.messages.errors import ConfigError
from driftline.policy_store.tensor import Bytes1D, HostTensor

__all__ = ["FLOATS", "from_float32", "ordered", "to_float32", "values"]

FLOATS = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float16", "bfloat16", "float32", "float64"})
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def values(dtype: str, data: Bytes1D) -> npt.NDArray[np.float64]:
    """The numbers of these bytes, float64 [n]: exact for every float dtype."""
    with np.errstate(invalid="ignore"):  # a NaN that wants to be noticed
        match dtype:
            case "bfloat16":
                return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            case "float16" | "float32" | "float64":
                return data.view({"float16": "<f2", "float32": "<f4", "float64": "<f8"}[dtype]).astype(np.float64)
            case "float8_e4m3fn" | "float8_e5m2" | "float8_e8m0fnu":
                found: npt.NDArray[np.float64] = _table(dtype)[data]
                return found
    raise ConfigError("not a float", field="dtype", value=dtype)


def ordered(dtype: str, data: Bytes1D) -> npt.NDArray[np.int64]:
    """Bits as integers in the order of the numbers, so that neighbouring numbers differ by 1: int64 [n]. -0.0 and 0.0 are the same.

    Of float64 only differences below 2**63 are meaningful.
    """
    width = np.dtype(_UNSIGNED[{"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}.get(dtype, 1)])
    bits = data.view(width).astype(np.int64)
    if dtype == "float8_e8m0fnu":
        return bits
    size = 8 * width.itemsize
    magnitude = bits & ((1 << (size - 1)) - 1)
    negative = bits < 0 if size == 64 else bits >> (size - 1) == 1
    return np.where(negative, -magnitude, magnitude)


def to_float32(tensor: HostTensor) -> npt.NDArray[np.float32]:
    """A bfloat16, float16 or float32 tensor as float32, shaped, of its own."""
    match tensor.dtype:
        case "bfloat16":
            wide = (tensor.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        case "float16" | "float32":
            wide = tensor.data.view("<f2" if tensor.dtype == "float16" else "<f4").astype(np.float32)
        case _:
            raise ConfigError("cannot be computed with", field="dtype", value=tensor.dtype, remedy="one of bfloat16, float16, float32")
    return wide.reshape(tensor.shape)


def from_float32(array: npt.NDArray[np.float32], dtype: str) -> HostTensor:
    """Rounded to nearest, ties to even; NaN stays NaN, too large becomes infinite."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array).view(np.uint32)
        # Adding just under half of what is cut off, and one more where the last kept bit is odd, rounds ties to even.
        rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
        rounded[np.isnan(array)] = 0x7FC0
        return HostTensor.from_numpy(rounded, "bfloat16")
    with np.errstate(over="ignore"):
        return HostTensor.from_numpy(array.astype({"float16": "<f2", "float32": "<f4"}[dtype]), dtype)


@cache
def _table(dtype: str) -> npt.NDArray[np.float64]:
    bits = np.arange(256)
    if dtype == "float8_e8m0fnu":
        return np.where(bits == 255, np.nan, np.ldexp(1.0, bits - 127))
    fraction_bits, bias = (3, 7) if dtype == "float8_e4m3fn" else (2, 15)
    fraction = (bits & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    exponent = (bits & 0x7F) >> fraction_bits
    size = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    if dtype == "float8_e4m3fn":
        size[(bits & 0x7F) == 0x7F] = np.nan  # no infinities: one NaN of each sign
    else:
        top = exponent == 31
        size[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    return np.where(bits >= 128, -size, size)
