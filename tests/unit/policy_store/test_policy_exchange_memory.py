"""A version goes from a store to a folder, and back, without the weights ever being in memory."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import topology
from driftline.policy_store import HostTensor, MemoryBlobs, PolicyReader, PolicyWriter, State, state_digest
from driftline.policy_store.exchange import ModelFolder, OutFiles
from driftline.policy_store.mapped import mapped_in

MIB = 2**20
WEIGHTS = 192 * MIB
HELD = 32 * MIB
"""Shards and packs on their way; the weights are six times as much."""


@pytest.fixture
def state() -> State:
    """Bits of few values: quick to code, and their packs are small beside them."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 4, WEIGHTS // 6 // 2, np.uint16)
    return {f"layers.{n}": HostTensor.from_numpy(np.roll(bits, n), "bfloat16") for n in range(6)}


async def test_neither_an_export_nor_an_import_holds_the_weights(quick_bus: MemoryBus, fresh_run: str, state: State, tmp_path: Path) -> None:
    blobs = MemoryBlobs()
    await quick_bus.declare(topology(f"{fresh_run}x"))
    writer = PolicyWriter(quick_bus, blobs, fresh_run)
    await writer.resume()
    manifest = await writer.publish(state, version=0, learner_step=0)
    del writer
    state.clear()
    gc.collect()
    tracemalloc.start()
    try:
        out = OutFiles(tmp_path, manifest.layouts(), file_bytes=WEIGHTS // 2)
        reader = PolicyReader(quick_bus, blobs, fresh_run, allocate=out.allocate)
        out.settle(await reader.materialise_manifest(manifest))
        exported = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        folder = ModelFolder.open(tmp_path)
        importer = PolicyWriter(quick_bus, MemoryBlobs(), f"{fresh_run}x", allocate=mapped_in(tmp_path))
        await importer.resume()
        async with importer.draft(folder.layouts, version=0, learner_step=0) as draft:
            for name in folder.layouts:
                await draft.put(name, folder.tensor(name))
            again = await draft.commit()
        stored = sum(pack.size for pack in again.packs)
        imported = tracemalloc.get_traced_memory()[1] - before - stored
    finally:
        tracemalloc.stop()
    assert exported < HELD
    assert imported < HELD
    assert again.digest == manifest.digest == state_digest({name: folder.tensor(name) for name in folder.layouts})
