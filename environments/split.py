"""Which tasks may be trained on: the split is by content, so no sampling order can leak a held-out question.

Guarantees: a question is held out exactly when the hash of its normalised text falls in the first eighth of the hash space,
whatever family, parameters, seed or process made it; `training_task` never returns such a question and `heldout_tasks` returns
only such questions, each text once; within a run (one seed) no two indices and no two attempts share an item seed.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator

import xxhash

from driftline.messages.errors import ConfigError
from driftline.messages.types import Task

__all__ = ["ATTEMPTS", "STRIDE", "Draw", "heldout_tasks", "is_heldout", "item_seed", "training_task"]

HELDOUT_ONE_IN = 8

# An index owns the draws index, index + STRIDE, index + 2 * STRIDE, ...: never another index's, since indices stay below STRIDE.
# STRIDE is prime so that a user's list indexed by `draw % len(list)` is walked and not revisited. 64 attempts all held out has
# probability 8**-64 unless the source hardly varies.
ATTEMPTS = 64
STRIDE = 33_554_393
_TRAINING_DRAWS = ATTEMPTS * STRIDE  # < 2**31; the held-out draws start above them

# After this many draws in a row without a new held-out question the source is taken to be exhausted.
_PATIENCE = 2048

Draw = Callable[[int, int], Task]
"""(draw, item seed) -> Task: one draw of a generator. `draw` counts, the seed is below 2**32 and unique to the draw."""


def is_heldout(question: str) -> bool:
    """Whether this question may never be trained on. Case, spacing and Unicode form do not matter."""
    text = " ".join(unicodedata.normalize("NFKC", question).casefold().split())
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) < 2**64 // HELDOUT_ONE_IN


def item_seed(draw: int, seed: int) -> int:
    """The seed of a draw: an odd multiplier makes draw -> seed a bijection of the 32-bit integers, so none repeats."""
    key = xxhash.xxh3_128_intdigest(seed.to_bytes(16, "little", signed=True))
    multiplier, offset = (key & 0xFFFFFFFF) | 1, (key >> 32) & 0xFFFFFFFF
    return (draw * multiplier + offset) % 2**32


def training_task(draw: Draw, index: int, seed: int) -> Task:
    """The training task at `index`: the first of the index's draws that is not held out."""
    if not 0 <= index < STRIDE:
        raise ConfigError(f"a task index is at least 0 and below {STRIDE}", field="index", value=index)
    for attempt in range(ATTEMPTS):
        number = index + attempt * STRIDE
        task = draw(number, item_seed(number, seed))
        if not is_heldout(task.prompt):
            return task
    raise ConfigError(
        f"{ATTEMPTS} draws in a row gave only held-out questions",
        field="tasks",
        value=task.prompt,
        remedy="use parameters (or a function) whose questions vary more",
    )


def heldout_tasks(draw: Draw, count: int, seed: int) -> list[Task]:
    """At most `count` distinct held-out tasks: fewer when the source has no more, ConfigError when it has none."""
    found: dict[str, Task] = {}
    unlucky = 0
    for number in _heldout_draws():
        if len(found) >= count or unlucky >= _PATIENCE:
            break
        task = draw(number, item_seed(number, seed))
        question = " ".join(task.prompt.split()).casefold()
        if is_heldout(task.prompt) and question not in found:
            found[question] = task
            unlucky = 0
        else:
            unlucky += 1
    if not found:
        raise ConfigError(
            f"none of {unlucky} draws is a held-out question (one distinct question in {HELDOUT_ONE_IN} is)",
            field="tasks",
            value=task.prompt,
            remedy="use parameters (or a function) whose questions vary more",
        )
    return list(found.values())


def _heldout_draws() -> Iterator[int]:
    return iter(range(_TRAINING_DRAWS, 2**32))
