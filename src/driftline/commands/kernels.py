"""`driftline kernels`: what a machine's kernels need before a run is to be fast there."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from driftline.messages.errors import ConfigError

__all__ = ["register"]

app = typer.Typer(no_args_is_help=True, help="The GPU kernels of this machine.")


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="kernels")


@app.command(name="compile")
def compile_(
    processes: Annotated[int, typer.Option("--processes", min=1, help="How many compile at once; each holds the device beside the others.")] = min(8, os.cpu_count() or 1),
) -> None:
    """Compile every kernel at K3's widths into Triton's cache, so that no service waits for the compiler in its first step."""
    import torch

    from driftline.kernels.dispatch import runs_triton
    from driftline.kernels.first_calls import CALLS, compiled

    there = torch.cuda.is_available()
    if not there or not runs_triton(torch.empty(0, device="cuda")):
        raise ConfigError("no kernels run here", field="device", value=torch.cuda.get_device_name() if there else "no CUDA device",
                          remedy="a Hopper GPU and `pip install driftline[gpu]` are needed; elsewhere everything is computed by torch, and nothing is compiled")
    start = time.perf_counter()
    for done in compiled(processes=processes):
        typer.echo(f"{done.name:40} {done.seconds:6.1f} s")
    typer.echo(f"{len(CALLS)} calls in {time.perf_counter() - start:.1f} s")
