"""The tree of a pack as a rule: no loops under any views, bounded depth and fanout, load that spreads."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.policy_store.relay_tree import before, depth, order, parent

NAMES = st.from_regex(r"[a-z0-9-]{1,12}", fullmatch=True)
DIGESTS = st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
FANOUTS = st.integers(1, 64)


def peers(count: int) -> list[str]:
    return [f"host-{i // 8}-{i % 8}" for i in range(count)]


@given(DIGESTS, st.dictionaries(NAMES, st.sets(NAMES, max_size=8), max_size=12), FANOUTS)
def test_no_views_however_different_make_a_loop(digest: str, views: dict[str, set[str]], fanout: int) -> None:
    for start, seen in views.items():
        asked, at = [start], parent(digest, start, seen, fanout)
        while at is not None:
            assert before(digest, at, asked[-1])
            assert at not in asked
            asked.append(at)
            at = parent(digest, at, views.get(at, set()), fanout)


@given(DIGESTS, NAMES, NAMES, NAMES)
def test_the_order_of_a_pack_is_one_order(digest: str, a: str, b: str, c: str) -> None:
    assert before(digest, a, b) + before(digest, b, a) == (a != b)
    if before(digest, a, b) and before(digest, b, c):
        assert before(digest, a, c)


@given(DIGESTS, st.integers(1, 64), FANOUTS)
@settings(max_examples=60, deadline=None)
def test_under_one_view_it_is_a_tree_of_the_fanout_with_one_root(digest: str, count: int, fanout: int) -> None:
    everyone = peers(count)
    parents = {me: parent(digest, me, everyone, fanout) for me in everyone}
    children = Counter(parents.values())
    assert children[None] == 1
    assert max((many for above, many in children.items() if above is not None), default=0) <= fanout
    for position, me in enumerate(order(digest, everyone)):
        above, at = 0, parents[me]
        while at is not None:
            above, at = above + 1, parents[at]
        assert above == depth(position, fanout)


@given(st.integers(1, 64), st.integers(2, 64))
def test_the_depth_is_bounded_by_the_logarithm(count: int, fanout: int) -> None:
    levels, reached = 0, 1
    while reached < count:
        levels, reached = levels + 1, reached * fanout
    assert max(depth(position, fanout) for position in range(count)) <= levels


@given(DIGESTS, st.integers(2, 32), FANOUTS, st.data())
def test_without_a_dead_parent_another_ancestor_or_the_origin_is_asked(digest: str, count: int, fanout: int, data: st.DataObject) -> None:
    everyone = peers(count)
    me = data.draw(st.sampled_from(everyone))
    others, asked = set(everyone) - {me}, list[str]()
    while (above := parent(digest, me, others, fanout)) is not None:
        assert above not in asked
        asked.append(above)
        others.discard(above)
    assert len(asked) == order(digest, everyone).index(me)


def test_every_pack_has_another_tree_so_the_load_spreads() -> None:
    everyone, served = peers(32), Counter[str | None]()
    packs = 800
    for number in range(packs):
        digest = f"{number:032x}"
        served.update(parent(digest, me, everyone, 4) for me in everyone)
    assert served[None] == packs
    loads = [served[me] / packs for me in everyone]
    assert 0.7 < min(loads) <= max(loads) < 1.3  # the mean is 31/32: each serves about what it receives
