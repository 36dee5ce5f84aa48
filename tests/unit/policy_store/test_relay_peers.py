"""Who is there: beats that come, stop, end with a word, come again from another life; and a broker that is away."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relay_cases import until

from driftline.messages.bus import Bus, PubAck
from driftline.messages.errors import BrokerDenied
from driftline.messages.memory import MemoryBroker, MemoryBus
from driftline.messages.subjects import Subjects, topology
from driftline.messages.types import Message, RelayPeer
from driftline.policy_store import MemoryBlobs
from driftline.policy_store.relay import Relay, RelaySettings
from driftline.policy_store.relay_peers import Membership, Peers


def peer(name: str, life: int = 0, **changes: Any) -> RelayPeer:
    return RelayPeer(**{"run": "r", "peer": name, "host": "h", "port": 1, "token": f"{life:032x}", "beat": 1, "at": 0.0, **changes})


def names(members: Membership, now: float) -> set[str]:
    return set(members.live(now))


def test_a_peer_is_there_from_its_first_beat_until_it_was_silent_for_long() -> None:
    members = Membership("me", gone_s=10)
    members.hear(peer("a"), 0)
    assert names(members, 0) == {"a"}
    members.hear(peer("b"), 9)
    assert names(members, 9) == {"a", "b"}
    members.hear(peer("b"), 11)
    assert names(members, 11) == {"b"}


def test_our_own_beats_are_time_passing_and_we_are_not_our_own_peer() -> None:
    members = Membership("me", gone_s=10)
    members.hear(peer("a"), 0)
    members.hear(peer("me"), 11)
    assert names(members, 11) == set()


def test_a_broker_that_is_away_makes_nobody_look_dead() -> None:
    members = Membership("me", gone_s=10)
    members.hear(peer("a"), 0)
    assert names(members, 1000) == {"a"}


def test_who_leaves_is_gone_at_once_but_not_a_later_life_of_the_same_name() -> None:
    members = Membership("me")
    members.hear(peer("a", life=1), 0)
    members.hear(peer("a", life=2), 1)
    members.hear(peer("a", life=1, leaving=True), 2)
    assert members.live(2)["a"].token == f"{2:032x}"
    members.hear(peer("a", life=2, leaving=True), 3)
    assert names(members, 3) == set()


def test_an_avoided_peer_is_back_after_its_time_and_its_next_life_at_once() -> None:
    members = Membership("me", gone_s=10)
    members.hear(peer("a", life=1), 0)
    members.avoid(peer("a", life=1), 100)
    members.avoid(peer("a", life=1), 5)  # a lesser fault does not shorten it
    assert names(members, 99) == set()
    assert names(members, 100) == {"a"}
    members.avoid(peer("a", life=1), 200)
    members.hear(peer("a", life=2), 1)
    assert names(members, 101) == {"a"}


@given(st.lists(st.tuples(st.sampled_from("abcm"), st.integers(0, 2), st.booleans(), st.floats(0, 5)), max_size=40))
def test_who_is_there_is_who_last_beat_in_time_and_did_not_leave(events: list[tuple[str, int, bool, float]]) -> None:
    members, now = Membership("m", gone_s=10), 0.0
    for name, life, leaving, later in events:
        now += later
        members.hear(peer(name, life, leaving=leaving), now)
        there = members.live(now)
        assert "m" not in there
        if leaving:
            assert name not in there or there[name].token != f"{life:032x}"
        elif name != "m":
            assert there[name].token == f"{life:032x}"


async def test_peers_find_each_other_over_the_bus_and_say_good_bye(bus: Bus, fresh_run: str) -> None:
    one, other = (Peers(bus, fresh_run, name, beat_s=0.05) for name in ("one", "other"))
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(work) for p in (one, other) for work in (p.follow(), p.beat(f"host-{p.me}", 4711))]
        await until(lambda: bool(one.live()) and bool(other.live()), "they did not find each other")
        found = one.live()["other"]
        assert (found.host, found.port, found.token) == ("host-other", 4711, other.token)
        for task in running[2:]:
            task.cancel()
        await asyncio.wait(running[2:])
        await other.leave()
        await until(lambda: not one.live(), "it is still taken to be there")
        for task in running[:2]:
            task.cancel()


async def test_who_comes_later_knows_at_once_who_is_there_and_not_who_once_was(bus: Bus, fresh_run: str) -> None:
    subjects = Subjects(fresh_run)
    for name, at in (("now", time.time()), ("long-ago", time.time() - 3600)):
        await bus.publish(subjects.relay(name), peer(name, run=fresh_run, at=at), id=name)
    late = Peers(bus, fresh_run, "late")
    running = [asyncio.create_task(work) for work in (late.follow(), late.beat("h", 1))]
    await late.caught_up(30.0)
    assert set(late.live()) == {"now"}
    # What is said from now on counts whatever the clock over there says.
    await bus.publish(subjects.relay("long-ago"), peer("long-ago", run=fresh_run, at=time.time() - 3600, beat=2), id="again")
    await until(lambda: set(late.live()) == {"now", "long-ago"}, "its beat was not heard")
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def test_the_secret_is_in_no_log_line(fresh_run: str) -> None:
    assert f"{7:032x}" not in repr(peer("a", life=7))


async def test_a_broker_that_is_away_is_ridden_out_by_both_halves(fresh_run: str) -> None:
    broker = MemoryBroker()
    async with MemoryBus(broker) as mine, MemoryBus(broker) as theirs:
        await mine.declare(topology(fresh_run))
        one, other = Peers(mine, fresh_run, "one", beat_s=0.02), Peers(theirs, fresh_run, "other", beat_s=0.02)
        broker.down = True
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for p in (one, other) for work in (p.follow(), p.beat("h", 1))]
            await one.caught_up(0.1)
            assert not one.live()
            assert not any(task.done() for task in running)
            broker.down = False
            await until(lambda: bool(one.live()) and bool(other.live()), "they did not find each other")
            for task in running:
                task.cancel()


async def test_credentials_that_do_not_allow_announcing_end_it_with_the_cause(fresh_run: str) -> None:
    class Denying(MemoryBus):
        async def publish(self, subject: str, message: Message, *, id: str, expect_last: int | None = None) -> PubAck:
            raise BrokerDenied("no permission", field="subject", value=subject)

    async with Denying() as denying:
        await denying.declare(topology(fresh_run))
        relay = Relay(denying, fresh_run, "a", MemoryBlobs(), RelaySettings())
        with pytest.raises(BaseExceptionGroup) as failure:
            async with relay.serving():
                await asyncio.Event().wait()
        assert failure.group_contains(BrokerDenied)
