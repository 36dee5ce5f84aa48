"""`driftline record` and `driftline replay`: a run as a file, and its versions made again from it."""

from __future__ import annotations

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
