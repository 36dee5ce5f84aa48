"""What a role may not do, tried over a real broker: refused at once and by name, and nothing is changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from security_cases import ACCOUNT, OTHER_ACCOUNT, OTHER_RUN, RUN, Guarded

from driftline.messages.credentials import load_credentials
from driftline.messages.dead_letters import dead_letters
from driftline.messages.errors import BrokerDenied, BrokerUnavailable, ConfigError
from driftline.messages.subjects import Subjects, topology
from driftline.messages.types import Metrics
from driftline.services.config import Config
from driftline.services.runtime import connect, prepare
from driftline.services.security.permissions import PLANES, Role, inbox_prefix

NAMES = Subjects(RUN)
SERVICES = tuple(role for role in Role if role is not Role.ADMIN)
WRITTEN_BY: dict[str, set[Role]] = {
    NAMES.groups: {Role.DISPATCHER, Role.LEARNER},
    NAMES.trajectory("g"): {Role.ROLLOUT},
    NAMES.graded("g"): {Role.GRADER},
    NAMES.admitted("g"): {Role.DISPATCHER},
    NAMES.outcome("g"): {Role.LEARNER},
    NAMES.retried("g", 1): {Role.LEARNER},
    NAMES.divergence(1, "numerics"): {Role.LEARNER},
    NAMES.head: {Role.LEARNER},
    NAMES.manifest(1): {Role.LEARNER},
    f"{NAMES.root}.policy.pins": {Role.LEARNER, Role.POLICY_STORE, Role.EVALUATOR},
    f"{NAMES.root}.policy.shortcut.2.{'0' * 32}.0": {Role.LEARNER, Role.POLICY_STORE},
    f"{NAMES.root}.policy.store": {Role.LEARNER, Role.POLICY_STORE},
    NAMES.chunk("blob", "0" * 32, 0): {Role.LEARNER, Role.POLICY_STORE},
    NAMES.chunk("record.1", "0" * 32, 0): {Role.LEARNER},
    NAMES.finished: {Role.LEARNER},
    NAMES.learner: {Role.LEARNER},
    NAMES.evaluation(1): {Role.EVALUATOR},
    **{NAMES.metrics(role): {role} for role in SERVICES if role not in (Role.OBSERVER, Role.RECORDER)},
    NAMES.dead("trajectories"): {Role.GRADER},
    f"$JS.API.STREAM.CREATE.{NAMES.stream('POLICY')}": set(),
    f"$JS.API.STREAM.UPDATE.{NAMES.stream('POLICY')}": set(),
    f"$JS.API.STREAM.DELETE.{NAMES.stream('POLICY')}": set(),
    f"$JS.API.STREAM.MSG.DELETE.{NAMES.stream('LEDGER')}": set(),
    f"$JS.API.STREAM.PURGE.{NAMES.stream('POLICY')}": {Role.POLICY_STORE},
    f"$JS.API.STREAM.PURGE.{NAMES.stream('LEDGER')}": set(),
    f"$JS.API.CONSUMER.DELETE.{NAMES.stream('TRAJECTORIES')}.grader": set(),
    f"$JS.API.CONSUMER.MSG.NEXT.{NAMES.stream('TRAJECTORIES')}.grader": {Role.GRADER},
    f"$JS.API.CONSUMER.CREATE.{NAMES.stream('GROUPS')}": set(),
    f"$JS.ACK.{NAMES.stream('GRADED')}.learner.1.1.1.1.1": {Role.LEARNER},
}


@asynccontextmanager
async def client(broker: Guarded, role: Role, account: str = ACCOUNT) -> AsyncIterator[tuple[Client, list[str]]]:
    """A client of the protocol itself, which is bound by nothing of ours, and what the server said it may not do."""
    mine, said = load_credentials(broker.file(role, account)), list[str]()

    async def on_error(error: Exception) -> None:
        said.append(str(error).lower())

    connection = await nats.connect(
        broker.url, user=mine.user, password=mine.password, tls=mine.tls, tls_handshake_first=True, inbox_prefix=mine.inbox_prefix,
        error_cb=on_error, allow_reconnect=False,
    )
    try:
        yield connection, said
    finally:
        await connection.close()


async def settled(connection: Client) -> None:
    """The server has judged what was sent before this. (Not a flush: the pong of the connection itself may end it early.)"""
    async with asyncio.timeout(20):
        await connection.request("$JS.API.INFO", timeout=20)


async def stored(broker: Guarded) -> dict[str, Any]:
    """Messages and consumers by stream of the run."""
    async with client(broker, Role.ADMIN) as (admin, _):
        answers = {plane: json.loads((await admin.request(f"$JS.API.STREAM.INFO.{NAMES.stream(plane)}")).data) for plane in PLANES}
    return {plane: (answer["state"]["last_seq"], answer["state"]["messages"], answer["state"]["consumer_count"]) for plane, answer in answers.items()}


@pytest.mark.parametrize("role", SERVICES)
async def test_a_role_writes_its_own_subjects_and_no_others(broker: Guarded, role: Role) -> None:
    forbidden = [subject for subject, roles in WRITTEN_BY.items() if role not in roles]
    before = await stored(broker)
    async with client(broker, role) as (connection, said):
        for subject in forbidden:
            await connection.publish(subject, b"forged")
        await settled(connection)
    denied = {subject for subject in forbidden if any(f'publish to "{subject.lower()}"' in line for line in said)}
    assert denied == set(forbidden)
    assert await stored(broker) == before


@pytest.mark.parametrize("role", SERVICES)
async def test_a_role_hears_only_its_own_inbox(broker: Guarded, role: Role) -> None:
    others = [f"{inbox_prefix(ACCOUNT, other)}.>" for other in Role if other is not role]
    forbidden = [">", "dl.>", NAMES.head, "$JS.>", "_INBOX.>", "$SYS.>", *others]
    async with client(broker, role) as (connection, said):
        for subject in forbidden:
            await connection.subscribe(subject)
        await settled(connection)
    assert [subject for subject in forbidden if not any(f'subscription to "{subject.lower()}"' in line for line in said)] == [], said


@pytest.mark.parametrize("role", [Role.ROLLOUT, Role.GRADER, Role.EVALUATOR, Role.OBSERVER])
async def test_an_answer_cannot_be_directed_into_another_s_stream(broker: Guarded, role: Role) -> None:
    """The server asks nobody's permission for the subject of an answer: "read me this message, and answer on the policy's head"."""
    async with client(broker, Role.LEARNER) as (learner, _):
        await learner.request(NAMES.manifest(7), b"anything that can be read", headers={"Nats-Msg-Id": f"bait-{role}"})
    before = await stored(broker)
    read, follow = NAMES.stream("POLICY"), NAMES.stream("CONTROL" if role is Role.GRADER else "POLICY")
    async with client(broker, role) as (connection, said):
        allowed = role is not Role.GRADER  # which may not even read policies
        ask = json.dumps({"last_by_subj": NAMES.manifest(7)}).encode()
        await connection.publish(f"$JS.API.DIRECT.GET.{read}", ask, reply=NAMES.head)
        create = {"stream_name": follow, "config": {"deliver_policy": "all", "ack_policy": "none"}}
        made = json.loads((await connection.request(f"$JS.API.CONSUMER.CREATE.{follow}", json.dumps(create).encode())).data)
        await connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{follow}.{made['name']}", b'{"batch":1,"no_wait":true}', reply=NAMES.head)
        create["config"]["deliver_subject"] = NAMES.head  # type: ignore[index]
        await connection.request(f"$JS.API.CONSUMER.CREATE.{follow}", json.dumps(create).encode())
        await settled(connection)
        assert any("direct.get" in line for line in said) is not allowed
    after = await stored(broker)
    async with broker.bus(Role.ADMIN) as admin:
        await admin.purge(read, NAMES.manifest(7))
    assert {plane: state[:2] for plane, state in after.items()} == {plane: state[:2] for plane, state in before.items()}


async def test_a_reader_passes_over_what_it_cannot_decode_and_may_not_set_aside(broker: Guarded) -> None:
    metrics = Metrics(run=RUN, service="x", at=0.0)
    async with broker.bus(Role.ADMIN) as admin, broker.bus(Role.OBSERVER) as observer:
        await admin.publish_bytes(NAMES.metrics("x"), b"not a message", id="bad")
        await admin.publish(NAMES.metrics("x"), metrics, id="good")
        async with asyncio.timeout(30), aclosing(observer.follow(NAMES.stream("METRICS"), NAMES.metrics("x"))) as found:  # type: ignore[type-var]
            assert (await anext(found)).message == metrics
        assert await dead_letters(admin, RUN) == []
        await admin.purge(NAMES.stream("METRICS"), NAMES.metrics("x"))


async def test_a_denied_subject_is_an_error_at_once_with_field_and_remedy(broker: Guarded) -> None:
    async with broker.bus(Role.ROLLOUT) as bus:
        with pytest.raises(BrokerDenied) as denied:
            await bus.publish_bytes(NAMES.head, b"forged", id="x")
        assert denied.value.field == "subject"
        assert "role" in denied.value.remedy
        assert await bus.last(NAMES.stream("POLICY"), NAMES.head) is None
        assert await bus.healthy()


@pytest.mark.parametrize("role", [Role.LEARNER, Role.ROLLOUT, Role.EVALUATOR, Role.POLICY_STORE, Role.RECORDER, Role.OBSERVER])
async def test_who_reads_blobs_may_ask_which_are_there_and_nobody_may_ask_another_tenant_s_stream(broker: Guarded, role: Role) -> None:
    async with broker.bus(role) as bus:
        assert await bus.subjects(NAMES.stream("BLOB"), f"{NAMES.root}.blob.>") == {}
        with pytest.raises((BrokerDenied, BrokerUnavailable)):
            await bus.subjects(Subjects(OTHER_RUN).stream("BLOB"), f"{Subjects(OTHER_RUN).root}.blob.>")


async def test_another_tenant_s_streams_are_out_of_reach(broker: Guarded) -> None:
    theirs = Subjects(OTHER_RUN)
    async with broker.bus(Role.ADMIN, OTHER_ACCOUNT) as owner:
        await owner.publish_bytes(theirs.head, b"secret", id="s")
        assert await owner.get_bytes(theirs.stream("POLICY"), theirs.head) == b"secret"
    for role in (Role.ADMIN, Role.OBSERVER, Role.LEARNER):
        async with broker.bus(role) as bus:
            with pytest.raises((BrokerDenied, BrokerUnavailable)):
                await bus.get_bytes(theirs.stream("POLICY"), theirs.head)
            with pytest.raises(BrokerDenied):
                await bus.publish_bytes(theirs.head, b"forged", id="f")
            assert await bus.missing(topology(OTHER_RUN)) == tuple(spec.name for spec in topology(OTHER_RUN).streams)


async def test_an_admin_of_one_run_does_not_hear_another_s(broker: Guarded) -> None:
    """Both accounts may even have the same subjects: they are different ones."""
    async with client(broker, Role.ADMIN) as (admin, said), client(broker, Role.ADMIN, OTHER_ACCOUNT) as (other, _):
        await admin.subscribe(f"{inbox_prefix(OTHER_ACCOUNT, Role.ADMIN)}.>")
        await settled(admin)
        assert any("subscription" in line for line in said)
        names = json.loads((await other.request("$JS.API.STREAM.NAMES")).data)["streams"]
    assert names
    assert not [name for name in names if RUN in name]


def config_for(broker: Guarded, role: Role, **section: Any) -> Config:
    return Config.model_validate({"run": {"name": RUN}, "broker": {"url": broker.url, "credentials": str(broker.file(role)), **section}})


async def test_a_service_that_may_not_declare_streams_says_how_they_are_declared(broker: Guarded) -> None:
    config = config_for(broker, Role.ROLLOUT)
    bus = await connect(config, "rollout-0")
    try:
        with pytest.raises(BrokerDenied) as denied:
            await prepare(bus, config, "rollout-0")
        assert denied.value.field == "broker.provision"
        assert "driftline provision" in denied.value.remedy
    finally:
        await bus.close()


@pytest.mark.parametrize("role", Role)
async def test_without_provision_streams_are_only_looked_for(broker: Guarded, role: Role) -> None:
    before = await stored(broker)
    config = config_for(broker, role, provision=False)
    bus = await connect(config, role)
    try:
        await prepare(bus, config, role)
        absent = config.model_copy(update={"run": config.run.model_copy(update={"name": "nowhere"})})
        with pytest.raises(ConfigError) as missing:
            await prepare(bus, absent, role)
        assert "driftline provision" in missing.value.remedy
    finally:
        await bus.close()
    assert await stored(broker) == before
