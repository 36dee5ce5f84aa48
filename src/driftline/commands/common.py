"""What commands on a running broker share: their arguments, and a connection that is closed whatever happens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from driftline.messages.errors import DriftlineError

if TYPE_CHECKING:
    from driftline.messages.nats_bus import NatsBus

__all__ = ["BROKER", "AsJson", "RunName", "Url", "with_bus"]

BROKER = "nats://127.0.0.1:4222"

Url = Annotated[str, typer.Option("--url", help="The broker's address.", envvar="DRIFTLINE_BROKER_URL")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name (run.name).")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")]


async def with_bus(url: str, body: Callable[[NatsBus], Awaitable[None]]) -> None:
    """Connect, do it, disconnect; a failure inside a group of tasks comes out as itself."""
    from driftline.messages.nats_bus import NatsBus
    from driftline.services.runtime import configure_logging

    configure_logging("cli", "", "warning")
    bus = await NatsBus.connect(url, name="driftline-cli", connect_timeout_s=3.0)
    try:
        await body(bus)
    except* DriftlineError as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    finally:
        await bus.close()
