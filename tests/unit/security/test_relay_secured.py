"""The relay on a broker with users: the rollout role's permissions suffice, nobody else's allow it, and no other tenant learns of it."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack

import pytest
from loop_cases import eventually, tiny
from security_cases import OTHER_ACCOUNT, RUN, Guarded

from driftline.messages.errors import BrokerDenied, DriftlineError
from driftline.messages.memory import MemoryBus
from driftline.messages.nats_bus import NatsBus
from driftline.policy_store.blobs import JetStreamBlobs, MemoryBlobs
from driftline.policy_store.relay import Relay, RelaySettings
from driftline.policy_store.relay_peers import Peers
from driftline.services.rollout.relay import relay_of
from driftline.services.security.permissions import Role


def relay(bus: NatsBus, name: str) -> Relay:
    return Relay(bus, RUN, name, JetStreamBlobs(bus, RUN), RelaySettings(tls=True, beat_s=0.1))


async def test_two_engines_find_each_other_and_read_from_each_other_under_tls(broker: Guarded) -> None:
    async with broker.bus(Role.LEARNER) as learner, AsyncExitStack() as stack:
        refs = [await JetStreamBlobs(learner, RUN).put(os.urandom(50_000)) for _ in range(8)]
        relays = []
        for name in ("one", "other"):
            made = relay(await stack.enter_async_context(broker.bus(Role.ROLLOUT)), name)
            await stack.enter_async_context(made.serving())
            relays.append(made)
        one, other = relays
        await eventually(lambda: bool(one.peers.live()) and bool(other.peers.live()))
        assert all(peer.certificate for made in relays for peer in made.peers.live().values())
        for made in relays:
            await asyncio.gather(*(made.blobs.get(ref) for ref in refs))
        assert one.upstream.counts.origin_reads + other.upstream.counts.origin_reads == len(refs)
        assert one.upstream.counts.hits + other.upstream.counts.hits == len(refs)


@pytest.mark.parametrize("role", [Role.GRADER, Role.EVALUATOR, Role.DISPATCHER])
async def test_another_role_may_not_announce_itself(broker: Guarded, role: Role) -> None:
    async with broker.bus(role) as bus:
        with pytest.raises(BaseExceptionGroup) as failure:
            async with relay(bus, "impostor").serving():
                await asyncio.Event().wait()
        assert failure.group_contains(BrokerDenied)


async def test_another_tenant_s_engine_neither_hears_of_the_peers_nor_announces_itself_among_them(broker: Guarded) -> None:
    async with broker.bus(Role.ROLLOUT, OTHER_ACCOUNT) as stranger:
        theirs = Peers(stranger, RUN, "x")
        with pytest.raises(DriftlineError):
            await theirs.beat("h", 1)
        with pytest.raises(BrokerDenied):
            await theirs.follow()


def test_between_engines_it_is_tls_exactly_where_the_broker_asks_for_credentials() -> None:
    secured = tiny("r", broker={"url": "tls://h:1", "credentials": "/keys"}, relay={"enabled": True})
    plain = tiny("r", relay={"enabled": True})
    assert [relay_of(MemoryBus(), MemoryBlobs(), config, "0")._settings.tls for config in (secured, plain)] == [True, False]
