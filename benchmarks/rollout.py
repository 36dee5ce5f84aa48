"""The rollout engine on rollouts: what its cache saves, what drafts, versions, pairing and a split into two engines cost or bring, and that none changes a bit.

    python benchmarks/rollout.py --cases cache,peer [--device h200] [--limit SECONDS] [--quick] [--out FOLDER] [--commit ID]

Each case writes a file of its own, rollout_<case>.json, as soon as it is done; what a case could not do within its `--limit` its rows say. Cases:

    cache          the prefix cache on and off: hit rate, tokens a second by length of history
    identical      deterministic mode: tokens and log-probabilities bit for bit under hits, misses, eviction, preemption, restores
    peer           the same dense model through transformers' generate
    speculation    n-gram drafts on and off
    replay         closed-loop replay against a snapshot of the state behind every token
    exactness      total variation of both rules of speculation
    pairing        measured costs, groups in lockstep simulated
    disaggregated  two engines that do both against one for prompts and one for decoding
    updates        pauses of applied versions, 1, 10 and 100 % changed
    load           thousands of queued trajectories: memory, scheduling, a slow tool
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rollout_cache
import rollout_drafts
import rollout_halves
import rollout_service
import torch
from rollout_models import ON_GPU
from rollout_rows import Given, Row

CASES: dict[str, Callable[[Given], list[Row]]] = {
    "cache": rollout_cache.cache, "identical": rollout_cache.identical, "peer": rollout_cache.peer, "speculation": rollout_drafts.speculation,
    "replay": rollout_drafts.replay, "exactness": rollout_drafts.exactness, "pairing": rollout_halves.pairing, "disaggregated": rollout_halves.disaggregated,
    "updates": rollout_service.updates, "load": rollout_service.load,
}
LIMIT_S = {"cache": 75.0, "identical": 30.0, "peer": 35.0, "speculation": 35.0, "replay": 10.0, "exactness": 30.0, "pairing": 20.0, "disaggregated": 60.0,
           "updates": 36.0, "load": 60.0}
"""Of each case, unless told."""


def show(case: str, rows: list[Row], seconds: float) -> None:
    for entry in rows:
        cells = ["-" if entry[k] is None else f"{entry[k]:.4g}" for k in ("ours", "peer_value", "ratio", "bound")]
        print(f"{case:13} {entry['case']!s:74} {' '.join(f'{cell:>9}' for cell in cells)}  {entry['unit']}", flush=True)
        if entry["note"]:
            print(f"{'':13}   {entry['note']}", flush=True)
    print(f"{case:13} {seconds:.1f} s", flush=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--cases", default=",".join(CASES), help="names, separated by commas")
    arguments.add_argument("--device", default="h200" if ON_GPU else "cpu-2core", help="what the results are filed under")
    arguments.add_argument("--limit", type=float, help="seconds of each case")
    arguments.add_argument("--quick", action="store_true", help="the smallest forms")
    arguments.add_argument("--threads", type=int, default=0 if ON_GPU else 1)
    arguments.add_argument("--commit", nargs="?", default="", const="unnamed", help="what to name as measured; git's where there is one")
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = arguments.parse_args()
    names = given.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        sys.exit(f"--cases {unknown[0]}: one of {', '.join(CASES)}")
    if given.threads:
        torch.set_num_threads(given.threads)
    commit = given.commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    folder = given.out / given.device
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names:
        began, limit = time.perf_counter(), given.limit or LIMIT_S[name]
        try:
            rows = CASES[name](Given(given.quick, began + limit, torch.cuda.device_count() if ON_GPU else 1))
        except Exception:  # a case that fails is shown, and the others are measured all the same
            traceback.print_exc()
            failed += 1
            continue
        finally:
            if ON_GPU:
                torch.cuda.empty_cache()
        seconds = time.perf_counter() - began
        show(name, rows, seconds)
        body: dict[str, Any] = {
            "command": f"python benchmarks/rollout.py --cases {name} --device {given.device} --limit {limit:g}" + (" --quick" if given.quick else ""),
            "commit": commit, "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": given.device,
            "note": f"Weights are random unless said. {seconds:.0f} s. Load average at the end {os.getloadavg()[0]:.1f}.", "rows": rows,
        }
        (folder / f"rollout_{name}.json").write_text(json.dumps(body, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
