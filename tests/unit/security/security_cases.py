"""A broker with TLS, users and permissions, and buses as the roles on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from driftline.messages.credentials import load_credentials
from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer
from driftline.messages.subjects import topology
from driftline.services.security.keys import Existing, Keys, auth_file, make_keys
from driftline.services.security.permissions import Role

RUN, ACCOUNT = "secured", "acme"
OTHER_RUN, OTHER_ACCOUNT = "foreign", "other"


@dataclass(frozen=True)
class Guarded:
    """`url` is where the server is; `keys` its folder."""

    server: NatsServer
    keys: Keys

    @property
    def url(self) -> str:
        return self.server.url

    def file(self, role: Role, account: str = ACCOUNT) -> Path:
        return self.keys.credentials(role, account)

    def folder(self, account: str = ACCOUNT) -> Path:
        return self.keys.folder / account

    @asynccontextmanager
    async def bus(self, role: Role, account: str = ACCOUNT) -> AsyncIterator[NatsBus]:
        credentials = load_credentials(self.file(role, account))
        async with await NatsBus.connect(self.url, name=f"test-{role}", credentials=credentials) as bus:
            yield bus


@asynccontextmanager
async def guarded(folder: Path, *, days: int = 365) -> AsyncIterator[Guarded]:
    """Two runs of two tenants, declared."""
    keys = make_keys(folder / "keys", RUN, account=ACCOUNT, days=days)
    keys = make_keys(folder / "keys", OTHER_RUN, account=OTHER_ACCOUNT, existing=Existing(add=True))
    async with NatsServer(folder / "store", auth=auth_file(keys.folder)) as server:
        broker = Guarded(server, keys)
        if days > 0:
            for account, run in ((ACCOUNT, RUN), (OTHER_ACCOUNT, OTHER_RUN)):
                async with broker.bus(Role.ADMIN, account) as admin:
                    await admin.declare(topology(run))
        yield broker
