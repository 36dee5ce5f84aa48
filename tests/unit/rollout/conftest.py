"""What tests of the rollout service share. `bus` is each module's own: its consumers differ."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loop_cases import publish_version
from rollout_cases import RUN, Gate, gated

from driftline.messages.memory import MemoryBus
from driftline.policy_store.blobs import MemoryBlobs


@pytest.fixture
async def blobs(bus: MemoryBus) -> MemoryBlobs:
    """With version 0 published."""
    blobs = MemoryBlobs()
    await publish_version(bus, blobs, RUN, 0)
    return blobs


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    with gated(monkeypatch) as gate:
        yield gate
