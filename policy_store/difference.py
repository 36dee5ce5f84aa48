"""Difference: what changed between two versions, tensor by tensor: how many elements, by how much, and by how many ulps.

Elements are compared as bits, so a NaN equals itself and -0.0 is a change of 0.0 (by no amount). Amounts are of the pairs in which
both are finite numbers. Unchanged tensors are left out; working memory is a few shards, whatever the tensors' sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from driftline.policy_store.floats import FLOATS, ordered, values
from driftline.policy_store.tensor import SHARD_BYTES, Bytes1D, HostTensor, State, tensor_digest

__all__ = ["Change", "Difference", "compare"]


class Change(StrEnum):
    VALUES = "values"
    LAYOUT = "layout"
    """Another dtype or shape: all elements count as changed."""
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True)
class Difference:
    """`largest` and `ulps` are the largest absolute difference and the largest distance in representable numbers (0 where there is
    no pair of finite numbers; `ulps` is None for integers); `not_finite` counts changed elements of which either side is no finite number."""

    name: str
    change: Change
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int
    largest: float
    ulps: int | None
    not_finite: int
    old_digest: str
    new_digest: str

    @property
    def share(self) -> float:
        return self.changed / self.elements if self.elements else 0.0


def compare(old: State, new: State, digests: tuple[Mapping[str, str], Mapping[str, str]] | None = None) -> list[Difference]:
    """What differs, most changed first. `digests`: the tensors' digests of both sides, where they are known: what has the same one
    need not even be in `old` or `new`."""
    before, after = digests or ({n: tensor_digest(n, t) for n, t in old.items()}, {n: tensor_digest(n, t) for n, t in new.items()})
    found = [
        _difference(name, old.get(name), new.get(name), before.get(name, ""), after.get(name, ""))
        for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)
    ]
    return sorted(found, key=lambda difference: (-difference.share, -difference.changed, difference.name))


def _difference(name: str, old: HostTensor | None, new: HostTensor | None, old_digest: str, new_digest: str) -> Difference:
    shown = new if new is not None else old
    assert shown is not None  # it has a digest on one side
    if old is None or new is None or old.layout != new.layout:
        change = Change.ADDED if old is None else Change.REMOVED if new is None else Change.LAYOUT
        return Difference(name, change, shown.dtype, shown.shape, shown.elements, shown.elements, 0.0, None, 0, old_digest, new_digest)
    changed = not_finite = 0
    largest, ulps = 0.0, 0
    for start in range(0, new.data.size, SHARD_BYTES):
        part = _part(new.dtype, new.width, old.data[start : start + SHARD_BYTES], new.data[start : start + SHARD_BYTES])
        changed, not_finite = changed + part[0], not_finite + part[3]
        largest, ulps = max(largest, part[1]), max(ulps, part[2])
    return Difference(name, Change.VALUES, new.dtype, new.shape, new.elements, changed, largest, ulps if new.dtype in FLOATS else None,
                      not_finite, old_digest, new_digest)


def _part(dtype: str, width: int, old: Bytes1D, new: Bytes1D) -> tuple[int, float, int, int]:
    """Of one shard: changed elements, largest difference, largest distance in ulps, changed elements that are not finite."""
    unsigned = np.dtype(f"<u{width}")
    at = np.flatnonzero(old.view(unsigned) != new.view(unsigned))
    if at.size == 0:
        return 0, 0.0, 0, 0
    a, b = (np.ascontiguousarray(side.view(unsigned)[at]).view(np.uint8) for side in (old, new))
    if dtype not in FLOATS:
        return int(at.size), _integers_apart(dtype, a, b), 0, 0
    x, y = values(dtype, a), values(dtype, b)
    finite = np.isfinite(x) & np.isfinite(y)
    if not finite.any():
        return int(at.size), 0.0, 0, int(at.size)
    with np.errstate(over="ignore"):
        amount = float(np.abs(x[finite] - y[finite]).max())
    # Two float64 of unlike signs may be more than 2**63 apart: as floats the distance stays the right order of magnitude.
    p, q = ordered(dtype, a)[finite], ordered(dtype, b)[finite]
    apart = int(np.abs(p.astype(np.float64) - q).max()) if dtype == "float64" and (np.sign(p) * np.sign(q) < 0).any() else int(np.abs(p - q).max())
    return int(at.size), amount, apart, int(at.size - np.count_nonzero(finite))


def _integers_apart(dtype: str, a: Bytes1D, b: Bytes1D) -> float:
    kind = "u1" if dtype == "bool" else f"<{'u' if dtype.startswith('u') else 'i'}{np.dtype(dtype).itemsize}"
    x: npt.NDArray[np.float64] = a.view(kind).astype(np.float64)
    return float(np.abs(x - b.view(kind)).max())
