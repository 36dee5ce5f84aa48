"""Which subjects of a stream have messages, and how many: on both buses, and beyond what the server says in one answer."""

from __future__ import annotations

import os

import nats
import pytest
from messages_samples import note, small_topology

from driftline.messages import Bus, ConfigError, NatsBus, Subjects, put_blob
from driftline.messages.blobs import CHUNK_BYTES, has_blob, stored_chunks
from driftline.messages.subjects import topology

PAGE = 100_000  # the server's


async def test_every_subject_under_a_filter_is_counted(bus: Bus, fresh_run: str) -> None:
    made, root = small_topology(fresh_run), Subjects(fresh_run).root
    await bus.declare(made)
    for index, subject in enumerate(["a.x", "a.x", "a.y", "b.x"]):
        await bus.publish(f"{root}.log.{subject}", note(fresh_run), id=f"n{index}")
    stream = made.stream("LOG")
    assert await bus.subjects(stream, f"{root}.log.a.*") == {f"{root}.log.a.x": 2, f"{root}.log.a.y": 1}
    assert await bus.subjects(stream, f"{root}.log.>") == {f"{root}.log.a.x": 2, f"{root}.log.a.y": 1, f"{root}.log.b.x": 1}
    assert await bus.subjects(stream, f"{root}.log.c.*") == {}


async def test_a_subject_whose_messages_are_gone_is_not_listed(bus: Bus, fresh_run: str) -> None:
    made, root = small_topology(fresh_run), Subjects(fresh_run).root
    await bus.declare(made)
    await bus.publish(f"{root}.log.a", note(fresh_run), id="a")
    await bus.publish(f"{root}.log.b", note(fresh_run), id="b")
    await bus.purge(made.stream("LOG"), f"{root}.log.a")
    assert await bus.subjects(made.stream("LOG"), f"{root}.log.>") == {f"{root}.log.b": 1}


async def test_the_subjects_of_a_stream_that_is_not_there_are_an_error(bus: Bus, fresh_run: str) -> None:
    with pytest.raises(ConfigError, match="declare the topology"):
        await bus.subjects(f"DL-{fresh_run}-LOG", ">")


async def test_more_subjects_than_one_answer_holds_are_all_listed(nats_bus: NatsBus, nats_url: str, fresh_run: str) -> None:
    await nats_bus.declare(topology(fresh_run))
    root, count = Subjects(fresh_run).root, PAGE + 50
    client = await nats.connect(nats_url)
    try:
        for index in range(count - 1):
            await client.publish(f"{root}.blob.{index:032x}.0", b"x")
            if index % 2000 == 0:
                await client.flush()
        await client.jetstream().publish(f"{root}.blob.{count - 1:032x}.0", b"x", timeout=30)  # after it, the others are stored too
    finally:
        await client.close()
    stream = Subjects(fresh_run).stream("BLOB")
    found = await nats_bus.subjects(stream, f"{root}.blob.>")
    assert len(found) == count
    assert set(found.values()) == {1}
    assert f"{root}.blob.{count - 1:032x}.0" in found
    await nats_bus.purge(stream, f"{root}.blob.>")


async def test_the_stored_chunks_of_a_blob_are_known_without_reading_them(bus: Bus, fresh_run: str) -> None:
    made = small_topology(fresh_run)
    await bus.declare(made)
    ref = await put_blob(bus, fresh_run, os.urandom(4 * CHUNK_BYTES))
    await bus.purge(made.stream("BLOB"), Subjects(fresh_run).chunk("blob", ref.digest, 2))
    assert await stored_chunks(bus, fresh_run, ref.digest) == {0, 1, 3}
    assert not await has_blob(bus, fresh_run, ref)
    assert not await has_blob(bus, fresh_run, ref._replace(chunks=1 << 50)), "a count that is made up costs nothing"
