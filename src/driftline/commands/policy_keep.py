"""`driftline policy pin | unpin | pins`: what stays, for whom, and until when."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from driftline.commands.common import BROKER, AsJson, RunName, Url
from driftline.commands.policy_open import OWNER_LIMIT, Endpoint, OpenRun, Store, VersionName, opened
from driftline.commands.policy_open import owner as owner_here
from driftline.commands.policy_text import age, duration_of, emit, table
from driftline.messages.errors import ConfigError

__all__ = ["add_to"]

Owner = Annotated[str, typer.Option("--owner", help="Who needs it; you at this machine if nothing is said.")]


def add_to(policy: typer.Typer) -> None:
    """Add the commands to `policy`."""
    for command in (pin, unpin):
        policy.command(command.__name__)(command)
    policy.command("pins")(list_pins)


def pin(
    name: RunName, version: VersionName, url: Url = BROKER, owner: Owner = "", for_: Annotated[str, typer.Option("--for", help="Let go by itself after this long: 90s, 30m, 2h, 7d. Otherwise it stays until `unpin`.")] = "",
    as_json: AsJson = False, store: Store = "", endpoint: Endpoint = None,
) -> None:
    """Keep a version, and all it is made from, until it is unpinned. Returns when it is safe; exit code 1 when it is already gone."""
    named, lease_s = _owner(owner), duration_of(for_, "--for") if for_ else None

    async def body(run: OpenRun) -> int:
        from driftline.policy_store import pins

        link = await pins.pin(run.bus, run.reader, await run.number(version), named, for_s=lease_s)
        if as_json:
            emit({"run": run.name, "version": link.version, "seal": link.seal, "owner": named, "for_s": lease_s})
        else:
            typer.echo(f"version {link.version} is kept for {named}" + (f", for {age(lease_s)}" if lease_s is not None else ""))
        return 0

    sys.exit(opened(name, url, body, store=store, endpoint=endpoint, role="policy-store"))


def unpin(
    name: RunName, version: VersionName, url: Url = BROKER, owner: Owner = "",
    every: Annotated[bool, typer.Option("--all-owners", help="Whoever pinned it.")] = False, as_json: AsJson = False, store: Store = "", endpoint: Endpoint = None,
) -> None:
    """Let a version go: the next collection may take it. Exit code 1 when nobody of that name had pinned it."""
    if every and owner:
        raise ConfigError("they exclude each other", field="--owner", value=owner, remedy="one owner, or --all-owners")
    named = _owner(owner)

    async def body(run: OpenRun) -> int:
        from driftline.policy_store import pins

        number = await run.number(version)
        owners = sorted({held.owner for held in await pins.pins(run.bus, run.name) if held.link.version == number})
        gone = owners if every else [known for known in owners if known == named]
        for known in gone:
            await pins.unpin(run.bus, run.name, number, known)
        left = [known for known in owners if known not in gone]
        if as_json:
            emit({"run": run.name, "version": number, "unpinned": gone, "still_pinned_by": left})
        else:
            still = f"; still pinned by {', '.join(left)}" if left else ""
            typer.echo(f"version {number} is no longer kept for {', '.join(gone)}{still}" if gone
                       else f"version {number} was not pinned by {'anybody' if every else named}{still}")
        return 0 if gone else 1

    sys.exit(opened(name, url, body, store=store, endpoint=endpoint, role="policy-store"))


def list_pins(name: RunName, url: Url = BROKER, as_json: AsJson = False, store: Store = "", endpoint: Endpoint = None) -> None:
    """List the pins: version, owner, since when, until when."""

    async def body(run: OpenRun) -> int:
        from driftline.policy_store import pins

        now = time.time()
        rows: list[dict[str, Any]] = [
            {"version": held.link.version, "seal": held.link.seal, "owner": held.owner, "at": held.at, "until": held.until}
            for held in sorted(await pins.pins(run.bus, run.name), key=lambda held: (held.link.version, held.owner))
        ]
        if as_json:
            emit({"run": run.name, "pins": rows})
        elif not rows:
            typer.echo("no pins")
        else:
            table("", [("version", "right"), ("owner", "left"), ("since", "right"), ("lapses in", "right")], [
                [str(row["version"]), row["owner"], age(max(0.0, now - row["at"])), "never" if row["until"] is None else age(max(0.0, row["until"] - now))]
                for row in rows
            ])
        return 0

    sys.exit(opened(name, url, body, store=store, endpoint=endpoint))


def _owner(given: str) -> str:
    if len(given) > OWNER_LIMIT or not given.isprintable():
        raise ConfigError(f"a name of at most {OWNER_LIMIT} printable characters", field="--owner", value=given, remedy="a shorter one")
    return given or owner_here()
