"""The summary of a run: stable keys, one meaning each, written as summary.json.

`heldout_*` are mean rewards on the held-out tasks at the training temperature, first and last measured; `train_reward_*` those of
the first and last step; `k3_*` token-averaged KL between learner and rollout, over the steps that had such tokens; `versions`
counts published versions, the starting one included; `policy_bytes_*` are totals published; `audit_findings` counts the ids that
the audit at the end found missing, doubled or unfinished; `k3_numerics_mean` and `k3_staleness_mean` are the two parts of `k3_mean`, over the steps that have
them; `divergence_alarms` counts the alarms that the divergence watch raised, `divergence_halt` is the signal that ended the run or null. A figure that was never
measured is null, never zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from driftline.messages.types import DivergenceLevel, Outcome
from driftline.services.config import Config
from driftline.services.watch.picture import Picture, Step

__all__ = ["KEYS", "summarise", "write_summary"]

KEYS = (
    "run", "seed", "max_lag", "max_lag_seen", "versions", "steps", "wall_s", "heldout_first", "heldout_last",
    "train_reward_first", "train_reward_last", "k3_lag0_mean", "k3_mean", "outcomes", "dead_letters", "restarts",
    "policy_bytes_full", "policy_bytes_delta", "tokens_sampled", "tokens_trained", "audit_findings",
    "k3_numerics_mean", "k3_staleness_mean", "divergence_alarms", "divergence_halt",
)


def summarise(picture: Picture, config: Config, wall_s: float, *, audit_findings: int | None = None) -> dict[str, Any]:
    steps, evals = picture.ordered, picture.evaluations
    rewards = [reward for step in steps if (reward := step.get("reward_train")) is not None]
    values: dict[str, Any] = {
        "run": config.run.name,
        "seed": config.run.seed,
        "max_lag": config.run.max_lag,
        "max_lag_seen": picture.max_lag_seen,
        "versions": picture.version + 1,
        "steps": len(steps),
        "wall_s": round(wall_s, 3),
        "heldout_first": evals[0].reward_sampled if evals else None,
        "heldout_last": evals[-1].reward_sampled if evals else None,
        "train_reward_first": rewards[0] if rewards else None,
        "train_reward_last": rewards[-1] if rewards else None,
        "k3_lag0_mean": _mean(step.get("k3_lag0") for step in steps),
        "k3_mean": _mean(step.get("k3") for step in steps),
        "outcomes": {outcome.value: picture.outcomes[outcome] for outcome in Outcome},
        "dead_letters": picture.dead_letters,
        "restarts": sum(picture.restarts.values()),
        "policy_bytes_full": sum(full for full, _ in picture.policy_bytes.values()),
        "policy_bytes_delta": sum(delta for _, delta in picture.policy_bytes.values()),
        "tokens_sampled": picture.tokens_sampled,
        "tokens_trained": int(_sum(steps, "tokens_trained")),
        "audit_findings": audit_findings,
        "k3_numerics_mean": _mean(step.get("k3_numerics") for step in steps),
        "k3_staleness_mean": _mean(step.get("k3_staleness") for step in steps),
        "divergence_alarms": picture.alarms,
        "divergence_halt": next((e.signal.value for e in picture.divergences.values() if e.level is DivergenceLevel.HALT), None),
    }
    return {key: values[key] for key in KEYS}


def write_summary(summary: dict[str, Any], path: Path) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    partial.replace(path)


def _sum(steps: Iterable[Step], key: str) -> float:
    return sum(step.get(key) or 0.0 for step in steps)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
