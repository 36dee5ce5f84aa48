"""A rollout engine that passes packs on: the relay around the service, and its numbers among the service's own.

Guarantees: others can ask from before the first version is read until the service has ended, drained or failed; a relay that cannot listen or
may not announce itself ends the service with the cause, as it was asked for; anything else that goes wrong with it costs bytes, not work.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence

from driftline.messages.bus import Bus
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.relay import Relay, RelaySettings
from driftline.services.config import Config
from driftline.services.rollout.service import RolloutService
from driftline.services.telemetry import Reporter

__all__ = ["RelayedReporter", "RelayedRollout", "peer_name", "relay_of"]

EVERYWHERE = ("0.0.0.0", "::")


def peer_name(host: str, instance: str) -> str:
    """This engine among all of the run's: its machine and its instance, of letters, digits, _ and -, at most 64."""
    clean = [re.sub(r"[^A-Za-z0-9_-]", "-", part) for part in (host, instance)]
    return f"{clean[0][: 63 - len(clean[1][:20])]}-{clean[1][:20]}"


def relay_of(bus: Bus, origin: BlobStore, config: Config, instance: str) -> Relay:
    """The relay of engine `instance`; a fixed port is the first engine's, and each other's on a machine is that plus its instance. What
    passes between engines is as private as what they say to the broker: under TLS exactly where that is. One that listens on every address
    and was not told how it is called is called by its machine's name."""
    relay = config.relay
    advertise = relay.advertise or (socket.gethostname() if relay.host in EVERYWHERE else "")
    port = relay.port + (int(instance) if relay.port and instance.isdigit() else 0)
    settings = RelaySettings(host=relay.host, advertise=advertise, port=port, fanout=relay.fanout, cache_bytes=relay.cache_bytes,
                             wait_s=relay.wait_s, tls=bool(config.broker.credentials))
    return Relay(bus, config.run.name, peer_name(socket.gethostname(), instance), origin, settings)


class RelayedReporter(Reporter):
    """Adds the relay's numbers to each report of the engine."""

    def __init__(self, reporter: Reporter, relay: Relay) -> None:
        self._reporter, self._relay = reporter, relay

    async def report(self, values: Mapping[str, float], series: Mapping[str, Sequence[float]] | None = None, *, step: int = -1) -> None:
        await self._reporter.report({**values, **self._relay.numbers()}, series, step=step)


class RelayedRollout:
    def __init__(self, bus: Bus, origin: BlobStore, config: Config, instance: str, reporter: Reporter) -> None:
        self.relay = relay_of(bus, origin, config, instance)
        self.service = RolloutService(bus, self.relay.blobs, config, instance, RelayedReporter(reporter, self.relay))

    def drain(self) -> None:
        self.service.drain()

    async def run(self) -> None:
        async with self.relay.serving():
            await self.service.run()
