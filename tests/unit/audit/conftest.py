from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from driftline.messages import Bus, MemoryBus, NatsBus, NatsServer


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    """Both implementations, under the same tests."""
    if request.param == "memory":
        async with MemoryBus() as memory:
            yield memory
    else:
        server: NatsServer = request.getfixturevalue("nats_server")
        async with await NatsBus.connect(server.url, name="audit") as nats:
            yield nats
