"""Several sources drawn by weight.

Guarantees: which part serves an index depends on (index, seed) only; each part sees each index at most once, so it never
repeats a seed; every part contributes its share of the held-out tasks, at least one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from driftline.environments.source import TaskSource
from driftline.messages.errors import ConfigError
from driftline.messages.types import Task

__all__ = ["MixtureSource", "shares"]


@dataclass(frozen=True)
class MixtureSource:
    sources: tuple[TaskSource, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[TaskSource, float]]) -> MixtureSource:
        for number, (_, weight) in enumerate(parts):
            if not (math.isfinite(weight) and weight > 0):
                raise ConfigError(
                    "a weight is a positive number", field=f"tasks.mixture[{number}].weight", value=weight, remedy="try 1.0"
                )
        return cls(tuple(source for source, _ in parts), tuple(weight for _, weight in parts))

    def task(self, index: int, seed: int) -> Task:
        unit = xxhash.xxh3_64_intdigest(f"mixture/{seed}/{index}".encode()) / 2**64
        bounds = list(itertools.accumulate(self.weights))
        part = next(i for i, bound in enumerate(bounds) if unit * bounds[-1] < bound or i == len(bounds) - 1)
        return self.sources[part].task(index, seed)

    def heldout(self, count: int) -> list[Task]:
        found: dict[str, Task] = {}
        for source, share in zip(self.sources, shares(count, self.weights), strict=True):
            found.update((task.id, task) for task in source.heldout(share))
        return list(found.values())


def shares(count: int, weights: Sequence[float]) -> list[int]:
    """`count` split by weight, largest remainders first, at least one each."""
    total = sum(weights)
    exact = [count * weight / total for weight in weights]
    floors = [max(1, math.floor(share)) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (math.floor(exact[i]) - exact[i], i))
    for i in by_remainder[: max(0, count - sum(floors))]:
        floors[i] += 1
    return floors
