"""Squashes and rebases: the same bytes by fewer steps, never stored where they do not pay, never trusted more than a delta."""

from __future__ import annotations

import numpy as np
import pytest
from policy_cases import Policy, copy_of, publish_chain, same

from driftline.messages.bus import Bus
from driftline.messages.errors import IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.policy_store import (
    BlobStore,
    HostTensor,
    Manifest,
    MemoryBlobs,
    PolicyReader,
    PolicyWriter,
    State,
)
from driftline.policy_store.codec import encode_delta
from driftline.policy_store.fold import Fold, Folds
from driftline.policy_store.forms import DeltaForm
from driftline.policy_store.inspect import verify
from driftline.policy_store.packing import PackHead
from driftline.policy_store.paths import Path
from driftline.policy_store.shortcuts import WORTH, Shortcut, bases, load_shortcut
from driftline.policy_store.squash import make_shortcut, rebase, squash
from driftline.policy_store.tensor import DTYPES
from driftline.policy_store.unfold import unfold
from driftline.policy_store.workers import shared_workers


async def follow(bus: Bus, blobs: BlobStore, run: str, count: int, folds: Folds) -> dict[tuple[int, int], Shortcut]:
    """What the store does: step by step, storing what each version completes."""
    reader, made = PolicyReader(bus, blobs, run), {}
    state = await reader.materialise(0)
    for version in range(1, count):
        target = await reader.manifest(version)
        assert target.delta is not None
        fold = Fold(await reader.manifest(version - 1), version, target.delta.nbytes)
        state = await reader.advance(state, version - 1, version, seen=fold.see)
        async for longer in folds.add(fold, target.nbytes):
            shards = longer.shards(target, state, shared_workers(), DeltaForm.SMALL)
            shortcut = await make_shortcut(bus, blobs, target, longer.base.link, shards, longer.replaces)
            if shortcut is not None:
                longer.replaces = shortcut.encoding.nbytes
                made[longer.base.version, version] = shortcut
    return made


async def test_folding_while_following_makes_every_aligned_squash_and_a_late_follower_takes_few_steps(
    bus: Bus, fresh_run: str
) -> None:
    blobs = MemoryBlobs()
    _, states = await publish_chain(bus, blobs, fresh_run, Policy(elements=3_000), 17, full_every=100)
    made = await follow(bus, blobs, fresh_run, 17, Folds(shared_workers()))
    assert sorted(made) == sorted((v - span, v) for span in (2, 4, 8, 16) for v in range(span, 17, span))
    reader = PolicyReader(bus, blobs, fresh_run)
    for start in range(0, 17, 3):
        for end in range(start + 1, 17, 2):
            path = await reader._between(await reader.manifest(end), start)
            assert len(path.steps) <= 2 * (end - start).bit_length()
            assert same(await reader.advance(copy_of(states[start]), start, end, fallback=False), states[end])
    assert str(await reader._between(await reader.manifest(15), 1)) == "delta 2 + shortcut 2-4 + shortcut 4-8 + shortcut 8-12 + shortcut 12-14 + delta 15"
    assert same(await reader.materialise(16), states[16])
    assert str((await reader.paths(await reader.manifest(16)))[0]) == "full 0 + shortcut 0-16"


async def test_a_squash_from_the_packs_alone_is_the_one_that_folding_gives(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, policy: Policy
) -> None:
    await publish_chain(quick_bus, quick_blobs, fresh_run, policy, 9, full_every=4)
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    unfolded = {}
    for base, version in ((0, 2), (4, 8), (0, 8), (6, 8)):
        made = await squash(quick_bus, quick_blobs, reader, await reader.manifest(version), base)
        assert made is not None
        unfolded[base, version] = made
    folded = await follow(quick_bus, quick_blobs, fresh_run, 9, Folds(shared_workers()))
    for span, made in unfolded.items():
        assert [pack.digest for pack in made.encoding.packs] == [pack.digest for pack in folded[span].encoding.packs]
        assert made.encoding.changed == folded[span].encoding.changed


async def test_tensors_that_come_go_and_change_their_shape_are_squashed(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str
) -> None:
    base = Policy(elements=5_000).state
    other = {**base, "new": HostTensor.from_numpy(np.arange(5, dtype=np.uint8)), "norm": HostTensor.from_numpy(np.ones((3, 11), np.float32))}
    del other["frozen"]
    back = {**copy_of(base), "scale": HostTensor.from_numpy(np.asarray(2, np.int64))}
    states: list[State] = [base, other, back, other, base]
    writer = PolicyWriter(quick_bus, quick_blobs, fresh_run, 100)
    await writer.resume()
    for version, state in enumerate(states):
        await writer.publish(state, version=version, learner_step=version)
    made = await follow(quick_bus, quick_blobs, fresh_run, 5, Folds(shared_workers()))
    assert set(made) == {(0, 2), (2, 4), (0, 4)}
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    for start, end in ((0, 2), (2, 4), (0, 4)):
        assert same(await reader.advance(copy_of(states[start]), start, end, fallback=False), states[end])


async def test_a_squash_that_saves_less_than_a_tenth_is_not_stored_and_leaves_no_blob(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str
) -> None:
    writer = PolicyWriter(quick_bus, quick_blobs, fresh_run, 100)
    await writer.resume()
    state = {"w": HostTensor.from_numpy(np.zeros(200_000, np.uint16), "bfloat16")}
    rng = np.random.default_rng(0)
    for version in range(3):  # each version changes other elements: two deltas are as good as one
        if version:
            part = state["w"].data.view(np.uint16)[100_000 * (version - 1) : 100_000 * version]
            part[:] = rng.integers(0, 1 << 16, part.size)
        await writer.publish(state, version=version, learner_step=version)
    before = dict(quick_blobs.blobs)
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    assert await squash(quick_bus, quick_blobs, reader, await reader.manifest(2), 0) is None
    assert quick_blobs.blobs == before
    assert await load_shortcut(quick_bus, fresh_run, (await reader.manifest(2)).link, 0) is None


async def test_making_a_shortcut_again_leaves_the_one_that_is_there(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str
) -> None:
    """Its packs are the same bytes under the same names: to take back the second would take the first."""
    _, states = await publish_chain(quick_bus, quick_blobs, fresh_run, Policy(elements=3_000), 5, full_every=100)
    made = await follow(quick_bus, quick_blobs, fresh_run, 5, Folds(shared_workers()))
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    target = await reader.manifest(4)
    before = dict(quick_blobs.blobs)
    assert (await squash(quick_bus, quick_blobs, reader, target, 0)).seal == made[0, 4].seal  # type: ignore[union-attr]
    path = Path((*(await reader.paths(await reader.manifest(0)))[0].steps, *(await reader._between(target, 0)).steps))
    shards = unfold(path, quick_blobs, shared_workers(), lambda item: encode_delta(item.base, item.data, DTYPES[item.dtype].width, exponent=DTYPES[item.dtype].exponent), mark=0)  # type: ignore[arg-type]
    assert await make_shortcut(quick_bus, quick_blobs, target, made[0, 4].base, shards, 1) is None
    assert quick_blobs.blobs == before
    del quick_blobs.blobs[made[0, 4].encoding.packs[0].digest]
    again = await squash(quick_bus, quick_blobs, reader, target, 0)
    assert again is not None
    assert quick_blobs.blobs == before, "a damaged one is made anew"
    assert same(await reader.advance(copy_of(states[0]), 0, 4, fallback=False), states[4])


async def test_a_rebased_version_needs_nothing_older(bus: Bus, blobs: BlobStore, fresh_run: str) -> None:
    _, states = await publish_chain(bus, blobs, fresh_run, Policy(elements=3_000), 6, full_every=100)
    reader = PolicyReader(bus, blobs, fresh_run)
    target = await reader.manifest(4)
    await rebase(bus, blobs, reader, target)
    for version in range(4):
        for pack in (await reader.manifest(version)).packs:
            await blobs.delete(pack.ref)
    fresh = PolicyReader(bus, blobs, fresh_run)
    assert same(await fresh.materialise(4), states[4])
    assert same(await fresh.materialise(5), states[5]), "and what follows it starts there"
    assert str(await fresh.reachable(target.link)) == "rebase 4"


@pytest.mark.parametrize(("base", "target"), [(1, 3), (0, 3), (2, 6), (1, 2), (4, 4), (5, 4)])
async def test_a_squash_over_anything_but_an_aligned_power_of_two_is_refused(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, base: int, target: int
) -> None:
    await publish_chain(quick_bus, quick_blobs, fresh_run, Policy(elements=100), 7)
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    with pytest.raises(IntegrityError, match="aligned power of two"):
        await squash(quick_bus, quick_blobs, reader, await reader.manifest(target), base)


def test_the_bases_of_a_version_are_nested_or_apart() -> None:
    spans = [(base, version) for version in range(130) for base in bases(version, 0)]
    assert spans[:4] == [(0, 2), (0, 4), (2, 4), (4, 6)]
    for a, b in spans:
        for c, d in spans:
            assert max(a, c) >= min(b, d) or (a <= c and d <= b) or (c <= a and b <= d)


@pytest.fixture
async def made(quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str) -> tuple[Shortcut, Manifest]:
    await publish_chain(quick_bus, quick_blobs, fresh_run, Policy(elements=3_000), 5, full_every=100)
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    target = await reader.manifest(4)
    shortcut = await squash(quick_bus, quick_blobs, reader, target, 0)
    assert shortcut is not None
    return shortcut, target


@pytest.mark.parametrize("name", sorted(set(Shortcut.model_fields) - {"seal"}))
async def test_every_changed_field_of_a_shortcut_is_found(made: tuple[Shortcut, Manifest], name: str) -> None:
    body = made[0].model_dump()
    changed: object
    match body[name]:
        case {"seal": seal}:
            changed = {**body[name], "seal": seal[::-1]}
        case {"changed": count}:
            changed = {**body[name], "changed": count + 1}
        case int() | float() as number:
            changed = number + 1
        case str() as text:
            changed = text + "x"
        case value:
            raise AssertionError(value)
    with pytest.raises(ValueError, match=r"seal"):
        Shortcut.model_validate({**body, name: changed})


async def test_a_shortcut_that_does_not_pay_cannot_exist(made: tuple[Shortcut, Manifest]) -> None:
    body = {**made[0].model_dump(), "seal": "", "replaces": int(made[0].encoding.nbytes / WORTH) - 1}
    with pytest.raises(ValueError, match="replaces"):
        Shortcut.model_validate(body)


def test_no_pack_of_one_encoding_opens_like_one_of_another() -> None:
    heads = [PackHead(full, 8, 0, shortcut, span) for full, shortcut, span in
             ((True, False, 0), (False, False, 0), (True, True, 0), (False, True, 2), (False, True, 4), (False, True, 8))]
    assert len({head.encode() for head in heads}) == len(heads)
    for head in heads:
        for other in heads:
            if head is not other:
                with pytest.raises(IntegrityError, match="not the"):
                    head.check(other.encode())


async def test_folds_hold_at_most_half_of_the_weights_and_drop_the_longest(quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str) -> None:
    rng = np.random.default_rng(0)
    state = {"w": HostTensor.from_numpy(rng.integers(0, 1 << 16, 40_000).astype(np.uint16), "bfloat16")}
    writer = PolicyWriter(quick_bus, quick_blobs, fresh_run, 100)
    await writer.resume()
    for version in range(9):
        at = np.flatnonzero(rng.random(40_000) < 0.12)
        state["w"].data.view(np.uint16)[at] ^= rng.integers(1, 1 << 16, at.size).astype(np.uint16)
        await writer.publish(state, version=version, learner_step=version)
    folds = Folds(shared_workers())
    made = await follow(quick_bus, quick_blobs, fresh_run, 9, folds)
    assert folds.dropped > 0
    assert (0, 8) not in made
    assert sum(fold.nbytes for fold in folds.waiting) <= 40_000
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    assert same(await reader.materialise(8), state)


async def test_verifying_a_version_tries_its_shortcuts_and_the_deltas_they_stand_for(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str
) -> None:
    await publish_chain(quick_bus, quick_blobs, fresh_run, Policy(elements=3_000), 5, full_every=100)
    await follow(quick_bus, quick_blobs, fresh_run, 5, Folds(shared_workers()))
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    report = await verify(reader, 4)
    assert [check.path for check in report.paths] == [
        "full 0 + shortcut 0-4", "full 0 + shortcut 0-2 + shortcut 2-4", "full 0 + delta 1 + delta 2 + delta 3 + delta 4"]
    assert report.intact
    delta = (await reader.manifest(3)).delta
    assert delta is not None
    quick_blobs.blobs[delta.packs[0].digest] = b"damaged"
    report = await verify(reader, 4)
    assert [check.ok for check in report.paths] == [True, True, False]
    assert report.ok
    assert not report.intact
