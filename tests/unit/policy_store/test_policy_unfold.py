"""Unfolding a version from its packs: bit for bit, each pack about once, few at a time, in whatever order the writer laid them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from policy_cases import copy_of, same

from driftline.messages.errors import IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.policy_store import BlobRef, HostTensor, MemoryBlobs, PolicyReader, PolicyWriter, State
from driftline.policy_store import packing as packing_module
from driftline.policy_store import unfold as unfold_module
from driftline.policy_store.paths import Path
from driftline.policy_store.squash import rebase, squash
from driftline.policy_store.tensor import Shard
from driftline.policy_store.unfold import Unfolded, unfold
from driftline.policy_store.workers import Workers, shared_workers

NAMES = [f"layer.{number:02d}" for number in range(24)]


class Counting(MemoryBlobs):
    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    async def get(self, ref: BlobRef) -> bytes:
        self.asked[ref.digest] += 1
        return await super().get(ref)


def changed(state: State, rng: np.random.Generator) -> State:
    state = copy_of(state)
    for tensor in state.values():
        words = tensor.data.view(np.uint16)
        words[rng.random(words.size) < 0.05] ^= 3
    return state


@pytest.fixture
async def states(quick_bus: MemoryBus, fresh_run: str, monkeypatch: pytest.MonkeyPatch, blobs: Counting) -> list[State]:
    """Five versions handed in in an order of their own each, a pack for every few shards."""
    monkeypatch.setattr(packing_module, "PACK_BYTES", 700)
    monkeypatch.setattr(unfold_module, "BATCH_BYTES", 6_000)
    rng = np.random.default_rng(0)
    states: list[State] = [{name: HostTensor.from_numpy(rng.integers(0, 1 << 16, 1_500).astype(np.uint16), "bfloat16") for name in NAMES}]
    for _ in range(4):
        states.append(changed(states[-1], rng))
    writer = PolicyWriter(quick_bus, blobs, fresh_run, 100)
    await writer.resume()
    for version, state in enumerate(states):
        async with writer.draft({name: tensor.layout for name, tensor in state.items()}, version=version, learner_step=version) as draft:
            for name in rng.permutation(NAMES) if version == 3 else NAMES:
                await draft.put(str(name), state[name].copy())
            await draft.commit()
    return states


@pytest.fixture
def blobs() -> Counting:
    return Counting()


async def whole(path: Path, blobs: MemoryBlobs, mark: int = -1) -> tuple[State, State]:
    """The version and, of `mark`, the base, put together again."""
    state = {name: HostTensor.empty(layout) for name, layout in path.steps[-1].manifest.layouts().items()}
    base = copy_of(state)

    def take(item: Unfolded) -> Shard:
        state[item.shard.name].data[item.shard.start : item.shard.stop] = item.data
        if item.base is not None:
            base[item.shard.name].data[item.shard.start : item.shard.stop] = item.base
        return item.shard

    numbers = [shard.number async for shard, _ in unfold(path, blobs, shared_workers(), take, mark=mark)]
    assert numbers == list(range(len(NAMES)))
    return state, base


async def test_each_version_is_unfolded_bit_for_bit_with_the_base_beside_it(
    quick_bus: MemoryBus, blobs: Counting, fresh_run: str, states: list[State]
) -> None:
    reader = PolicyReader(quick_bus, blobs, fresh_run)
    for version in range(5):
        (path, *_) = await reader.paths(await reader.manifest(version))
        assert len(path.packs) > 4
        for mark in range(version + 1):
            state, base = await whole(path, blobs, mark)
            assert same(state, states[version])
            assert same(base, states[mark])


async def test_each_pack_in_order_is_fetched_once_and_few_are_held(
    quick_bus: MemoryBus, blobs: Counting, fresh_run: str, states: list[State], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    piece = unfold_module._Source.piece

    def counting(source: unfold_module._Source, shard: Shard) -> object:
        held.append(len(source.packs))
        return piece(source, shard)

    monkeypatch.setattr(unfold_module._Source, "piece", counting)
    reader = PolicyReader(quick_bus, blobs, fresh_run)
    (path, *_) = await reader.paths(await reader.manifest(2))
    blobs.asked.clear()
    await whole(path, blobs)
    assert set(blobs.asked.values()) == {1}
    assert len(blobs.asked) == len(path.packs)
    assert max(held) <= 3 + unfold_module.PACKS_KEPT


async def test_shortcuts_are_made_from_packs_that_lie_in_any_order(
    quick_bus: MemoryBus, blobs: Counting, fresh_run: str, states: list[State]
) -> None:
    reader = PolicyReader(quick_bus, blobs, fresh_run)
    assert await squash(quick_bus, blobs, reader, await reader.manifest(4), 0) is not None
    await rebase(quick_bus, blobs, reader, await reader.manifest(3))
    assert same(await reader.advance(copy_of(states[0]), 0, 4, fallback=False), states[4])
    assert same(await reader.materialise(3), states[3])
    assert str((await reader.paths(await reader.manifest(3)))[0]) == "rebase 3"


@pytest.mark.parametrize("version", [0, 2, 4])
async def test_damage_is_named_by_version_and_tensor(
    quick_bus: MemoryBus, blobs: Counting, fresh_run: str, states: list[State], version: int
) -> None:
    class Trusting(MemoryBlobs):
        async def get(self, ref: BlobRef) -> bytes:
            return self.blobs[ref.digest]

    reader = PolicyReader(quick_bus, blobs, fresh_run)
    manifest = await reader.manifest(version)
    trusting = Trusting()
    trusting.blobs = dict(blobs.blobs)
    victim = manifest.packs[-1].digest
    data = bytearray(trusting.blobs[victim])
    data[-5:] = bytes(5)
    trusting.blobs[victim] = bytes(data)
    (path, *_) = await reader.paths(await reader.manifest(4))
    with pytest.raises(IntegrityError, match=rf"tensor layer\.\d\d = .*of version {version}"):
        await whole(path, trusting)


async def test_what_is_made_is_made_in_worker_threads_and_a_failure_stops_the_rest(
    quick_bus: MemoryBus, blobs: Counting, fresh_run: str, states: list[State]
) -> None:
    reader, workers = PolicyReader(quick_bus, blobs, fresh_run), Workers(2)
    (path, *_) = await reader.paths(await reader.manifest(1))
    made: list[int] = []

    def fail(item: Unfolded) -> None:
        made.append(item.shard.number)
        if item.shard.number == 5:
            raise IntegrityError("no", field="shard", value=5)

    with pytest.raises(IntegrityError, match="no"):
        async for _ in unfold(path, blobs, workers, fail):
            pass
    assert max(made) < 8
    workers.close()
