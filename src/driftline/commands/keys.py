"""`driftline keys`: certificates and credentials for a broker that others can reach; `driftline provision`: its streams."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from driftline.commands.common import CredentialsFile
from driftline.messages.errors import ConfigError

if TYPE_CHECKING:
    from driftline.services.config import Config

__all__ = ["register"]

keys = typer.Typer(no_args_is_help=True, help="Certificates, users and permissions for a broker.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="What `driftline keys make` wrote.")]
AccountName = Annotated[str, typer.Option("--account", help="Which run's; needed when there are several.")]
RunFile = Annotated[Path | None, typer.Option("--config", help="The run file (TOML).")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", envvar="DRIFTLINE_SET")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(keys, name="keys")
    app.command("provision")(provision)


@keys.command("make")
def make(
    out: Annotated[Path, typer.Option("--out", help="Where the files are written; the folder is yours alone.")],
    run: Annotated[str, typer.Option("--run", help="The run's name (run.name).")] = "",
    config: Annotated[Path | None, typer.Option("--config", help="Take the run's name from this run file.")] = None,
    host: Annotated[list[str] | None, typer.Option("--host", help="A name or address clients use for the broker; may be repeated. "
                                                                 "This machine's own are always in.")] = None,
    days: Annotated[int, typer.Option("--days", min=1, help="How long the broker's certificate is valid.")] = 365,
    account: Annotated[str, typer.Option("--account", help="The run's account on the broker; the run's name otherwise.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Start over: every credential that is there stops working.")] = False,
    if_absent: Annotated[bool, typer.Option("--if-absent", help="Do nothing when the keys are there.")] = False,
    add: Annotated[bool, typer.Option("--add", help="Add a run to the keys that are there, in an account of its own.")] = False,
) -> None:
    """Make an authority, the broker's certificate and auth.conf, and a credentials file for each role."""
    from driftline.services.config import load
    from driftline.services.security.keys import SERVER, Existing, make_keys

    if sum((force, if_absent, add)) > 1:
        raise ConfigError("they exclude each other", field="keys make", value="--force, --if-absent, --add", remedy="choose one")
    if (config is None) == (not run):
        raise ConfigError("whose keys?", field="--run", value=run, remedy="give either --run NAME or --config FILE")
    name = run if config is None else load(config).run.name
    made = make_keys(out, name, account=account, hosts=host or (), days=days, existing=Existing(leave=if_absent, replace=force, add=add))
    typer.echo(f"for nats-server: {made.folder / SERVER / 'auth.conf'} (driftline nats --auth {made.folder})")
    typer.echo(f"for each role:   {made.folder / (account or name)}/ROLE/credentials.json")


@keys.command("show")
def show(folder: Folder) -> None:
    """List runs, users and how long certificates are valid; no secrets."""
    from driftline.services.security.keys import Keys

    for line in Keys.load(folder).lines():
        typer.echo(line)


@keys.command("rotate")
def rotate(
    folder: Folder,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="A role, or `server` for the broker's certificate.")],
    account: AccountName = "",
    days: Annotated[int | None, typer.Option("--days", min=1, help="For the certificate: how long it is valid.")] = None,
) -> None:
    """Give a role a new password, or the broker a new certificate."""
    from driftline.services.security.keys import SERVER, Keys
    from driftline.services.security.permissions import Role

    known = Keys.load(folder)
    if role == SERVER:
        changed = known.renew_server(days)
    elif role in set(Role):
        changed = known.rotate(Role(role), account)
    else:
        raise ConfigError("no such role", field="ROLE", value=role, remedy=f"one of {', '.join(Role)}, {SERVER}")
    typer.echo(f"{changed} is new: let nats-server read its configuration again (SIGHUP to it, or to `driftline nats`), then restart "
               "who uses it")


def provision(
    config: Annotated[Path, typer.Option("--config", help="The run file (TOML).")],
    set_: Overrides = None, credentials: CredentialsFile = None,
) -> None:
    """Declare a run's streams on its broker, as the admin; services can then do without that right."""
    from driftline.services.config import load

    asyncio.run(_provision(load(config, set_ or ()), credentials))


async def _provision(config: Config, credentials: Path | None) -> None:
    from driftline.commands.common import with_bus
    from driftline.messages.errors import BrokerDenied
    from driftline.services.runtime import run_topology

    if not config.broker.url:
        raise ConfigError("which broker?", field="broker.url", value="", remedy="set it in the run file, or with --set broker.url=...")
    wanted = run_topology(config)
    named = credentials or (Path(config.broker.credentials) if config.broker.credentials else None)
    try:
        await with_bus(config.broker.url, lambda bus: bus.declare(wanted), credentials=named, role="admin")
    except BrokerDenied as error:
        if error.field != "subject":
            raise
        raise BrokerDenied("these credentials may not declare streams", field="--credentials", value=str(named or ""),
                           remedy="give the admin's: --credentials DIR/ACCOUNT/admin/credentials.json") from error  # fmt: skip
    typer.echo(f"{len(wanted.streams)} streams and {len(wanted.consumers)} consumers of {config.run.name} are there")
