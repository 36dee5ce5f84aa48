"""A small engine: rows on a pool, a runner, a speculator. Nothing is shared, evicted or scheduled, so what it samples is what speculation makes of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from driftline.models.causal_lm import CausalLM
from driftline.models.drafter import Taps
from driftline.models.paged import PAGE, Pool
from driftline.services.rollout.runner import DecodeBatch, PrefillBatch, Runner, Sampled, runner_for
from driftline.services.rollout.speculation import Row, Seen, Speculator, agreeing
from driftline.services.rollout.speculation.judging import judge
from driftline.services.rollout_config import SpeculationRule


@dataclass
class Running:
    id: int
    key: int
    prompt: int
    history: array[int]
    table: list[int]
    accepted: int = 0
    logprobs: list[float] = field(default_factory=list)

    @property
    def sampled(self) -> list[int]:
        return list(self.history[self.prompt :])


@torch.inference_mode()
def sample(
    model: CausalLM, prompts: Sequence[Sequence[int]], speculator: Speculator | None, *, tokens: int, temperature: float = 1.0, family: str = "f", graphs: bool = False,
) -> list[Running]:
    """Every prompt continued by `tokens` tokens; None: plain decoding."""
    window = speculator.window if speculator else 1
    each = -(-(max(map(len, prompts)) + tokens) // PAGE)
    pool = Pool.make(model, pages=1 + each * len(prompts), slots=len(prompts), window=window)
    taps = Taps(model, speculator.taps) if speculator and speculator.taps else None
    rejection = speculator is not None and speculator.rule is SpeculationRule.REJECTION
    runner = runner_for(model, pool, len(prompts), cuda_graphs=graphs, rule=judge if rejection else None, taps=taps.take if taps else None)
    rows = [Running(i, 977 * i + 5, len(p), array("i", p), list(range(1 + each * i, 1 + each * (i + 1)))) for i, p in enumerate(prompts)]
    try:
        _prefill(runner, rows, temperature, speculator, tokens, family)
        running = list(rows)
        while running := [row for row in running if len(row.sampled) < tokens]:
            _step(runner, running, temperature, speculator, tokens, family)
    finally:
        if taps:
            taps.close()
    return rows


def _columns(rows: Sequence[Running], temperature: float) -> dict[str, np.ndarray]:
    return {
        "slots": np.array([row.id for row in rows], dtype=np.int32), "tables": np.array([row.table for row in rows], dtype=np.int32),
        "keys": np.array([row.key for row in rows], dtype=np.uint64), "positions": np.array([len(row.sampled) for row in rows], dtype=np.int64),
        "temperatures": np.full(len(rows), temperature, dtype=np.float32),
    }


def _seen(rows: Sequence[Running], temperature: float, tokens: int, family: str) -> list[Row]:
    return [Row(row.id, row.history, tokens - len(row.sampled), family, row.key, len(row.sampled), temperature) for row in rows]


def _prefill(runner: Runner, rows: list[Running], temperature: float, speculator: Speculator | None, tokens: int, family: str) -> None:
    flat = np.concatenate([np.array(row.history, dtype=np.int64) for row in rows])
    out = runner.prefill(PrefillBatch(flat, [row.prompt for row in rows], context=np.zeros(len(rows), dtype=np.int32), **_columns(rows, temperature)))
    for i, row in enumerate(rows):
        row.history.append(int(out.tokens[i, 0]))
        row.logprobs.append(float(out.logprobs[i, 0]))
    if speculator and out.taps is not None:
        speculator.saw(_seen(rows, temperature, tokens, family), Seen(out.taps.flatten(0, -2), [row.prompt for row in rows]))


def _step(runner: Runner, rows: list[Running], temperature: float, speculator: Speculator | None, tokens: int, family: str) -> None:
    asked = _seen(rows, temperature, tokens, family)
    drafts = speculator.begin_step(asked) if speculator else None
    last = np.array([[row.history[-1]] for row in rows], dtype=np.int64)
    batch = DecodeBatch(
        last if drafts is None else np.concatenate([last, drafts.tokens], 1), lengths=np.array([len(row.history) - 1 for row in rows], dtype=np.int32),
        accepted=np.array([row.accepted for row in rows], dtype=np.int32) if speculator else None,
        counts=None if drafts is None else drafts.counts, probs=None if drafts is None else drafts.probs, **_columns(rows, temperature),
    )
    out = runner.decode(batch)
    stood = np.zeros(len(rows), dtype=np.int32)
    if drafts is not None:
        stood = agreeing(drafts.tokens, drafts.counts, out.tokens) if out.accepted is None else out.accepted
    for i, row in enumerate(rows):
        row.accepted = int(stood[i]) + 1
        row.history.extend(out.tokens[i, : row.accepted].tolist())
        row.logprobs += out.logprobs[i, : row.accepted].tolist()
    if speculator:
        speculator.finish_step(asked, drafts, None if drafts is None else stood, 0.0)
        _show(speculator, rows, out, temperature, tokens, family)


def _show(speculator: Speculator, rows: list[Running], out: Sampled, temperature: float, tokens: int, family: str) -> None:
    if out.taps is not None:
        parts = [out.taps[i, : row.accepted] for i, row in enumerate(rows)]
        speculator.saw(_seen(rows, temperature, tokens, family), Seen(torch.cat(parts), [row.accepted for row in rows]))
