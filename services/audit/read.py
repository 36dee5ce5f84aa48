"""Reading a run for its audit: everything from the broker, page by page, changing nothing.

The order makes an audit of a live run sound. What names a group (queues, dead letters, the head) is read before the ledger, so its
admission is seen; the head is read again after the ledger, so every outcome's version is seen. The outcomes of versions older
than the first reading of the head must be in the ledger: the learner writes them before its next step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from driftline.messages import frames
from driftline.messages.bus import Bus
from driftline.messages.dead_letters import Raw, group_of, parse
from driftline.messages.errors import ConfigError, IntegrityError, MalformedMessage
from driftline.messages.recording import load_version
from driftline.messages.subjects import Subjects, topology
from driftline.messages.types import Group, RunFinished
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.manifest import PolicyHead
from driftline.policy_store.reader import PolicyReader
from driftline.services.audit.fold import Accounts, Consumed
from driftline.services.audit.report import Bounds, Report

__all__ = ["audit", "check_exists"]

PAGE: Final = 64  # messages of at most 2 MiB: what an audit holds at once


async def audit(bus: Bus, run: str, *, bounds: Bounds | None = None, finished: bool = False) -> Report:
    """`finished`: hold the run to be over even though nothing says so. ConfigError when there is no such run."""
    await check_exists(bus, run)
    names, accounts = Subjects(run), Accounts(run, bounds)
    end = await bus.last(names.stream("CONTROL"), names.finished)
    why = end.message.reason if end is not None and isinstance(end.message, RunFinished) else "taken to be over" if finished else None
    for plane, subject in (("GROUPS", names.groups), ("TRAJECTORIES", names.trajectory("*")), ("GRADED", names.graded("*"))):
        await _queue(bus, names.stream(plane), subject, plane.lower(), accounts)
    async for page in _pages(bus, names.stream("DEAD"), names.dead("*")):
        for raw in page:
            letter = parse(raw)
            accounts.letter(letter.seq, letter.kind, group_of(letter))
    # Manifests are in the broker, and the bytes of versions are none of an audit's business: it needs no store, and no keys to one.
    reader = PolicyReader(bus, MemoryBlobs(), run)
    before = await reader.head()
    await _ledger(bus, names, accounts)
    head = await reader.head()
    if head is not None:
        await _versions(bus, reader, head, accounts)
    return accounts.report(
        head=-1 if head is None else head.version, settled=-1 if before is None else before.version - 1, finished=why
    )


async def check_exists(bus: Bus, run: str) -> None:
    """ConfigError, with the run's name, when the broker has no such run."""
    try:
        for consumer in topology(run).consumers:
            await bus.depth(consumer)
    except ConfigError as error:
        raise ConfigError("the broker has no such run", field="run", value=run,
                          remedy="give run.name as in its run file, and its broker with --url") from error


async def _pages(bus: Bus, stream: str, subject: str) -> AsyncIterator[list[Raw]]:
    start = 1
    while page := await bus.read(stream, subject, start=start, limit=PAGE):
        yield page
        start = page[-1].seq + 1


async def _ledger(bus: Bus, names: Subjects, accounts: Accounts) -> None:
    async for page in _pages(bus, names.stream("LEDGER"), names.ledger):
        events = []
        for raw in page:
            try:
                events.append(await frames.open_frame(bus, raw.subject, raw.data))
            except (MalformedMessage, IntegrityError) as error:
                accounts.unreadable(f"LEDGER {raw.seq}", f"on {raw.subject}: {error}")
        accounts.ledger(events)


async def _queue(bus: Bus, stream: str, subject: str, plane: str, accounts: Accounts) -> None:
    async for page in _pages(bus, stream, subject):
        for raw in page:
            group = await _group(bus, raw, subject)
            if group is not None or await _still_there(bus, stream, raw):
                accounts.queued(plane, group, f"{plane} {raw.seq}")


async def _group(bus: Bus, raw: Raw, pattern: str) -> str | None:
    if pattern != raw.subject:
        return raw.subject.rsplit(".", 1)[-1]
    try:
        message = await frames.open_frame(bus, raw.subject, raw.data)
    except (MalformedMessage, IntegrityError):
        return None
    return message.group if isinstance(message, Group) else None


async def _still_there(bus: Bus, stream: str, raw: Raw) -> bool:
    """A large message that was acknowledged while it was looked at has lost its claim, and is no concern."""
    found = await bus.read(stream, raw.subject, start=raw.seq, limit=1)
    return bool(found) and found[0].seq == raw.seq


async def _versions(bus: Bus, reader: PolicyReader, head: PolicyHead, accounts: Accounts) -> None:
    """Manifests as far back as collection has left them, records of what came before."""
    oldest = head.version
    async for manifest in reader.lineage(head.link):
        accounts.version(Consumed(manifest.version, manifest.consumed))
        oldest = manifest.version
    for version in range(oldest):
        try:
            recorded = await load_version(bus, reader.run, version)
        except MalformedMessage:
            continue
        if recorded is not None:
            accounts.version(Consumed(version, recorded.consumed, recorded=True))
