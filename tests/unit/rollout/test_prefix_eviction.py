"""What gives way when memory is short: the least worth a byte, to the host first, and never a row that somebody holds."""

from __future__ import annotations

from array import array

import pytest
import torch

from driftline.messages.errors import ConfigError
from driftline.services.rollout.prefix import PAGE, CacheKey, HostTier, PrefixCache
from driftline.services.rollout.prefix.extents import Extents
from driftline.services.rollout.prefix.host import Kind
from tests.unit.rollout.prefix_cases import KEY, RecordingPool, text
from tests.unit.rollout.test_prefix_cache import left, started


def cached(cache: PrefixCache, tokens: array[int], key: CacheKey = KEY) -> bool:
    return cache.length_of_hit([key], tokens + text(99, 1)) == len(tokens)


def crowd(cache: PrefixCache, pool: RecordingPool, seed: int, length: int = 30) -> None:
    """Somebody comes, leaves a leaf, and needs room for it."""
    left(cache, pool, text(seed, length))


def test_a_long_sequence_outlives_short_ones_of_the_same_age() -> None:
    """Both cost a state; one of them would take ten times the tokens to compute again."""
    pool = RecordingPool(pages=40, slots=3, state_bytes=64 * PAGE * 8)
    cache = PrefixCache(pool)
    left(cache, pool, text(1, 640))
    left(cache, pool, text(2, 40))
    left(cache, pool, text(3, 50))
    crowd(cache, pool, 4)
    assert cached(cache, text(1, 640))
    assert not cached(cache, text(2, 40))


def test_pages_are_weighed_with_the_state_that_needs_them() -> None:
    """Where rows are dear and states cheap, the long one costs as much a token as the short one, and use decides."""
    pool = RecordingPool(pages=40, slots=3, state_bytes=8)
    cache = PrefixCache(pool)
    left(cache, pool, text(1, 640))
    left(cache, pool, text(2, 64))
    for _ in range(3):
        lease = cache.begin([KEY], text(2, 65))
        assert lease is not None
        cache.end(lease)
    left(cache, pool, text(3, 640))
    crowd(cache, pool, 4)
    assert cached(cache, text(2, 64))
    assert not cached(cache, text(1, 640))


def test_what_is_not_used_is_overtaken() -> None:
    pool = RecordingPool(pages=60, slots=3, state_bytes=64 * PAGE * 8)
    cache = PrefixCache(pool)
    left(cache, pool, text(1, 200))
    for seed in range(2, 30):
        crowd(cache, pool, seed, 60)
    assert not cached(cache, text(1, 200))


@pytest.mark.parametrize("first", [200, 3 * PAGE])
def test_the_leaf_of_a_turn_goes_before_other_sequences_once_the_next_turn_left_its_own(first: int) -> None:
    pool = RecordingPool(pages=60, slots=5, state_bytes=64 * PAGE * 8)
    cache = PrefixCache(pool)
    left(cache, pool, text(2, 70))
    left(cache, pool, text(1, first))
    left(cache, pool, text(1, 230))
    left(cache, pool, text(3, 70))
    crowd(cache, pool, 4)
    crowd(cache, pool, 5)
    assert not cached(cache, text(1, first))
    assert cached(cache, text(1, 230))
    assert cached(cache, text(2, 70))
    assert cached(cache, text(3, 70))


def test_an_old_turn_that_somebody_goes_on_from_counts_again() -> None:
    pool = RecordingPool(pages=60, slots=5, state_bytes=64 * PAGE * 8)
    cache = PrefixCache(pool)
    left(cache, pool, text(1, 200))
    left(cache, pool, text(1, 230))
    branch = started(cache, pool, text(1, 200) + text(8, 4))
    assert branch.hit == 200
    cache.end(branch)
    for seed in (4, 5, 6):
        crowd(cache, pool, seed)
    assert cached(cache, text(1, 200))


def test_a_state_kept_where_prompts_part_stays_after_the_first_that_used_it() -> None:
    pool = RecordingPool(pages=60, slots=5, state_bytes=64 * PAGE * 8)
    cache = PrefixCache(pool)
    shared = text(1, 3 * PAGE)
    lease = started(cache, pool, shared)
    cache.commit(lease, KEY, shared, 3 * PAGE, keep=True)
    cache.end(lease)
    left(cache, pool, shared + text(2, 20))
    for seed in (4, 5, 6):
        crowd(cache, pool, seed)
    assert cached(cache, shared)


def test_a_leaf_that_several_continued_stays_a_branch() -> None:
    pool = RecordingPool(pages=60, slots=5, state_bytes=64 * PAGE * 8)
    cache = PrefixCache(pool)
    left(cache, pool, text(1, 200))
    branches = [started(cache, pool, text(1, 200) + text(seed, 9)) for seed in (6, 7)]
    for branch, seed in zip(branches, (6, 7), strict=True):
        cache.end(branch, KEY, text(1, 200) + text(seed, 9), 209)
    crowd(cache, pool, 4)
    crowd(cache, pool, 5)
    assert cached(cache, text(1, 200))


def test_pages_go_with_the_last_state_that_needs_them() -> None:
    pool = RecordingPool(pages=60, slots=2)
    cache = PrefixCache(pool)
    left(cache, pool, text(1, 5 * PAGE))
    assert cache.stats.cached_page_bytes == 5 * pool.page_bytes
    for seed in (2, 3):
        started(cache, pool, text(seed, 30))
    cache.check()
    assert cache.stats.cached_page_bytes == 0
    assert cache.stats.moves.lost_pages == 5


def test_rows_are_evicted_from_the_end_and_the_common_beginning_last() -> None:
    pool = RecordingPool(pages=9, state_bytes=0)
    cache = PrefixCache(pool)
    shared = text(0, 2 * PAGE)
    for seed in (1, 2, 3):
        left(cache, pool, shared + text(seed, 2 * PAGE))
    lease = started(cache, pool, text(7, 5 * PAGE))
    cache.check()
    assert cache.length_of_hit([KEY], shared + text(9, 1)) == 2 * PAGE
    cache.end(lease)


def test_a_page_of_two_trees_is_free_once_both_let_go() -> None:
    pool = RecordingPool(pages=5, slots=3)
    cache = PrefixCache(pool)
    tokens = text(1, 2 * PAGE)
    lease = started(cache, pool, tokens)
    cache.commit(lease, KEY, tokens, 2 * PAGE, keep=True)
    cache.end(lease, CacheKey.of_mixed("base", "", "a"), tokens, 2 * PAGE, versions=[1] * 128)
    assert cache.stats.cached_page_bytes == 2 * pool.page_bytes
    started(cache, pool, text(2, 4 * PAGE))
    cache.check()


@pytest.mark.parametrize("state_bytes", [24, 0])
def test_the_host_keeps_what_the_device_let_go_and_gives_it_back(state_bytes: int) -> None:
    pool = RecordingPool(pages=8, slots=2, state_bytes=state_bytes)
    cache = PrefixCache(pool, host=HostTier(100_000))
    tokens = text(1, 3 * PAGE + 20)
    left(cache, pool, tokens)
    other = started(cache, pool, text(2, 7 * PAGE))
    cache.check()
    assert cache.stats.host_bytes == 4 * pool.page_bytes + state_bytes
    cache.end(other)
    pool.rows[:] = -1  # nothing on the device is what it was
    pool.states[:] = -1
    lease = cache.begin([KEY], tokens + text(3, 1))
    assert lease is not None
    cache.check()
    assert lease.hit == len(tokens)
    assert pool.holds(lease, [KEY] * len(tokens), tokens)
    assert cache.stats.moves.restored_pages == 4


def test_a_full_host_gives_way_by_worth() -> None:
    pool = RecordingPool(pages=30, slots=1, state_bytes=8 * 512)
    cache = PrefixCache(pool, host=HostTier(3 * 512 + 24 + 100))
    left(cache, pool, text(1, 60))
    left(cache, pool, text(2, 3 * PAGE))
    left(cache, pool, text(3, 30))
    cache.check()
    assert cached(cache, text(2, 3 * PAGE)), "the longer one took the shorter one's place on the host"
    assert not cached(cache, text(1, 60))


def test_what_a_lease_is_about_to_continue_is_not_lost_to_what_makes_room_for_it() -> None:
    """The only room on the host is that of the very rows that come back."""
    pool = RecordingPool(pages=4, slots=1)
    cache = PrefixCache(pool, host=HostTier(3 * 512 + 24))
    left(cache, pool, text(1, 2 * PAGE + 20))
    left(cache, pool, text(2, 2 * PAGE + 30))
    lease = cache.begin([KEY], text(1, 2 * PAGE + 21))
    assert lease is not None
    cache.check()
    assert lease.hit == 2 * PAGE + 20
    assert pool.holds(lease, [KEY] * lease.hit, text(1, lease.hit))


def test_what_is_larger_than_the_host_is_lost_whole() -> None:
    pool = RecordingPool(pages=30, slots=1)
    cache = PrefixCache(pool, host=HostTier(2 * 512))
    left(cache, pool, text(1, 5 * PAGE))
    left(cache, pool, text(2, 30))
    cache.check()
    assert not cached(cache, text(1, 5 * PAGE))
    assert cache.stats.host_bytes == 0


def test_preempted_work_comes_back_from_the_host() -> None:
    pool = RecordingPool(pages=8, slots=1)
    cache = PrefixCache(pool, host=HostTier(100_000))
    parked = cache.preempt(started(cache, pool, text(1, 150)), KEY, text(1, 150), 150)
    cache.end(started(cache, pool, text(2, 7 * PAGE)))
    lease = cache.restore(parked)
    assert lease is not None
    assert lease.hit == 150
    assert pool.holds(lease, [KEY] * 150, text(1, 150))


def test_a_tier_made_in_inference_mode_is_written_outside_of_it() -> None:
    """An engine makes it there, and cancels a group anywhere."""
    with torch.inference_mode():
        host = HostTier(100_000)
    pool = RecordingPool(pages=8, slots=1)
    cache = PrefixCache(pool, host=host)
    left(cache, pool, text(1, 100))
    left(cache, pool, text(2, 100))
    assert cache.stats.moves.demoted_states == 1
    assert cached(cache, text(1, 100))


def test_a_tier_of_no_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="host_cache_mb"):
        HostTier(0)


def test_ranges_are_found_again_as_one() -> None:
    ranges = Extents(100)
    taken = [ranges.take(30) for _ in range(3)]
    assert ranges.take(11) is None
    for extent in (taken[0], taken[2], taken[1]):
        assert extent is not None
        ranges.give(extent)
    assert ranges.free == 100
    assert ranges.take(100) == (0, 100)


def test_a_tree_whose_last_rows_the_host_gave_up_is_gone() -> None:
    """Found by the machine of test_prefix_machine.py: an empty root was kept for every session that ever was."""
    pool = RecordingPool(pages=14, slots=1)
    cache = PrefixCache(pool, host=HostTier(900))
    mixed = CacheKey.of_mixed("base", "", "session 1")
    cache.end(started(cache, pool, text(1, 10)), mixed, text(1, 10), 10, versions=[1] * 10)
    for seed in (2, 3):
        left(cache, pool, text(seed, 11))
    cache.check()
    assert list(cache.stock.roots) == [KEY]


def test_a_begin_that_found_no_memory_is_no_use_of_the_leaf() -> None:
    pool = RecordingPool(pages=60, slots=1)
    cache = PrefixCache(pool, host=HostTier(10_000))
    left(cache, pool, text(1, 100))
    held = started(cache, pool, text(2, 9))
    assert cache.begin([KEY], text(1, 110)) is None
    assert [node.hits for node in cache.stock.roots[KEY].below()] == [0, 0, 0]
    cache.end(held)
    lease = cache.begin([KEY], text(1, 110))
    assert lease is not None
    assert [node.hits for node in cache.stock.roots[KEY].below()] == [0, 0, 1]


def test_what_lies_scattered_on_the_host_comes_back_in_order() -> None:
    host = HostTier(6 * 64)
    held = [host.take(64) for _ in range(6)]
    order = [e for i in (0, 1, 4, 3, 5) if (e := held[i]) is not None]  # two that are one copy, and three that are not
    rows = torch.arange(5 * 16, dtype=torch.int32).reshape(5, 16)
    host.put(Kind.PAGE, order, [rows[:, :6], rows[:, 6:]])
    found: list[torch.Tensor] = []
    host.get(Kind.PAGE, order, found.extend)
    assert torch.equal(torch.cat(found, dim=1), rows)
    host.get(Kind.PAGE, [order[3]], found.extend)
    assert torch.equal(torch.cat(found[2:], dim=1), rows[3:4])
