"""A picture as text: the live view, and one line per step where there is no terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from driftline.messages.types import EvalResult
from driftline.services.watch.picture import Picture, Step

__all__ = ["eval_line", "render", "sparkline", "step_line"]

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The newest `width` values as bars between their own minimum and maximum."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int((value - low) / span * 7.999))] for value in shown)


def step_line(step: Step, picture: Picture) -> str:
    """One step on one line, for logs and pipes."""
    parts = [
        f"step {step.version:>4}/{picture.steps_wanted or '?'}",
        f"reward {_number(step.get('reward_train'))}",
        f"lag {_number(step.get('lag_mean'), 2)} max {_number(step.get('lag_max'), 0)}",
        f"k3@0 {_number(step.get('k3_lag0'), exponent=True)}",
        *([f"k3 {_number(step.get('k3'), exponent=True)} ALARM"] if step.get("alarms") else []),
        f"entropy {_number(step.get('entropy'))}",
        f"clip {_number(step.get('clip_fraction'))}",
        f"{_number(step.get('step_s'), 2)} s",
        f"{picture.tokens_per_s:.0f} tok/s",
    ]
    return "  ".join(parts)


def eval_line(result: EvalResult) -> str:
    return (f"eval  v{result.version}  held-out reward {result.reward_sampled:.4f} sampled, "
            f"{result.reward_greedy:.4f} greedy  ({result.tasks} tasks, {result.samples} samples)")


def render(picture: Picture, *, now: float, started_at: float) -> RenderableType:
    """The whole view; everything in it comes from the picture and the clock."""
    done = max(picture.version, 0)
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(picture.run, style="bold"), f"step {done}/{picture.steps_wanted or '?'}",
        ProgressBar(total=max(picture.steps_wanted, 1), completed=done, width=30),
        f"elapsed {_clock(now - started_at)}", f"left {_clock(picture.eta_s(now))}",
    )
    left = Panel(_rewards(picture), title="reward", title_align="left")
    middle = Panel(_loop(picture), title="loop", title_align="left")
    right = Panel(_health(picture), title="outcomes", title_align="left")
    return Group(head, Columns([left, middle, right]))


def _rewards(picture: Picture) -> Table:
    steps, evals = picture.ordered, picture.evaluations
    train = [value for step in steps if (value := step.get("reward_train")) is not None]
    sampled, greedy = [e.reward_sampled for e in evals], [e.reward_greedy for e in evals]
    table = Table.grid(padding=(0, 1))
    for name, values in (("train", train), ("held-out sampled", sampled), ("held-out greedy", greedy)):
        first_last = f"{values[0]:.3f} → {values[-1]:.3f}" if values else "not yet"
        table.add_row(name, first_last, Text(sparkline(values, 24), style="cyan"))
    return table


def _loop(picture: Picture) -> Table:
    last = picture.ordered[-1] if picture.steps else Step(-1, 0.0, {})
    table = Table.grid(padding=(0, 1))
    table.add_row("version", str(picture.version) if picture.version >= 0 else "none yet")
    table.add_row("tokens/s", f"{picture.tokens_per_s:.0f} from {picture.engines} engines")
    table.add_row("lag", f"{_histogram(last.lag_histogram)}  max seen {picture.max_lag_seen}")
    table.add_row("k3 at lag 0", f"{_number(last.get('k3_lag0'), exponent=True)}  "
                  f"bitwise equal {_number(last.get('bitwise_equal'), 4)}")
    table.add_row("k3 split", f"numerics {_number(last.get('k3_numerics'), exponent=True)}  staleness {_number(last.get('k3_staleness'), exponent=True)}")
    table.add_row("apart", f"extreme {_number(last.get('extreme'), 4)}  flipped routes {_number(last.get('flips'), 4)}")
    table.add_row("entropy", f"{_number(last.get('entropy'))}  clip {_number(last.get('clip_fraction'))}")
    table.add_row("step / wait", f"{_number(last.get('step_s'), 2)} s / {_number(last.get('wait_s'), 2)} s")
    queues = "  ".join(f"{name} {depth.pending}+{depth.ack_pending}" for name, depth in picture.depths.items())
    table.add_row("queues", queues or "not read yet")
    return table


def _health(picture: Picture) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_row("admitted", f"{picture.admitted}, in flight {len(picture.open)}")
    for outcome, count in sorted(picture.outcomes.items()):
        table.add_row(outcome.value, str(count))
    for reason, count in picture.drops.most_common(4):
        if ": " in reason:
            table.add_row("", Text(f"{count} × {reason[:44]}", style="dim"))
    bad = "bold red" if picture.dead_letters else ""
    table.add_row("dead letters", Text(str(picture.dead_letters), style=bad))
    restarted = ", ".join(f"{name} {count}" for name, count in sorted(picture.restarts.items())) or "none"
    table.add_row("restarts", restarted)
    raised = ", ".join(picture.alarmed)
    table.add_row("divergence", Text(f"{raised or 'no alarm'}, {picture.alarms} alarms so far", style="bold red" if raised else ""))
    return table


def _histogram(counts: Sequence[float]) -> str:
    return " ".join(f"{lag}:{count:.0f}" for lag, count in enumerate(counts)) or "none yet"


def _number(value: float | None, digits: int = 3, *, exponent: bool = False) -> str:
    if value is None:
        return "n/a"
    return f"{value:.1e}" if exponent else f"{value:.{digits}f}"


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "--:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"
