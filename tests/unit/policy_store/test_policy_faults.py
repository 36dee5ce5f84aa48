"""Every fault, in every part: detected, named, got around by another path; a version is applied wholly or not at all.

The chain has fulls at 0, 4 and 8, a delta for each version and every aligned squash; the target is version 7, whose cheapest way is the full
of 4, the squash 4-6 and the delta 7.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pytest
from policy_cases import Policy, copy_of, cut_after, publish_chain, same

from driftline.messages.dead_letters import Raw
from driftline.messages.errors import BrokerUnavailable, DriftlineError, IntegrityError, MalformedMessage
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.policy_store import BlobRef, MemoryBlobs, PolicyReader, State
from driftline.policy_store.manifest import Encoding, manifest_subject
from driftline.policy_store.paths import Path, Step
from driftline.policy_store.pins import pin, pins
from driftline.policy_store.reader import VersionCollected
from driftline.policy_store.shortcuts import load_shortcut, shortcut_subject
from driftline.policy_store.squash import rebase, squash

T = TypeVar("T")

SPANS = ((0, 2), (2, 4), (4, 6), (6, 8), (0, 4), (4, 8), (0, 8))
BEST = "full 4 + shortcut 4-6 + delta 7"


class Trusting(MemoryBlobs):
    """A store that gives what it has without looking, and other blobs where it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.instead: dict[str, str] = {}

    async def get(self, ref: BlobRef) -> bytes:
        digest = self.instead.get(ref.digest, ref.digest)
        if digest not in self.blobs:
            raise IntegrityError("not in the store", field="blob", value=digest)
        return self.blobs[digest]


@dataclass
class Case:
    bus: MemoryBus
    blobs: Trusting
    run: str
    states: list[State] = field(default_factory=list)

    def reader(self, *, strict: bool = False) -> PolicyReader:
        """`strict`: its store checks what it gives."""
        if not strict:
            return PolicyReader(self.bus, self.blobs, self.run)
        checked = MemoryBlobs()
        checked.blobs = self.blobs.blobs
        return PolicyReader(self.bus, checked, self.run)

    async def step(self, name: str) -> Step:
        """A step of the best path, or the rebase of 5."""
        reader = self.reader()
        if name == "rebase":
            target = await reader.manifest(5)
            return (await reader.paths(target))[0].steps[0]
        if name == "delta":
            target = await reader.manifest(8)
            assert target.delta is not None
            return Step(target, await reader.manifest(7), target.delta)
        (path, *_) = await reader.paths(await reader.manifest(7))
        assert str(path) == BEST
        return path.steps[("full", "shortcut").index(name)]

    async def read(self, reader: PolicyReader, kind: str) -> None:
        """Get a version whose best way is by that kind of step, and which can be had without it."""
        match kind:
            case "delta":
                assert same(await reader.advance(copy_of(self.states[7]), 7, 8), self.states[8])
            case "rebase":
                assert same(await reader.materialise(5), self.states[5])
            case _:
                assert same(await reader.materialise(7), self.states[7])

    async def step_of(self, base: int, version: int) -> Step:
        """The squash between two versions."""
        reader = self.reader()
        target = await reader.manifest(version)
        made = await load_shortcut(self.bus, self.run, target.link, base)
        assert made is not None
        return Step(target, await reader.manifest(base), made.encoding, True)


@pytest.fixture
async def case(quick_bus: MemoryBus, fresh_run: str) -> Case:
    case = Case(quick_bus, Trusting(), fresh_run)
    _, case.states = await publish_chain(quick_bus, case.blobs, fresh_run, Policy(elements=3_000), 9, full_every=4)
    reader = case.reader()
    for base, version in SPANS:
        assert await squash(quick_bus, case.blobs, reader, await reader.manifest(version), base) is not None
    await rebase(quick_bus, case.blobs, reader, await reader.manifest(5))
    return case


def regions(encoding: Encoding) -> Iterator[tuple[int, int]]:
    """(pack, byte): in the head's magic, kind, span, version and number; and at each shard's start, inside, and end."""
    for byte in (0, 4, 6, 8, 16):
        yield 0, byte
    for pack, offset, length in zip(encoding.pack.tolist(), encoding.offset.tolist(), encoding.length.tolist(), strict=True):
        if pack >= 0:
            yield from ((pack, offset + at) for at in sorted({0, 5, length // 3, length // 2, length - 1}))


KINDS = ("full", "shortcut", "delta", "rebase")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_flipped_bit_in_any_region_of_a_pack_is_found_named_and_passed_by(case: Case, kind: str) -> None:
    step = await case.step(kind)
    refused = 0
    for pack, byte in regions(step.encoding):
        digest = step.encoding.packs[pack].digest
        whole = case.blobs.blobs[digest]
        case.blobs.blobs[digest] = whole[:byte] + bytes([whole[byte] ^ 0x10]) + whole[byte + 1 :]
        strict, trusting = case.reader(strict=True), case.reader()
        await case.read(strict, kind)
        assert digest in strict.counts.refused[0], "the store's digest names the blob"
        await case.read(trusting, kind)
        for why in trusting.counts.refused:  # below the store's digest: the pack's head, or the shard's digest
            assert f"of version {step.manifest.version}" in why
            refused += 1
        case.blobs.blobs[digest] = whole
    assert refused >= 5, "a bit that no decoder looks at may pass, and then the weights are right"


Damage = Callable[[Case, Step], None]


def missing(case: Case, step: Step) -> None:
    for pack in step.encoding.packs:
        del case.blobs.blobs[pack.digest]


def truncated(case: Case, step: Step) -> None:
    for pack in step.encoding.packs:
        case.blobs.blobs[pack.digest] = case.blobs.blobs[pack.digest][:-3]


def empty(case: Case, step: Step) -> None:
    for pack in step.encoding.packs:
        case.blobs.blobs[pack.digest] = b""


@pytest.mark.parametrize("damage", [missing, truncated, empty])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_missing_or_truncated_shard_is_found_and_passed_by(case: Case, kind: str, damage: Damage) -> None:
    step = await case.step(kind)
    damage(case, step)
    for reader in (case.reader(), case.reader(strict=True)):
        await case.read(reader, kind)
        assert f"of version {step.manifest.version}" in reader.counts.refused[0] or step.encoding.packs[0].digest in reader.counts.refused[0]


@pytest.mark.parametrize("kind", ["shortcut", "delta"])
@pytest.mark.parametrize("damage", [missing, truncated, empty])
async def test_a_follower_that_meets_damage_ends_with_the_version_or_with_nothing(case: Case, kind: str, damage: Damage) -> None:
    step = await case.step(kind)
    assert step.base is not None
    start, end = (step.base.version, step.manifest.version)
    damage(case, step)
    reader = case.reader()
    assert same(await reader.advance(copy_of(case.states[start]), start, end), case.states[end])
    state = copy_of(case.states[start])
    if kind == "shortcut" and damage is missing:
        # It may have been collected at this moment: the deltas are taken, and the state was not torn for it.
        assert await reader.advance(state, start, end, fallback=False) is state
        assert same(state, case.states[end])
        return
    with pytest.raises(IntegrityError):
        await reader.advance(state, start, end, fallback=False)
    assert state == {}


async def test_deltas_in_the_wrong_order_are_refused_by_name(case: Case) -> None:
    reader = case.reader()
    six, seven = [(await reader.manifest(version)).delta for version in (6, 7)]
    assert six is not None
    assert seven is not None
    case.blobs.instead = {six.packs[0].digest: seven.packs[0].digest, seven.packs[0].digest: six.packs[0].digest}
    with pytest.raises(IntegrityError, match="not the delta pack 0 of version 7"):
        await case.reader().advance(copy_of(case.states[6]), 6, 7, fallback=False)
    with pytest.raises(IntegrityError, match="not the delta pack 0 of version 6"):
        await case.reader().advance(copy_of(case.states[5]), 5, 6, fallback=False)
    with pytest.raises(IntegrityError, match="every path is damaged"):
        await case.reader().materialise(7)
    case.blobs.instead = {}
    assert same(await case.reader().materialise(7), case.states[7])


async def test_a_repeated_delta_is_refused_by_the_pack_and_by_the_base(case: Case) -> None:
    reader = case.reader()
    deltas = {version: (await reader.manifest(version)).delta for version in (6, 7)}
    assert all(deltas.values())
    case.blobs.instead = {deltas[7].packs[0].digest: deltas[6].packs[0].digest}  # type: ignore[union-attr]
    with pytest.raises(IntegrityError, match="not the delta pack 0 of version 7"):
        await reader.advance(copy_of(case.states[6]), 6, 7, fallback=False)
    case.blobs.instead = {}
    for start, end in ((6, 7), (4, 6), (0, 8)):
        with pytest.raises(IntegrityError, match="base has another digest"):
            await reader.advance(copy_of(case.states[end]), start, end, fallback=False)


@pytest.mark.parametrize("wrong", [5, 3, 8])
async def test_a_shortcut_on_a_wrong_base_touches_nothing_it_gives_out(case: Case, wrong: int) -> None:
    state = copy_of(case.states[wrong])
    with pytest.raises(IntegrityError, match="base has another digest"):
        await case.reader().advance(state, 4, 6, fallback=False)
    assert state == {}
    assert same(await case.reader().advance(copy_of(case.states[wrong]), 4, 6), case.states[6])


async def test_two_damaged_paths_leave_the_third(case: Case) -> None:
    missing(case, await case.step("full"))
    truncated(case, await case.step_of(4, 6))
    reader = case.reader(strict=True)
    assert same(await reader.materialise(7), case.states[7])
    assert [why.split(":")[0] for why in reader.counts.refused] == [BEST, "full 0 + shortcut 0-4 + shortcut 4-6 + delta 7"]
    for base, version in ((0, 4), (0, 2)):
        truncated(case, await case.step_of(base, version))
    reader = case.reader(strict=True)
    assert same(await reader.materialise(7), case.states[7])
    assert len(reader.counts.refused) == 4


async def test_when_no_path_is_left_every_one_of_them_is_named(case: Case) -> None:
    reader = case.reader()
    for version in (0, 4):
        manifest = await reader.manifest(version)
        assert manifest.full is not None
        missing(case, Step(manifest, None, manifest.full))
    missing(case, await case.step("rebase"))
    with pytest.raises(IntegrityError) as caught:
        await case.reader().materialise(7)
    assert not isinstance(caught.value, VersionCollected)
    for start in ("full 4", "full 0", "rebase 5"):
        assert start in str(caught.value)


async def test_a_version_that_goes_while_it_is_read_is_said_to_be_collected(case: Case) -> None:
    reader = case.reader()
    target = await reader.manifest(7)
    case.blobs.blobs.clear()
    await case.bus.purge(Subjects(case.run).stream("POLICY"), manifest_subject(case.run, target.link))
    with pytest.raises(VersionCollected, match="collected"):
        await reader.materialise_manifest(target)
    with pytest.raises(VersionCollected, match="collected"):
        await case.reader().materialise(7)


# ---- what lies in the policy stream ----


def flip(case: Case, subject: str, bit: int) -> Callable[[], None]:
    """Flip one bit of the newest message on a subject, as the broker holds it; the returned call puts it back."""
    stream = case.bus.broker.stream(Subjects(case.run).stream("POLICY"))
    raw = stream.last_on(subject)
    assert raw is not None
    entry = stream._entries[raw.seq]
    data = bytearray(raw.data)
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    stream._entries[raw.seq] = entry._replace(raw=Raw(raw.seq, raw.subject, raw.headers, bytes(data)))

    def back() -> None:
        stream._entries[raw.seq] = entry

    return back


async def refusal(work: Awaitable[T], right: Callable[[T], bool]) -> str | None:
    """Why it was refused, or None and then what it gave is right."""
    try:
        found = await work
    except DriftlineError as error:
        return str(error)
    assert right(found)
    return None


async def test_a_flipped_bit_in_a_manifest_is_found_or_changes_nothing(case: Case) -> None:
    target = await case.reader().manifest(7)
    refused = 0
    for bit in np.random.default_rng(0).integers(0, 1 << 16, 60):
        back = flip(case, manifest_subject(case.run, target.link), int(bit))
        why = await refusal(case.reader().materialise(7), lambda state: same(state, case.states[7]))
        assert why is None or "manifest of version 7" in why
        refused += why is not None
        back()
    assert refused > 50


async def test_a_flipped_bit_in_a_shortcut_costs_the_shortcut_only(case: Case) -> None:
    target = await case.reader().manifest(6)
    refused = 0
    for bit in np.random.default_rng(1).integers(0, 1 << 16, 60):
        back = flip(case, shortcut_subject(case.run, target.link, 4), int(bit))
        reader = case.reader()
        assert same(await reader.advance(copy_of(case.states[4]), 4, 6, fallback=False), case.states[6])
        refused += len(reader.counts.refused)
        assert all("shortcut to version 6" in why for why in reader.counts.refused)
        back()
    assert refused > 50


async def test_a_flipped_bit_in_the_pins_is_found_and_nothing_is_taken_for_unpinned(case: Case) -> None:
    await pin(case.bus, case.reader(), 2, "someone")
    told = await pins(case.bus, case.run)
    refused = 0
    for bit in np.random.default_rng(2).integers(0, 1 << 16, 60):
        back = flip(case, f"{Subjects(case.run).root}.policy.pins", int(bit))
        why = await refusal(pins(case.bus, case.run), lambda found: found == told)
        assert why is None or "pins" in why
        refused += why is not None
        back()
    assert refused > 50


async def test_a_flipped_bit_in_the_head_never_gives_other_weights(case: Case) -> None:
    refused = 0
    for bit in np.random.default_rng(3).integers(0, 1 << 14, 80):
        back = flip(case, Subjects(case.run).head, int(bit))
        reader = case.reader()
        try:
            head = await reader.head()
            assert head is not None
            state = await reader.materialise_manifest(await reader.load(head.link))
            assert same(state, case.states[8])  # a bit of the time or the step, which say nothing about weights
        except (IntegrityError, MalformedMessage):
            refused += 1
        back()
    assert refused > 40


# ---- torn: stopped at every point where something is waited for ----


@dataclass
class Stopping(MemoryBlobs):
    """Fails at the n-th call."""

    inner: MemoryBlobs
    left: int
    error: Exception

    async def get(self, ref: BlobRef) -> bytes:
        await self._count()
        return await self.inner.get(ref)

    async def has(self, ref: BlobRef) -> bool:
        await self._count()
        return await self.inner.has(ref)

    async def _count(self) -> None:
        await asyncio.sleep(0)
        self.left -= 1
        if self.left < 0:
            raise self.error


@pytest.mark.parametrize("error", [IntegrityError("torn"), BrokerUnavailable("away"), ConnectionError("a fault of the store itself")], ids=["damage", "outage", "bug"])
async def test_a_store_that_fails_at_any_call_leaves_the_version_or_nothing(case: Case, error: Exception) -> None:
    outcomes = set()
    for calls in range(12):
        reader = PolicyReader(case.bus, Stopping(case.blobs, calls, error), case.run, blob_timeout_s=0.01)
        state = copy_of(case.states[3])
        try:
            done = await reader.advance(state, 3, 7, fallback=False)
        except (DriftlineError, ConnectionError):
            outcomes.add("refused" if state == {} or same(state, case.states[3]) else "torn")
        else:
            outcomes.add("done" if same(done, case.states[7]) else "torn")
    assert outcomes == {"refused", "done"}


async def test_a_cancellation_at_any_point_leaves_the_version_or_nothing(case: Case) -> None:
    class Slow(MemoryBlobs):
        async def get(self, ref: BlobRef) -> bytes:
            for _ in range(3):
                await asyncio.sleep(0)
            return await case.blobs.get(ref)

        async def has(self, ref: BlobRef) -> bool:
            await asyncio.sleep(0)
            return await case.blobs.has(ref)

    cancelled = 0
    for turns in range(400):
        state = copy_of(case.states[3])
        task, finished = await cut_after(turns, PolicyReader(case.bus, Slow(), case.run).advance(state, 3, 7))
        cancelled += task.cancelled()
        if task.cancelled():
            assert state == {} or any(same(state, case.states[version]) for version in (3, 4, 6, 7))
        else:
            assert same(task.result(), case.states[7])
        if finished:
            break
    assert cancelled > 10
    assert same(await case.reader().materialise(7), case.states[7])


async def test_a_squash_or_rebase_cut_off_anywhere_is_there_whole_or_not_at_all(case: Case) -> None:
    reader = case.reader()
    target = await reader.manifest(2)
    stream = Subjects(case.run).stream("POLICY")
    for base in (0, None):
        await case.bus.purge(stream, shortcut_subject(case.run, target.link, base))
        cut = 0
        for turns in range(400):
            whole = rebase(case.bus, case.blobs, reader, target) if base is None else squash(case.bus, case.blobs, reader, target, base)
            task, _ = await cut_after(turns, whole)
            cut += task.cancelled()
            made = await load_shortcut(case.bus, case.run, target.link, base)
            if made is not None:
                assert all([await case.blobs.has(pack.ref) for pack in made.encoding.packs])
                break
        assert cut > 3
        assert made is not None
        manifest = await reader.manifest(0)
        step = Step(target, None if base is None else manifest, made.encoding, True)
        entry = () if base is None else (Step(manifest, None, manifest.full),)  # type: ignore[arg-type]
        assert same(await reader.walk(Path((*entry, step))), case.states[2])


# ---- outages that pass ----


async def test_a_pack_that_comes_at_the_second_asking_does_not_cost_the_version(case: Case) -> None:
    class Flaky(MemoryBlobs):
        def __init__(self) -> None:
            super().__init__()
            self.asked: dict[str, int] = {}

        async def get(self, ref: BlobRef) -> bytes:
            self.asked[ref.digest] = self.asked.get(ref.digest, 0) + 1
            if self.asked[ref.digest] == 1:
                raise BrokerUnavailable("away for a moment", field="blob", value=ref.digest)
            return await case.blobs.get(ref)

        async def has(self, ref: BlobRef) -> bool:
            return await case.blobs.has(ref)

    flaky = Flaky()
    reader = PolicyReader(case.bus, flaky, case.run)
    state = copy_of(case.states[3])
    assert await reader.advance(state, 3, 7, fallback=False) is state
    assert same(state, case.states[7])
    assert set(flaky.asked.values()) == {2}
    assert reader.counts.refused == []


async def test_watching_a_run_that_is_not_declared_says_so_and_leaves_no_task_behind() -> None:
    complaints: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    async with MemoryBus() as bus:
        heads: AsyncIterator[object] = PolicyReader(bus, MemoryBlobs(), "nobody", outage_s=0.1).watch(poll_s=0.01)
        with pytest.raises(DriftlineError, match="no such stream"):
            await anext(heads)
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
