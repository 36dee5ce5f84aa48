"""The report of a run: what happened, for a person, as Markdown."""

from __future__ import annotations

from typing import Any

from driftline.services.config import Config
from driftline.services.watch.picture import Picture
from driftline.services.watch.render import sparkline

__all__ = ["report"]


def report(picture: Picture, config: Config, summary: dict[str, Any], ending: str) -> str:
    lines = [
        f"# {config.run.name}", "", f"{ending} Seed {config.run.seed}, {config.learner.objective.value} on "
        f"{config.tasks.family or config.tasks.source}, {summary['wall_s']:.0f} s.", "",
        *_evaluations(picture), "",
        "| measure | value |", "|---|---|",
        *(f"| {name} | {_text(summary[key])} |" for name, key in _ROWS), "",
        "## How groups ended", "", "| outcome | groups |", "|---|---|",
        *(f"| {outcome} | {count} |" for outcome, count in summary["outcomes"].items()), "",
    ]
    if picture.drops:
        lines += ["Most frequent reasons of those not trained on:", ""]
        lines += [f"* {count} × {reason}" for reason, count in picture.drops.most_common(8)] + [""]
    if picture.restarts:
        lines += ["Restarted services: " + ", ".join(f"{k} ({n})" for k, n in sorted(picture.restarts.items())), ""]
    rewards = [value for step in picture.ordered if (value := step.get("reward_train")) is not None]
    lines += [f"Training reward: `{sparkline(rewards, 60)}`", "", "![curves](curves.png)", ""]
    return "\n".join(lines)


_ROWS = (
    ("training reward, first step", "train_reward_first"), ("training reward, last step", "train_reward_last"),
    ("steps", "steps"), ("policy versions", "versions"), ("bound on the lag", "max_lag"), ("largest lag seen", "max_lag_seen"),
    ("k3 at lag 0, mean", "k3_lag0_mean"), ("k3, mean", "k3_mean"), ("k3, numerics, mean", "k3_numerics_mean"),
    ("k3, staleness, mean", "k3_staleness_mean"), ("divergence alarms", "divergence_alarms"), ("tokens sampled", "tokens_sampled"),
    ("tokens trained on", "tokens_trained"), ("bytes published as fulls", "policy_bytes_full"),
    ("bytes published as deltas", "policy_bytes_delta"), ("dead letters", "dead_letters"), ("restarts", "restarts"),
)


def _evaluations(picture: Picture) -> list[str]:
    rows = [f"| {e.version} | {e.reward_sampled:.4f} | {e.reward_greedy:.4f} | {e.exact_sampled:.4f} | {e.exact_greedy:.4f} |"
            for e in picture.evaluations]
    if not rows:
        return ["No evaluation finished."]
    last = picture.evaluations[-1]
    return [f"Held-out: {last.tasks} tasks, {last.samples} samples each at the training temperature.", "",
            "| version | reward, sampled | reward, greedy | exact, sampled | exact, greedy |", "|---|---|---|---|---|", *rows]


def _text(value: object) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:.3e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"
    return str(value)
