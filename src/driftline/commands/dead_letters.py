"""`driftline dead-letters`: what could not be processed, and what to do with it."""

from __future__ import annotations

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
