"""Texts for a drafter to learn from: what a run recorded, or what the model samples now on the run's tasks.

A drafter guesses what its target would sample, so texts of the target itself, on its own tasks and at its own temperature, are what it should see; others' texts teach it
others' words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from driftline.environments.source import MixturePart, load_source
from driftline.messages.types import Group, Sampling, Trajectory
from driftline.models.causal_lm import CausalLM
from driftline.models.drafter.text import Text
from driftline.models.tokenizer import Tokenizer
from driftline.services.config import Config
from driftline.services.replay.reader import Recording
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.randomness import member_key
from driftline.services.rollout.runner import runner_for

__all__ = ["Grouped", "recorded", "self_sampled", "text_of"]


@dataclass(frozen=True)
class Grouped:
    """A text and the group it is of."""

    text: Text
    group: str


def text_of(trajectory: Trajectory, seed: int) -> Text:
    """With the key of its draws in a group of that seed."""
    return Text(trajectory.tokens, trajectory.prompt_tokens, trajectory.temperature, member_key(seed, trajectory.group, trajectory.member))


def recorded(files: Iterable[Path]) -> Iterator[Grouped]:
    """The trajectories of recordings that `driftline record` wrote. ConfigError and IntegrityError where a file is none."""
    for file in files:
        recording = Recording.open(file)
        for step in recording.steps():
            for group in recording.groups(step):
                yield from (Grouped(text_of(member.trajectory, group.group.seed), group.group.group) for member in group.members)


def self_sampled(config: Config, model: CausalLM, tokenizer: Tokenizer, *, first: int, groups: int, members: int, max_tokens: int = 0) -> list[Grouped]:
    """Sampled by `model` on tasks `first` .. `first + groups` of the run's tasks, at its temperature, `max_tokens` long at most (0: the run's)."""
    tasks = config.tasks
    mixture = [MixturePart(part.family, part.params, part.weight, part.source) for part in tasks.mixture]
    source = load_source(tasks.source, tasks.family, tasks.params, mixture=mixture, heldout_seed=tasks.heldout_seed, few_shot=tasks.few_shot)
    sampling = Sampling(temperature=config.sampling.temperature, max_tokens=max_tokens or config.sampling.max_tokens)
    engine = Engine(model, version=0, max_batch=config.rollout.max_batch, tokenizer=tokenizer, runner=runner_for)
    seed, done = config.run.seed, list[Trajectory]()
    for index in range(first, first + groups):
        engine.submit(Group(run="drafter", group=f"g{index}", index=index, task=source.task(index, seed), members=members, sampling=sampling, seed=seed))
    while not engine.idle:
        done += engine.step()
    done.sort(key=lambda trajectory: (trajectory.index, trajectory.member))
    return [Grouped(text_of(trajectory, seed), trajectory.group) for trajectory in done]
