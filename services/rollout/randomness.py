"""Counter-based randomness: the draw at a position is a function of (run seed, group, member, position) and of nothing else.

Whatever the batch, the engine or the order of arrival, a redelivered group samples the same tokens under the same version. A draw is splitmix64's
output function applied twice to key + position (Steele, Lea, Flood 2014), scaled to 53 bits.
"""

from __future__ import annotations

import numpy as np
import xxhash

__all__ = ["member_key", "uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


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
