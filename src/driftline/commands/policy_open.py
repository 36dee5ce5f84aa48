"""What the `driftline policy` commands share: a run opened for reading, versions as people name them, and a denial explained."""

from __future__ import annotations

import asyncio
import getpass
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from driftline.commands.common import with_bus
from driftline.commands.progress import Meter, MeteredBlobs
from driftline.messages.errors import BrokerDenied, ConfigError, HeadConflict

if TYPE_CHECKING:
    from driftline.messages.nats_bus import NatsBus
    from driftline.policy_store.blobs import BlobStore
    from driftline.policy_store.manifest import Manifest, PolicyHead
    from driftline.policy_store.mapped import Allocate
    from driftline.policy_store.reader import PolicyReader
    from driftline.services.config import Config

__all__ = ["OWNER_LIMIT", "Endpoint", "OpenRun", "Store", "VersionName", "explained", "leased", "opened", "owned", "owner", "settings_of", "where"]

VersionName = Annotated[str, typer.Argument(metavar="VERSION", help="A number, head, head~3 or start.")]
Store = Annotated[
    str, typer.Option("--store", help="Where the run's bytes are ('jetstream', 'file:FOLDER', 's3://BUCKET/PREFIX'), if the run does not say it itself."),
]
Endpoint = Annotated[str | None, typer.Option("--s3-endpoint", help="The address of an S3-compatible server, if not AWS's and not the run's.")]

WRITERS: Final = {
    "policy-store": "this needs the policy-store's or the admin's credentials: --credentials DIR/ACCOUNT/policy-store/credentials.json before `policy`",
    "learner": "this needs the learner's or the admin's credentials: --credentials DIR/ACCOUNT/learner/credentials.json before `policy`",
}

OWNER_LIMIT: Final = 64
LEASE_S: Final = 30.0
"""A learner that is silent this long is gone: three times its default, because the run's own setting is not known here."""

_RELATIVE = re.compile(r"^head(?:~([0-9]{1,18}))?$")


@dataclass(frozen=True)
class OpenRun:
    """A run and its policy. `origin` is its store; the reader's traffic with it is metered."""

    name: str
    bus: NatsBus
    origin: BlobStore
    reader: PolicyReader
    meter: Meter

    def through(self, blobs: BlobStore) -> OpenRun:
        """The same run, its bytes taken from other blobs."""
        return replace(self, origin=blobs, reader=self.into(None, blobs))

    def into(self, allocate: Allocate | None, blobs: BlobStore | None = None) -> PolicyReader:
        """A reader that puts weights where `allocate` says (None: in memory)."""
        from driftline.policy_store.mapped import in_memory
        from driftline.policy_store.reader import PolicyReader

        return PolicyReader(self.bus, MeteredBlobs(blobs or self.origin, self.meter), self.name, allocate=allocate or in_memory)

    @property
    def metered(self) -> BlobStore:
        return MeteredBlobs(self.origin, self.meter)

    async def head(self) -> PolicyHead:
        """ConfigError when no version was published yet."""
        head = await self.reader.head()
        if head is None:
            raise ConfigError("it has no version yet", field="run", value=self.name, remedy="wait for its learner, or import weights")
        return head

    async def number(self, version: str) -> int:
        """A version's number from what a person typed. ConfigError when it is no way to name one, or before the first."""
        if version.isascii() and version.isdigit() and len(version) <= 18:
            return int(version)
        if version == "start":
            return 0
        relative = _RELATIVE.match(version)
        if relative is None:
            raise ConfigError("not a version", field="VERSION", value=version, remedy="a number, head, head~3 or start")
        head = (await self.head()).version
        if (found := head - int(relative[1] or 0)) < 0:
            raise ConfigError(f"the head is at {head}", field="VERSION", value=version, remedy="start is the first")
        return found

    async def manifest(self, version: str) -> Manifest:
        """Also of a version that only a pin keeps. IntegrityError when it is not there (any more)."""
        from driftline.policy_store.pins import find

        return await find(self.bus, self.reader, await self.number(version))


def opened(
    name: str, url: str, body: Callable[[OpenRun], Awaitable[int]], *, store: str = "", endpoint: str | None = None, role: str = "observer",
) -> int:
    """Connect, open the run's policy, do `body`; what it returns. `role`: whose rights it needs, for a folder of credentials."""
    results: list[int] = []

    async def work(bus: NatsBus) -> None:
        from driftline.messages.subjects import Topology, topology
        from driftline.policy_store.reader import PolicyReader

        declared = topology(name)
        policy = Topology(name, tuple(stream for stream in declared.streams if stream.name == declared.stream("POLICY")), ())
        if await bus.missing(policy):
            raise ConfigError("the broker has no such run", field="run", value=name, remedy="give run.name as in its run file, and its broker with --url")
        meter = Meter()
        origin = await where(bus, name, store, endpoint)
        with explained(role):
            results.append(await body(OpenRun(name, bus, origin, PolicyReader(bus, MeteredBlobs(origin, meter), name), meter)))

    asyncio.run(with_bus(url, work, role=role))
    return results[0]


async def where(bus: NatsBus, name: str, store: str, endpoint: str | None) -> BlobStore:
    """The store the run names, or the one given instead."""
    from driftline.policy_store.location import located_store, open_store

    return open_store(store, bus, name, endpoint=endpoint or "") if store else await located_store(bus, name, endpoint=endpoint)


@asynccontextmanager
async def leased(run: OpenRun, manifest: Manifest) -> AsyncIterator[None]:
    """The version is kept from collection while the block reads it; without the right to say so, it is read all the same."""
    from driftline.policy_store.pins import held

    async with AsyncExitStack() as stack:
        try:
            # A name of this process's: the lease's end must not take off a pin of the same person, or another command's lease.
            mine = f"reading:{os.getpid()}:{owner()}"[:OWNER_LIMIT]
            await stack.enter_async_context(held(run.bus, run.reader, manifest.version, mine))
        except BrokerDenied:
            typer.echo("these credentials take no lease: a collection meanwhile may take the version (the policy-store's would keep it)", err=True)
        yield


@asynccontextmanager
async def owned(bus: NatsBus, run: str) -> AsyncIterator[int]:
    """The learner's claim on the run, kept while the block runs; its epoch. HeadConflict when a learner has it, or takes it meanwhile."""
    from driftline.messages.subjects import Subjects
    from driftline.messages.types import LearnerOwner
    from driftline.services.learner.ownership import Ownership

    claim = Ownership(bus, run, lease_s=LEASE_S)
    names = Subjects(run)
    stored = await bus.last(names.stream("CONTROL"), names.learner)
    if stored is not None and isinstance(stored.message, LearnerOwner) and not stored.message.released:
        typer.echo(f"process {stored.message.pid} on {stored.message.host} has not let go of the run: waiting up to {LEASE_S:.0f} s for a sign of it", err=True)
    try:
        epoch = await claim.claim()
    except HeadConflict as error:
        raise HeadConflict(error.problem, field="run", value=run, remedy="stop it first: while a run has a learner, this is the learner's to do") from error
    try:
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(claim.keep(), name="ownership")
            yield epoch
            keeping.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    finally:
        await claim.release()


def settings_of(name: str, run_file: Path | None) -> Config | None:
    """The run file given with --run-file. ConfigError when it describes another run."""
    if run_file is None:
        return None
    from driftline.services.config import load

    config = load(run_file)
    if config.run.name != name:
        raise ConfigError(f"it describes run {config.run.name!r}", field="--run-file", value=str(run_file), remedy=f"name the run file of {name!r}")
    return config


def owner() -> str:
    """Who pins: this person at this machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:OWNER_LIMIT]


@contextmanager
def explained(role: str) -> Iterator[None]:
    """A refusal of the broker said as which credentials would do."""
    try:
        yield
    except BrokerDenied as error:
        if error.field != "subject" or role not in WRITERS:
            raise
        raise BrokerDenied("these credentials may not write it", field="subject", value=error.value, remedy=WRITERS[role]) from error
