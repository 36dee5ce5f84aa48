"""Make tests/replay/data/recorded.dlr again: python tests/replay/make_recording.py

A run of two steps of two groups of four members, sampled by the shipped policy as version 0, each with rewards that differ, trained by
the learner service and recorded. To be run when the shipped policy, the randomness of sampling, the arithmetic of a step or the format
changes.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from loop_cases import admit, grade, groups_of, head_at, running, sampled, tiny

from driftline.environments.source import load_scorer
from driftline.messages.memory import MemoryBus
from driftline.messages.types import Graded, Group
from driftline.policy_store.blobs import MemoryBlobs
from driftline.services.learner.service import LearnerService
from driftline.services.replay.record import Recorded, record
from driftline.services.runtime import run_topology
from driftline.services.starting import starting_config

FILE = Path(__file__).with_name("data") / "recorded.dlr"
RUN = "replay"
GROUPS = 4
CONFIG = tiny(RUN, run={"steps": 2}, tasks={"params": {"min_word_len": 7, "max_word_len": 8}}, sampling={"max_tokens": 12},
              learner={"probe_members": 0})


def graded_groups() -> list[tuple[Group, list[Graded]]]:
    """The first groups of the task source whose rewards differ."""
    scorer = load_scorer([CONFIG.tasks.source])
    chosen: list[tuple[Group, list[Graded]]] = []
    index = 0
    while len(chosen) < GROUPS:
        (group,) = groups_of(CONFIG, [index])
        index += 1
        members = []
        for trajectory in sampled([group]):
            still = trajectory.model_copy(update={"started_at": 0.0, "finished_at": 0.0})
            score = scorer.score(still.task, still.text)
            members.append(Graded(run=RUN, trajectory=still, reward=score.reward, components=score.components))
        if len({member.reward for member in members}) > 1:
            chosen.append((group, members))
    return chosen


async def make(path: Path) -> Recorded:
    parts, size = graded_groups(), CONFIG.run.groups_per_step
    model = starting_config(CONFIG)
    async with MemoryBus() as bus:
        blobs = MemoryBlobs()
        await bus.declare(run_topology(CONFIG))
        with tempfile.TemporaryDirectory() as folder:
            async with running(LearnerService(bus, blobs, CONFIG, Path(folder))) as task:
                for step in range(CONFIG.run.steps):
                    await head_at(bus, blobs, RUN, step)
                    part = parts[step * size : (step + 1) * size]
                    await admit(bus, [group for group, _ in part], at=0.0)
                    await grade(bus, [member for _, members in part for member in members])
                await task
        return await record(bus, blobs, CONFIG, model, path)


def main() -> None:
    FILE.parent.mkdir(exist_ok=True)
    FILE.unlink(missing_ok=True)
    torch.set_num_threads(1)
    print(asyncio.run(make(FILE)))


if __name__ == "__main__":
    main()
