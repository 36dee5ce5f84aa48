"""A state that a lease took over is not there to be evicted: no slot is given back twice, and none is given out that does not exist."""

from __future__ import annotations

from array import array

from driftline.services.rollout.prefix import PAGE, PrefixCache
from tests.unit.rollout.prefix_cases import KEY, RecordingPool


def test_a_node_whose_state_was_taken_over_is_never_asked_for_it() -> None:
    pool = RecordingPool(slots=2)
    cache = PrefixCache(pool)
    first, other = array("i", range(PAGE)), array("i", range(1000, 1000 + PAGE))
    done = cache.begin([KEY], first)
    assert done is not None
    assert cache.grow(done, PAGE)
    cache.end(done, KEY, first, PAGE)  # its state stays as a snapshot at a page's end
    beside = cache.begin([KEY], other)
    assert beside is not None
    assert cache.grow(beside, PAGE)
    taken = cache.begin([KEY], first + array("i", [7]))  # no slot is free: the snapshot's own goes over
    assert taken is not None
    assert (taken.hit, cache.stats.moves.taken_over) == (PAGE, 1)
    copied = pool.copies["states"]
    cache.commit(beside, KEY, other, PAGE, keep=True)  # wants a slot for its snapshot, and there is none
    assert pool.copies["states"] == copied
    assert {beside.slot, taken.slot} == {0, 1}
    cache.check()
    cache.end(beside)
    cache.end(taken)
    again = [cache.begin([KEY], array("i", [n])) for n in range(2)]
    assert sorted(lease.slot for lease in again if lease is not None) == [0, 1]
    cache.check()
