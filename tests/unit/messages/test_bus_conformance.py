"""What every Bus does, whichever it is."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
from messages_samples import group, note, small_topology, trajectory

from driftline.messages import (
    BrokerFull,
    BrokerUnavailable,
    Bus,
    ConfigError,
    Delivery,
    DriftlineError,
    HeadConflict,
    MalformedMessage,
    PayloadTooLarge,
    Subjects,
    Topology,
    dead_letters,
    decode,
    encode,
    lease,
)
from driftline.messages.bus import Stored
from driftline.messages.dead_letters import Archive


async def declared(bus: Bus, run: str, **options: float) -> tuple[Topology, str]:
    topology = small_topology(run, **options)  # type: ignore[arg-type]
    await bus.declare(topology)
    return topology, Subjects(run).root


async def one(bus: Bus, topology: Topology, timeout_s: float = 5.0) -> Delivery:
    [delivery] = await bus.pull(topology.consumers[0], batch=1, timeout_s=timeout_s)
    return delivery


async def buried(bus: Bus, run: str) -> list[str]:
    assert isinstance(bus, object)
    archive: Archive = bus  # type: ignore[assignment]
    return [letter.reason for letter in await dead_letters(archive, run)]


async def take(bus: Bus, stream: str, subject: str, count: int, start: int = 1) -> list[Stored]:
    found: list[Stored] = []
    async with asyncio.timeout(10), aclosing(bus.follow(stream, subject, start=start)) as messages:  # type: ignore[type-var]
        async for stored in messages:
            found.append(stored)
            if len(found) == count:
                break
    return found


def is_bus(bus: Bus) -> bool:
    return isinstance(bus, Bus)


async def test_implements_the_protocol(bus: Bus) -> None:
    assert is_bus(bus)
    assert await bus.healthy()


async def test_declaring_twice_changes_nothing(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    await bus.publish(f"{root}.work.a", group(fresh_run), id="a")
    await bus.declare(topology)
    assert (await bus.depth(topology.consumers[0])).pending == 1


async def test_a_message_arrives_as_it_was_published(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    sent = group(fresh_run)
    await bus.publish(f"{root}.work.a", sent, id="a")
    delivery = await one(bus, topology)
    assert delivery.message == sent
    assert delivery.subject == f"{root}.work.a"
    assert delivery.deliveries == 1


async def test_the_same_id_is_stored_once(bus: Bus, fresh_run: str) -> None:
    """L1 (docs/field_failures.md)."""
    topology, root = await declared(bus, fresh_run)
    first = await bus.publish(f"{root}.work.a", group(fresh_run), id="a")
    again = await bus.publish(f"{root}.work.a", group(fresh_run), id="a")
    assert not first.duplicate
    assert again.duplicate
    assert again.seq == first.seq
    assert (await bus.depth(topology.consumers[0])).pending == 1


async def test_the_same_id_after_its_acknowledgement_is_still_a_duplicate(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    await bus.publish(f"{root}.work.a", group(fresh_run), id="a")
    await (await one(bus, topology)).ack()
    assert (await bus.publish(f"{root}.work.a", group(fresh_run), id="a")).duplicate
    assert await bus.pull(topology.consumers[0], batch=1, timeout_s=0.05) == []


async def test_compare_and_set_refuses_all_but_the_expected_last(bus: Bus, fresh_run: str) -> None:
    """L20 (docs/field_failures.md)."""
    _, root = await declared(bus, fresh_run)
    head = f"{root}.log.head"
    first = await bus.publish(head, note(fresh_run, "0"), id="0", expect_last=0)
    with pytest.raises(HeadConflict):
        await bus.publish(head, note(fresh_run, "x"), id="x", expect_last=0)
    await bus.publish(head, note(fresh_run, "1"), id="1", expect_last=first.seq)
    with pytest.raises(HeadConflict):
        await bus.publish(head, note(fresh_run, "y"), id="y", expect_last=first.seq)


async def test_compare_and_set_is_per_subject(bus: Bus, fresh_run: str) -> None:
    _, root = await declared(bus, fresh_run)
    await bus.publish(f"{root}.log.a", note(fresh_run), id="a", expect_last=0)
    assert (await bus.publish(f"{root}.log.b", note(fresh_run), id="b", expect_last=0)).seq == 2


async def test_a_repeated_compare_and_set_has_won_already(bus: Bus, fresh_run: str) -> None:
    _, root = await declared(bus, fresh_run)
    first = await bus.publish(f"{root}.log.head", note(fresh_run), id="0", expect_last=0)
    again = await bus.publish(f"{root}.log.head", note(fresh_run), id="0", expect_last=0)
    assert again.duplicate
    assert again.seq == first.seq


async def test_of_two_writers_one_wins(bus: Bus, fresh_run: str) -> None:
    _, root = await declared(bus, fresh_run)
    writes = [bus.publish(f"{root}.log.head", note(fresh_run, w), id=w, expect_last=0) for w in ("a", "b")]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert sorted(isinstance(r, HeadConflict) for r in results) == [False, True]


async def test_a_full_queue_refuses_and_takes_again_after_an_acknowledgement(bus: Bus, fresh_run: str) -> None:
    """L9, L10 (docs/field_failures.md)."""
    topology, root = await declared(bus, fresh_run, work_bytes=300_000)
    results = [
        await asyncio.gather(
            bus.publish(f"{root}.work.a", note(fresh_run, size=15_000, seed=i), id=str(i)), return_exceptions=True
        )
        for i in range(10)
    ]
    refused = [isinstance(result, BrokerFull) for [result] in results]
    assert refused == [False] * 4 + [True] * 6
    await (await one(bus, topology)).ack()
    assert not (await bus.publish(f"{root}.work.a", note(fresh_run, size=15_000, seed=99), id="99")).duplicate


async def test_telemetry_drops_the_oldest(bus: Bus, fresh_run: str) -> None:
    """L10 (docs/field_failures.md)."""
    topology, root = await declared(bus, fresh_run)
    for i in range(5):
        await bus.publish(f"{root}.telemetry.a", note(fresh_run, str(i)), id=str(i))
    kept = await take(bus, topology.stream("TELEMETRY"), f"{root}.telemetry.>", 3)
    assert [s.seq for s in kept] == [3, 4, 5]


async def test_unacknowledged_work_is_delivered_again(bus: Bus, fresh_run: str) -> None:
    """L12, H19 (docs/field_failures.md)."""
    topology, root = await declared(bus, fresh_run, ack_wait_s=0.3)
    await bus.publish(f"{root}.work.a", group(fresh_run), id="a")
    first = await one(bus, topology)
    second = await one(bus, topology)
    assert (first.deliveries, second.deliveries) == (1, 2)
    assert (await bus.depth(topology.consumers[0])).redelivered == 1
    await second.ack()
    assert (await bus.depth(topology.consumers[0])).ack_pending == 0


async def test_given_back_work_comes_again_at_once(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    await bus.publish(f"{root}.work.a", group(fresh_run), id="a")
    await (await one(bus, topology)).nak()
    assert (await one(bus, topology)).deliveries == 2


async def test_given_back_with_a_delay_stays_away_for_it(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    await bus.publish(f"{root}.work.a", group(fresh_run), id="a")
    await (await one(bus, topology)).nak(delay_s=0.5)
    assert await bus.pull(topology.consumers[0], batch=1, timeout_s=0.05) == []
    assert (await one(bus, topology)).deliveries == 2


async def test_a_renewed_lease_keeps_the_work(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run, ack_wait_s=0.6)
    await bus.publish(f"{root}.work.a", group(fresh_run), id="a")
    delivery = await one(bus, topology)
    async with lease(delivery):
        assert await bus.pull(topology.consumers[0], batch=1, timeout_s=1.5) == []
    await delivery.ack()
    assert (await bus.depth(topology.consumers[0])).ack_pending == 0


async def test_work_delivered_too_often_becomes_a_dead_letter(bus: Bus, fresh_run: str) -> None:
    """H19 (docs/field_failures.md)."""
    topology, root = await declared(bus, fresh_run, max_deliver=2)
    await bus.publish(f"{root}.work.a", group(fresh_run), id="a")
    for expected in (1, 2):
        delivery = await one(bus, topology)
        assert delivery.deliveries == expected
        await delivery.nak()
    assert await bus.pull(topology.consumers[0], batch=1, timeout_s=0.5) == []
    [reason] = await buried(bus, fresh_run)
    assert reason == "delivered 2 times without an acknowledgement"
    depth = await bus.depth(topology.consumers[0])
    assert (depth.pending, depth.ack_pending) == (0, 0)


async def test_what_is_malformed_becomes_a_dead_letter_and_the_rest_arrives(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    good = group(fresh_run)
    await bus.publish_bytes(f"{root}.work.bad", b"not a frame", id="bad")
    await bus.publish_bytes(f"{root}.work.cut", encode(good)[:-3], id="cut")
    await bus.publish_bytes(f"{root}.work.new", encode(good).replace(b"\xa1v\x01", b"\xa1v\x63"), id="new")
    await bus.publish(f"{root}.work.good", good, id="good")
    [delivery] = await bus.pull(topology.consumers[0], batch=10, timeout_s=5)
    assert delivery.message == good
    archive: Archive = bus  # type: ignore[assignment]
    letters = await dead_letters(archive, fresh_run)
    assert [letter.subject.rsplit(".", 1)[-1] for letter in letters] == ["bad", "cut", "new"]
    assert "head" in letters[0].reason
    assert "group/99" in letters[2].reason
    assert letters[0].data == b"not a frame"
    assert letters[0].kind == "work"
    assert letters[0].stream == topology.stream("WORK")
    assert letters[0].deliveries == 1
    assert (await bus.depth(topology.consumers[0])).ack_pending == 1


async def test_a_dead_letter_of_choice_is_kept_whole_with_its_reason(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    await bus.publish(f"{root}.work.a", group(fresh_run), id="a")
    delivery = await one(bus, topology)
    await delivery.dead_letter("line one\nline two \u00e9")
    assert await buried(bus, fresh_run) == ["line one line two \\xe9"]
    assert await bus.pull(topology.consumers[0], batch=1, timeout_s=0.05) == []
    with pytest.raises(DriftlineError, match="already"):
        await delivery.ack()


async def test_a_large_message_travels_as_a_claim(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    large = note(fresh_run, size=1_500_000)
    await bus.publish(f"{root}.work.a", large, id="a")
    await bus.publish(f"{root}.log.a", large, id="a")
    stored = await bus.get_bytes(topology.stream("LOG"), f"{root}.log.a")
    assert stored is not None
    assert len(stored) < 1024
    delivery = await one(bus, topology)
    assert np.array_equal(delivery.message.array, large.array)  # type: ignore[attr-defined]
    last = await bus.last(topology.stream("LOG"), f"{root}.log.a")
    assert last is not None
    assert np.array_equal(last.message.array, large.array)  # type: ignore[attr-defined]
    [followed] = await take(bus, topology.stream("LOG"), f"{root}.log.>", 1)
    assert np.array_equal(followed.message.array, large.array)  # type: ignore[attr-defined]


async def test_a_claim_is_collected_with_its_acknowledgement(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    await bus.publish(f"{root}.work.a", note(fresh_run, size=300_000), id="a")
    archive: Archive = bus  # type: ignore[assignment]
    assert await archive.read(topology.stream("CLAIM"), f"{root}.claim.>")
    await (await one(bus, topology)).ack()
    assert not await archive.read(topology.stream("CLAIM"), f"{root}.claim.>")


async def test_a_claim_without_its_blob_becomes_a_dead_letter(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    await bus.publish(f"{root}.work.a", note(fresh_run, size=300_000), id="a")
    await bus.purge(topology.stream("CLAIM"), f"{root}.claim.>")
    assert await bus.pull(topology.consumers[0], batch=1, timeout_s=0.5) == []
    [reason] = await buried(bus, fresh_run)
    assert "missing" in reason


async def test_raw_bytes_beyond_the_limit_are_refused_before_they_are_sent(bus: Bus, fresh_run: str) -> None:
    _, root = await declared(bus, fresh_run)
    with pytest.raises(PayloadTooLarge):
        await bus.publish_bytes(f"{root}.log.a", bytes(2 * 1024 * 1024), id="a")
    assert await bus.healthy()


async def test_following_yields_history_then_live_in_order(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    for i in range(300):
        await bus.publish(f"{root}.log.{i % 3}", note(fresh_run, str(i)), id=str(i))
    reading = asyncio.create_task(take(bus, topology.stream("LOG"), f"{root}.log.>", 400))
    for i in range(300, 400):
        await bus.publish(f"{root}.log.{i % 3}", note(fresh_run, str(i)), id=str(i))
    found = await reading
    assert [s.message.text for s in found] == [str(i) for i in range(400)]  # type: ignore[attr-defined]
    assert [s.seq for s in found] == list(range(1, 401))


async def test_following_from_a_sequence_and_a_subject(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    for i in range(6):
        await bus.publish(f"{root}.log.{'ab'[i % 2]}", note(fresh_run, str(i)), id=str(i))
    found = await take(bus, topology.stream("LOG"), f"{root}.log.b", 2, start=3)
    assert [s.seq for s in found] == [4, 6]


async def test_following_passes_over_what_is_malformed_and_keeps_a_copy(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    await bus.publish_bytes(f"{root}.log.a", b"junk", id="0")
    await bus.publish(f"{root}.log.a", note(fresh_run, "1"), id="1")
    for _ in range(2):
        assert [s.seq for s in await take(bus, topology.stream("LOG"), f"{root}.log.>", 1)] == [2]
    assert len(await buried(bus, fresh_run)) == 1


async def test_following_a_stream_that_does_not_exist_is_an_error(bus: Bus, fresh_run: str) -> None:
    with pytest.raises(ConfigError, match="stream"):
        await take(bus, f"DL-{fresh_run}-NONE", "dl.>", 1)


async def test_a_slow_follower_misses_nothing(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    found: list[int] = []
    async with asyncio.timeout(20), aclosing(bus.follow(topology.stream("LOG"), f"{root}.log.>")) as messages:  # type: ignore[type-var]
        for i in range(50):
            await bus.publish(f"{root}.log.a", note(fresh_run, size=20_000, seed=i), id=f"a{i}")
        async for stored in messages:
            found.append(stored.seq)
            if len(found) <= 50:
                await bus.publish(f"{root}.log.a", note(fresh_run, size=20_000, seed=len(found)), id=f"b{len(found)}")
            if len(found) == 100:
                break
    assert found == list(range(1, 101))


async def test_last_and_get_bytes_of_an_empty_subject_are_none(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    assert await bus.last(topology.stream("LOG"), f"{root}.log.none") is None
    assert await bus.get_bytes(topology.stream("LOG"), f"{root}.log.none") is None


async def test_last_is_the_newest_and_bytes_come_back_exactly(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    for i in range(3):
        await bus.publish(f"{root}.log.head", note(fresh_run, str(i)), id=str(i))
    last = await bus.last(topology.stream("LOG"), f"{root}.log.head")
    assert last is not None
    assert (last.seq, last.message.text) == (3, "2")  # type: ignore[attr-defined]
    await bus.publish_bytes(f"{root}.blob.x.0", b"", id="empty")
    await bus.publish_bytes(f"{root}.blob.x.1", b"\r\n\x00NATS", id="odd")
    assert await bus.get_bytes(topology.stream("BLOB"), f"{root}.blob.x.0") == b""
    assert await bus.get_bytes(topology.stream("BLOB"), f"{root}.blob.x.1") == b"\r\n\x00NATS"


async def test_purge_removes_a_subject_and_nothing_else(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    for name in "ab":
        await bus.publish(f"{root}.log.{name}", note(fresh_run, name), id=name)
    await bus.purge(topology.stream("LOG"), f"{root}.log.a")
    assert await bus.last(topology.stream("LOG"), f"{root}.log.a") is None
    assert await bus.last(topology.stream("LOG"), f"{root}.log.b") is not None


async def test_depth_counts_what_waits_and_what_is_out(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    for i in range(5):
        await bus.publish(f"{root}.work.a", group(fresh_run, f"g{i}"), id=str(i))
    await bus.pull(topology.consumers[0], batch=2, timeout_s=5)
    assert await bus.depth(topology.consumers[0]) == (3, 2, 0)


async def test_two_consumers_share_the_work(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    names = [f"g{i}" for i in range(40)]
    for name in names:
        await bus.publish(f"{root}.work.a", group(fresh_run, name), id=name)
    seen: list[list[str]] = [[], []]

    async def work(mine: list[str]) -> None:
        while deliveries := await bus.pull(topology.consumers[0], batch=3, timeout_s=0.2):
            for delivery in deliveries:
                mine.append(delivery.message.group)  # type: ignore[attr-defined]
                await delivery.ack()

    await asyncio.gather(*(work(mine) for mine in seen))
    assert sorted(seen[0] + seen[1]) == sorted(names)
    assert all(seen)


async def test_a_pull_waits_for_work_and_takes_a_batch_at_most(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    waiting = asyncio.create_task(bus.pull(topology.consumers[0], batch=2, timeout_s=10))
    await asyncio.sleep(0)
    for i in range(3):
        await bus.publish(f"{root}.work.a", group(fresh_run, f"g{i}"), id=str(i))
    assert 1 <= len(await waiting) <= 2


async def test_a_cancelled_pull_loses_nothing(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run, ack_wait_s=30)
    waiting = asyncio.create_task(bus.pull(topology.consumers[0], batch=2, timeout_s=10))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await bus.publish(f"{root}.work.a", group(fresh_run), id="a")
    await (await one(bus, topology, timeout_s=10)).ack()  # well within ack_wait: it was given back, not aged
    assert (await bus.depth(topology.consumers[0])).ack_pending == 0


async def test_a_missing_consumer_is_made_from_its_specification(bus: Bus, fresh_run: str) -> None:
    topology = small_topology(fresh_run)
    await bus.declare(Topology(fresh_run, topology.streams, ()))
    await bus.publish(f"{Subjects(fresh_run).root}.work.a", group(fresh_run), id="a")
    assert (await one(bus, topology)).deliveries == 1


async def test_a_closed_bus_says_so(bus: Bus, fresh_run: str) -> None:
    topology, root = await declared(bus, fresh_run)
    await bus.close()
    await bus.close()
    with pytest.raises(BrokerUnavailable, match="closed"):
        await bus.publish(f"{root}.work.a", group(fresh_run), id="a")
    with pytest.raises(BrokerUnavailable, match="closed"):
        await bus.pull(topology.consumers[0], batch=1, timeout_s=0.1)
    assert not await bus.healthy()


BAD_GROUPS = ["a.b", "*", ">", "a b", "", "a\r\nPUB x 1\r\n", "x" * 5000, "\x00", "a\tb"]


@pytest.mark.parametrize("text", [t for t in BAD_GROUPS if t != "a.b"], ids=repr)
async def test_what_is_no_subject_or_id_is_refused_before_it_reaches_the_broker(bus: Bus, fresh_run: str, text: str) -> None:
    """A space or a line break would be another command, and a line too long would end the connection for everybody who shares it."""
    await bus.declare(small_topology(fresh_run))
    root = Subjects(fresh_run).root
    with pytest.raises(ConfigError, match="subject"):
        await bus.publish(f"{root}.log.{text}", note(fresh_run), id="a")
    if any(character in text for character in "\r\n\x00\t") or not text or len(text) > 4096:
        with pytest.raises(ConfigError, match="message id"):
            await bus.publish(f"{root}.log.a", note(fresh_run), id=text)
    assert await bus.healthy()
    await bus.publish(f"{root}.log.a", note(fresh_run), id="a")


@pytest.mark.parametrize("text", BAD_GROUPS, ids=repr)
def test_a_group_that_could_be_no_part_of_a_subject_does_not_decode(text: str) -> None:
    """What a rollout sends becomes the subject a grader publishes on."""
    sent = trajectory("r").model_copy(update={"group": text})
    with pytest.raises(MalformedMessage, match="group"):
        decode(encode(sent))
