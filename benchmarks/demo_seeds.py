"""The demo over seeds, asynchronous (`max_lag = 2`) beside synchronous (`max_lag = 0`): wall time, tokens trained, final held-out reward.

    python benchmarks/demo_seeds.py --seeds 0 1 2 --device cpu-2core

Runs are whole `driftline run`s, one after the other, in turn (async, sync, async, ...), so that a drifting machine meets both. Each row's `ours` is the asynchronous
run and `peer` the synchronous one of the same seed, in the same session.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run(seed: int, max_lag: int, extra: list[str]) -> dict[str, Any]:
    name = f"demo-s{seed}-lag{max_lag}"
    settings = [f"run.name={name}", f"run.seed={seed}", f"run.max_lag={max_lag}", "run.time_limit_s=1200", *extra]
    command = [sys.executable, "-m", "driftline", "run", "examples/demo.toml", "--plain"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    folder = Path(done.stdout.strip().splitlines()[-1])
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    learner = [row for row in curve if row["service"] == "learner"]
    evals = [row for row in curve if row["service"] == "evaluator" and "reward_greedy" in row]
    summary["step_span_s"] = learner[-1]["at"] - learner[0]["at"]
    summary["bitwise_equal_mean"] = sum(r.get("bitwise_equal", 0.0) for r in learner) / len(learner)
    summary["greedy_first"], summary["greedy_last"] = evals[0]["reward_greedy"], evals[-1]["reward_greedy"]
    summary["load"] = os.getloadavg()[2]
    return summary


def rows_of(seed: int, ours: dict[str, Any], peer: dict[str, Any]) -> list[dict[str, Any]]:
    def row(case: str, key: str, unit: str, note: str = "") -> dict[str, Any]:
        a, b = ours[key], peer[key]
        return {"case": f"seed {seed}: {case}", "ours": a, "unit": unit, "peer": "same run, max_lag = 0", "peer_value": b,
                "ratio": a / b if a is not None and b else None, "bound": None, "note": note}

    load = f"15-minute load {ours['load']:.1f} and {peer['load']:.1f} on 2 cores"
    return [
        row("held-out reward, first", "heldout_first", "mean reward at T = 1"),
        row("held-out reward, last", "heldout_last", "mean reward at T = 1"),
        row("held-out reward greedy, first", "greedy_first", "mean reward"),
        row("held-out reward greedy, last", "greedy_last", "mean reward"),
        row("wall time of the run", "wall_s", "s", load),
        row("first to last version", "step_span_s", "s", load),
        row("tokens trained", "tokens_trained", "tokens"),
        row("tokens sampled", "tokens_sampled", "tokens"),
        row("largest lag seen", "max_lag_seen", "versions"),
        row("versions", "versions", "versions"),
        row("k3 at the same weights, mean", "k3_lag0_mean", "nats"),
        row("bitwise equal log-probabilities", "bitwise_equal_mean", "fraction"),
        row("dead letters", "dead_letters", "messages", json.dumps({"ours": ours["outcomes"], "peer": peer["outcomes"]})),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cpu-2core")
    parser.add_argument("--set", action="append", default=[], dest="extra")
    options = parser.parse_args()
    out = ROOT / "benchmarks" / "results" / options.device / "demo_seeds.json"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        ours, peer = run(seed, 2, options.extra), run(seed, 0, options.extra)
        rows += rows_of(seed, ours, peer)
        for row in rows[-13:]:
            print(f"{row['case']:45} {row['ours']!s:>22} {row['peer_value']!s:>22}  {row['unit']}", flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({
            "command": "python benchmarks/demo_seeds.py " + " ".join(sys.argv[1:]), "commit": commit, "date": datetime.now(UTC).date().isoformat(),
            "device": options.device, "rows": rows,
        }, indent=2) + "\n")


if __name__ == "__main__":
    main()
