"""Properties: whatever a run's tensors do and whatever was squashed, rebased, pinned and collected, every version that stays is read back
bit for bit, by every path there is, and the path taken is the cheapest."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import copy_of, same

from driftline.messages.errors import IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import topology
from driftline.policy_store import (
    HostTensor,
    Link,
    Manifest,
    MemoryBlobs,
    PolicyReader,
    PolicyWriter,
    State,
    state_digest,
)
from driftline.policy_store.collect import Retention, collect, plan, survey, survey_shortcuts
from driftline.policy_store.fold import Fold, Folds
from driftline.policy_store.forms import DeltaForm
from driftline.policy_store.paths import Path, Step
from driftline.policy_store.pins import find, pin
from driftline.policy_store.shortcuts import bases
from driftline.policy_store.squash import make_shortcut, rebase, squash
from driftline.policy_store.tensor import DTYPES, Layout
from driftline.policy_store.workers import shared_workers

MIB = 1024 * 1024
RUN = "r"
NAMES = ("a", "b.weight", "c", "d/e", "z")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7, 3), (3, 7), (40, 25), (1000,), (0, 4))


@dataclass(frozen=True)
class Change:
    """What a step does to one tensor: which share of its elements change, or what it becomes."""

    name: str
    density: float
    becomes: Layout | None
    gone: bool


layouts = st.builds(Layout, st.sampled_from(sorted(DTYPES)), st.sampled_from(SHAPES))
changes = st.builds(
    Change, st.sampled_from(NAMES), st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    st.one_of(st.none(), st.none(), st.none(), layouts), st.sampled_from([False] * 9 + [True]),
)


@dataclass(frozen=True)
class History:
    """A run: its first tensors, what each step changes, and what is done to the store afterwards."""

    seed: int
    first: dict[str, Layout]
    steps: list[list[Change]]
    full_every: int
    squashes: list[int]
    folded: bool
    rebased: list[int]
    pinned: list[int]
    keep: int


@st.composite
def histories(draw: st.DrawFn) -> History:
    steps = draw(st.lists(st.lists(changes, max_size=4), min_size=1, max_size=11))
    versions = st.integers(0, len(steps))
    return History(
        draw(st.integers(0, 2**32 - 1)), draw(st.dictionaries(st.sampled_from(NAMES), layouts, min_size=1)), steps,
        draw(st.integers(1, 12)), draw(st.lists(versions, max_size=5)), draw(st.booleans()), draw(st.lists(versions, max_size=2)),
        draw(st.lists(versions, max_size=2)), draw(st.integers(1, 6)),
    )


def filled(layout: Layout, rng: np.random.Generator) -> HostTensor:
    """Any bits: NaNs with payloads, negative zeros and denormals among them."""
    tensor = HostTensor.empty(layout)
    tensor.data[:] = rng.integers(0, 256, tensor.data.size, dtype=np.uint8)
    if layout.dtype == "bool":
        tensor.data[:] &= 1
    return tensor


def stepped(state: State, step: list[Change], rng: np.random.Generator) -> State:
    state = copy_of(state)
    for change in step:
        if change.becomes is not None:
            state[change.name] = filled(change.becomes, rng)
        elif change.name in state and change.gone and len(state) > 1:
            del state[change.name]
        elif change.name in state:
            tensor = state[change.name]
            elements = tensor.data.reshape(-1, tensor.width)
            touched = rng.random(len(elements)) < change.density
            elements[touched] ^= rng.integers(0, 2, (int(touched.sum()), tensor.width), dtype=np.uint8)
    return state


async def store(history: History, bus: MemoryBus, blobs: MemoryBlobs) -> list[State]:
    """Publish it and make its shortcuts."""
    rng = np.random.default_rng(history.seed)
    states = [{name: filled(layout, rng) for name, layout in history.first.items()}]
    for step in history.steps:
        states.append(stepped(states[-1], step, rng))
    writer = PolicyWriter(bus, blobs, RUN, history.full_every)
    await writer.resume()
    for version, state in enumerate(states):
        await writer.publish(copy_of(state), version=version, learner_step=version)
    reader = PolicyReader(bus, blobs, RUN)
    if history.folded:
        await fold(bus, blobs, reader, states)
    for version in history.squashes:
        for base in bases(version, 0):
            await squash(bus, blobs, reader, await reader.manifest(version), base)
    for version in history.rebased:
        await rebase(bus, blobs, reader, await reader.manifest(version))
    return states


async def fold(bus: MemoryBus, blobs: MemoryBlobs, reader: PolicyReader, states: list[State]) -> None:
    """As the store's service does."""
    folds, state = Folds(shared_workers()), copy_of(states[0])
    for version in range(1, len(states)):
        target = await reader.manifest(version)
        assert target.delta is not None
        seen = Fold(await reader.manifest(version - 1), version, target.delta.nbytes)
        state = await reader.advance(state, version - 1, version, seen=seen.see, fallback=False)
        async for longer in folds.add(seen, 1 << 40):
            shards = longer.shards(target, state, shared_workers(), DeltaForm.SMALL)
            made = await make_shortcut(bus, blobs, target, longer.base.link, shards, longer.replaces)
            longer.replaces = longer.replaces if made is None else made.encoding.nbytes


async def steps_to(reader: PolicyReader, target: Manifest) -> list[Step]:
    """Every single step that leads to a version."""
    found = [] if target.full is None else [Step(target, None, target.full)]
    if target.delta is not None and target.parent is not None:
        found.append(Step(target, await reader.load(target.parent), target.delta))
    for made in await reader.shortcuts(target.link):
        found.append(Step(target, None if made.base is None else await reader.load(made.base), made.encoding, True))
    return found


class Everywhere:
    """All ways to each version from nothing that need none of the blobs `without`, by brute force; the cheapest `LIMIT` for each."""

    LIMIT = 64

    def __init__(self, reader: PolicyReader, without: frozenset[str] = frozenset()) -> None:
        self._reader, self._without, self._known = reader, without, dict[str, list[Path]]()

    async def to(self, link: Link) -> list[Path]:
        if link.seal not in self._known:
            self._known[link.seal] = await self._find(link)
        return self._known[link.seal]

    async def _find(self, link: Link) -> list[Path]:
        try:
            steps = await steps_to(self._reader, await self._reader.load(link))
        except IntegrityError:
            return []
        found = []
        for step in steps:
            if self._without & {pack.digest for pack in step.encoding.packs}:
                continue
            before = [Path(())] if step.base is None else await self.to(step.base.link)
            found += [Path((*path.steps, step)) for path in before]
        return sorted(found, key=lambda path: path.nbytes)[: self.LIMIT]


def spread(paths: list[Path]) -> list[Path]:
    """A few of many, the cheapest and the dearest among them."""
    return [*paths[:: max(1, len(paths) // 5)], *paths[-1:]]


async def check(history: History) -> None:
    async with MemoryBus() as bus:
        await bus.declare(topology(RUN, queue_bytes=64 * MIB, blob_bytes=64 * MIB))
        blobs = MemoryBlobs()
        states = await store(history, bus, blobs)
        reader = PolicyReader(bus, blobs, RUN)
        everywhere = Everywhere(reader)
        for version, state in enumerate(states):
            manifest = await reader.manifest(version)
            assert manifest.digest == state_digest(state)
            paths = await everywhere.to(manifest.link)
            for path in spread(paths):
                assert same(await reader.walk(path), state)
            offered = await reader.paths(manifest)
            newest = [path for path in paths if path.steps[0].manifest.version == offered[0].steps[0].manifest.version]
            assert offered[0].nbytes == min(path.nbytes for path in newest if path.steps[0].shortcut == offered[0].steps[0].shortcut)
            assert same(await reader.materialise(version), state)
            start = version // 2
            if start < version:
                assert same(await reader.advance(copy_of(states[start]), start, version, fallback=False), state)
        await check_collected(history, bus, blobs, states)


async def check_collected(history: History, bus: MemoryBus, blobs: MemoryBlobs, states: list[State]) -> None:
    reader = PolicyReader(bus, blobs, RUN)
    held = [await pin(bus, reader, version, "someone") for version in history.pinned]
    known = await survey(bus, reader)
    head = await reader.head()
    assert head is not None
    chosen = plan(known, head.link, Retention(history.keep), held, shortcuts=await survey_shortcuts(reader, known))
    assert chosen.blocked == ""
    await collect(bus, blobs, RUN, chosen.delete, shortcuts=chosen.chords, pinned=held)
    fresh = PolicyReader(bus, blobs, RUN)
    everywhere = Everywhere(fresh)
    kept = {link.version for link in held} | set(range(max(0, head.version - history.keep + 1), head.version + 1))
    for version in kept:
        manifest = await find(bus, fresh, version)
        assert same(await fresh.materialise_manifest(manifest), states[version])
        for path in spread(await everywhere.to(manifest.link)):
            assert same(await fresh.walk(path), states[version])
    named = {blob.digest for version in known.values() if version.link.seal in chosen.keep for blob in version.blobs}
    for version in known.values():
        if version.link.seal in chosen.keep:
            named |= {pack.digest for made in await fresh.shortcuts(version.link) for pack in made.encoding.packs}
    assert set(blobs.blobs) == named, "what was collected left nothing behind"


@given(histories())
@settings(max_examples=60, deadline=None)
def test_every_version_that_stays_is_read_back_bit_for_bit_by_every_path(history: History) -> None:
    asyncio.run(check(history))


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_damage_in_any_encodings_leaves_the_version_by_another_path_or_a_refusal(data: st.DataObject) -> None:
    """Any set of encodings is damaged: a reader gives the version exactly as long as some path is whole, and never anything else."""
    history = data.draw(histories())

    async def run() -> None:
        async with MemoryBus() as bus:
            await bus.declare(topology(RUN, queue_bytes=64 * MIB, blob_bytes=64 * MIB))
            blobs = MemoryBlobs()
            states = await store(history, bus, blobs)
            damaged = frozenset(digest for digest in sorted(blobs.blobs) if data.draw(st.booleans()))
            for digest in damaged:
                blobs.blobs[digest] = blobs.blobs[digest][:-1]
            version = len(states) - 1
            reader = PolicyReader(bus, blobs, RUN)
            manifest = await reader.manifest(version)
            if await Everywhere(reader, damaged).to(manifest.link):
                assert same(await reader.materialise(version), states[version])
            else:
                with pytest.raises(IntegrityError, match="every path is damaged"):
                    await reader.materialise(version)

    asyncio.run(run())
