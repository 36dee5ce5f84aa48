"""What stays: by count, age and bytes, with the shortcuts; what goes: after a grace, and orphans only when nothing can name them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import Policy, publish_chain, same

from driftline.messages.memory import MemoryBus
from driftline.policy_store import BlobRef, Link, MemoryBlobs, PolicyReader
from driftline.policy_store.collect import (
    Chord,
    Grace,
    Retention,
    Version,
    chain_of,
    collect,
    plan,
    survey,
    survey_shortcuts,
)
from driftline.policy_store.orphans import Orphans
from driftline.policy_store.pins import pin
from driftline.policy_store.squash import rebase, squash


def link(version: int) -> Link:
    return Link(version=version, seal=f"{version:032x}")


def chain(count: int, full_every: int = 5) -> dict[str, Version]:
    """Deltas of 10 bytes, fulls of 100; one a second."""
    known = {}
    for version in range(count):
        full = version % full_every == 0
        blobs = {BlobRef(f"d{version}", 10, 1)} | ({BlobRef(f"f{version}", 100, 1)} if full else set())
        known[link(version).seal] = Version(link(version), link(version - 1) if version else None, full, frozenset(blobs), float(version), 100 * full)
    return known


def kept(known: Mapping[str, Version], keep: Retention, now: float = 0.0, pinned: tuple[Link, ...] = ()) -> list[int]:
    chosen = plan(known, link(len(known) - 1), keep, pinned, now=now)
    gone = {version.link.seal for version in chosen.delete}
    return sorted(version.link.version for seal, version in known.items() if seal not in gone)


def test_the_newest_by_count_or_by_age_stay_whichever_is_more() -> None:
    known = chain(23)
    assert kept(known, Retention(2)) == [20, 21, 22]
    assert kept(known, Retention(2, seconds=6.5), now=22.0) == [15, 16, 17, 18, 19, 20, 21, 22]
    assert kept(known, Retention(9, seconds=1.0), now=22.0) == [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]


def test_the_oldest_go_until_the_rest_fits_but_never_the_head_or_a_pin() -> None:
    known = chain(23)
    assert kept(known, Retention(23, nbytes=10_000)) == list(range(23))
    assert kept(known, Retention(23, nbytes=300)) == [15, 16, 17, 18, 19, 20, 21, 22]
    assert kept(known, Retention(23, nbytes=1)) == [20, 21, 22]
    assert kept(known, Retention(23, nbytes=1), pinned=(link(7),)) == [5, 6, 7, 20, 21, 22]


def test_the_bytes_of_shortcuts_count_with_their_target() -> None:
    known = chain(23)
    heavy = {"s": Chord("s", link(18), link(16), frozenset({BlobRef("s", 1_000, 1)}))}
    chosen = plan(known, link(22), Retention(23, nbytes=300), shortcuts=heavy)
    assert 18 in {version.link.version for version in chosen.delete}
    assert [chord.seal for chord in chosen.chords] == ["s"]


def test_a_shortcut_goes_with_either_end_and_a_rebase_with_its_version() -> None:
    known = chain(23)
    chords = {
        name: Chord(name, link(target), None if base is None else link(base), frozenset({BlobRef(name, 1, 1)}))
        for name, target, base in (("both", 22, 20), ("base", 20, 16), ("target", 8, 0), ("rebase", 22, None), ("old", 7, None))
    }
    chosen = plan(known, link(22), 2, shortcuts=chords)
    assert sorted(chord.seal for chord in chosen.chords) == ["base", "old", "target"]


def test_a_version_with_a_full_made_afterwards_holds_nothing_older() -> None:
    known = chain(23)
    assert kept(known, Retention(1), pinned=(link(9),)) == [5, 6, 7, 8, 9, 20, 21, 22]
    based = {"r": Chord("r", link(9), None, frozenset({BlobRef("r", 100, 1)}))}
    chosen = plan(known, link(22), 1, [link(9)], shortcuts=based)
    assert {5, 6, 7, 8} <= {version.link.version for version in chosen.delete}
    assert link(9).seal in chosen.keep
    assert chosen.chords == ()


def test_a_blob_of_a_shortcut_that_stays_outlives_the_version_it_shares_it_with() -> None:
    known = chain(23)
    shared = BlobRef("d3", 10, 1)
    chosen = plan(known, link(22), 1, shortcuts={"s": Chord("s", link(22), None, frozenset({shared}))})
    (three,) = [version for version in chosen.delete if version.link.version == 3]
    assert three.blobs == frozenset()


@st.composite
def stores(draw: st.DrawFn) -> tuple[dict[str, Version], dict[str, Chord], Retention, list[Link], float]:
    count = draw(st.integers(1, 40))
    known = chain(count, draw(st.integers(1, 9)))
    chords = {}
    for number, target in enumerate(draw(st.lists(st.integers(1, 40), max_size=8))):
        span = target & -target
        base = None if draw(st.booleans()) else target - span
        if target < count:
            chords[f"c{number}"] = Chord(f"c{number}", link(target), None if base is None else link(base), frozenset({BlobRef(f"c{number}", 7, 1)}))
    retention = Retention(draw(st.integers(1, 12)), draw(st.sampled_from([0.0, 3.0, 20.0])), draw(st.sampled_from([0, 1, 200, 600])))
    pinned = [link(version) for version in draw(st.sets(st.integers(0, count - 1), max_size=3))]
    return known, chords, retention, pinned, float(count)


@given(stores())
@settings(max_examples=300, deadline=None)
def test_whatever_is_asked_for_the_rest_can_be_made_and_collecting_again_finds_nothing(
    store: tuple[dict[str, Version], dict[str, Chord], Retention, list[Link], float]
) -> None:
    known, chords, retention, pinned, now = store
    head = link(len(known) - 1)
    chosen = plan(known, head, retention, pinned, shortcuts=chords, now=now)
    assert chosen.blocked == ""
    gone, cut = {version.link.seal for version in chosen.delete}, {chord.seal for chord in chosen.chords}
    left = {seal: version for seal, version in known.items() if seal not in gone}
    left_chords = {seal: chord for seal, chord in chords.items() if seal not in cut}
    based = {chord.target.seal for chord in left_chords.values() if chord.base is None}
    for target in (head, *pinned):
        made_of = chain_of(left, target, based)
        assert made_of is not None
        blobs = {blob for seal in made_of for blob in left[seal].blobs}
        assert not blobs & {blob for item in (*chosen.delete, *chosen.chords) for blob in item.blobs}
    for version in left.values():
        assert chain_of(left, version.link, based) is not None, "nothing that cannot be made is kept"
    for chord in left_chords.values():
        assert all(end.seal in left for end in chord.ends)
    again = plan(left, head, retention, pinned, shortcuts=left_chords, now=now)
    assert again.delete == ()
    assert again.chords == ()


def test_a_thing_is_ripe_only_after_it_was_unneeded_without_a_break() -> None:
    grace = Grace(10.0)
    assert grace.ripe(["a", "b"], 0.0) == set()
    assert grace.next_in(4.0) == 6.0
    assert grace.ripe(["a"], 5.0) == set()
    assert grace.ripe(["a", "b"], 10.0) == {"a"}
    assert grace.ripe(["a", "b"], 19.9) == {"a"}
    assert grace.ripe(["a", "b"], 20.0) == {"a", "b"}
    assert grace.next_in(20.0) is None
    assert Grace(0.0).ripe(["a"], 0.0) == {"a"}


async def test_after_every_kind_of_collection_the_versions_that_stay_are_read_back(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str
) -> None:
    _, states = await publish_chain(quick_bus, quick_blobs, fresh_run, Policy(elements=3_000), 18, full_every=8)
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    for base, target in ((0, 4), (8, 12), (12, 16), (8, 16), (14, 16)):
        assert await squash(quick_bus, quick_blobs, reader, await reader.manifest(target), base) is not None
    await rebase(quick_bus, quick_blobs, reader, await reader.manifest(5))
    held = [await pin(quick_bus, reader, 5, "someone")]
    known = await survey(quick_bus, reader)
    head = await reader.head()
    assert head is not None
    chosen = plan(known, head.link, 2, held, shortcuts=await survey_shortcuts(reader, known))
    done = await collect(quick_bus, quick_blobs, fresh_run, chosen.delete, shortcuts=chosen.chords, pinned=held)
    assert (done.versions, done.shortcuts) == (15, 5)
    fresh = PolicyReader(quick_bus, quick_blobs, fresh_run)
    assert same(await fresh.materialise(16), states[16])
    assert same(await fresh.materialise(17), states[17])
    assert same(await fresh.materialise_manifest(await fresh.load(held[0])), states[5])


# ---- orphans ----


async def orphan(blobs: MemoryBlobs, what: bytes) -> str:
    return (await blobs.put(what)).digest


async def test_an_orphan_goes_at_the_second_look_when_the_head_has_passed_it_and_it_is_old() -> None:
    blobs = MemoryBlobs()
    lost, named = await orphan(blobs, b"lost"), await orphan(blobs, b"named")
    orphans = Orphans(blobs, age_s=100.0)

    async def look(head: int, now: float, also: str = "") -> list[str]:
        return [blob.digest for blob in orphans.judge(await orphans.stored(), {named, also}, head_before=head, head_after=head, now=now)]

    assert await look(4, 0.0) == []
    assert await look(4, 1000.0) == [], "the version after the head may still come to name it"
    assert await look(5, 50.0) == [], "it is not old enough"
    assert await look(5, 1000.0, also=lost) == [], "it was named meanwhile"
    assert await look(6, 1000.0) == [], "so this is a first look again"
    assert await look(7, 1100.0) == [lost]
    assert await look(8, 9999.0) == [], "said once"


async def test_a_blob_put_again_by_a_learner_that_came_back_after_a_day_is_never_taken_for_an_orphan() -> None:
    """The bytes were left by a crash; the same version is handed in again, finds them there and names them only minutes later."""
    blobs = MemoryBlobs()
    digest = await orphan(blobs, b"pack of version 5")
    orphans = Orphans(blobs, age_s=100.0)
    day = 86_400.0
    for now in (0.0, day, 2 * day):  # the head is at 4 all the time, put again or not
        assert orphans.judge(await orphans.stored(), set(), head_before=4, head_after=4, now=now) == []
        assert await orphan(blobs, b"pack of version 5") == digest
    # Its manifest is stored and the head moves in the middle of a look: what was named before that is not enough.
    assert orphans.judge(await orphans.stored(), set(), head_before=4, head_after=5, now=3 * day) == []
    assert orphans.judge(await orphans.stored(), {digest}, head_before=5, head_after=5, now=4 * day) == []


@pytest.mark.parametrize("head_after", [4, 5])
async def test_what_was_seen_while_the_head_moved_counts_for_the_later_head(head_after: int) -> None:
    blobs = MemoryBlobs()
    digest = await orphan(blobs, b"pack of version 6")
    orphans = Orphans(blobs, age_s=0.0)
    orphans.judge(await orphans.stored(), set(), head_before=4, head_after=head_after, now=0.0)
    due = orphans.judge(await orphans.stored(), set(), head_before=5, head_after=5, now=1.0)
    assert [blob.digest for blob in due] == ([digest] if head_after == 4 else [])
