"""`driftline dead-letters`: what could not be processed, and what to do with it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from driftline.commands.common import BROKER, AsJson, RunName, Url, with_bus
from driftline.messages.errors import ConfigError, DriftlineError

if TYPE_CHECKING:
    from driftline.messages.bus import Bus
    from driftline.messages.dead_letters import DeadLetter
    from driftline.messages.nats_bus import NatsBus

__all__ = ["register"]

Numbers = Annotated[list[int] | None, typer.Argument(metavar="[SEQ]...", help="Which letters, by the number `ls` shows.")]
All = Annotated[bool, typer.Option("--all", help="Every dead letter of the run.")]
Kind = Annotated[str, typer.Option("--kind", help="All from one plane: groups, trajectories, graded, ledger, ...")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    letters = typer.Typer(no_args_is_help=True, help="Messages that could not be processed: look, queue again, drop.")
    letters.command("ls")(ls)
    letters.command("show")(show)
    letters.command("requeue")(requeue)
    letters.command("drop")(drop)
    app.add_typer(letters, name="dead-letters")


def ls(name: RunName, url: Url = BROKER, kind: Kind = "", as_json: AsJson = False) -> None:
    """List them, oldest first: number, time, plane, group, deliveries, reason."""
    rows: list[dict[str, object]] = []

    async def one(bus: Bus, letter: DeadLetter) -> bool:
        from driftline.messages.dead_letters import group_of
        from driftline.services.audit.text import letter_line

        if as_json:
            rows.append({"seq": letter.seq, "kind": letter.kind, "group": group_of(letter), "reason": letter.reason,
                         "subject": letter.subject, "deliveries": letter.deliveries, "failed_at": letter.failed_at, "size": len(letter.data)})
        else:
            typer.echo(letter_line(letter))
        return True

    count = _each(name, url, None, kind, one)
    if as_json:
        import json

        typer.echo(json.dumps(rows, indent=2))
    elif not count:
        typer.echo("no dead letters")


def show(name: RunName, numbers: Numbers = None, url: Url = BROKER, all_: All = False, kind: Kind = "") -> None:
    """Print headers and content: the decoded message, or the first bytes of what does not decode."""
    _check_chosen(numbers, all_, kind)

    async def one(bus: Bus, letter: DeadLetter) -> bool:
        from driftline.services.audit.letters import contents
        from driftline.services.audit.text import hexdump, message_text, plain

        typer.echo(f"letter {letter.seq}, {len(letter.data)} bytes")
        for header, value in sorted(letter.headers.items()):
            typer.echo(plain(f"  {header}: {value}"))
        try:
            typer.echo(message_text(await contents(bus, letter)))
        except DriftlineError as error:
            typer.echo(plain(f"  does not decode: {error}"))
            for line in hexdump(letter.data):
                typer.echo(line)
        return True

    _each(name, url, numbers, kind, one)


def requeue(
    name: RunName, numbers: Numbers = None, url: Url = BROKER, all_: All = False, kind: Kind = "",
    force: Annotated[bool, typer.Option("--force", help="Also what cannot be read, or whose group has ended.")] = False,
) -> None:
    """Put the original bytes back into the queue they came from, as a new message, and delete the letter.

    Exit code 1 when one was refused; the others are queued all the same."""
    _check_chosen(numbers, all_, kind)

    async def one(bus: Bus, letter: DeadLetter) -> bool:
        from driftline.services.audit import letters
        from driftline.services.audit.text import plain

        try:
            new = await letters.requeue(bus, name, letter, force=force)
        except letters.Refused as error:
            typer.echo(plain(f"refused: {error}"), err=True)
            return False
        typer.echo(plain(f"{letter.seq} {'queued' if new else 'was queued already'} on {letter.subject}"))
        return True

    _each(name, url, numbers, kind, one, role="admin")


def drop(
    name: RunName, numbers: Numbers = None, url: Url = BROKER, all_: All = False, kind: Kind = "",
    yes: Annotated[bool, typer.Option("--yes", help="They are gone for good: say so.")] = False,
) -> None:
    """Delete them."""
    _check_chosen(numbers, all_, kind)
    if not yes:
        raise ConfigError("a dropped letter is gone for good", field="--yes", value=yes, remedy="look with `show`, then repeat with --yes")

    async def one(bus: Bus, letter: DeadLetter) -> bool:
        from driftline.services.audit import letters

        gone = await letters.drop(bus, name, letter)
        typer.echo(f"{letter.seq} {'dropped' if gone else 'was gone already'}")
        return True

    _each(name, url, numbers, kind, one, role="admin")


def _check_chosen(numbers: list[int] | None, all_: bool, kind: str) -> None:
    if sum((bool(numbers), all_, bool(kind))) != 1:
        raise ConfigError("say which letters, in one way", field="SEQ", value=numbers or "", remedy="numbers, or --kind, or --all")


def _each(
    name: str, url: str, numbers: list[int] | None, kind: str, do: Callable[[Bus, DeadLetter], Awaitable[bool]], *, role: str = "observer"
) -> int:
    """`do` to each chosen letter, with the credentials of `role`; how many there were. Exits with 1 when it said no to one."""
    done: list[bool] = []

    async def body(bus: NatsBus) -> None:
        from driftline.services.audit import letters
        from driftline.services.audit.read import check_exists

        await check_exists(bus, name)
        chosen: AsyncIterator[DeadLetter] = letters.those(bus, name, numbers) if numbers else letters.every(bus, name, kind or None)
        async for letter in chosen:
            done.append(await do(bus, letter))

    asyncio.run(with_bus(url, body, role=role))
    if not all(done):
        sys.exit(1)
    return len(done)
