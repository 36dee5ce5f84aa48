"""`make chaos`: the long form, seed after seed, with a record of each.

    python tests/chaos/soak.py [--seeds 20] [--first 1] [--steps 30] [--out runs/chaos]

Writes <out>/summary.json after every seed and prints a line for each. The folder of a seed that kept every promise is removed; that of one that
did not is kept, with the faults in order (faults.jsonl), every service's log and the broker's store, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "chaos")]

import structlog  # noqa: E402
from chaos_schedule import KINDS, schedule  # noqa: E402
from chaos_stage import Result, perform  # noqa: E402

from driftline.services.runtime import configure_logging  # noqa: E402

KILLS = 5  # of each kind, at least; a few more are scheduled
COLUMNS = ("seed", "versions", "kills", "broker", "pauses", "dupes", "ids", "lost", "doubled", "replay", "wall_s", "")
FORMAT = "{:>5} {:>8} {:>20} {:>6} {:>6} {:>5} {:>6} {:>4} {:>7} {:>6} {:>7}  {}"


def line(result: Result) -> str:
    kills = "/".join(str(result.kills[kind]) for kind in KINDS)
    replay = "-" if result.replay_equal is None else ("equal" if result.replay_equal else "NOT")
    return FORMAT.format(
        result.seed, result.versions, kills, f"{result.broker_stops}+{result.broker_kills}", f"{result.pauses}+{result.cut_offs}",
        sum(result.duplicates.values()), result.ids, result.lost, result.doubled, replay, result.wall_s, "" if not result.problems else "FAILED",
    )


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()


def write_summary(path: Path, results: Sequence[tuple[str, Result]], command: str) -> None:
    """`results`: with the commit that each seed ran on."""
    records = [result for _, result in results]
    total: dict[str, Any] = {
        "seeds": len(records), "failed": [r.seed for r in records if r.problems], "kills": sum(sum(r.kills.values()) for r in records),
        "broker_restarts": sum(r.broker_stops + r.broker_kills for r in records), "pauses": sum(r.pauses + r.cut_offs for r in records),
        "duplicates": sum(sum(r.duplicates.values()) for r in records), "ids": sum(r.ids for r in records),
        "lost": sum(r.lost for r in records), "doubled": sum(r.doubled for r in records), "versions": sum(r.versions for r in records),
        "replayed_equal": sum(bool(r.replay_equal) for r in records),
    }
    body = {"command": command, "total": total, "seeds": [{**r.json(), "commit": made_by} for made_by, r in results]}
    path.write_text(json.dumps(body, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    given = parser.parse_args(arguments)
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results: list[tuple[str, Result]] = []
    print(f"kills: {'/'.join(KINDS)}; broker: stopped+killed; pauses: stopped+cut off", flush=True)
    print(FORMAT.format(*COLUMNS), flush=True)
    for seed in range(given.first, given.first + given.seeds):
        folder = out / f"seed-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        made_by = commit()
        with (folder / "harness.log").open("w") as stream:
            configure_logging("chaos", str(seed), stream=stream)
            result = asyncio.run(perform(seed, given.steps, schedule(seed, given.steps), folder, kills=KILLS))
            structlog.reset_defaults()
        results.append((made_by, result))
        write_summary(out / "summary.json", results, f"make chaos SEEDS={given.seeds} STEPS={given.steps}")
        print(line(result), flush=True)
        if result.problems:
            for problem in result.problems[:12]:
                print(f"      {problem}", flush=True)
            print(f"      kept: {folder}; again: make chaos SEEDS=1 FIRST={seed} STEPS={given.steps}", flush=True)
        else:
            shutil.rmtree(folder)
    return 1 if any(result.problems for _, result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
