"""Following more than one batch: the server says when a batch is complete, and that is no reason to start over."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from messages_samples import small_topology

from driftline.messages import NatsBus, Subjects, nats_follow


async def test_one_consumer_serves_a_history_of_many_batches(
    nats_bus: NatsBus, fresh_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology, root = small_topology(fresh_run), Subjects(fresh_run).root
    await nats_bus.declare(topology)
    count = 4 * nats_follow.BATCH + 10
    await asyncio.gather(*(nats_bus.publish_bytes(f"{root}.log.a", b"x", id=str(i)) for i in range(count)))
    opened = 0
    real = nats_follow._Reader.open

    async def counted(*arguments: object) -> nats_follow._Reader:
        nonlocal opened
        opened += 1
        return await real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(nats_follow._Reader, "open", counted)
    found: list[int] = []
    async with asyncio.timeout(30), aclosing(nats_bus.follow_raw(topology.stream("LOG"), f"{root}.log.>")) as messages:
        async for raw in messages:
            found.append(raw.seq)
            if len(found) == count:
                break
    assert found == list(range(1, count + 1))
    assert opened == 1
