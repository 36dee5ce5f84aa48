"""Counter-based randomness: the draw at a position is a function of (run seed, group, member, position) and of nothing else.

Whatever the batch, the engine or the order of arrival, a redelivered group samples the same tokens under the same version. A draw is splitmix64's
output function applied twice to key + position (Steele, Lea, Flood 2014), scaled to 53 bits. On a device the same draws come from integers of the same width, bit
for bit, so that a step need not wait for the host.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash

__all__ = ["device_uniforms", "member_key", "uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN64, _M1_64, _M2_64 = (int(x.view(np.int64)) for x in (_GOLDEN, _M1, _M2))
"""The same bits as signed numbers: torch has no arithmetic of unsigned ones, and products and sums of both wrap alike."""


def member_key(seed: int, group: str, member: int) -> int:
    """64-bit key of one member's stream."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{group}/{member}".encode())


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [N] in [0, 1): the draw of each key (uint64 [N]) at each position (int [N])."""
    with np.errstate(over="ignore"):
        counter = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        bits = _mix(_mix(counter) + _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits with zeros from the left, where torch fills in the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_on_device(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * _M1_64
    x = (x ^ _shifted(x, 27)) * _M2_64
    return x ^ _shifted(x, 31)


def device_uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`uniforms` where the numbers are: keys int64 (the bits of the uint64) and positions int64, of shapes that broadcast; float64 in [0, 1), equal to the last bit."""
    counter = keys + (positions + 1) * _GOLDEN64
    bits = _mix_on_device(_mix_on_device(counter) + _GOLDEN64)
    return _shifted(bits, 11).double() * 2.0**-53
