"""Whose turn it is, and what of it a step computes: rules about numbers, tried on all kinds of them."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline.services.rollout.engine.scheduler import CHUNK, QueueFull, Scheduler, Work, common, pieces

LENGTHS = st.lists(st.tuples(st.integers(1, 700), st.integers(0, 300), st.lists(st.integers(1, 10), max_size=3)), min_size=1, max_size=9)


def work(length: int, *, members: int = 1, **more: object) -> Work:
    return Work(tokens=array("i", [0]) * length, members=members, **more)  # type: ignore[arg-type]


def scheduler(queue_bytes: int = 10**9) -> Scheduler[Work]:
    return Scheduler(queue_bytes=queue_bytes)


def filling(cases: list[tuple[int, int, list[int]]]) -> list[Work]:
    return [work(length, serial=i, done=min(done, length - 1), stops=[CHUNK * s for s in stops]) for i, (length, done, stops) in enumerate(cases)]


@given(LENGTHS, st.integers(1, 3000))
def test_a_piece_ends_at_a_boundary_a_stop_or_the_end_and_the_step_at_its_budget(cases: list[tuple[int, int, list[int]]], budget: int) -> None:
    works = filling(cases)
    chunks = pieces(works, budget)
    assert chunks
    assert chunks[0].work is works[0], "whoever is oldest always goes on"
    assert [chunk.work.serial for chunk in chunks] == sorted({chunk.work.serial for chunk in chunks})
    for chunk in chunks:
        assert chunk.begin == chunk.work.done < chunk.end <= chunk.work.limit <= chunk.work.length
        assert chunk.end % CHUNK == 0 or chunk.end == chunk.work.limit
        assert not any(chunk.begin < stop < chunk.end for stop in chunk.work.stops), "others wait to go on from there"
    spent = sum(chunk.end - chunk.begin for chunk in chunks)
    assert spent <= max(budget, chunks[0].end - chunks[0].begin)
    assert chunks[0].end - chunks[0].begin <= max(budget, CHUNK)


@given(LENGTHS, st.integers(1, 3000))
def test_a_budget_is_used_up_before_somebody_waits(cases: list[tuple[int, int, list[int]]], budget: int) -> None:
    works = filling(cases)
    chunks = pieces(works, budget)
    left = budget - sum(chunk.end - chunk.begin for chunk in chunks)
    hungry = [chunk for chunk in chunks if chunk.end < chunk.work.limit]
    assert not hungry or left < CHUNK
    if len(chunks) < len(works):
        after = works[len(chunks)]
        assert min(after.limit, (after.done // CHUNK + 1) * CHUNK) - after.done > left or left < CHUNK


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(1, 2000))
def test_every_prompt_is_computed_once_and_in_order(lengths: list[int], budget: int) -> None:
    works = [work(length, serial=i) for i, length in enumerate(lengths)]
    computed: Counter[int] = Counter()
    left, steps = list(works), 0
    while left:
        for chunk in pieces(left, budget):
            assert chunk.begin == computed[chunk.work.serial]
            computed[chunk.work.serial] = chunk.work.done = chunk.end
        left = [w for w in left if w.done < w.length]
        steps += 1
    assert [computed[i] for i in range(len(lengths))] == lengths
    assert steps <= sum(-(-length // CHUNK) for length in lengths)


def test_a_long_prompt_does_not_hold_up_a_short_one() -> None:
    """Head of line: 100,000 tokens of one prompt would be 50 steps of everybody's waiting."""
    long, short = work(100_000, serial=0), work(100, serial=1)
    ends = {chunk.work.serial: chunk.end for chunk in pieces([long, short], 2048)}
    assert ends[1] == 100
    assert ends[0] > 1500, "and what the short one leaves is the long one's"


def test_within_a_tenant_the_order_is_that_of_arrival_and_nobody_overtakes() -> None:
    made = scheduler()
    works = [work(10 * (i + 1), members=5 - i) for i in range(5)]
    for one in works:
        made.submit(one)
    assert made.members == 15
    assert [made.take() for _ in range(5)] == works
    assert not made
    assert made.queued_bytes == made.members == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 500)), min_size=1, max_size=60))
def test_no_tenant_gets_much_more_than_another_while_both_wait(asked: list[tuple[int, int]]) -> None:
    """The one who was given least goes next, so two that wait all the time differ by one piece of work at most."""
    made = scheduler()
    for tenant, length in asked:
        made.submit(work(length, tenant=str(tenant)))
    waiting = Counter(str(tenant) for tenant, _ in asked)
    given_to: Counter[str] = Counter()
    while made:
        one = made.take()
        given_to[one.tenant] += one.length + one.members
        waiting[one.tenant] -= 1
        both = [tenant for tenant in waiting if waiting[tenant]]
        assert all(given_to[a] - given_to[b] <= 501 for a in both for b in both)


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    made = scheduler()
    for _ in range(1000):
        made.submit(work(100, tenant="flood"))
    made.submit(work(100, tenant="late"))
    assert "late" in {made.take().tenant for _ in range(2)}


def test_a_higher_priority_goes_first_and_what_was_interrupted_before_everything() -> None:
    made = scheduler()
    low, high, younger, older = work(1), work(1, priority=2), work(70), work(70)
    for one in (older, younger):
        made.submit(one)
        made.take()
        one.done, one.stops = 64, [64]
    for one in (low, high, younger, older):
        if one in (younger, older):
            made.interrupt(one)
        else:
            made.submit(one)
    assert made.interrupted_members == 2
    assert [made.take() for _ in range(4)] == [older, younger, high, low]
    assert (older.done, older.stops) == (0, []), "it begins again, with what is cached by then"


def test_what_waits_is_bounded_in_bytes_and_the_refusal_says_what_to_do() -> None:
    made = scheduler(queue_bytes=20_000)
    for _ in range(20_000 // work(1000).nbytes):
        made.submit(work(1000))
    with pytest.raises(QueueFull, match=r"rollout\.queue_mb.*submit it again"):
        made.submit(work(1000))
    assert made.queued_bytes <= 20_000
    made.take()
    made.submit(work(1000))
    alone = scheduler(queue_bytes=10)
    alone.submit(work(1000))
    with pytest.raises(QueueFull):
        alone.submit(work(1))


def test_what_was_interrupted_is_never_refused() -> None:
    made = scheduler(queue_bytes=1000)
    made.submit(work(100))
    held = work(5000)
    made.interrupt(held)
    assert made.first() is held


def test_dropping_leaves_the_others_and_their_count() -> None:
    made = scheduler()
    for i in range(6):
        made.submit(work(10 + i, tenant=str(i % 2), members=i + 1))
    made.interrupt(work(99, members=7))
    gone = made.drop(lambda w: w.length in (11, 99))
    assert sorted(w.length for w in gone) == [11, 99]
    assert made.members == 1 + 3 + 4 + 5 + 6
    assert made.interrupted_members == 0
    assert made.queued_bytes == sum(w.nbytes for w in made)
    assert len(made.drop(lambda _: True)) == 5
    assert not made
    with pytest.raises(IndexError):
        made.take()


@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_the_common_beginning_is_the_longest(a: list[int], b: list[int]) -> None:
    found = common(array("i", a), array("i", b))
    assert a[:found] == b[:found]
    assert found == min(len(a), len(b)) or a[found] != b[found]
