"""Every family of reasoning-gym as a task source and scorer.

Guarantees: a draw depends on (family, parameters, seed) and on nothing else: not on the hash seed, not on global random state,
not on what was drawn before. A task carries only those three; the scorer makes the entry again from them, so nothing that a
message says about the right answer is trusted, and a library that would make another question is noticed and refused. A family's
own parameters are the library's; one more, `credit`, is ours: "exact" gives nothing for an answer that is only partly right. Text from a model is never evaluated as code, and whatever it does to the library's scorer is worth 0 and never an exception.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
from reasoning_gym.factory import DATASETS, create_dataset

from driftline.environments.reasoning_gym_guards import make_iteration_ordered, patch_library, refuses
from driftline.environments.source import REASONING_GYM, Score, task_id
from driftline.environments.split import is_heldout
from driftline.messages.errors import ConfigError, IntegrityError
from driftline.messages.types import Task

__all__ = [
    "NO_ORACLE",
    "Credit",
    "ReasoningGymMaker",
    "ReasoningGymScorer",
    "extract_answer",
    "families",
    "is_heldout",
    "oracle",
]

# A mixture of other families with its own sampling; `[[tasks.mixture]]` does that here, with the content split applied.
_NOT_A_FAMILY = frozenset({"composite"})

# The library keeps no solution for these, it only checks one: they can be trained on, and not used for supervised warm-up.
NO_ORACLE = frozenset({"boxnet", "rush_hour"})

# These decide in the constructor what item i will be, so a new seed needs a new object. acre draws three kinds of question as
# 60/20/20 percent of the size: five is the smallest size that has them all, and item 0 of the shuffle is any of them.
_REBUILT = {"acre": 5, "gsm_symbolic": 1, "list_functions": 1}

_RESERVED = ("seed", "size")

_CREDIT = "credit"


class Credit(StrEnum):
    """What an answer that is not right is worth. Many families give a part of 1 to a text that contains the right answer, which a policy that
    cannot find the answer learns to use: it lists all of them."""

    PARTIAL = "partial"
    EXACT = "exact"


# One generator at a time: seeds live on the shared dataset object, and some families draw from the global generators.
_LOCK = threading.Lock()

patch_library()


def families() -> list[str]:
    return sorted(set(DATASETS) - _NOT_A_FAMILY)


@dataclass(frozen=True)
class ReasoningGymMaker:
    """One family with its parameters, checked."""

    family: str
    params: Mapping[str, Any]
    credit: Credit = Credit.PARTIAL

    @classmethod
    def of(cls, family: str, params: Mapping[str, Any]) -> ReasoningGymMaker:
        if family in _NOT_A_FAMILY:
            raise ConfigError(
                "is not a family of its own", field="tasks.family", value=family, remedy="list its parts under [[tasks.mixture]]"
            )
        if family not in DATASETS:
            raise ConfigError(
                "reasoning-gym has no such family", field="tasks.family", value=family, remedy=f"one of {', '.join(families())}"
            )
        credit = params.get(_CREDIT, Credit.PARTIAL)
        if credit not in list(Credit):
            raise ConfigError("no such credit", field=f"tasks.params.{_CREDIT}", value=credit, remedy=f"one of {', '.join(Credit)}")
        own = {name: value for name, value in params.items() if name != _CREDIT}
        _check_params(family, own)
        return cls(family, own, Credit(credit))

    def draw(self, number: int, seed: int) -> Task:
        key = json.dumps(self.params, sort_keys=True)
        entry = _entry(self.family, key, seed)
        prompt, answer = str(entry["question"]), oracle(self.family, entry)
        return Task(
            id=task_id(REASONING_GYM, self.family, prompt, answer),
            source=REASONING_GYM,
            family=self.family,
            prompt=prompt,
            answer=answer,
            metadata={"params": key, "seed": seed, **({_CREDIT: self.credit.value} if self.credit is Credit.EXACT else {})},
        )


@dataclass(frozen=True)
class ReasoningGymScorer:
    def score(self, task: Task, completion: str) -> Score:
        family, key, seed = task.family, str(task.metadata["params"]), int(task.metadata["seed"])
        entry = copy.deepcopy(_entry(family, key, seed))  # some scorers write into the entry
        if entry["question"] != task.prompt:
            raise IntegrityError(
                "regenerating the task gave another question",
                field="task.id",
                value=task.id,
                remedy="dispatcher and grader must run the same version of reasoning-gym",
            )
        answer = extract_answer(completion)
        if refuses(family, answer):
            return Score(0.0, {"exact": 0.0, "refused": 1.0})
        try:
            with _LOCK, _randomness(seed):
                reward = float(_dataset(family, key, seed).score_answer(answer, entry))
        except MemoryError:
            raise  # the process is in doubt, not the answer
        except Exception:  # whatever the library does with junk, the junk is worth nothing
            return Score(0.0, {"exact": 0.0, "scorer_error": 1.0})
        if not math.isfinite(reward):
            return Score(0.0, {"exact": 0.0, "scorer_error": 1.0})
        reward = min(1.0, max(0.0, reward))
        exact = float(reward == 1.0)
        return Score(exact if task.metadata.get(_CREDIT) == Credit.EXACT else reward, {"exact": exact})


def extract_answer(completion: str) -> str:
    """The answer in a completion: inside the last <answer> tags where there are any, else the whole text, stripped."""
    _, tag, tail = completion.rpartition("<answer>")
    if tag and "</answer>" in tail:
        return tail.partition("</answer>")[0].strip()
    return completion.strip()


def oracle(family: str, entry: Mapping[str, Any]) -> str | None:
    """A right answer, as text that the family's scorer accepts; None for the families in NO_ORACLE."""
    if entry["answer"] is not None:
        return str(entry["answer"])
    metadata = entry["metadata"]
    match family:
        case "graph_color":
            return json.dumps(metadata["possible_answer"])
        case "propositional_logic":
            return str(metadata["example_answer"])
        case "rubiks_cube":
            return str(metadata["example_correct_answer"])
    return None


def _check_params(family: str, params: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(DATASETS[family][1]) if field.name not in _RESERVED]
    for name, value in params.items():
        if name in _RESERVED:
            raise ConfigError("is chosen per task", field=f"tasks.params.{name}", value=value, remedy="remove it")
        if name not in known:
            raise ConfigError(
                f"{family} has no such parameter", field=f"tasks.params.{name}", value=value, remedy=f"one of {', '.join((*known, _CREDIT))}"
            )
    try:
        key = json.dumps(params, sort_keys=True)
        _entry(family, key, 0)
    except Exception as error:  # the library raises what it likes on a bad value; all of it is the run file's fault
        raise ConfigError(
            f"{family} refuses these parameters: {type(error).__name__}: {error}",
            field="tasks.params",
            value=dict(params),
            remedy="see the family's config class in reasoning-gym",
        ) from error


# Large enough for the groups in flight of a grader; an entry is a few kilobytes.
@lru_cache(maxsize=512)
def _entry(family: str, key: str, seed: int) -> dict[str, Any]:
    with _LOCK, _randomness(seed):
        dataset = _dataset(family, key, seed)
        dataset.seed = dataset.config.seed = seed  # all derive item i from seed + i; survo reads the config's
        entry: dict[str, Any] = dataset[0]
    return entry


def _dataset(family: str, key: str, seed: int) -> Any:
    return _construct(family, key, seed) if family in _REBUILT else _shared(family, key)


@lru_cache(maxsize=64)
def _shared(family: str, key: str) -> Any:
    return _construct(family, key, 0)


def _construct(family: str, key: str, seed: int) -> Any:
    dataset = create_dataset(family, seed=seed, size=_REBUILT.get(family, 1), **json.loads(key))
    return make_iteration_ordered(family, dataset)


@contextmanager
def _randomness(seed: int) -> Iterator[None]:
    """The global generators, seeded for one item and put back: some families draw from them."""
    state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
