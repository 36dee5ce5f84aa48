"""Collection never takes what the head, a pin, or a kept version needs."""

from __future__ import annotations

import asyncio
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import Policy, publish_chain, same

from driftline.messages.bus import Bus
from driftline.messages.errors import IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.policy_store import BlobRef, BlobStore, Link, MemoryBlobs, PolicyReader, PolicyWriter
from driftline.policy_store.collect import Plan, Version, collect, plan, survey
from driftline.policy_store.pins import find, pin, pins, unpin


def seal(version: int, writer: int = 0) -> str:
    return f"{version:028x}{writer:04x}"


def link(version: int, writer: int = 0) -> Link:
    return Link(version=version, seal=seal(version, writer))


def made(version: int, parent: Link | None, full: bool, writer: int = 0) -> Version:
    blobs = {BlobRef(seal(version, writer), 10, 1)} | ({BlobRef(seal(version, writer)[::-1], 100, 1)} if full else set())
    return Version(link(version, writer), parent, full, frozenset(blobs))


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[str, Version], Link, int, list[Link]]:
    """A lineage with fulls at random places, losers beside it and beyond its head, some versions pinned, some unknown."""
    count = draw(st.integers(1, 30))
    known: dict[str, Version] = {}
    for version in range(count):
        full = version == 0 or draw(st.integers(0, 4)) == 0
        known[seal(version)] = made(version, link(version - 1) if version else None, full)
        if draw(st.integers(0, 5)) == 0:
            known[seal(version, 1)] = made(version, link(version - 1) if version else None, False, 1)
    if draw(st.booleans()):
        known[seal(count, 2)] = made(count, link(count - 1), False, 2)  # being published at this moment
    pinned = [link(version) for version in draw(st.sets(st.integers(0, count - 1), max_size=3))]
    for version in draw(st.sets(st.integers(0, count - 1), max_size=2)):
        known.pop(seal(version), None)
    return known, link(count - 1), draw(st.integers(1, 12)), pinned


def chain(known: dict[str, Version], target: Link) -> list[Version]:
    """What a reader must find to make `target`; fails where it would."""
    found = [known[target.seal]]
    while not found[-1].full:
        parent = found[-1].parent
        assert parent is not None
        found.append(known[parent.seal])
    return found


@given(histories())
@settings(max_examples=500, deadline=None)
def test_what_is_kept_can_still_be_made(history: tuple[dict[str, Version], Link, int, list[Link]]) -> None:
    """W3, W5 (docs/field_failures.md)."""
    known, head, keep_versions, pinned = history
    chosen = plan(known, head, keep_versions, pinned)
    gone_blobs = {blob for version in chosen.delete for blob in version.blobs}
    left = {key: version for key, version in known.items() if key not in {v.link.seal for v in chosen.delete}}
    if chosen.blocked:
        assert left == known
        return
    window = [link(version) for version in range(max(0, head.version - keep_versions + 1), head.version + 1)]
    for target in [head, *pinned, *(kept for kept in window if kept.seal in known)]:
        try:
            before = chain(known, target)
        except KeyError:
            continue  # it could not be made before either
        assert chain(left, target) == before
        assert not gone_blobs & {blob for version in before for blob in version.blobs}
    assert all(version.link.version <= head.version for version in chosen.delete)


@given(histories())
@settings(max_examples=200, deadline=None)
def test_collecting_again_finds_nothing_more(history: tuple[dict[str, Version], Link, int, list[Link]]) -> None:
    known, head, keep_versions, pinned = history
    chosen = plan(known, head, keep_versions, pinned)
    left = {key: version for key, version in known.items() if key not in {v.link.seal for v in chosen.delete}}
    assert plan(left, head, keep_versions, pinned).delete == ()


def test_old_versions_and_losers_do_go() -> None:
    known = {seal(v): made(v, link(v - 1) if v else None, v % 5 == 0) for v in range(21)}
    known[seal(20, 1)] = made(20, link(19), False, 1)
    known[seal(19, 1)] = made(19, link(18), False, 1)
    chosen = plan(known, link(20), 3, [link(7)])
    assert sorted(chosen.keep) == sorted(seal(v) for v in (5, 6, 7, 15, 16, 17, 18, 19, 20))
    assert [(v.link.version, v.link.seal[-1]) for v in chosen.delete][-2:] == [(19, "1"), (20, "1")]
    assert [v.link.version for v in chosen.delete[:5]] == [0, 1, 2, 3, 4]


def test_a_shared_blob_outlives_the_version_that_goes() -> None:
    shared = BlobRef("f" * 32, 1, 1)
    old = Version(link(0), None, True, frozenset({shared, BlobRef("0" * 32, 1, 1)}))
    new = Version(link(1), link(0), True, frozenset({shared}))
    (gone,) = plan({old.link.seal: old, new.link.seal: new}, link(1), 1).delete
    assert gone.blobs == {BlobRef("0" * 32, 1, 1)}


@pytest.mark.parametrize("unknown", [10, 9])
def test_nothing_goes_on_partial_knowledge(unknown: int) -> None:
    """W3 (docs/field_failures.md)."""
    known = {seal(v): made(v, link(v - 1) if v else None, v == 0) for v in range(11)}
    del known[seal(unknown)]
    assert plan(known, link(10), 1) == Plan(frozenset(known), (), "the chain of version 10 is not known to its full")


async def test_after_collection_every_kept_and_pinned_version_is_read_back(
    bus: Bus, blobs: BlobStore, fresh_run: str
) -> None:
    """W5 (docs/field_failures.md)."""
    _, states = await publish_chain(bus, blobs, fresh_run, Policy(elements=3_000), 12, full_every=4)
    reader = PolicyReader(bus, blobs, fresh_run)
    held = await pin(bus, reader, 2, "evaluator")
    known = await survey(bus, reader)
    head = await reader.head()
    assert head is not None
    chosen = plan(known, head.link, 3, [p.link for p in await pins(bus, fresh_run)])
    assert [v.link.version for v in chosen.delete] == [3, 4, 5, 6, 7]
    done = await collect(bus, blobs, fresh_run, chosen.delete)
    assert done.versions == 5

    fresh = PolicyReader(bus, blobs, fresh_run)
    for version in (8, 9, 10, 11):
        assert same(await fresh.materialise(version), states[version])
    assert same(await fresh.materialise_manifest(await fresh.load(held)), states[2])
    assert same(await fresh.materialise_manifest(await find(bus, fresh, 2)), states[2])
    with pytest.raises(IntegrityError, match="collected"):
        await fresh.materialise(5)
    assert same(await fresh.advance(states[5], 5, 11), states[11]), "one left behind catches up from a full"

    await unpin(bus, fresh_run, 2, "evaluator")
    assert await pins(bus, fresh_run) == ()


async def test_pinning_what_was_collected_is_refused_and_leaves_no_pin(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str
) -> None:
    await publish_chain(quick_bus, quick_blobs, fresh_run, Policy(elements=100), 6, full_every=2)
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    await reader.materialise(0)  # its manifest is now remembered here, but no longer stored
    head = await reader.head()
    assert head is not None
    await collect(quick_bus, quick_blobs, fresh_run, plan(await survey(quick_bus, reader), head.link, 2).delete)
    with pytest.raises(IntegrityError):
        await pin(quick_bus, reader, 0, "late")
    assert await pins(quick_bus, fresh_run) == ()


async def test_owners_pinning_at_once_never_lose_each_others_pins(bus: Bus, fresh_run: str) -> None:
    blobs = MemoryBlobs()
    await publish_chain(bus, blobs, fresh_run, Policy(elements=100), 3)
    reader = PolicyReader(bus, blobs, fresh_run)
    await asyncio.gather(*(pin(bus, reader, version, f"owner-{n}") for n in range(4) for version in (0, 2)))
    held = {(p.link.version, p.owner) for p in await pins(bus, fresh_run)}
    assert held == {(version, f"owner-{n}") for n in range(4) for version in (0, 2)}


async def test_a_manifest_too_large_for_the_stream_leaves_nothing_in_the_claim_stream(bus: Bus, fresh_run: str) -> None:
    """What lies in the claim stream for a manifest is deleted by nobody else, and a full claim stream stops the run."""
    blobs, policy = MemoryBlobs(), Policy(elements=100)
    writer = PolicyWriter(bus, blobs, fresh_run, 1)
    await writer.resume()
    for version in range(4):
        await writer.publish(policy.step(), version=version, learner_step=version, numerics={"large": os.urandom(700_000).hex()})
    subjects = Subjects(fresh_run)
    assert len(await bus.subjects(subjects.stream("CLAIM"), f"{subjects.root}.claim.>")) == 4 * 2, "chunks"
    reader = PolicyReader(bus, blobs, fresh_run)
    head = await reader.head()
    assert head is not None
    await collect(bus, blobs, fresh_run, plan(await survey(bus, reader), head.link, 1).delete)
    assert len(await bus.subjects(subjects.stream("CLAIM"), f"{subjects.root}.claim.>")) == 2
    assert same(await PolicyReader(bus, blobs, fresh_run).materialise(3), policy.state)
