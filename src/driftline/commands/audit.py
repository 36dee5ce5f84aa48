"""`driftline audit`: is every id accounted for?"""

from __future__ import annotations

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
