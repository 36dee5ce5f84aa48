"""The curves of a run as one PNG: held-out and training reward, lag, agreement of learner and rollout, entropy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from driftline.services.watch.picture import Picture

__all__ = ["draw_curves"]


def draw_curves(picture: Picture, path: Path) -> None:
    """Draws what there is; an empty run gives empty axes. matplotlib is imported here: it takes half a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    figure.suptitle(f"{picture.run}: {len(picture.steps)} steps, lag at most {picture.max_lag_seen}")
    _rewards(axes[0][0], picture)
    _lag(axes[0][1], picture)
    _agreement(axes[1][0], picture)
    _series(axes[1][1], picture, ("entropy", "clip_fraction", "grad_norm"), "entropy, clipping, gradient")
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.set_xlabel("version")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _rewards(axis: Any, picture: Picture) -> None:
    evals = picture.evaluations
    versions = [result.version for result in evals]
    axis.plot(versions, [result.reward_sampled for result in evals], "o-", label="held-out, sampled")
    axis.plot(versions, [result.reward_greedy for result in evals], "s--", label="held-out, greedy")
    _line(axis, picture, "reward_train", "training", alpha=0.6)
    axis.set_title("mean reward")
    axis.legend(loc="best")


def _lag(axis: Any, picture: Picture) -> None:
    """How many trajectories of each lag every step was made of, stacked."""
    steps = [step for step in picture.ordered if step.lag_histogram]
    width = max((len(step.lag_histogram) for step in steps), default=0)
    floor = [0.0] * len(steps)
    for lag in range(width):
        heights = [step.lag_histogram[lag] if lag < len(step.lag_histogram) else 0.0 for step in steps]
        axis.bar([step.version for step in steps], heights, bottom=floor, width=0.9, label=f"lag {lag}")
        floor = [below + height for below, height in zip(floor, heights, strict=True)]
    axis.set_title("trajectories by lag of their oldest token")
    if width:
        axis.legend(loc="best")


def _agreement(axis: Any, picture: Picture) -> None:
    drawn = [_line(axis, picture, key, label, positive=True) for key, label in (("k3_lag0", "lag 0"), ("k3_numerics", "numerics"), ("k3", "all lags"))]
    axis.set_title("k3 KL between learner and rollout")
    if any(drawn):
        axis.set_yscale("log")
        axis.legend(loc="best")


def _series(axis: Any, picture: Picture, keys: tuple[str, ...], title: str) -> None:
    drawn = [_line(axis, picture, key, key.replace("_", " ")) for key in keys]  # all of them, not the first
    if any(drawn):
        axis.legend(loc="best")
    axis.set_title(title)


def _line(axis: Any, picture: Picture, key: str, label: str, *, positive: bool = False, **style: Any) -> bool:
    points = [(step.version, value) for step in picture.ordered if (value := step.get(key)) is not None]
    if positive:
        points = [(version, value) for version, value in points if value > 0]
    if points:
        axis.plot(*zip(*points, strict=True), label=label, **style)
    return bool(points)
