"""What is done to a run, and when. A pure function of the seed: the same seed tells the same story on every machine.

Guarantees: every kind of process is killed at least `kills` times, spread over the whole run; the broker is stopped in order and killed as
often as `broker` says; faults name the version they follow, not a time, so a slow machine meets them at the same place in the run. `after_s`
is how long after that version, chosen so that kills fall into every part of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

__all__ = ["ENGINES", "KINDS", "LONG", "SHORT", "Act", "Fault", "Plane", "Story", "kills_by_kind", "kind_of", "schedule"]

KINDS = ("learner", "rollout", "grader", "dispatcher", "evaluator", "policy-store")
ENGINES = ("rollout-0", "rollout-1")

# Longer than the longest lease of work (20 s, the learner's) and than the learner's ownership (10 s).
LAPSE_S = (21.0, 24.0)
AFTER_S = 1.5
DOWN_S = 3.0


class Act(StrEnum):
    KILL = "kill"  # SIGKILL, once it serves
    KILL_STARTING = "kill_starting"  # SIGKILL, then again while the next one is starting
    PAUSE = "pause"  # SIGSTOP until its leases have lapsed, then SIGCONT
    CUT_OFF = "cut_off"  # its messages are held back by the network, both ways, until its leases have lapsed
    DUPLICATE = "duplicate"  # messages published again under ids of their own
    STOP_BROKER = "stop_broker"  # SIGTERM, then started again
    KILL_BROKER = "kill_broker"  # SIGKILL, then started again


class Plane(StrEnum):
    GROUPS = "groups"
    TRAJECTORIES = "trajectories"
    GRADED = "graded"


@dataclass(frozen=True)
class Fault:
    """`target` is a process name or, for duplicates, a plane. `seconds`: how long a pause or an outage lasts."""

    version: int
    after_s: float
    act: Act
    target: str
    seconds: float = 0.0
    count: int = 0


@dataclass(frozen=True)
class Story:
    """How much happens. The long form is the default; every list is of process names."""

    kills: int = 6
    broker: Sequence[Act] = (Act.STOP_BROKER, Act.KILL_BROKER)
    paused: Sequence[str] = ("rollout-0", "grader", "learner", "dispatcher")
    cut_off: Sequence[str] = ("rollout-1", "grader", "learner")
    duplicates: int = 6  # times per plane
    at_once: int = 8  # messages a time


LONG = Story()
SHORT = Story(kills=1, broker=(Act.KILL_BROKER,), paused=("rollout-0",), cut_off=(), duplicates=2)


def schedule(seed: int, steps: int, story: Story = LONG) -> tuple[Fault, ...]:
    """In order of version, and of time after it."""
    if steps < 4:
        raise ValueError(f"steps = {steps}: a story needs at least 4")
    rng = Random(f"chaos {seed} {steps}")
    faults: list[Fault] = []

    def moment(part: int, parts: int) -> tuple[int, float]:
        """Somewhere in the `part`-th of `parts` of the run; never after the last step but one."""
        first, last = 1, steps - 2
        share = (last - first + 1) / parts
        version = first + int(share * part + rng.random() * share)
        return min(version, last), round(rng.random() * AFTER_S, 3)

    for kind in KINDS:
        for number in range(story.kills):
            version, after = moment(number, story.kills)
            # Engines in turn, so that each of them dies; the one to begin with is drawn.
            target = ENGINES[(number + seed) % 2] if kind == "rollout" else kind
            act = Act.KILL_STARTING if rng.random() < 0.15 else Act.KILL
            faults.append(Fault(version, after, act, target))
    for act, names in ((Act.PAUSE, story.paused), (Act.CUT_OFF, story.cut_off)):
        for number, name in enumerate(rng.sample(list(names), len(names))):
            version, after = moment(number, len(names))
            faults.append(Fault(version, after, act, name, seconds=round(rng.uniform(*LAPSE_S), 2)))
    for number, act in enumerate(rng.sample(list(story.broker), len(story.broker))):
        version, after = moment(number, len(story.broker))
        faults.append(Fault(version, after, act, "nats-server", seconds=round(rng.random() * DOWN_S, 2)))
    for plane in Plane:
        for number in range(story.duplicates):
            version, after = moment(number, story.duplicates)
            faults.append(Fault(version, after, Act.DUPLICATE, plane, count=story.at_once))
    # A learner that has made its last version still has outcomes to write and the end to declare.
    faults.append(Fault(steps, round(rng.random() * 0.4, 3), Act.KILL, "learner"))
    return tuple(sorted(faults, key=lambda fault: (fault.version, fault.after_s)))


def kills_by_kind(faults: Sequence[Fault]) -> dict[str, int]:
    counts = Counter(dict.fromkeys(KINDS, 0))
    for fault in faults:
        if fault.act in (Act.KILL, Act.KILL_STARTING):
            counts[kind_of(fault.target)] += 2 if fault.act is Act.KILL_STARTING else 1
    return dict(counts)


def kind_of(name: str) -> str:
    return "rollout" if name in ENGINES else name
