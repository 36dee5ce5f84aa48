"""What commands on a running broker share: their arguments, and a connection that is closed whatever happens."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from driftline.messages.errors import DriftlineError

if TYPE_CHECKING:
    from driftline.messages.credentials import Credentials
    from driftline.messages.nats_bus import NatsBus

__all__ = ["BROKER", "AsJson", "CredentialsFile", "RunName", "Url", "credentials_of", "remember_credentials", "with_bus"]

BROKER = "nats://127.0.0.1:4222"
VARIABLE = "DRIFTLINE_CREDENTIALS"

Url = Annotated[str, typer.Option("--url", help="The broker's address.", envvar="DRIFTLINE_BROKER_URL")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name (run.name).")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")]
CredentialsFile = Annotated[
    Path | None,
    typer.Option("--credentials", envvar=VARIABLE, help="A credentials file of `driftline keys`, or the folder of an account."),
]


def remember_credentials(path: Path | None) -> None:
    """`driftline --credentials FILE COMMAND`: for whatever the command connects to."""
    if path is not None:
        os.environ[VARIABLE] = str(path)


def credentials_of(path: Path | None, role: str) -> Credentials | None:
    """Those of `path`, else those that were given before the command or in the environment."""
    from driftline.messages.credentials import credentials_file, load_credentials

    named = os.fspath(path) if path is not None else os.environ.get(VARIABLE, "")
    return load_credentials(credentials_file(named, role)) if named else None


async def with_bus(
    url: str, body: Callable[[NatsBus], Awaitable[None]], *, credentials: Path | None = None, role: str = "observer"
) -> None:
    """Connect, do it, disconnect; a failure inside a group of tasks comes out as itself. `role`: whose file it is in a folder of
    credentials."""
    from driftline.messages.nats_bus import NatsBus
    from driftline.services.runtime import configure_logging

    configure_logging("cli", "", "warning")
    bus = await NatsBus.connect(url, name="driftline-cli", connect_timeout_s=3.0, credentials=credentials_of(credentials, role))
    try:
        await body(bus)
    except* DriftlineError as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    finally:
        await bus.close()
