"""`driftline record` and `driftline replay`: a run as a file, and its versions made again from it."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from driftline.commands.common import BROKER, AsJson, RunName, Url, with_bus
from driftline.messages.errors import ConfigError, DriftlineError, IntegrityError

if TYPE_CHECKING:
    from driftline.messages.nats_bus import NatsBus
    from driftline.services.config import Config
    from driftline.services.replay.comparison import Comparison, Span
    from driftline.services.replay.reader import Recording

__all__ = ["register"]

DAMAGED = 4  # as every service: stored bytes are not what was written


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command(name="record")(record)
    app.command(name="replay")(replay)


def record(
    name: RunName,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.dlr", help="The recording; it appears when it is whole.")],
    url: Url = BROKER,
    run_file: Annotated[Path | None, typer.Option("--run-file", help="The run's settings: config.toml of its run folder.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Record while the run goes on, to its end.")] = False,
    to: Annotated[int | None, typer.Option("--to", min=1, help="The last version to record.")] = None,
) -> None:
    """Write a run to one file: its start and every batch it trained on."""
    config = _run_config(name, run_file)
    _exits_on_damage(lambda: asyncio.run(_record(name, out, url, config, follow, to)))


def _run_config(name: str, run_file: Path | None) -> Config:
    from driftline.services.config import load

    if run_file is None:
        copies = sorted(Path("runs").glob(f"{name}-*/config.toml"))
        found = f"--run-file {copies[-1]}" if copies else "--run-file FILE, the config.toml of the run's folder or its run file"
        raise ConfigError("a recording holds the run's settings, which the broker does not have", field="--run-file", remedy=found)
    config = load(run_file)
    if config.run.name != name:
        raise ConfigError(f"it describes run {config.run.name!r}", field="--run-file", value=str(run_file),
                          remedy=f"name the run file of {name!r}")
    return config


async def _record(name: str, out: Path, url: str, config: Config, follow: bool, to: int | None) -> None:
    from driftline.services.replay.record import record as record_run
    from driftline.services.starting import starting_config
    from driftline.services.wiring import blob_store

    model = starting_config(config)

    async def body(bus: NatsBus) -> None:
        done = await record_run(bus, blob_store(bus, config), config, model, out, to=to, follow=follow, say=_say)
        typer.echo(str(done))

    await with_bus(url, body, role="recorder")


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE.dlr", help="What `driftline record` wrote.")],
    first: Annotated[int | None, typer.Option("--from", min=0, help="The first version to compare; earlier ones are only computed.")] = None,
    last: Annotated[int | None, typer.Option("--to", min=0, help="The last version to compute.")] = None,
    learner_only: Annotated[bool, typer.Option("--learner-only", help="Step a trainer; no broker, no service.")] = False,
    device: Annotated[str | None, typer.Option("--device", help="Compute here instead of on the recorded device.")] = None,
    into: Annotated[str | None, typer.Option("--into", metavar="RUN", help="Feed the trajectories to a live run instead.")] = None,
    url: Url = BROKER,
    in_flight: Annotated[int, typer.Option("--in-flight", min=0, help="Groups fed and not ended; 0: as the recorded run.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Feed a run whose dispatcher admits groups too.")] = False,
    wait: Annotated[float, typer.Option("--wait", min=1.0, help="Seconds a version, or an ended group, may take.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Make every version of a recording again and compare. Exit code 1: one differs; 4: the file is damaged."""
    from driftline.services.replay.reader import Recording

    def body() -> int:
        recording = Recording.open(file)
        if into is not None:
            if learner_only:
                raise ConfigError("feeds a live run, which --learner-only is without", field="--into", value=into, remedy="drop one of the two")
            asyncio.run(_into(recording, into, url, first, last, in_flight, force, wait, as_json))
            return 0
        from driftline.services.replay.replay import span

        found = _compare(recording, span(recording, first, last), learner_only, device, wait)
        typer.echo(json.dumps(found.document(), indent=2) if as_json else str(found))
        return 0 if found.equal else 1

    _exits_on_damage(lambda: sys.exit(body()))


def _compare(recording: Recording, wanted: Span, learner_only: bool, device: str | None, wait_s: float) -> Comparison:
    from driftline.services.replay.replay import replay_learner
    from driftline.services.runtime import configure_logging

    configure_logging("replay", "", "warning")
    with tempfile.TemporaryDirectory(prefix="driftline-replay-") as folder:
        if learner_only:
            return replay_learner(recording, Path(folder), wanted, device=device, say=_say)
        return asyncio.run(_loop(recording, Path(folder), wanted, device, wait_s))


async def _loop(recording: Recording, folder: Path, wanted: Span, device: str | None, wait_s: float) -> Comparison:
    from driftline.messages.nats_bus import NatsBus
    from driftline.services.replay.replay import recorded_config, replay_loop
    from driftline.services.runtime import run_topology
    from driftline.services.supervisor.broker import EmbeddedBroker

    config = recorded_config(recording, folder / "start", wanted.last, device)
    async with EmbeddedBroker(folder / "broker") as broker, await NatsBus.connect(broker.url, name="driftline-replay") as bus:
        await bus.declare(run_topology(config))
        try:
            return await replay_loop(bus, recording, config, folder / "learner", wanted, wait_s=wait_s, say=_say)
        except* DriftlineError as errors:
            failure: BaseException = errors
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
            raise failure from None


async def _into(
    recording: Recording, run: str, url: str, first: int | None, last: int | None, in_flight: int, force: bool, wait_s: float, as_json: bool
) -> None:
    import tomllib

    from driftline.services.config import resolve
    from driftline.services.replay.into import feed_into

    bound = resolve(tomllib.loads(recording.header.config), origin=str(recording.path)).max_in_flight_groups

    async def body(bus: NatsBus) -> None:
        fed = await feed_into(bus, recording, run, first=first, last=last, in_flight=in_flight or bound, force=force, wait_s=wait_s, say=_say)
        typer.echo(json.dumps(fed.document(), indent=2) if as_json else str(fed))

    await with_bus(url, body, role="admin")  # admits as the dispatcher does, and samples as an engine does


def _exits_on_damage(work: Callable[[], object]) -> None:
    try:
        work()
    except IntegrityError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(DAMAGED)


def _say(line: str) -> None:
    typer.echo(line, err=True)
