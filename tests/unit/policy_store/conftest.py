"""Fixtures: a run on a bus (in memory and on a real broker) and its blob stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from policy_cases import Policy
from s3_server import BUCKET

from driftline.messages.bus import Bus
from driftline.messages.memory import MemoryBus
from driftline.messages.nats_bus import NatsBus
from driftline.messages.subjects import topology
from driftline.policy_store import BlobStore, DirectoryBlobs, JetStreamBlobs, MemoryBlobs, open_store

MIB = 1024 * 1024


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest, fresh_run: str) -> AsyncIterator[Bus]:
    """The run's topology declared, on both buses."""
    opened: MemoryBus | NatsBus
    if request.param == "memory":
        opened = MemoryBus()
    else:
        opened = await NatsBus.connect(request.getfixturevalue("nats_url"), name="policy-test")
    async with opened:
        await opened.declare(topology(fresh_run, queue_bytes=16 * MIB, blob_bytes=64 * MIB))
        yield opened


@pytest.fixture
async def quick_bus(fresh_run: str) -> AsyncIterator[MemoryBus]:
    async with MemoryBus() as opened:
        await opened.declare(topology(fresh_run, queue_bytes=16 * MIB, blob_bytes=256 * MIB))
        yield opened


@pytest.fixture
def quick_blobs() -> MemoryBlobs:
    return MemoryBlobs()


@pytest.fixture(params=["jetstream", "directory", "s3", "memory"])
def blobs(request: pytest.FixtureRequest, bus: Bus, fresh_run: str, tmp_path: Path) -> BlobStore:
    match request.param:
        case "jetstream":
            return JetStreamBlobs(bus, fresh_run)
        case "directory":
            return DirectoryBlobs(tmp_path / "blobs")
        case "s3":
            server = request.getfixturevalue("s3_keys")
            return open_store(f"s3://{BUCKET}/unit", bus, fresh_run, endpoint=server.url)
        case _:
            return MemoryBlobs()


@pytest.fixture
def policy() -> Policy:
    return Policy()


@pytest.fixture
def small_policy() -> Policy:
    return Policy(elements=5_000)
