"""An audit and a dead letter as lines to read. What a stranger wrote is shown without its control characters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

import numpy as np

from driftline.messages.dead_letters import DeadLetter, group_of
from driftline.messages.types import Message
from driftline.services.audit.report import Report

__all__ = ["CLEAN", "hexdump", "letter_line", "message_text", "plain", "report_lines"]

CLEAN: Final = "nothing missing, nothing doubled, nothing unfinished"
REASONS_SHOWN: Final = 5
HEX_SHOWN: Final = 256


def report_lines(report: Report) -> Iterator[str]:
    t, v = report.trajectories, report.versions
    yield f"run           {report.run}, {f'finished: {plain(report.finished)}' if report.finished is not None else 'going on'}"
    yield (f"groups        {report.admitted} admitted = {report.ended} ended + {report.open} open; cursor {report.cursor}, "
           f"{report.retries} retries, {report.events} events")
    yield f"outcomes      {_counts(report.outcomes)}"
    for kind, reasons in report.reasons.items():
        for reason, count in list(reasons.items())[:REASONS_SHOWN]:
            if reason != "-":
                yield f"              {kind} {count}: {plain(reason)}"
    untrained = f"{sum(t.untrained.values())} untrained" + (f" ({_counts(t.untrained)})" if t.untrained else "")
    yield (f"trajectories  {t.total} = {t.trained} trained + {untrained} + {t.never_arrived} never arrived + {t.in_flight} in flight")
    yield (f"versions      {f'head {v.head}' if v.head >= 0 else 'none yet'}; compared with {v.manifests} manifests and {v.records} records, "
           f"{v.unverified} groups with neither")
    room = "" if report.capacity is None else f", room for {report.capacity} more"
    yield f"admission     {report.open} open, at most {report.peak_open} so far{room}"
    for plane, content in report.queues.items():
        yield f"queue         {plane}: {content.in_flight} in flight, {content.residue} residue, {content.stray} stray"
    yield f"dead letters  {_counts(report.dead_letters)}"
    yield f"divergence    {_counts(report.divergences)}"
    yield from (plain(str(finding)) for finding in report.findings)
    yield CLEAN if not report.findings else f"{len(report.findings)} findings"


def letter_line(letter: DeadLetter) -> str:
    at = datetime.fromtimestamp(letter.failed_at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return plain(f"{letter.seq:>6}  {at}  {letter.kind:<12}  {group_of(letter) or '-':<12}  {letter.deliveries} deliveries  {letter.reason}")


def message_text(message: Message) -> str:
    """A message as indented JSON; of an array its shape and its ends."""
    body = json.dumps(message.model_dump(), default=_shown, indent=2)
    return f"{message.schema_name}/{message.schema_version} {body}"


def hexdump(data: bytes) -> Iterator[str]:
    for at in range(0, min(len(data), HEX_SHOWN), 16):
        row = data[at : at + 16]
        yield f"{at:08x}  {row.hex(' '):<47}  {''.join(chr(c) if 32 <= c < 127 else '.' for c in row)}"
    if len(data) > HEX_SHOWN:
        yield f"{HEX_SHOWN:08x}  and {len(data) - HEX_SHOWN} bytes more"


def plain(text: str) -> str:
    """Without what could drive a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _shown(value: object) -> object:
    if isinstance(value, np.ndarray):
        text = np.array2string(value.ravel(), threshold=16, edgeitems=6, max_line_width=10_000)
        return f"{value.dtype}{list(value.shape)} {text}"
    raise TypeError(type(value).__name__)
