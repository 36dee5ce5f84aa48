"""The command line: one command per service, and `driftline run`, which starts them all.

Every command imports what it needs when it runs, so that `driftline --help` answers at once and no service loads what another
needs. Errors of ours are one sentence on stderr and the exit codes of `driftline.services.runtime`; 0 is success.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from driftline.commands import audit, dead_letters, drafter, kernels, keys, model, policy, replay, serve
from driftline.commands.common import BROKER, CredentialsFile, RunName, Url, remember_credentials, with_bus
from driftline.messages.errors import (
    BrokerDenied,
    BrokerUnavailable,
    ConfigError,
    DriftlineError,
)

if TYPE_CHECKING:
    from driftline.messages.nats_bus import NatsBus

__all__ = ["app", "exit_code", "main"]

app = typer.Typer(
    name="driftline", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Asynchronous RL of hybrid mixture-of-experts language models over NATS JetStream.",
)
for _module in (audit, dead_letters, replay, keys, policy, model, drafter, kernels, serve):
    _module.register(app)

RunFile = Annotated[Path, typer.Argument(metavar="FILE", help="The run file (TOML).")]
ConfigFile = Annotated[Path, typer.Option("--config", help="The run file (TOML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", envvar="DRIFTLINE_SET",
                 help="Replace one setting; may be repeated. In the environment: separated by spaces."),
]
Instance = Annotated[str, typer.Option("--instance", help="Which of several this one is, for logs and metrics.")]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="Where files of the run are written (runs/<name>).")]


def main() -> None:
    """Entry point. Ours are told apart from bugs: a bug keeps its traceback."""
    try:
        app()
    except DriftlineError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(exit_code(error))


def exit_code(error: DriftlineError) -> int:
    """2: used or configured wrongly, or not allowed. 3: the broker or a store does not answer. 1: anything else."""
    if isinstance(error, ConfigError | BrokerDenied):
        return 2
    return 3 if isinstance(error, BrokerUnavailable) else 1


@app.callback()
def options(credentials: CredentialsFile = None) -> None:
    """Asynchronous RL of hybrid mixture-of-experts language models over NATS JetStream."""
    remember_credentials(credentials)


@app.command()
def run(
    file: RunFile,
    set_: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved settings and exit.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line per step instead of the live view.")] = False,
) -> None:
    """Run everything on this machine: broker, services, live view. Ends by itself; Ctrl-C drains, twice stops."""
    from driftline.services.config import load, to_toml

    config = load(file, set_ or ())
    if dry_run:
        typer.echo(to_toml(config), nl=False)
        return
    from driftline.services.runtime import configure_logging
    from driftline.services.supervisor.folder import RunFolder
    from driftline.services.supervisor.local import LocalRun
    from driftline.services.supervisor.preflight import preflight
    from driftline.services.watch.screen import screen_for

    preflight(config)
    folder = RunFolder.create(config)
    screen = screen_for(plain)
    with (folder.logs / "supervisor.log").open("a", encoding="utf-8") as stream:
        configure_logging("supervisor", "", config.telemetry.log_level, stream)
        screen.say(f"{config.run.name}: {config.run.steps} steps, run folder {folder.path}")
        ending = asyncio.run(LocalRun(config, folder, screen).run())
    typer.echo(str(folder.path))
    sys.exit(ending.value)


@app.command()
def nats(
    store_dir: Annotated[Path, typer.Option("--store-dir", help="Where streams are kept.")] = Path("nats-store"),
    port: Annotated[int, typer.Option("--port", help="0 picks a free one.")] = 4222,
    host: Annotated[str, typer.Option("--host")] = "127.0.0.1",
    auth: Annotated[Path | None, typer.Option("--auth", metavar="DIR", help="What `driftline keys make` wrote: TLS, users and permissions.")] = None,
) -> None:
    """Run a broker for services started one by one. SIGHUP makes it read users and certificates again."""
    asyncio.run(_nats(store_dir, port, host, auth))


async def _nats(store_dir: Path, port: int, host: str, auth: Path | None) -> None:
    import signal

    from driftline.messages.server import NatsServer
    from driftline.services.security.keys import auth_file

    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    async with NatsServer(store_dir, port, host=host, auth=auth_file(auth) if auth else None) as server:
        loop.add_signal_handler(signal.SIGHUP, server.reload)
        typer.echo(server.url)
        died, stopped = asyncio.create_task(server.wait()), asyncio.create_task(asked.wait())
        await asyncio.wait({died, stopped}, return_when=asyncio.FIRST_COMPLETED)
        failure = server.failure()
        for task in (died, stopped):
            task.cancel()
        if failure is not None:
            raise failure


def _service(name: str, summary: str) -> None:
    """Registers `driftline NAME --config FILE`."""

    def command(config: ConfigFile, set_: Overrides = None, instance: Instance = "", run_dir: RunDir = None) -> None:
        from driftline.services.config import load
        from driftline.services.runtime import serve
        from driftline.services.wiring import SERVICES

        sys.exit(serve(name, SERVICES[name], load(config, set_ or ()), instance=instance, run_dir=run_dir))

    app.command(name=name, help=summary)(command)


for _name, _summary in (
    ("dispatcher", "Owns the task cursor: lets groups into the loop, as many as the staleness bound allows."),
    ("rollout", "Samples groups with the newest policy; start as many as you like."),
    ("grader", "Gives finished trajectories their rewards."),
    ("learner", "Trains on graded groups and publishes policy versions."),
    ("policy-store", "Verifies, mirrors and collects policy versions."),
    ("evaluator", "Measures pinned versions on the held-out tasks."),
):
    _service(_name, _summary)


@app.command()
def watch(
    name: RunName, url: Url = BROKER,
    steps: Annotated[int, typer.Option("--steps", help="How many steps the run will have, for the time left.")] = 0,
    plain: Annotated[bool, typer.Option("--plain")] = False,
) -> None:
    """Show a running run until it is finished. It only reads: any number may watch."""
    asyncio.run(_watch(name, url, steps, plain))


async def _watch(name: str, url: str, steps: int, plain: bool) -> None:
    from driftline.messages.subjects import topology
    from driftline.services.runtime import finished
    from driftline.services.watch.collector import Collector
    from driftline.services.watch.picture import Picture
    from driftline.services.watch.screen import screen_for

    async def body(bus: NatsBus) -> None:
        picture, screen = Picture(name, steps), screen_for(plain)
        collector = Collector(bus, picture, topology(name).consumers,
                              on_change=lambda message: screen.see(message, picture))
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(collector.run()), tasks.create_task(screen.draw(picture))]
            end = await finished(bus, name)
            await collector.catch_up(10.0)
            for task in beside:
                task.cancel()
        screen.say(f"finished at version {end.version}: {end.reason}")

    await with_bus(url, body)


@app.command()
def status(name: RunName, url: Url = BROKER) -> None:
    """Print where a run stands, once."""
    asyncio.run(_status(name, url))


async def _status(name: str, url: str) -> None:
    import time

    from rich.console import Console

    from driftline.messages.subjects import topology
    from driftline.services.watch.collector import Collector
    from driftline.services.watch.picture import Picture
    from driftline.services.watch.render import render

    async def body(bus: NatsBus) -> None:
        picture, consumers = Picture(name), topology(name).consumers
        collector = Collector(bus, picture)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(collector.run())
            await collector.catch_up(30.0)
            reading.cancel()
        picture.depths = {consumer.durable: await bus.depth(consumer) for consumer in consumers}
        first = picture.ordered[0].at if picture.steps else time.time()
        Console().print(render(picture, now=time.time(), started_at=first))
        if picture.finished:
            typer.echo(f"finished at version {picture.finished.version}: {picture.finished.reason}")

    await with_bus(url, body)


@app.command()
def doctor(file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A run file to check as well.")] = None) -> None:
    """Check that this machine has what a run needs."""
    from driftline.services.config import load
    from driftline.services.supervisor.preflight import examine

    checks = examine(load(file) if file else None)
    for check in checks:
        remedy = f"  -> {check.remedy}" if check.remedy else ""
        typer.echo(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<16} {check.found}{remedy}")
    sys.exit(0 if all(check.ok for check in checks) else 1)


@app.command()
def pretrain(
    config: ConfigFile,
    out: Annotated[Path, typer.Option("--out", help="Where the checkpoint is written.")],
    corpus: Annotated[Path | None, typer.Option("--corpus", help="A corpus made earlier.")] = None,
    corpus_only: Annotated[Path | None, typer.Option("--corpus-only", help="Only make the corpus, into this file.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, or empty to choose.")] = "",
    save_every: Annotated[int, typer.Option("--save-every", help="Steps between checkpoints; 0: only the last.")] = 0,
) -> None:
    """Make a starting checkpoint by supervised learning on solved tasks."""
    from driftline.services.learner.pretrain import main as pretrain_main

    pretrain_main(config, out, corpus=corpus, corpus_only=corpus_only, device=device, save_every=save_every)
