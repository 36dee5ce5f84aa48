"""How good the shipped base policy is on held-out tasks of the families it was pretrained on, and of the demo.

    python benchmarks/base_policy.py --device cpu-2core
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from driftline.environments.source import load_scorer, load_source
from driftline.messages.types import Group, Sampling
from driftline.models.checkpoint import load_checkpoint
from driftline.models.model import K3ForCausalLM
from driftline.services.rollout.engine import Engine

ROOT = Path(__file__).resolve().parent.parent
TASKS, SAMPLES = 256, 2


def measure(model: K3ForCausalLM, family: str, params: dict[str, Any], greedy: bool) -> tuple[float, float, int]:
    """(mean reward, fraction exact, tasks) on held-out tasks."""
    engine, scorer = Engine(model, version=0, max_batch=128, greedy_decoding=greedy), load_scorer(["reasoning_gym"])
    tasks = load_source("reasoning_gym", family, params).heldout(TASKS)
    for i, task in enumerate(tasks):
        engine.submit(Group(run="base", group=f"g{i}", index=i, task=task, members=1 if greedy else SAMPLES, sampling=Sampling(max_tokens=16), seed=7))
    rewards, exact = [], []
    while not engine.idle:
        for done in engine.step():
            score = scorer.score(done.task, done.text)
            rewards.append(score.reward)
            exact.append(score.components.get("exact", 0.0))
    return sum(rewards) / len(rewards), sum(exact) / len(exact), len(tasks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu-2core")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_checkpoint("base")
    parts = [(p["family"], p["params"]) for p in tomllib.loads((ROOT / "examples/pretrain.toml").read_text())["mixture"]]
    demo = tomllib.loads((ROOT / "examples/demo.toml").read_text())["tasks"]
    rows = []
    for family, params in [*parts, (demo["family"], demo["params"])]:
        sampled, exact, count = measure(model, family, params, greedy=False)
        greedy, exact_greedy, _ = measure(model, family, params, greedy=True)
        words = ", ".join(f"{k} = {v}" for k, v in params.items())
        rows.append({"case": f"{family} ({words})", "ours": sampled, "unit": "mean reward at T = 1", "peer": "greedy", "peer_value": greedy,
                     "ratio": None, "bound": 1.0, "note": f"{count} held-out tasks; exact {exact:.3f} sampled, {exact_greedy:.3f} greedy"})
        print(f"{rows[-1]['case']:90} {sampled:.3f} {greedy:.3f}", flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    out = ROOT / "benchmarks" / "results" / options.device / "base_policy.json"
    out.write_text(json.dumps({"command": "python benchmarks/base_policy.py " + " ".join(sys.argv[1:]), "commit": commit,
                               "date": datetime.now(UTC).date().isoformat(), "device": options.device, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
