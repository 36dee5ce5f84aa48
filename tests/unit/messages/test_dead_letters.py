"""Dead letters on every Bus: whose group lacks the message, following them, and taking stored messages out of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

import pytest
from messages_samples import group, trajectory

from driftline.messages import (
    Bus,
    ConfigError,
    DeadLetter,
    Raw,
    Subjects,
    Topology,
    dead_letters,
    encode,
    topology,
)
from driftline.messages.bus import Delivery
from driftline.messages.dead_letters import follow_dead, group_of, parse
from driftline.messages.subjects import ConsumerSpec


def letter(subject: str, data: bytes = b"") -> DeadLetter:
    return DeadLetter(seq=1, kind="k", reason="", subject=subject, stream="", sequence=1, deliveries=1, failed_at=0.0, data=data, headers={})


def consumer(run: str, durable: str) -> ConsumerSpec:
    return next(spec for spec in topology(run).consumers if spec.durable == durable)


async def declared(bus: Bus, run: str) -> tuple[Topology, Subjects]:
    whole = topology(run)
    await bus.declare(whole)
    return whole, Subjects(run)


async def one(bus: Bus, spec: ConsumerSpec) -> Delivery:
    [delivery] = await bus.pull(spec, batch=1, timeout_s=5.0)
    return delivery


async def bury(bus: Bus, run: str, subject: str, data: bytes, durable: str, id: str) -> None:
    await bus.publish_bytes(subject, data, id=id)
    assert await bus.pull(consumer(run, durable), batch=1, timeout_s=0.2) == []


@pytest.mark.parametrize(
    ("subject", "data", "expected"),
    [
        ("dl.v1.r.trajectories.g7", b"junk", "g7"),
        ("dl.v1.r.graded.g8", b"", "g8"),
        ("dl.v1.r.groups", encode(group("r", "g9")), "g9"),
        ("dl.v1.r.groups", encode(trajectory("r")), None),
        ("dl.v1.r.groups", encode(group("r"))[:-1], None),
        ("dl.v1.r.graded.g8.more", b"", None),
        ("dl.v1.r.ledger.outcome.g8", b"", None),
        ("", b"", None),
        ("graded.g8", b"", None),
    ],
)
def test_the_group_of_a_letter_is_known_from_its_subject_or_its_content(subject: str, data: bytes, expected: str | None) -> None:
    assert group_of(letter(subject, data)) == expected


async def test_following_yields_old_letters_then_new_ones(bus: Bus, fresh_run: str) -> None:
    _, names = await declared(bus, fresh_run)
    await bury(bus, fresh_run, names.graded("g0"), b"first", "learner", "0")
    found: list[DeadLetter] = []
    async with asyncio.timeout(10), aclosing(follow_dead(bus, fresh_run)) as letters:
        async for dead in letters:
            found.append(dead)
            if len(found) == 2:
                break
            await bury(bus, fresh_run, names.trajectory("g1"), b"second", "grader", "1")
    assert [(dead.seq, dead.kind, dead.data, group_of(dead)) for dead in found] == [
        (1, "graded", b"first", "g0"), (2, "trajectories", b"second", "g1"),
    ]  # fmt: skip


async def test_undecodable_letters_are_followed_without_being_buried_again(bus: Bus, fresh_run: str) -> None:
    _, names = await declared(bus, fresh_run)
    await bury(bus, fresh_run, names.graded("g0"), b"junk", "learner", "0")
    async with asyncio.timeout(10), aclosing(follow_dead(bus, fresh_run)) as letters:
        async for _ in letters:
            break
    assert len(await dead_letters(bus, fresh_run)) == 1


@pytest.mark.parametrize("headers", [{}, {"x-original-sequence": "many", "x-failed-at": "nan", "x-delivery-count": "inf"}])
def test_a_letter_with_senseless_headers_is_read_as_unknown(headers: Mapping[str, str]) -> None:
    found = parse(Raw(7, "dl.v1.r.dead.graded", headers, b"?"))
    assert (found.seq, found.kind, found.sequence, found.deliveries, found.failed_at) == (7, "graded", 0, 0, 0.0)
    assert group_of(found) is None


async def test_a_deleted_message_is_gone_and_the_rest_stays(bus: Bus, fresh_run: str) -> None:
    whole, names = await declared(bus, fresh_run)
    for i in range(3):
        await bus.publish_bytes(names.graded("g0"), bytes([i]), id=str(i))
    stream = whole.stream("GRADED")
    assert await bus.delete(stream, 2)
    assert not await bus.delete(stream, 2)
    assert not await bus.delete(stream, 99)
    assert [raw.data for raw in await bus.read(stream, names.graded("*"))] == [b"\x00", b"\x02"]


async def test_deleting_from_a_stream_that_does_not_exist_is_an_error(bus: Bus, fresh_run: str) -> None:
    with pytest.raises(ConfigError, match="stream"):
        await bus.delete(f"DL-{fresh_run}-NONE", 1)


async def test_a_queued_message_that_is_deleted_is_not_delivered(bus: Bus, fresh_run: str) -> None:
    whole, names = await declared(bus, fresh_run)
    await bus.publish(names.groups, group(fresh_run, "g0"), id="0")
    await bus.publish(names.groups, group(fresh_run, "g1"), id="1")
    await bus.delete(whole.stream("GROUPS"), 1)
    assert (await one(bus, consumer(fresh_run, "rollout"))).message == group(fresh_run, "g1")


async def test_raw_following_yields_what_cannot_be_decoded(bus: Bus, fresh_run: str) -> None:
    whole, names = await declared(bus, fresh_run)
    await bus.publish_bytes(names.outcome("g0"), b"junk", id="0")
    await bus.publish_bytes(names.outcome("g1"), b"more", id="1")
    async with asyncio.timeout(10), aclosing(bus.follow_raw(whole.stream("LEDGER"), names.ledger, start=2)) as stored:
        async for raw in stored:
            assert (raw.seq, raw.subject, raw.data) == (2, names.outcome("g1"), b"more")
            break
    assert await dead_letters(bus, fresh_run) == []
