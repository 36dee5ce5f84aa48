"""A run's own record, made and played as a person would: `driftline record`, then `driftline replay` with a learner that has seen nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from loop_processes import driftline

__all__ = ["Replayed", "replay_own_record"]

WAIT_S = 600.0


class Replayed:
    """Whether every version came out bit for bit, and if not, why."""

    def __init__(self, equal: bool, versions: int, problems: list[str]) -> None:
        self.equal, self.versions, self.problems = equal, versions, problems


async def replay_own_record(url: str, run: str, config: Path, folder: Path, *, learner_only: bool) -> Replayed:
    file = folder / f"{run}.dlr"
    async with asyncio.timeout(WAIT_S):
        async with driftline(folder, "record", run, "-o", str(file), "--url", url, "--run-file", str(config)) as process:
            recorded = await process.ended()
        if recorded.code != 0:
            return Replayed(False, 0, [f"record ended with {recorded.code}: {recorded.output[-2000:]}"])
        how = ["--learner-only"] if learner_only else []
        async with driftline(folder, "replay", str(file), "--json", *how) as process:
            played = await process.ended()
    if played.code not in (0, 1):
        return Replayed(False, 0, [f"replay ended with {played.code}: {played.output[-2000:]}"])
    found = json.loads(played.output[played.output.index("{\n") :])
    problems = [] if found["equal"] else [f"replay: {found['difference'] or found['problems']}"]
    return Replayed(bool(found["equal"]) and played.code == 0, int(found["span"]["last"]) + 1, problems)
