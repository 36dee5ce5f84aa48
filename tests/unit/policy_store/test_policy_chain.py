"""Publishing and reading a chain of versions: exact, atomic, and refusing what it cannot prove."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
from policy_cases import Policy, copy_of, publish_chain, same

from driftline.messages.bus import Bus
from driftline.messages.errors import (
    BrokerUnavailable,
    IntegrityError,
    MalformedMessage,
)
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import RunFinished
from driftline.policy_store import (
    BlobRef,
    BlobStore,
    HostTensor,
    Link,
    Manifest,
    MemoryBlobs,
    PolicyHead,
    PolicyReader,
    PolicyWriter,
    VersionKind,
    state_digest,
)
from driftline.policy_store.manifest import manifest_subject


async def test_every_version_is_read_back_bit_for_bit_and_by_any_joiner(
    bus: Bus, blobs: BlobStore, fresh_run: str, policy: Policy
) -> None:
    _, states = await publish_chain(bus, blobs, fresh_run, policy, 8)
    for version in range(8):
        joiner = PolicyReader(bus, blobs, fresh_run)
        state = await joiner.materialise(version)
        assert same(state, states[version])
        manifest = await joiner.manifest(version)
        assert manifest.digest == state_digest(state) == state_digest(states[version])
        assert manifest.consumed == (f"g{version}",)
        for later in range(version + 1, 8):
            assert same(await joiner.advance(copy_of(state), version, later), states[later])
    head = await PolicyReader(bus, blobs, fresh_run).head()
    assert head is not None
    assert (head.version, head.digest) == (7, state_digest(states[7]))


async def test_fulls_come_periodically_and_a_follower_steps_over_them(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, policy: Policy
) -> None:
    _, states = await publish_chain(quick_bus, quick_blobs, fresh_run, policy, 8)
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    kinds = [(await reader.manifest(version)).kind for version in range(8)]
    delta, both = VersionKind.DELTA, VersionKind.BOTH
    assert kinds == [VersionKind.FULL, delta, delta, both, delta, delta, both, delta]
    state = await reader.materialise(0)
    before = reader.counts.bytes_read
    for version in range(1, 8):
        held = state["layers.0.weight"].data
        state = await reader.advance(state, version - 1, version)
        assert state["layers.0.weight"].data is held, "a delta is applied in place"
    assert same(state, states[7])
    full = (await reader.manifest(6)).full
    assert full is not None
    assert reader.counts.bytes_read - before < full.nbytes / 4


async def test_advancing_far_takes_a_full_when_that_is_cheaper(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str
) -> None:
    """H13 (docs/field_failures.md)."""
    policy = Policy(elements=200_000)
    writer = PolicyWriter(quick_bus, quick_blobs, fresh_run, 8)
    await writer.resume()
    for version in range(9):
        await writer.publish(policy.step(0.5), version=version, learner_step=version)
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    state = await reader.materialise(0)
    assert same(await reader.advance(state, 0, 8), policy.state)
    assert reader.counts.materialised == 2


async def test_tensors_may_be_added_removed_and_reshaped_between_versions(
    bus: Bus, blobs: BlobStore, fresh_run: str, small_policy: Policy
) -> None:
    writer = PolicyWriter(bus, blobs, fresh_run, 100)
    await writer.resume()
    first = copy_of(small_policy.state)
    second = copy_of(first)
    del second["frozen"]
    second["new"] = HostTensor.from_numpy(np.arange(5, dtype=np.uint8))
    second["norm"] = HostTensor.from_numpy(np.ones((3, 11), np.float32))
    second["scale"] = HostTensor.from_numpy(np.asarray(2, np.int64))
    third = copy_of(first)
    for version, state in enumerate((first, second, third)):
        await writer.publish(state, version=version, learner_step=version)
    reader = PolicyReader(bus, blobs, fresh_run)
    state = await reader.materialise(0)
    state = await reader.advance(state, 0, 1)
    assert same(state, second)
    assert list(state) == sorted(second)
    assert same(await reader.advance(state, 1, 2), third)
    assert same(await reader.materialise(2), third)
    assert reader.counts.fallbacks == 0


async def test_a_state_of_no_tensors_is_refused(quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str) -> None:
    writer = PolicyWriter(quick_bus, quick_blobs, fresh_run, 2)
    await writer.resume()
    with pytest.raises(IntegrityError, match="no tensors"):
        await writer.publish({}, version=0, learner_step=0)


async def test_a_wrong_base_is_refused_and_emptied_or_replaced_from_a_full(
    bus: Bus, fresh_run: str, policy: Policy
) -> None:
    """W1, W2 (docs/field_failures.md)."""
    blobs = MemoryBlobs()
    _, states = await publish_chain(bus, blobs, fresh_run, policy, 3)
    reader = PolicyReader(bus, blobs, fresh_run)
    wrong = copy_of(states[0])
    wrong["layers.0.weight"].data[-1] ^= 0x40
    with pytest.raises(IntegrityError, match=r"layers\.0\.weight.*base has another digest"):
        await reader.advance(copy_of(wrong), 0, 1, fallback=False)
    poisoned = copy_of(wrong)
    with pytest.raises(IntegrityError):
        await reader.advance(poisoned, 0, 1, fallback=False)
    assert poisoned == {}, "a half-applied state cannot be used by mistake"
    assert same(await reader.advance(wrong, 0, 1), states[1])
    assert reader.counts.fallbacks == 1
    assert "layers.0.weight" in reader.counts.refused[-1]


async def test_a_delta_is_never_applied_twice(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, policy: Policy
) -> None:
    """W2 (docs/field_failures.md)."""
    _, states = await publish_chain(quick_bus, quick_blobs, fresh_run, policy, 3)
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    with pytest.raises(IntegrityError, match="base has another digest"):
        await reader.advance(copy_of(states[1]), 0, 1, fallback=False)
    with pytest.raises(IntegrityError, match="not before version 1"):
        await reader.advance(copy_of(states[1]), 1, 1, fallback=False)
    assert same(await reader.advance(copy_of(states[1]), 0, 1), states[1])


async def test_a_base_with_other_tensors_is_refused_by_name(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, small_policy: Policy
) -> None:
    _, states = await publish_chain(quick_bus, quick_blobs, fresh_run, small_policy, 2)
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    missing = copy_of(states[0])
    del missing["frozen"]
    with pytest.raises(IntegrityError, match="tensor frozen"):
        await reader.advance(missing, 0, 1, fallback=False)


async def test_a_reader_goes_back_to_an_older_version_from_a_full(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, small_policy: Policy
) -> None:
    _, states = await publish_chain(quick_bus, quick_blobs, fresh_run, small_policy, 4)
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    assert same(await reader.advance(copy_of(states[3]), 3, 1), states[1])


async def test_every_bit_flipped_in_a_blob_is_found_and_another_path_is_taken(
    quick_bus: MemoryBus, fresh_run: str, policy: Policy
) -> None:
    blobs = MemoryBlobs()
    _, states = await publish_chain(quick_bus, blobs, fresh_run, policy, 5)
    manifest = await PolicyReader(quick_bus, blobs, fresh_run).manifest(3)
    assert manifest.full is not None
    rng = np.random.default_rng(0)
    for pack in manifest.full.packs:
        whole = blobs.blobs[pack.digest]
        for bit in rng.integers(0, len(whole) * 8, 8):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << int(bit) % 8
            blobs.blobs[pack.digest] = bytes(damaged)
            reader = PolicyReader(quick_bus, blobs, fresh_run)
            assert same(await reader.materialise(4), states[4])
            assert pack.digest in reader.counts.refused[0]
        blobs.blobs[pack.digest] = whole


async def test_damage_below_the_blob_digest_is_found_by_the_shard_digest(
    quick_bus: MemoryBus, fresh_run: str, policy: Policy
) -> None:
    """A store that returns other bytes without noticing: the shard's own digest must still refuse them."""

    class Trusting(MemoryBlobs):
        async def get(self, ref: BlobRef) -> bytes:
            return self.blobs[ref.digest]

    blobs = Trusting()
    _, states = await publish_chain(quick_bus, blobs, fresh_run, policy, 2, full_every=10)
    reader = PolicyReader(quick_bus, blobs, fresh_run)
    delta = (await reader.manifest(1)).delta
    assert delta is not None
    (pack,) = delta.packs
    whole = blobs.blobs[pack.digest]
    rng = np.random.default_rng(1)
    refused: list[str] = []
    for bit in rng.integers(0, len(whole) * 8, 60):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << int(bit) % 8
        blobs.blobs[pack.digest] = bytes(damaged)
        try:
            # A bit that no reader looks at (zstd's unused flags) may pass: then the weights must be right.
            assert same(await reader.advance(copy_of(states[0]), 0, 1, fallback=False), states[1])
        except IntegrityError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert all("version 1" in reason for reason in refused)


async def test_a_missing_blob_is_named_when_no_path_is_left(
    bus: Bus, blobs: BlobStore, fresh_run: str, small_policy: Policy
) -> None:
    """W3 (docs/field_failures.md)."""
    await publish_chain(bus, blobs, fresh_run, small_policy, 2, full_every=10)
    reader = PolicyReader(bus, blobs, fresh_run)
    full = (await reader.manifest(0)).full
    assert full is not None
    await blobs.delete(full.packs[0].ref)
    assert not await blobs.has(full.packs[0].ref)
    with pytest.raises(IntegrityError, match=full.packs[0].digest):
        await reader.materialise(1)


async def test_a_pack_in_another_versions_place_is_refused(
    quick_bus: MemoryBus, fresh_run: str, small_policy: Policy
) -> None:
    class Swapped(MemoryBlobs):
        swap: tuple[str, str] = ("", "")

        async def get(self, ref: BlobRef) -> bytes:
            return self.blobs[self.swap[1] if ref.digest == self.swap[0] else ref.digest]

    blobs = Swapped()
    _, states = await publish_chain(quick_bus, blobs, fresh_run, small_policy, 3, full_every=10)
    reader = PolicyReader(quick_bus, blobs, fresh_run)
    one, two = (await reader.manifest(1)).packs[0], (await reader.manifest(2)).packs[0]
    blobs.swap = (one.digest, two.digest)
    with pytest.raises(IntegrityError, match="not the delta pack 0 of version 1"):
        await reader.advance(copy_of(states[0]), 0, 1, fallback=False)


MANIFEST_FIELDS = sorted(set(Manifest.model_fields) - {"seal"})


@pytest.fixture
async def sealed(quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, small_policy: Policy) -> Manifest:
    await publish_chain(quick_bus, quick_blobs, fresh_run, small_policy, 4)
    return await PolicyReader(quick_bus, quick_blobs, fresh_run).manifest(3)


@pytest.mark.parametrize("name", MANIFEST_FIELDS)
def test_every_changed_manifest_field_is_found(sealed: Manifest, name: str) -> None:
    body = sealed.model_dump()
    value = body[name]
    match value:
        case int() | float():
            body[name] = value + 1
        case str():
            body[name] = ("0" if value[0] != "0" else "1") + value[1:]
        case np.ndarray():
            body[name] = value.copy()
            body[name].flat[0] ^= 1
        case tuple() | list():
            body[name] = value[:-1]
        case {"seal": seal}:
            body[name] = {**value, "seal": seal[::-1]}
        case {"chunks": chunks}:
            body[name] = {**value, "chunks": chunks + 1}
        case {"changed": changed}:
            body[name] = {**value, "changed": changed + 1}
        case dict():
            body[name] = {**value, "lr": 0.2}
        case _:
            raise AssertionError(name)
    with pytest.raises(ValueError, match=r"seal|digest|chain|parent|shard") as caught:
        Manifest.model_validate(body)
    named = {"run", "at", "consumed", "numerics", "learner_step", "delta", "full", "batch"}  # only the seal can tell
    assert name in named or any(word in str(caught.value) for word in (name, "digest", "chain", "parent"))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [("pack", 99, "pack = 99"), ("offset", 1 << 40, "offset: shard 0"), ("codec", 9, "codec = 9"), ("length", -1, "offset")],
)
def test_an_encoding_that_points_outside_its_packs_cannot_exist(
    sealed: Manifest, column: str, value: int, message: str
) -> None:
    body = sealed.model_dump()
    body["seal"] = ""
    changed = body["full"][column].copy()
    changed[0] = value
    body["full"] = {**body["full"], column: changed}
    with pytest.raises(ValueError, match=message):
        Manifest.model_validate(body)


async def test_a_manifest_under_another_seal_is_refused(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, sealed: Manifest
) -> None:
    other = Link(version=sealed.version, seal=sealed.seal[::-1])
    await quick_bus.publish(manifest_subject(fresh_run, other), sealed, id="misplaced")
    with pytest.raises(IntegrityError, match="another message is in its place"):
        await PolicyReader(quick_bus, quick_blobs, fresh_run).load(other)


async def test_an_unreadable_head_fails_closed(bus: Bus, fresh_run: str, small_policy: Policy) -> None:
    """W9 (docs/field_failures.md)."""
    blobs = MemoryBlobs()
    await publish_chain(bus, blobs, fresh_run, small_policy, 2)
    head = Subjects(fresh_run).head
    await bus.publish_bytes(head, b"\x00 not a message", id="garbage")
    reader, writer = PolicyReader(bus, blobs, fresh_run), PolicyWriter(bus, blobs, fresh_run)
    for attempt in (reader.head, writer.resume, lambda: reader.materialise(1), lambda: anext(aiter(reader.watch()))):
        with pytest.raises((MalformedMessage, IntegrityError)):
            await attempt()
    await bus.publish(head, RunFinished(run=fresh_run, version=1, reason="misplaced"), id="misplaced")
    for attempt in (reader.head, writer.resume):
        with pytest.raises(IntegrityError, match="not a policy head"):
            await attempt()


async def test_cancelling_an_advance_poisons_the_state_and_leaves_no_thread_writing(
    quick_bus: MemoryBus, fresh_run: str, policy: Policy
) -> None:
    """W2 (docs/field_failures.md)."""
    class Stuck(MemoryBlobs):
        asked: asyncio.Event | None = None

        async def get(self, ref: BlobRef) -> bytes:
            if self.asked is not None:
                self.asked.set()
                await asyncio.Event().wait()
            return await super().get(ref)

    blobs = Stuck()
    _, states = await publish_chain(quick_bus, blobs, fresh_run, policy, 2, full_every=10)
    blobs.asked = asyncio.Event()
    state = copy_of(states[0])
    task = asyncio.create_task(PolicyReader(quick_bus, blobs, fresh_run).advance(state, 0, 1))
    await blobs.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert state == {}


async def test_a_blob_store_that_never_answers_is_an_outage_and_not_a_hang(
    quick_bus: MemoryBus, fresh_run: str, small_policy: Policy
) -> None:
    """H12 (docs/field_failures.md)."""
    class Silent(MemoryBlobs):
        silent = False

        async def get(self, ref: BlobRef) -> bytes:
            if self.silent:
                await asyncio.Event().wait()
            return await super().get(ref)

    blobs = Silent()
    await publish_chain(quick_bus, blobs, fresh_run, small_policy, 1)
    blobs.silent = True
    with pytest.raises(BrokerUnavailable, match="no blob within"):
        await PolicyReader(quick_bus, blobs, fresh_run, blob_timeout_s=0.05).materialise(0)


async def test_a_watcher_sees_the_newest_head_and_each_later_one(bus: Bus, fresh_run: str, small_policy: Policy) -> None:
    """H13, S20 (docs/field_failures.md)."""
    blobs = MemoryBlobs()
    writer, _ = await publish_chain(bus, blobs, fresh_run, small_policy, 2)
    seen: list[int] = []
    async with asyncio.timeout(30), aclosing(PolicyReader(bus, blobs, fresh_run).watch()) as heads:  # type: ignore[type-var]
        async for head in heads:
            seen.append(head.version)
            if head.version == 4:
                break
            await writer.publish(small_policy.step(), version=head.version + 1, learner_step=0)
    assert seen == [1, 2, 3, 4]


async def test_a_watcher_without_pushes_still_learns_of_a_head(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, small_policy: Policy
) -> None:
    """H6 (docs/field_failures.md)."""
    class Deaf:
        def __getattr__(self, name: str) -> object:
            return getattr(quick_bus, name)

        async def follow(self, *_: object, **__: object) -> object:
            raise BrokerUnavailable("deaf")
            yield

    writer, _ = await publish_chain(quick_bus, quick_blobs, fresh_run, small_policy, 1)
    reader = PolicyReader(Deaf(), quick_blobs, fresh_run)  # type: ignore[arg-type]
    async with asyncio.timeout(30), aclosing(reader.watch(poll_s=0.01)) as heads:  # type: ignore[type-var]
        assert (await anext(heads)).version == 0
        await writer.publish(small_policy.step(), version=1, learner_step=1)
        assert (await anext(heads)).version == 1


async def test_a_watcher_refuses_a_head_that_moves_backwards(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, small_policy: Policy
) -> None:
    await publish_chain(quick_bus, quick_blobs, fresh_run, small_policy, 3)
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    async with asyncio.timeout(30), aclosing(reader.watch(poll_s=0.01)) as heads:  # type: ignore[type-var]
        head = await anext(heads)
        older = PolicyHead.model_validate({**head.model_dump(), "version": 1})
        await quick_bus.publish(Subjects(fresh_run).head, older, id="rewritten")
        with pytest.raises(IntegrityError, match="it was at version 2"):
            await anext(heads)


async def test_nothing_published_is_none_for_a_head_and_an_error_for_weights(
    bus: Bus, blobs: BlobStore, fresh_run: str
) -> None:
    reader = PolicyReader(bus, blobs, fresh_run)
    assert await reader.head() is None
    with pytest.raises(IntegrityError, match="nothing is published"):
        await reader.materialise(0)
