"""`driftline audit`: is every id accounted for?"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from driftline.commands.common import BROKER, AsJson, RunName, Url, with_bus
from driftline.messages.errors import ConfigError

if TYPE_CHECKING:
    from driftline.messages.nats_bus import NatsBus
    from driftline.services.audit.report import Bounds, Report

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("audit")(audit)


def audit(
    name: RunName,
    url: Url = BROKER,
    as_json: AsJson = False,
    run_file: Annotated[
        Path | None, typer.Option("--run-file", help="The run file: holds the run against its max_lag and groups_per_step.")
    ] = None,
    finished: Annotated[bool, typer.Option("--finished", help="The run is over, although nothing says so: open groups are lost.")] = False,
) -> None:
    """Recompute everything about a run from its broker and print each id that is missing, doubled or unfinished.

    Exit code 0: none. 1: some. 3: the broker cannot be reached."""
    report = asyncio.run(_audit(name, url, _bounds(run_file, name), finished))
    from driftline.services.audit.text import report_lines

    if as_json:
        import json

        typer.echo(json.dumps(report.document(), indent=2))
    else:
        for line in report_lines(report):
            typer.echo(line)
    sys.exit(1 if report.findings else 0)


def _bounds(run_file: Path | None, name: str) -> Bounds | None:
    if run_file is None:
        return None
    from driftline.services.audit.report import Bounds
    from driftline.services.config import load

    run = load(run_file).run
    if run.name != name:
        raise ConfigError(f"{run_file} is the run file of {run.name}", field="RUN", value=name, remedy="give its own run file, or none")
    return Bounds(run.max_lag, run.groups_per_step)


async def _audit(name: str, url: str, bounds: Bounds | None, finished: bool) -> Report:
    from driftline.services.audit.read import audit as read

    found: list[Report] = []

    async def body(bus: NatsBus) -> None:
        found.append(await read(bus, name, bounds=bounds, finished=finished))

    await with_bus(url, body)
    return found[0]
