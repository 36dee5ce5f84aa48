"""What a finished run is closed with: its audit, and its recording, into the run folder.

Neither can make a run fail that has ended: what goes wrong is said and logged, and the folder says `null`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import structlog

from driftline.messages.bus import Bus
from driftline.messages.errors import DriftlineError
from driftline.services.audit.read import audit
from driftline.services.audit.report import Bounds, Report
from driftline.services.audit.text import CLEAN
from driftline.services.config import Config
from driftline.services.replay.record import record
from driftline.services.starting import starting_config
from driftline.services.supervisor.folder import RunFolder
from driftline.services.wiring import blob_store

__all__ = ["close_books"]

log = structlog.get_logger("supervisor")

AUDIT_S = 120.0
RECORD_S = 600.0


async def close_books(bus: Bus, config: Config, folder: RunFolder, say: Callable[[str], None]) -> int | None:
    """Audit, and record if the run says so. Returns the number of findings, or None where the audit could not be made."""
    findings = await _audited(bus, config, folder, say)
    if config.run.record:
        await _recorded(bus, config, folder, say)
    return findings


async def _audited(bus: Bus, config: Config, folder: RunFolder, say: Callable[[str], None]) -> int | None:
    try:
        async with asyncio.timeout(AUDIT_S):
            report = await audit(bus, config.run.name, bounds=Bounds(config.run.max_lag, config.run.groups_per_step))
    except (TimeoutError, DriftlineError) as error:
        log.warning("run not audited", cause=str(error) or f"not read within {AUDIT_S:g} s")
        return None
    await asyncio.to_thread(folder.audit.write_text, json.dumps(report.document(), indent=1) + "\n")
    say(_sentence(report))
    for finding in report.findings:
        log.error("audit finding", finding=str(finding))
    return len(report.findings)


def _sentence(report: Report) -> str:
    counted = f"audit: {report.admitted} groups, {report.trajectories.total} trajectories: "
    return counted + (CLEAN if not report.findings else f"{len(report.findings)} findings, the first: {report.findings[0]}")


async def _recorded(bus: Bus, config: Config, folder: RunFolder, say: Callable[[str], None]) -> None:
    try:
        model = starting_config(config)
        async with asyncio.timeout(RECORD_S):
            say(str(await record(bus, blob_store(bus, config), config, model, folder.recording)))
    except (TimeoutError, OSError, DriftlineError) as error:
        cause = str(error) or f"not written within {RECORD_S:g} s"
        say(f"not recorded: {cause}")
        log.warning("run not recorded", cause=cause)
