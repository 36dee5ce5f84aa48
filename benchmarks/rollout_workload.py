"""The rollouts that the benchmarks run: trajectories that branch from shared prompts, alternate sampled text and tool output, and grow long.

What a trajectory says next is a function of (seed, trajectory, turn) and of what was sampled, whatever the order in which an engine finishes things. Tools are
synthetic: random tokens, or a text that says the same again and again, after a number of the engine's steps.
"""

from __future__ import annotations

import heapq
import time
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from driftline.messages.types import Sampling
from driftline.services.rollout.engine import Completion, Request
from driftline.services.rollout.randomness import member_key

__all__ = ["Answer", "Run", "Sampler", "Workload", "drive"]


class Sampler(Protocol):
    @property
    def idle(self) -> bool: ...
    def submit_request(self, request: Request) -> None: ...
    def step(self) -> object: ...
    def take_completions(self) -> list[Completion]: ...


class Workload(NamedTuple):
    """`system` tokens that all prompts begin with, `task` tokens that the `members` of a group share; a turn samples `sampled` tokens and a tool adds `tool`. At turn
    `branch` (0: never) every other member drops what it did and goes on from its neighbour's. A tool takes up to `tool_steps` steps of the engine; `slow`:
    one trajectory's takes that many."""

    trajectories: int = 128
    turns: int = 50
    members: int = 8
    system: int = 1024
    task: int = 512
    sampled: int = 20
    tool: int = 12
    branch: int = 25
    tool_steps: int = 4
    slow: int = 0
    repeats: bool = False
    temperature: float = 1.0
    vocabulary: int = 256
    seed: int = 0

    @property
    def longest(self) -> int:
        return self.system + self.task + self.turns * (self.sampled + self.tool)

    @property
    def mean_prompt(self) -> float:
        return self.system + self.task + (self.turns - 1) / 2 * (self.sampled + self.tool)

    @property
    def best_hit_rate(self) -> float:
        """Of prompt tokens, of a cache that forgets nothing: a token is computed once, and the last of every prompt is computed for it."""
        groups = -(-self.trajectories // self.members)
        first = self.system + groups * self.task + self.trajectories
        missed = first + self.trajectories * (self.turns - 1) * (self.tool + 1)
        return 1 - missed / (self.trajectories * self.turns * self.mean_prompt)

    def text(self, *name: int, length: int) -> array[int]:
        rng = np.random.default_rng([self.seed, *name])
        if self.repeats:
            return array("i", np.resize(np.random.default_rng(self.seed).integers(0, self.vocabulary, 24), length).tolist())
        return array("i", rng.integers(0, self.vocabulary, length).tolist())

    def prompt(self, trajectory: int) -> array[int]:
        return self.text(0, length=self.system) + self.text(1, trajectory // self.members, length=self.task)

    def elder(self, trajectory: int) -> int | None:
        """Whose history it goes on from at turn `branch`."""
        return trajectory - 1 if self.branch and trajectory % self.members % 2 else None

    def tool_of(self, trajectory: int, turn: int) -> tuple[array[int], int]:
        """What the tool says after this turn, and after how many steps."""
        text = self.text(2, trajectory, turn, length=self.tool)
        slow = self.slow and trajectory == 0
        return text, self.slow if slow else int(np.random.default_rng([self.seed, 3, trajectory, turn]).integers(0, self.tool_steps + 1))


class Answer(NamedTuple):
    tokens: np.ndarray
    logprobs: np.ndarray


class _Mark(NamedTuple):
    """After a step: seconds since the start, tokens sampled, mean tokens of the histories."""

    seconds: float
    tokens: int
    length: float


@dataclass
class Run:
    """What came of it. `whole`: every turn was done before the time was over. tokens: of turns that were; sampled: all, where the engine counts them. active:
    rows that ran in each step, where it says so."""

    seconds: float = 0.0
    tokens: int = 0
    sampled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    turns: int = 0
    whole: bool = False
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    marks: list[_Mark] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    stale: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.sampled / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    def by_length(self, parts: int = 5) -> list[tuple[float, float]]:
        """(mean history, tokens a second) of as many equal parts of the run's tokens."""
        rates: list[tuple[float, float]] = []
        edges = np.linspace(0, self.marks[-1].tokens if self.marks else 0, parts + 1)
        begin = _Mark(0.0, 0, self.marks[0].length if self.marks else 0.0)
        for edge in edges[1:]:
            end = next((mark for mark in self.marks if mark.tokens >= edge), None)
            if end is None or end.tokens == begin.tokens:
                continue
            rates.append(((begin.length + end.length) / 2, (end.tokens - begin.tokens) / max(1e-9, end.seconds - begin.seconds)))
            begin = end
        return rates


@dataclass
class _Trajectory:
    history: array[int]
    turn: int = 0
    sampled: int = 0


def drive(sampler: Sampler, load: Workload, *, limit_s: float, keep: bool = False) -> Run:
    """Run the workload, or as much of it as ends in `limit_s`. `keep` the answers."""
    run = Run()
    trajectories = [_Trajectory(load.prompt(i)) for i in range(load.trajectories)]
    after_branch: dict[int, array[int]] = {}  # of a trajectory that others may go on from: its history after that turn
    tools: list[tuple[int, int]] = []  # (step, trajectory): the tool is done
    held: dict[int, int] = {}  # elder: who waits for it
    running: dict[str, int] = {}
    steps, total = 0, sum(len(t.history) for t in trajectories)

    def ask(index: int) -> None:
        trajectory = trajectories[index]
        request = Request(
            f"{index}/{trajectory.turn}", trajectory.history, Sampling(temperature=load.temperature, max_tokens=load.sampled),
            member_key(load.seed, str(index // load.members), index % load.members), first_draw=trajectory.sampled, session=f"t{index}", stop_ids=(),
        )
        running[request.id] = index
        sampler.submit_request(request)

    def branched(index: int) -> bool:
        """Whether it can go on now."""
        elder = load.elder(index)
        if trajectories[index].turn != load.branch or elder is None:
            return True
        if elder not in after_branch:
            held[elder] = index
            return False
        text, _ = load.tool_of(index, load.branch - 1)
        trajectories[index].history = after_branch[elder] + text
        return True

    before = getattr(sampler, "tokens_sampled", 0)
    began = time.perf_counter()
    for index in range(load.trajectories):
        ask(index)
    while running or tools or held:
        elapsed = time.perf_counter() - began
        if elapsed > limit_s:
            break
        if not running and tools:
            steps = max(steps, tools[0][0])
        while tools and tools[0][0] <= steps:
            index = heapq.heappop(tools)[1]
            if branched(index):
                ask(index)
        if running:
            at = time.perf_counter()
            sampler.step()
            run.step_s.append(time.perf_counter() - at)
            run.active.append(getattr(sampler, "active", len(running)))
        steps += 1
        for done in sampler.take_completions():
            index = running.pop(done.id)
            trajectory = trajectories[index]
            run.turns, run.tokens = run.turns + 1, run.tokens + len(done.tokens)
            run.prompt_tokens, run.cached_tokens = run.prompt_tokens + done.prompt_tokens, run.cached_tokens + done.cached_tokens
            if keep:
                run.answers[index, trajectory.turn] = Answer(done.tokens, done.logprobs)
            said = array("i", done.tokens.tolist())
            text, wait = load.tool_of(index, trajectory.turn)
            trajectory.turn, trajectory.sampled = trajectory.turn + 1, trajectory.sampled + len(said)
            if trajectory.turn == load.branch and load.elder(index) is None:
                after_branch[index] = trajectory.history + said
                if index in held:
                    heapq.heappush(tools, (steps, held.pop(index)))
            trajectory.history = trajectory.history + said + text
            total += len(said) + len(text)
            if trajectory.turn < load.turns:
                heapq.heappush(tools, (steps + wait, index))
        run.sampled = getattr(sampler, "tokens_sampled", run.tokens + before) - before
        run.marks.append(_Mark(time.perf_counter() - began, run.sampled, total / len(trajectories)))
    run.seconds = time.perf_counter() - began
    run.whole = run.turns == load.trajectories * load.turns
    return run
