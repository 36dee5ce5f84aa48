"""Which members go together: every member once, no more tokens than the budget, the same cut each time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_samples import RUN, grade, group

from driftline.messages.errors import ConfigError
from driftline.messages.types import Finish, Trajectory
from driftline.services.learner.assembler import BatchGroup
from driftline.services.learner.micro_batches import MicroBatch, by_groups, by_tokens, token_count


def trajectory(index: int, member: int, members: int, prompt: int, completion: int) -> Trajectory:
    length = prompt + completion
    mask = np.arange(length) >= prompt
    return Trajectory(
        run=RUN, group=f"g{index:08d}", member=member, members=members, index=index, task=group(index).task, prompt_tokens=prompt,
        tokens=np.arange(length, dtype=np.int32) + index, action_mask=mask, logprobs=np.zeros(length, dtype=np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32), finish=Finish.LENGTH,
    )


def batch(sizes: list[tuple[int, list[int]]]) -> tuple[BatchGroup, ...]:
    """(prompt tokens, completion tokens of each member) of each group."""
    return tuple(
        BatchGroup(group(i, len(lengths)), tuple(grade(trajectory(i, m, len(lengths), prompt, n), 0.0) for m, n in enumerate(lengths)), ())
        for i, (prompt, lengths) in enumerate(sizes)
    )


def tokens_of(part: MicroBatch) -> int:
    return sum(token_count(range(len(g.members)), g) for g in part.groups)


def named(part: MicroBatch) -> list[tuple[int, str, int]]:
    members = [m.trajectory for g in part.groups for m in g.members]
    return [(number, t.group, t.member) for number, t in zip(part.numbers, members, strict=True)]


SIZES = st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 15), min_size=1, max_size=5)), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(SIZES, st.integers(1, 60))
def test_every_member_is_somewhere_once_and_no_part_is_over_the_budget_but_one_member_alone(sizes: list[tuple[int, list[int]]], budget: int) -> None:
    groups = batch(sizes)
    parts = by_tokens(groups, budget)
    everyone = [(number, m.trajectory.group, m.trajectory.member) for number, m in enumerate(m for g in groups for m in g.members)]
    assert sorted(name for part in parts for name in named(part)) == everyone
    for part in parts:
        assert tokens_of(part) <= budget or len(part.numbers) == 1
        assert list(part.numbers) == sorted(part.numbers)
    assert parts == by_tokens(groups, budget)


def test_a_prompt_counts_once_for_the_members_that_share_it() -> None:
    (one,) = batch([(11, [3, 4])])
    assert token_count((0, 1), one) == 10 + 3 + 4
    assert token_count((0,), one) == 10 + 3
    assert len(by_tokens((one,), 17)) == 1
    assert [named(p) for p in by_tokens((one,), 16)] == [[(1, "g00000000", 1)], [(0, "g00000000", 0)]]


def test_members_of_another_prompt_count_theirs() -> None:
    first, other = batch([(11, [3]), (6, [4])])
    both = BatchGroup(first.group, (*first.members, *other.members), ())
    assert token_count((0, 1), both) == 10 + 3 + 5 + 4


def test_small_groups_fill_what_large_ones_leave() -> None:
    groups = batch([(5, [6]), (1, [3]), (5, [16]), (5, [5])])  # 10, 3, 20 and 9 tokens
    parts = by_tokens(groups, 23)
    assert [[name for _, name, _ in named(p)] for p in parts] == [["g00000001", "g00000002"], ["g00000000", "g00000003"]]


def test_by_groups_takes_them_in_order_with_their_numbers() -> None:
    parts = by_groups(batch([(2, [1, 1]), (2, [1]), (2, [1, 1, 1])]), 2)
    assert [p.numbers for p in parts] == [(0, 1, 2), (3, 4, 5)]
    assert [[g.group.index for g in p.groups] for p in parts] == [[0, 1], [2]]


def test_a_budget_of_no_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        by_tokens(batch([(2, [1])]), 0)
