"""`driftline policy gc | squash | rebase`: what goes, and what makes the way to the rest shorter."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftline.commands.common import BROKER, AsJson, RunName, Url
from driftline.commands.policy_open import (
    Endpoint,
    OpenRun,
    Store,
    VersionName,
    explained,
    opened,
    owned,
    settings_of,
)
from driftline.commands.policy_text import age, duration_of, emit, size, size_of, table
from driftline.messages.errors import ConfigError, HeadConflict, IntegrityError

if TYPE_CHECKING:
    from driftline.policy_store.blobs import StoredBlob
    from driftline.policy_store.collect import Collected, Plan, Retention
    from driftline.policy_store.inventory import Inventory, Lacking
    from driftline.policy_store.manifest import Link
    from driftline.services.policy_config import PolicyStoreConfig

__all__ = ["add_to"]

ORPHAN_AGE_S = 3600.0
"""Blobs that nothing names and that are younger stay: a publish may be about to name them."""

ATTEMPTS = 3


def add_to(policy: typer.Typer) -> None:
    """Add the commands to `policy`."""
    for command in (gc, squash, rebase):
        policy.command(command.__name__)(command)


def gc(
    name: RunName, url: Url = BROKER,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go, and what stands in the way.")] = False,
    keep: Annotated[int | None, typer.Option("--keep", min=1, help="The newest so many versions stay (policy_store.keep_versions, 20).")] = None,
    keep_for: Annotated[str, typer.Option("--keep-for", help="So do versions younger than this: 90s, 30m, 2h, 7d.")] = "",
    keep_bytes: Annotated[str, typer.Option("--keep-bytes", help="The oldest of these go until the rest fits: 50GB.")] = "",
    drop_start: Annotated[bool, typer.Option("--drop-start", help="Version 0 need not stay: nothing will replay the run.")] = False,
    orphans: Annotated[bool, typer.Option("--orphans", help="Delete blobs that nothing names too; only while no learner owns the run.")] = False,
    grace: Annotated[str, typer.Option("--grace", help="What is to go must be unneeded this long, for readers that just started; 0 does not wait.")] = "30s",
    run_file: Annotated[Path | None, typer.Option("--run-file", help="The run's settings, for what to keep.")] = None,
    as_json: AsJson = False, store: Store = "", endpoint: Endpoint = None,
) -> None:
    """Delete old versions, never one that is the head, pinned, being read, or part of the way to one of these.

    Exit code 1 when something blocks the collection or the store lacks what it should have."""
    config = settings_of(name, run_file)
    settings = None if config is None else config.policy_store
    wanted = _retention(settings, keep, keep_for, keep_bytes)
    keep_start = not drop_start and (settings is None or settings.keep_start)
    grace_s = 0.0 if grace.strip() in ("0", "0s") else duration_of(grace, "--grace")

    async def body(run: OpenRun) -> int:
        if not dry_run:
            await _settle_start(run, keep_start)
        look = await _look(run, wanted, keep_start)
        done: Done | None = None
        if not dry_run:
            if look.plan.delete or look.plan.chords:
                if grace_s and not as_json and sys.stderr.isatty():
                    typer.echo(f"{len(look.plan.delete)} versions go if nobody needs them for {age(grace_s)}", err=True)
                await asyncio.sleep(grace_s)
            done = await _collect(run, wanted, keep_start, look)
            if orphans:
                done = Done(done.collected, await _delete_orphans(run, look))
        if as_json:
            emit(_document(run, look, done, dry_run))
        else:
            _print(look, done)
        return 1 if look.plan.blocked or look.damaged or look.stock.unreadable else 0

    sys.exit(opened(name, url, body, store=store, endpoint=endpoint, role="observer" if dry_run else "admin" if orphans else "policy-store"))


@dataclass(frozen=True)
class Look:
    """What is there, and what of it may go."""

    stock: Inventory
    plan: Plan
    pinned: tuple[Link, ...]
    """Those the plan was made with: a pin that comes later stops it."""

    @property
    def damaged(self) -> list[Lacking]:
        """What is missing of versions that stay. (Of one that goes, an earlier collection that was cut off took it.)"""
        going = {version.link.seal for version in self.plan.delete}
        return [lacking for lacking in self.stock.lacking if lacking.link.seal not in going]


@dataclass(frozen=True)
class Done:
    collected: Collected
    orphans: tuple[StoredBlob, ...] = ()


async def _settle_start(run: OpenRun, keep: bool) -> None:
    """Version 0 stays by a pin, as the policy store keeps it: what is only kept would not be found below a gap."""
    from driftline.policy_store.pins import pin, pins, unpin
    from driftline.services.policy_store.service import START_OWNER

    pinned = any(held.link.version == 0 and held.owner == START_OWNER for held in await pins(run.bus, run.name))
    if keep and not pinned:
        with suppress(IntegrityError):  # it is gone: there is nothing to keep
            await pin(run.bus, run.reader, 0, START_OWNER)
    elif pinned and not keep:
        await unpin(run.bus, run.name, 0, START_OWNER)


async def _look(run: OpenRun, wanted: Retention, keep_start: bool) -> Look:
    from driftline.policy_store.collect import Plan, plan
    from driftline.policy_store.inventory import take_stock
    from driftline.policy_store.pins import pins

    held = tuple(pin.link for pin in await pins(run.bus, run.name))
    stock = await take_stock(run.bus, run.origin, run.reader)
    if stock.head is None:
        raise ConfigError("it has no version yet", field="run", value=run.name, remedy="there is nothing to collect")
    start = [version.link for version in stock.versions.values() if version.link.version == 0] if keep_start else []
    look = Look(stock, plan(stock.versions, stock.head, wanted, [*held, *start], shortcuts=stock.chords, now=time.time()), held)
    if look.damaged and not look.plan.blocked:
        # The way around the damage may lead over what would go.
        first = look.damaged[0].link.version
        return Look(stock, Plan(frozenset(stock.versions), (), f"version {first} stays and lacks bytes: verify it, and rebase what can still be read"), held)
    return look


async def _collect(run: OpenRun, wanted: Retention, keep_start: bool, first: Look) -> Done:
    """What may go now and could go when it was first looked at."""
    from driftline.policy_store.collect import collect

    before = {version.link.seal for version in first.plan.delete}, {chord.seal for chord in first.plan.chords}
    for _ in range(ATTEMPTS):
        look = await _look(run, wanted, keep_start)
        versions = [version for version in look.plan.delete if version.link.seal in before[0]]
        chords = [chord for chord in look.plan.chords if chord.seal in before[1]]
        found: Collected = await collect(run.bus, run.origin, run.name, versions, shortcuts=chords, pinned=look.pinned)
        if not found.refused:
            return Done(found)
    raise HeadConflict(f"somebody pinned a version {ATTEMPTS} times while it was planned", field="pins", value=run.name, remedy="try again")


async def _delete_orphans(run: OpenRun, look: Look) -> tuple[StoredBlob, ...]:
    """Blobs that nothing named when this began and nothing names now. No version can be on its way: this holds the learner's claim and
    has stored the head again, so that whoever was about to move it cannot."""
    from driftline.messages.subjects import Subjects
    from driftline.policy_store.inventory import take_stock

    with explained("learner"):
        async with owned(run.bus, run.name) as epoch:
            names = Subjects(run.name)
            stored = await run.bus.last(names.stream("POLICY"), names.head)
            if stored is not None:
                await run.bus.publish(names.head, stored.message, id=f"{run.name}/fence/{epoch}/{stored.seq}", expect_last=stored.seq)
            old = {blob.digest for blob in look.stock.unnamed if blob.stored_at is not None and time.time() - blob.stored_at >= ORPHAN_AGE_S}
            gone = tuple(blob for blob in (await take_stock(run.bus, run.origin, run.reader)).unnamed if blob.digest in old)
            for blob in gone:
                await run.origin.delete(blob.ref)
            return gone


def _document(run: OpenRun, look: Look, done: Done | None, dry_run: bool) -> dict[str, Any]:
    stock, plan = look.stock, look.plan
    return {
        "run": run.name, "head": None if stock.head is None else stock.head.version, "dry_run": dry_run, "blocked": plan.blocked,
        "keep": sorted({stock.versions[seal].link.version for seal in stock.versions if seal not in {version.link.seal for version in plan.delete}}),
        "delete": [{"version": version.link.version, "seal": version.link.seal, "blobs": len(version.blobs), "nbytes": version.nbytes} for version in plan.delete],
        "shortcuts": [{"target": chord.target.version, "base": None if chord.base is None else chord.base.version, "nbytes": chord.nbytes} for chord in plan.chords],
        "stored": {"blobs": stock.stored, "nbytes": stock.stored_bytes},
        "orphans": {"blobs": len(stock.unnamed), "nbytes": sum(blob.size for blob in stock.unnamed), "young": _young(stock)},
        "lacking": [{"version": lacking.link.version, "digest": lacking.digest} for lacking in stock.lacking],
        "unreadable": list(stock.unreadable),
        "collected": None if done is None else {
            "versions": done.collected.versions, "shortcuts": done.collected.shortcuts, "blobs": done.collected.blobs, "nbytes": done.collected.nbytes,
            "orphans": len(done.orphans), "orphan_bytes": sum(blob.size for blob in done.orphans),
        },
    }


def _young(stock: Inventory) -> int:
    now = time.time()
    return sum(blob.stored_at is None or now - blob.stored_at < ORPHAN_AGE_S for blob in stock.unnamed)


def _print(look: Look, done: Done | None) -> None:
    stock, plan = look.stock, look.plan
    if plan.delete:
        table("would go" if done is None else "going", [("version", "right"), ("frees", "right"), ("seal", "left")], [
            [str(version.link.version), size(version.nbytes), version.link.seal[:12]] for version in plan.delete
        ])
    freed = sum(version.nbytes for version in plan.delete) + sum(chord.nbytes for chord in plan.chords)
    typer.echo(f"{len(stock.versions)} versions and {len(stock.chords)} shortcuts in {size(stock.stored_bytes)}; {len(plan.delete)} versions and "
               f"{len(plan.chords)} shortcuts may go: {size(freed)}")
    if stock.unnamed:
        typer.echo(f"{len(stock.unnamed)} blobs ({size(sum(blob.size for blob in stock.unnamed))}) are named by nothing, {_young(stock)} of them too new to judge")
    if plan.blocked:
        typer.echo(f"blocked: {plan.blocked}")
    for lacking in stock.lacking:
        typer.echo(f"missing: blob {lacking.digest} of version {lacking.link.version}; `driftline policy verify` says what can still be read")
    for line in stock.unreadable:
        typer.echo(f"unreadable: {line}")
    if done is not None:
        typer.echo(f"deleted {done.collected.versions} versions and {done.collected.shortcuts} shortcuts, {size(done.collected.nbytes)}"
                   + (f"; {len(done.orphans)} orphans, {size(sum(blob.size for blob in done.orphans))}" if done.orphans else ""))


def _retention(settings: PolicyStoreConfig | None, keep: int | None, keep_for: str, keep_bytes: str) -> Retention:
    from driftline.policy_store.collect import Retention
    from driftline.services.policy_config import PolicyStoreConfig

    said = settings or PolicyStoreConfig()
    versions = keep if keep is not None else said.keep_versions
    if versions < 1:
        raise ConfigError("the run's settings collect nothing", field="policy_store.keep_versions", value=versions, remedy="say how many stay: --keep N")
    return Retention(
        versions, duration_of(keep_for, "--keep-for") if keep_for else said.keep_s, size_of(keep_bytes, "--keep-bytes") if keep_bytes else said.keep_bytes)


def squash(
    name: RunName, version: VersionName, base: Annotated[str, typer.Option("--base", help="The version it leads from; the farthest possible if nothing is said.")] = "",
    url: Url = BROKER, as_json: AsJson = False, store: Store = "", endpoint: Endpoint = None,
) -> None:
    """Store one delta over 2, 4, 8, ... versions, for those who come late. Exit code 1 when it would not be worth its bytes."""

    async def body(run: OpenRun) -> int:
        from driftline.policy_store.shortcuts import bases
        from driftline.policy_store.squash import squash as make

        target = await run.manifest(version)
        possible = list(bases(target.version, 0))
        if not possible:
            raise ConfigError("no squash leads to it", field="VERSION", value=target.version, remedy="one leads to a version from 2^k below it, where 2^k divides it")
        start = await run.number(base) if base else possible[0]
        if start not in possible:
            raise ConfigError(f"a squash to version {target.version} leads from {', '.join(map(str, possible))}", field="--base", value=start, remedy="one of these")
        with run.meter.stage(f"version {start} to {target.version}"):
            made = await make(run.bus, run.metered, run.reader, target, start)
        if as_json:
            emit({"run": run.name, "version": target.version, "base": start, "stored": made is not None, "nbytes": 0 if made is None else made.encoding.nbytes,
                  "replaces": 0 if made is None else made.replaces})
        elif made is None:
            typer.echo(f"not stored: one delta from {start} to {target.version} is hardly smaller than the deltas it stands for")
        else:
            typer.echo(f"version {start} to {target.version} in {size(made.encoding.nbytes)} instead of {size(made.replaces)}")
        return 0 if made is not None else 1

    sys.exit(opened(name, url, body, store=store, endpoint=endpoint, role="policy-store"))


def rebase(name: RunName, version: VersionName, url: Url = BROKER, as_json: AsJson = False, store: Store = "", endpoint: Endpoint = None) -> None:
    """Store a full of a version that has none, so that it needs nothing older: before it is kept for long, or what it is made from is damaged."""

    async def body(run: OpenRun) -> int:
        from driftline.policy_store.squash import rebase as make

        target = await run.manifest(version)
        if target.full is not None:
            raise ConfigError("it has a full", field="VERSION", value=target.version, remedy="it needs nothing older already")
        with run.meter.stage(f"version {target.version}"):
            made = await make(run.bus, run.metered, run.reader, target)
        if as_json:
            emit({"run": run.name, "version": target.version, "nbytes": made.encoding.nbytes})
        else:
            typer.echo(f"version {target.version} by itself in {size(made.encoding.nbytes)}")
        return 0

    sys.exit(opened(name, url, body, store=store, endpoint=endpoint, role="policy-store"))
