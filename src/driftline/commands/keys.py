"""`driftline keys`: certificates and credentials for a broker that others can reach."""

from __future__ import annotations

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
