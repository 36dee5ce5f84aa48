"""The benchmarks' workload: every trajectory's text is its own whatever the order, branches go on from their neighbour's history, and rates count what was done."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from driftline.messages.types import Finish
from driftline.services.rollout.engine import Completion, Request

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from rollout_workload import Run, Workload, drive

LOAD = Workload(trajectories=8, turns=4, members=4, system=6, task=3, sampled=2, tool=3, branch=2, tool_steps=3)


@dataclass
class Scripted:
    """Answers each request with tokens of its key and position, so many a step, newest or oldest first."""

    newest: bool = False
    a_step: int = 1
    asked: list[Request] = field(default_factory=list)
    seen: dict[str, Sequence[int]] = field(default_factory=dict)
    done: list[Completion] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return not self.asked

    def submit_request(self, request: Request) -> None:
        self.asked.append(request)
        self.seen[request.id] = list(request.tokens)

    def step(self) -> None:
        for _ in range(min(self.a_step, len(self.asked))):
            request = self.asked.pop(-1 if self.newest else 0)
            count = request.sampling.max_tokens
            tokens = np.array([(request.key + request.first_draw + i) % 250 for i in range(count)], dtype=np.int32)
            self.done.append(Completion(request.id, tokens, np.zeros(count, np.float32), np.zeros(count, np.int32), None, Finish.LENGTH, len(request.tokens), 5, (0,)))

    def take_completions(self) -> list[Completion]:
        done, self.done = self.done, []
        return done


def test_what_is_asked_does_not_depend_on_the_order_of_answers() -> None:
    one, other = Scripted(), Scripted(newest=True, a_step=3)
    runs = [drive(sampler, LOAD, limit_s=60) for sampler in (one, other)]
    assert one.seen == other.seen
    assert [(run.turns, run.tokens, run.whole) for run in runs] == [(32, 64, True)] * 2


def test_members_share_their_prompt_and_every_trajectory_the_system() -> None:
    sampler = Scripted()
    drive(sampler, LOAD, limit_s=60)
    first = [sampler.seen[f"{i}/0"] for i in range(8)]
    assert first[0] == first[3] != first[4]
    assert first[0][:6] == first[4][:6]


def test_every_other_member_goes_on_from_its_neighbours_history_at_the_branch() -> None:
    sampler = Scripted(newest=True)
    drive(sampler, LOAD, limit_s=60)
    history = 6 + 3 + 2 * 2 + 3  # two turns sampled, one tool
    for elder in (0, 2, 4, 6):
        assert sampler.seen[f"{elder}/2"][:history] == sampler.seen[f"{elder + 1}/2"][:history]
        assert sampler.seen[f"{elder}/2"][history:] != sampler.seen[f"{elder + 1}/2"][history:]
        assert sampler.seen[f"{elder}/1"][9:11] != sampler.seen[f"{elder + 1}/1"][9:11]


def test_a_turn_begins_with_all_of_the_one_before() -> None:
    sampler = Scripted()
    drive(sampler, LOAD._replace(branch=0), limit_s=60)
    for i in range(8):
        for turn in range(1, 4):
            before = sampler.seen[f"{i}/{turn - 1}"]
            assert sampler.seen[f"{i}/{turn}"][: len(before)] == before
            assert len(sampler.seen[f"{i}/{turn}"]) == len(before) + 5


def test_the_best_hit_rate_is_that_of_computing_each_token_once() -> None:
    load = LOAD._replace(branch=0)
    prompts = 8 * sum(9 + 5 * turn for turn in range(4))
    computed = 6 + 2 * 3 + 8 + 8 * 3 * 4  # the system, two tasks, a last token each, then tool and last token of each turn
    assert load.best_hit_rate == pytest.approx(1 - computed / prompts)
    run = drive(Scripted(), load, limit_s=60)
    assert run.prompt_tokens == prompts
    assert run.hit_rate == pytest.approx(32 * 5 / prompts)


def test_the_time_ends_a_run_and_it_says_so() -> None:
    run = drive(Scripted(), LOAD, limit_s=0.0)
    assert not run.whole
    assert run.turns == 0
    assert run.tokens_per_s == 0


def test_rates_by_length_cover_all_tokens_in_equal_parts() -> None:
    run = drive(Scripted(), LOAD, limit_s=60)
    parts = run.by_length(4)
    assert len(parts) == 4
    assert [length for length, _ in parts] == sorted(length for length, _ in parts)
    assert Run().by_length() == []
