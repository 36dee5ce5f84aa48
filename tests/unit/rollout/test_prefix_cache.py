"""The prefix cache by its rules: what hits, what misses, what is shared and what is copied, and whose rows are nobody's."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from driftline.models import paged
from driftline.services.rollout.prefix import PAGE, CacheKey, HostTier, Lease, PrefixCache
from tests.unit.rollout.prefix_cases import ADAPTED, KEY, NEXT, RecordingPool, text


def started(cache: PrefixCache, pool: RecordingPool, tokens: array[int], keys: Sequence[CacheKey] = (KEY,)) -> Lease:
    """Begun and computed, under the first key."""
    lease = cache.begin(keys, tokens)
    assert lease is not None
    assert cache.grow(lease, len(tokens))
    pool.compute(lease, keys[0], tokens, lease.hit, len(tokens))
    return lease


def left(cache: PrefixCache, pool: RecordingPool, tokens: array[int], key: CacheKey = KEY) -> None:
    cache.end(started(cache, pool, tokens, (key,)), key, tokens, len(tokens))


def test_pages_are_those_of_the_pool() -> None:
    assert PAGE == paged.PAGE


def test_the_next_turn_hits_all_that_the_last_one_left() -> None:
    pool = RecordingPool()
    cache = PrefixCache(pool)
    turn = text(1, 2 * PAGE + 36)
    left(cache, pool, turn)
    lease = cache.begin([KEY], turn + text(2, 5))
    assert lease is not None
    assert (lease.hit, lease.key, lease.versions) == (len(turn), KEY, (1,))
    assert pool.holds(lease, [KEY] * len(turn), turn)
    assert pool.copies == {"pages": 1, "states": 1, "cleared": 1}, "full pages are shared, the page begun and the state are copied"


def test_a_whole_prompt_that_is_cached_leaves_its_last_token_to_compute() -> None:
    pool = RecordingPool(state_bytes=0)
    cache = PrefixCache(pool)
    prompt = text(1, 2 * PAGE)
    left(cache, pool, prompt)
    lease = cache.begin([KEY], prompt)
    assert lease is not None
    assert lease.hit == len(prompt) - 1


@pytest.mark.parametrize("key", [NEXT, ADAPTED, KEY._replace(base="another")])
def test_another_version_adapter_or_model_never_hits(key: CacheKey) -> None:
    pool = RecordingPool()
    cache = PrefixCache(pool)
    left(cache, pool, text(1, 100))
    lease = cache.begin([key], text(1, 120))
    assert lease is not None
    assert (lease.hit, lease.pages, pool.states[lease.slot].tolist()) == (0, [], [0, 0, 0])


def test_an_old_key_hits_only_for_who_names_it_and_says_so() -> None:
    pool = RecordingPool()
    cache = PrefixCache(pool)
    left(cache, pool, text(1, 100))
    lease = cache.begin([NEXT, KEY], text(1, 120))
    assert lease is not None
    assert (lease.hit, lease.key, lease.versions) == (100, KEY, (1,))


def test_of_two_keys_with_the_same_hit_the_first_is_taken() -> None:
    pool = RecordingPool()
    cache = PrefixCache(pool)
    for key in (KEY, NEXT):
        left(cache, pool, text(1, 100), key)
    lease = cache.begin([NEXT, KEY], text(1, 120))
    assert lease is not None
    assert lease.key == NEXT


def test_rows_of_an_old_version_are_not_filed_under_the_new_one() -> None:
    pool = RecordingPool()
    cache = PrefixCache(pool)
    left(cache, pool, text(1, 100))
    tokens = text(1, 130)
    lease = started(cache, pool, tokens, (NEXT, KEY))
    with pytest.raises(ValueError, match="of_mixed"):
        cache.commit(lease, NEXT, tokens, 130)
    mixed = CacheKey.of_mixed("base", "", "session 4")
    with pytest.raises(ValueError, match="without versions"):
        cache.end(lease, mixed, tokens, 130)


def test_rows_of_two_versions_are_their_owners_alone_and_stamped() -> None:
    pool = RecordingPool()
    cache = PrefixCache(pool)
    left(cache, pool, text(1, 100))
    tokens = text(1, 130)
    lease = started(cache, pool, tokens, (NEXT, KEY))
    mixed = CacheKey.of_mixed("base", "", "session 4")
    cache.end(lease, mixed, tokens, 130, versions=[1] * 100 + [2] * 30)
    cache.check()
    assert cache.length_of_hit([NEXT], text(1, 140)) == 0
    assert cache.length_of_hit([CacheKey.of_mixed("base", "", "session 5")], text(1, 140)) == 0
    again = cache.begin([mixed, NEXT], text(1, 140))
    assert again is not None
    assert (again.hit, again.versions) == (130, (1, 2))


def test_a_prefix_whose_state_was_not_kept_is_a_miss() -> None:
    pool = RecordingPool(state_bytes=10**6)
    cache = PrefixCache(pool)
    tokens = text(1, 3 * PAGE)
    lease = started(cache, pool, tokens)
    cache.commit(lease, KEY, tokens, 3 * PAGE)
    other = cache.begin([KEY], tokens + text(2, 3))
    assert other is not None
    assert other.hit == 0
    cache.commit(lease, KEY, tokens, 3 * PAGE, keep=True)
    assert cache.length_of_hit([KEY], tokens + text(2, 3)) == 3 * PAGE


def test_a_model_without_states_hits_any_beginning() -> None:
    pool = RecordingPool(state_bytes=0)
    cache = PrefixCache(pool)
    left(cache, pool, text(1, 150))
    for common in (1, 63, 64, 65, 128, 140):
        tokens = text(1, common) + text(2, 9)
        lease = cache.begin([KEY], tokens)
        assert lease is not None
        assert lease.hit == common
        assert pool.holds(lease, [KEY] * common, tokens)


def test_a_prompts_branch_is_kept_from_its_second_visit_on() -> None:
    pool = RecordingPool(pages=64, slots=12, state_bytes=10**6)
    cache = PrefixCache(pool)
    template = text(0, 3 * PAGE + 8)
    assert cache.snapshot_at([KEY], template + text(1, 50)) is None
    left(cache, pool, template + text(1, 50))
    assert cache.snapshot_at([KEY], template + text(2, 50)) == 3 * PAGE
    second = template + text(2, 50)
    lease = started(cache, pool, second[: 3 * PAGE])
    cache.commit(lease, KEY, second, 3 * PAGE)
    third = template + text(3, 50)
    assert cache.snapshot_at([KEY], third) is None
    assert cache.length_of_hit([KEY], third) == 3 * PAGE
    assert cache.snapshot_at([NEXT], third) == 3 * PAGE, "where prompts part is known under the next version, too"


def test_turns_of_one_sequence_are_not_a_branch() -> None:
    pool = RecordingPool(state_bytes=10**6)
    cache = PrefixCache(pool)
    for length in (100, 150, 230, 300):
        assert cache.snapshot_at([KEY], text(1, length)) is None
        left(cache, pool, text(1, length))


def test_the_same_prompt_again_is_worth_a_state() -> None:
    pool = RecordingPool(state_bytes=10**6)
    cache = PrefixCache(pool)
    for _ in range(2):
        cache.end(started(cache, pool, text(1, 150)))
    assert cache.snapshot_at([KEY], text(1, 150)) == 2 * PAGE


def test_states_of_a_long_prompt_lie_as_far_apart_as_they_weigh() -> None:
    pool = RecordingPool(pages=40, slots=20, state_bytes=4 * PAGE * 8)
    cache = PrefixCache(pool)
    tokens = text(1, 16 * PAGE)
    lease = cache.begin([KEY], tokens)
    assert lease is not None
    cache.grow(lease, len(tokens))
    for end in range(PAGE, len(tokens) + 1, PAGE):
        pool.compute(lease, KEY, tokens, end - PAGE, end)
        cache.commit(lease, KEY, tokens, end)
    assert pool.copies["states"] == 4


def test_members_share_full_pages_and_own_the_rest() -> None:
    pool = RecordingPool()
    cache = PrefixCache(pool)
    prompt = text(1, 2 * PAGE + 10)
    lease = started(cache, pool, prompt)
    forks = cache.forks(lease, len(prompt), 3)
    assert forks is not None
    members = [lease, *forks]
    assert len({m.pages[0] for m in members}) == len({m.pages[1] for m in members}) == 1
    assert len({m.pages[2] for m in members}) == len({m.slot for m in members}) == 4
    for i, member in enumerate(members):
        tokens = prompt + text(2 + i, 20)
        pool.compute(member, KEY, tokens, len(prompt), len(tokens))
    for i, member in enumerate(members):
        assert pool.holds(member, [KEY] * (len(prompt) + 20), prompt + text(2 + i, 20))
        cache.end(member)
        cache.check()
    assert cache.stats.leased_page_bytes == 0


def test_a_lease_keeps_its_rows_when_everything_is_forgotten() -> None:
    pool = RecordingPool(pages=8)
    cache = PrefixCache(pool)
    left(cache, pool, text(1, 100))
    lease = cache.begin([KEY], text(1, 120))
    assert lease is not None
    assert cache.forget(lambda key: key.version == 1) == 1
    other = started(cache, pool, text(2, 4 * PAGE))
    assert pool.holds(lease, [KEY] * 100, text(1, 100))
    cache.end(lease, KEY, text(1, 120), 100)
    cache.end(other)
    cache.check()
    assert cache.length_of_hit([KEY], text(1, 120)) == 100


def test_a_switched_off_cache_computes_everything_and_still_forks() -> None:
    pool = RecordingPool()
    cache = PrefixCache(pool, enabled=False)
    prompt = text(1, 100)
    for _ in range(2):
        lease = started(cache, pool, prompt)
        assert lease.hit == 0
        cache.commit(lease, KEY, prompt, PAGE)
        fork = cache.fork(lease, 100)
        assert fork is not None
        assert fork.pages[0] == lease.pages[0]
        cache.end(fork, KEY, prompt, 100)
        cache.end(lease, KEY, prompt, 100)
    assert cache.stats.cached_page_bytes == 0


def test_routes_come_back_with_the_rows() -> None:
    pool = RecordingPool()
    cache = PrefixCache(pool, routed=True)
    tokens = text(1, 150)
    routes = np.arange(150 * 2 * 3, dtype=np.int16).reshape(150, 2, 3)
    lease = started(cache, pool, tokens)
    with pytest.raises(ValueError, match="routed=True"):
        cache.end(lease, KEY, tokens, 150)
    cache.end(lease, KEY, tokens, 150, routes=routes)
    again = cache.begin([KEY], text(1, 160))
    assert again is not None
    assert again.routes is not None
    assert np.array_equal(again.routes, routes)
    assert again.routes.dtype == np.int16


def test_a_full_pool_refuses_and_takes_nothing() -> None:
    pool = RecordingPool(pages=4, slots=2)
    cache = PrefixCache(pool)
    lease = started(cache, pool, text(1, 3 * PAGE))
    before = cache.stats
    assert not cache.grow(lease, 3 * PAGE + 1)
    other = cache.begin([KEY], text(2, 10))
    assert other is not None
    assert not cache.grow(other, 10)
    assert cache.begin([KEY], text(3, 10)) is None
    assert cache.fork(lease, 3 * PAGE) is None
    cache.end(other)
    cache.check()
    assert cache.stats.leased_page_bytes == before.leased_page_bytes


def test_the_only_leaf_is_taken_over_where_there_is_no_room_beside_it() -> None:
    pool = RecordingPool(pages=3, slots=1)
    cache = PrefixCache(pool)
    left(cache, pool, text(1, 100))
    lease = cache.begin([KEY], text(1, 120))
    assert lease is not None
    assert lease.hit == 100
    assert pool.holds(lease, [KEY] * 100, text(1, 100))
    cache.check()
    assert cache.stats.moves.taken_over == 1
    assert cache.length_of_hit([KEY], text(1, 120)) == 0


def test_what_was_preempted_goes_on_where_it_was_without_a_copy() -> None:
    pool = RecordingPool()
    cache = PrefixCache(pool)
    tokens = text(1, 100)
    parked = cache.preempt(started(cache, pool, tokens), KEY, tokens, 100)
    lease = cache.restore(parked)
    assert lease is not None
    assert lease.hit == 100
    assert pool.holds(lease, [KEY] * 100, tokens)
    assert pool.copies == {"pages": 0, "states": 0, "cleared": 1}


def test_what_was_preempted_and_lost_is_computed_again() -> None:
    pool = RecordingPool(pages=4, slots=1)
    cache = PrefixCache(pool)
    parked = cache.preempt(started(cache, pool, text(1, 100)), KEY, text(1, 100), 100)
    cache.end(started(cache, pool, text(2, 3 * PAGE)))
    lease = cache.restore(parked)
    assert lease is not None
    assert lease.hit == 0


def test_bad_calls_are_refused_by_name() -> None:
    pool = RecordingPool()
    cache = PrefixCache(pool)
    with pytest.raises(ValueError, match="0 tokens"):
        cache.begin([KEY], array("i"))
    with pytest.raises(ValueError, match="0 keys"):
        cache.begin([], text(1, 3))
    with pytest.raises(ValueError, match="8 bytes"):
        cache.begin([KEY], array("q", [1, 2]))
    lease = started(cache, pool, text(1, 100))
    with pytest.raises(ValueError, match="grow the lease"):
        cache.commit(lease, KEY, text(1, 200), 200)
    cache.commit(lease, KEY, text(1, 100), 100)
    with pytest.raises(ValueError, match="not those"):
        cache.commit(lease, KEY, text(2, 100), 100)
    cache.end(lease)
    with pytest.raises(ValueError, match="has ended"):
        cache.end(lease)
    with pytest.raises(ValueError, match="has ended"):
        cache.grow(lease, 10)


def test_reset_leaves_nothing() -> None:
    pool = RecordingPool()
    cache = PrefixCache(pool, host=HostTier(4096))
    left(cache, pool, text(1, 100))
    lease = started(cache, pool, text(2, 100))
    cache.reset()
    cache.check()
    assert lease.ended
    assert cache.stats.free_page_bytes == (pool.pages - 1) * pool.page_bytes
    assert cache.stats.host_bytes == 0
