"""How the `driftline policy` commands say things: tables and sizes for people, one JSON document for programs, and both read back."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import typer

from driftline.messages.errors import ConfigError

__all__ = ["age", "duration_of", "emit", "share", "size", "size_of", "table"]

_SIZE = re.compile(r"^([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?$", re.IGNORECASE)
_DURATION = re.compile(r"^([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)$")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def emit(document: object) -> None:
    """One JSON document on stdout. Numbers JSON does not have become texts."""
    typer.echo(json.dumps(_plain(document), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    import numpy as np

    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case dict():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case np.ndarray() | np.generic():
            return _plain(value.tolist())
        case Path():
            return str(value)
    return value


def table(title: str, columns: list[tuple[str, str]], rows: list[list[str]]) -> None:
    """A table on stdout. `columns`: heading and "left" or "right". What strangers wrote is shown without its control characters."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from driftline.services.audit.text import plain

    made = Table(title=Text(plain(title)) if title else None, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for heading, justify in columns:
        made.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold", no_wrap=justify == "right")
    for row in rows:
        made.add_row(*(Text(plain(cell)) for cell in row))
    # Into a file or a pipe lines are as long as they need to be, so that they can be searched.
    Console(width=None if sys.stdout.isatty() else 240).print(made)


def size(nbytes: int) -> str:
    """Bytes for people."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{int(amount)} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"


def age(seconds: float) -> str:
    for limit, unit in ((120.0, 1.0), (7200.0, 60.0), (172800.0, 3600.0)):
        if seconds < limit:
            return f"{seconds / unit:.0f} {'s' if unit == 1 else 'min' if unit == 60 else 'h'}"
    return f"{seconds / 86400:.0f} d"


def size_of(text: str, field: str) -> int:
    """Bytes of "5GB", "512MiB" or "1000000". ConfigError for anything else."""
    parts = _SIZE.match(text.strip())
    found = float(parts[1]) * (1024 if parts[3] else 1000) ** " KMGT".index(parts[2].upper() or " ") if parts else 0.0
    if not 1 <= found < 2**63:
        raise ConfigError("not a size", field=field, value=text, remedy="e.g. 5GB or 512MiB")
    return int(found)


def duration_of(text: str, field: str) -> float:
    """Seconds of "90s", "30m", "2h" or "7d". ConfigError for anything else."""
    parts = _DURATION.match(text.strip())
    found = float(parts[1]) * _SECONDS[parts[2]] if parts else 0.0
    if not 0 < found < 1e9:
        raise ConfigError("not a duration", field=field, value=text, remedy="e.g. 90s, 30m, 2h or 7d")
    return found
