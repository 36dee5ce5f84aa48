"""What pairing is worth: groups in lockstep, as a cost model and a workload say. Deterministic; no clock but its own.

A trajectory alternates: a piece of prompt (its tool's output), tokens one by one, a tool that takes its time. A step lasts as long as its slowest group:

    decode_s + decode_row_s * rows + (prefill_s + prefill_token_s * tokens, if it computes prompts)

The four numbers are measured on an engine (`Costs.fitted`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from driftline.services.rollout.pairing.rules import Load, Pairing

__all__ = ["Costs", "Outcome", "Workload", "simulate"]


class Costs(NamedTuple):
    """Seconds: of a step that decodes, and for each of its rows; of computing prompts at all, and for each of their tokens."""

    decode_s: float
    decode_row_s: float
    prefill_s: float
    prefill_token_s: float

    @staticmethod
    def fitted(decode: Sequence[tuple[int, float]], prefill: Sequence[tuple[int, float]]) -> Costs:
        """From (rows, seconds) and (tokens, seconds) of at least two sizes each: least squares, nothing below zero. Raises ValueError."""
        lines: list[float] = []
        for name, points in (("decode", decode), ("prefill", prefill)):
            if len({size for size, _ in points}) < 2:
                raise ValueError(f"{name} was measured at {len({size for size, _ in points})} sizes; measure at least two")
            sizes, seconds = np.array(points, dtype=np.float64).T
            slope = max(0.0, float(np.polyfit(sizes, seconds, 1)[0]))
            lines += [max(0.0, float((seconds - slope * sizes).mean())), slope]
        return Costs(*lines)

    def of(self, rows: int, tokens: int) -> float:
        decode = self.decode_s + self.decode_row_s * rows if rows else 0.0
        return decode + (self.prefill_s + self.prefill_token_s * tokens if tokens else 0.0)


class Workload(NamedTuple):
    """Of each group: trajectories of `turns` turns. A turn is `prompt` tokens to compute, `sampled` tokens, and a tool of `tool_s` in the mean (exponential).
    At most `prefill_tokens` a step and group."""

    trajectories: int = 64
    turns: int = 20
    prompt: int = 256
    sampled: int = 32
    tool_s: float = 0.5
    prefill_tokens: int = 2048


class Outcome(NamedTuple):
    """seconds of the whole; tokens sampled; steps, and those in which some group computed prompts; wait_s: of prompts until their first piece, in order."""

    seconds: float
    tokens: int
    steps: int
    long_steps: int
    wait_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def wait(self, quantile: float) -> float:
        return float(np.quantile(self.wait_s, quantile))


class _Group:
    def __init__(self, load: Workload, rng: np.random.Generator) -> None:
        self.load, self._rng = load, rng
        self.coming = [(float(rng.exponential(load.tool_s)), i) for i in range(load.trajectories)]
        heapq.heapify(self.coming)
        self.turns = [0] * load.trajectories
        self.prompts: deque[tuple[int, float]] = deque()  # trajectory, since when
        self.left = 0  # of the first of them
        self.rows: dict[int, int] = {}  # trajectory: tokens still to sample
        self.waits: list[float] = []

    @property
    def done(self) -> bool:
        return not (self.coming or self.prompts or self.rows)

    def arrive(self, now: float) -> None:
        while self.coming and self.coming[0][0] <= now:
            at, trajectory = heapq.heappop(self.coming)
            if not self.prompts:
                self.left = self.load.prompt
            self.prompts.append((trajectory, at))

    @property
    def tokens(self) -> int:
        return self.left + self.load.prompt * (len(self.prompts) - 1) if self.prompts else 0

    def prefill(self, now: float) -> tuple[int, list[int]]:
        """Tokens computed in the step that begins now, and the trajectories whose prompts they complete."""
        budget, complete = self.load.prefill_tokens, []
        while self.prompts and budget > 0:
            trajectory, since = self.prompts[0]
            if self.left == self.load.prompt:
                self.waits.append(now - since)
            taken = min(budget, self.left)
            budget, self.left = budget - taken, self.left - taken
            if not self.left:
                complete.append(trajectory)
                self.prompts.popleft()
                self.left = self.load.prompt if self.prompts else 0
        return self.load.prefill_tokens - budget, complete

    def advance(self, end: float, complete: Sequence[int]) -> int:
        """The step ended: every row has a token more, and completed prompts their first. Returns the tokens sampled."""
        sampled = len(self.rows) + len(complete)
        self.rows |= dict.fromkeys(complete, self.load.sampled)
        beside = list(self.rows)
        for trajectory in beside:
            self.rows[trajectory] -= 1
            if self.rows[trajectory] <= 0:
                del self.rows[trajectory]
                self.turns[trajectory] += 1
                if self.turns[trajectory] < self.load.turns:
                    heapq.heappush(self.coming, (end + float(self._rng.exponential(self.load.tool_s)), trajectory))
        return sampled


def simulate(pairing: Pairing, costs: Costs, load: Workload, *, seed: int = 0) -> Outcome:
    """Run the workload of every group to its end. `Pairing(groups, 0.0)` is what engines do that do not pair. Raises ValueError for costs of nothing."""
    if costs.of(1, 0) <= 0 or costs.of(0, 1) <= 0:
        raise ValueError(f"{costs}: a step of no time never ends; measure the costs")
    groups = [_Group(load, np.random.default_rng([seed, i])) for i in range(pairing.groups)]
    now, tokens, steps, long_steps = 0.0, 0, 0, 0
    while not all(group.done for group in groups):
        for group in groups:
            group.arrive(now)
        loads = [Load(len(group.rows), group.tokens) for group in groups]
        if not any(load.rows or load.tokens for load in loads):
            now = min(group.coming[0][0] for group in groups if group.coming)
            continue
        chosen = pairing.step(now, loads).groups
        computed = [group.prefill(now) if i in chosen else (0, []) for i, group in enumerate(groups)]
        end = now + max(costs.of(len(group.rows), count) for group, (count, _) in zip(groups, computed, strict=True))
        tokens += sum(group.advance(end, complete) for group, (_, complete) in zip(groups, computed, strict=True))
        now, steps, long_steps = end, steps + 1, long_steps + bool(chosen)
    return Outcome(now, tokens, steps, long_steps, tuple(wait for group in groups for wait in group.waits))
