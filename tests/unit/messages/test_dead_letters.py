"""Dead letters on every Bus: whose group lacks the message, following them, deleting what is stored, and queueing letters again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from messages_samples import group, note, trajectory

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
from driftline.messages.types import Outcome, OutcomeEvent, Taken
from driftline.services.audit.letters import Refused, drop, every, requeue, those


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


async def only(bus: Bus, run: str) -> DeadLetter:
    [found] = await dead_letters(bus, run)
    return found


async def poisoned(bus: Bus, run: str, name: str = "g0") -> DeadLetter:
    """A member that was delivered more often than its consumer allows."""
    _, names = await declared(bus, run)
    spec = replace(consumer(run, "grader"), max_deliver=2)
    await bus.publish(names.trajectory(name), trajectory(run), id=f"{run}/trajectory/{name}/1")
    for _ in range(2):
        await (await one(bus, spec)).nak()
    assert await bus.pull(spec, batch=1, timeout_s=0.3) == []
    return await only(bus, run)


async def test_a_letter_queued_again_is_a_new_message_with_a_new_count(bus: Bus, fresh_run: str) -> None:
    letter = await poisoned(bus, fresh_run)
    assert (letter.deliveries, group_of(letter)) == (3, "g0")
    assert await requeue(bus, fresh_run, letter)
    assert await dead_letters(bus, fresh_run) == []
    delivery = await one(bus, replace(consumer(fresh_run, "grader"), max_deliver=2))
    assert (encode(delivery.message), delivery.deliveries, delivery.subject) == (letter.data, 1, letter.subject)
    await delivery.ack()


async def test_a_letter_queued_again_may_die_again_as_a_letter_of_its_own(bus: Bus, fresh_run: str) -> None:
    letter = await poisoned(bus, fresh_run)
    await requeue(bus, fresh_run, letter)
    await (await one(bus, consumer(fresh_run, "grader"))).dead_letter("still poison")
    again = await only(bus, fresh_run)
    assert (again.reason, again.data) == ("still poison", letter.data)
    assert again.seq > letter.seq
    assert await requeue(bus, fresh_run, again)
    assert (await one(bus, consumer(fresh_run, "grader"))).deliveries == 1


async def test_a_crash_between_queueing_again_and_deleting_queues_it_once(bus: Bus, fresh_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    letter = await poisoned(bus, fresh_run)

    async def killed(stream: str, seq: int) -> bool:
        raise ConnectionAbortedError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(bus, "delete", killed)
        with pytest.raises(ConnectionAbortedError):
            await requeue(bus, fresh_run, letter)
    assert await only(bus, fresh_run) == letter
    assert not await requeue(bus, fresh_run, letter)
    assert await dead_letters(bus, fresh_run) == []
    assert (await bus.depth(consumer(fresh_run, "grader"))).pending == 1


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.TRAINED])
async def test_a_letter_of_an_ended_group_is_refused_unless_it_is_forced(bus: Bus, fresh_run: str, outcome: Outcome) -> None:
    letter = await poisoned(bus, fresh_run)
    event = OutcomeEvent(run=fresh_run, group="g0", outcome=outcome)
    await bus.publish(Subjects(fresh_run).outcome("g0"), event, id="o")
    with pytest.raises(Refused, match=f"group g0 has ended as {outcome}"):
        await requeue(bus, fresh_run, letter)
    assert await only(bus, fresh_run) == letter
    assert await requeue(bus, fresh_run, letter, force=True)


async def test_a_letter_of_a_group_in_training_is_not_refused(bus: Bus, fresh_run: str) -> None:
    letter = await poisoned(bus, fresh_run)
    await bus.publish(Subjects(fresh_run).outcome("g0"), Taken(run=fresh_run, group="g0", version=1, epoch=1), id="t")
    assert await requeue(bus, fresh_run, letter)


async def test_a_letter_that_still_cannot_be_read_is_refused_unless_it_is_forced(bus: Bus, fresh_run: str) -> None:
    _, names = await declared(bus, fresh_run)
    await bury(bus, fresh_run, names.graded("g0"), b"junk", "learner", "0")
    with pytest.raises(Refused, match="still cannot be read"):
        await requeue(bus, fresh_run, await only(bus, fresh_run))
    assert await requeue(bus, fresh_run, await only(bus, fresh_run), force=True)


async def test_a_copy_of_what_is_still_in_its_stream_is_never_queued_again(bus: Bus, fresh_run: str) -> None:
    whole, names = await declared(bus, fresh_run)
    await bus.publish_bytes(names.outcome("g0"), b"junk", id="0")
    await bus.publish(names.outcome("g1"), OutcomeEvent(run=fresh_run, group="g1", outcome=Outcome.STALE), id="1")
    async with asyncio.timeout(10), aclosing(bus.follow(whole.stream("LEDGER"), names.ledger)) as events:  # type: ignore[type-var]
        async for _ in events:
            break
    for force in (False, True):
        with pytest.raises(Refused, match="in no work queue"):
            await requeue(bus, fresh_run, await only(bus, fresh_run), force=force)


async def test_a_letter_that_names_another_runs_queue_is_refused(bus: Bus, fresh_run: str) -> None:
    letter = replace(await poisoned(bus, fresh_run), subject="dl.v1.another.trajectories.g0")
    with pytest.raises(Refused):
        await requeue(bus, fresh_run, letter, force=True)


async def test_a_large_message_survives_death_and_return(bus: Bus, fresh_run: str) -> None:
    whole, names = await declared(bus, fresh_run)
    large = note(fresh_run, size=300_000)
    await bus.publish(names.graded("g0"), large, id="0")
    await (await one(bus, consumer(fresh_run, "learner"))).dead_letter("no graded trajectory")
    assert await requeue(bus, fresh_run, await only(bus, fresh_run))
    delivery = await one(bus, consumer(fresh_run, "learner"))
    assert np.array_equal(delivery.message.array, large.array)  # type: ignore[attr-defined]
    await delivery.dead_letter("still none")
    letter = await only(bus, fresh_run)
    assert await bus.read(whole.stream("CLAIM"), f"{names.root}.claim.>")
    assert await drop(bus, fresh_run, letter)
    assert not await bus.read(whole.stream("CLAIM"), f"{names.root}.claim.>")
    assert not await drop(bus, fresh_run, letter)


async def test_letters_are_listed_by_kind_and_number_and_what_comes_back_is_not_met_twice(bus: Bus, fresh_run: str) -> None:
    _, names = await declared(bus, fresh_run)
    for i in range(70):
        await bus.publish_bytes(names.graded(f"g{i}"), b"junk", id=f"g{i}")
    await bury(bus, fresh_run, names.trajectory("g0"), b"junk", "grader", "t")
    async with asyncio.timeout(20):
        while len(await dead_letters(bus, fresh_run)) < 71:
            assert await bus.pull(consumer(fresh_run, "learner"), batch=100, timeout_s=0.3) == []
    met = 0
    async for letter in every(bus, fresh_run, "graded"):
        assert await requeue(bus, fresh_run, letter, force=True)
        await bus.pull(consumer(fresh_run, "learner"), batch=1, timeout_s=0.05)
        met += 1
    assert met == 70
    assert [letter.kind async for letter in every(bus, fresh_run, "trajectories")] == ["trajectories"]
    last = (await dead_letters(bus, fresh_run))[-1].seq
    assert [letter.seq async for letter in those(bus, fresh_run, [last, last])] == [last]
    with pytest.raises(ConfigError, match="no such dead letter"):
        _ = [letter async for letter in those(bus, fresh_run, [last + 1])]


def test_whoever_imports_the_policy_store_knows_all_that_its_stream_holds() -> None:
    """A follower buries what it does not know: the live view did that to pins."""
    code = ("import driftline.policy_store; from driftline.messages.registry import schema\n"
            "assert all(schema(name, 1) for name in ('head', 'manifest', 'pins', 'store_located'))")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
