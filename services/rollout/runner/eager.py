"""The runner that launches every operator itself: on any device, for any shape, with or without adapters. What graphs are compared with, and fall back to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from driftline.models.causal_lm import CausalLM
from driftline.models.packed import Packed
from driftline.models.paged import Pool, decode, prefill
from driftline.services.rollout.randomness import device_uniforms
from driftline.services.rollout.runner.batch import DecodeBatch, PrefillBatch, Sampled
from driftline.services.rollout.runner.staging import Fetch, Inputs, Shape, Staged, sent
from driftline.services.rollout.runner.step import Computed, Greedy, Outputs, Rule, Taps, drawn, step

__all__ = ["Adapters", "EagerRunner", "Pending", "Runner"]


class Adapters(Protocol):
    """A bank of adapters, as far as a step needs it."""

    def rows(self, index: Sequence[int], packed: Packed | None = None) -> AbstractContextManager[None]: ...


class Pending(NamedTuple):
    """A step that was launched."""

    fetch: Fetch
    hidden: torch.Tensor
    judged: bool = False
    taps: torch.Tensor | None = None

    def result(self) -> Sampled:
        """Wait for it, once."""
        tokens, logprobs, routes, *accepted = self.fetch.arrays()
        return Sampled(tokens, logprobs, routes, self.hidden, accepted[0] if self.judged else None, self.taps)


class Runner(Protocol):
    """What the engine asks of whoever computes its steps. Several steps may be launched before the first is waited for; they run in that order."""

    def begin_prefill(self, batch: PrefillBatch) -> Pending: ...

    def begin_decode(self, batch: DecodeBatch) -> Pending: ...

    def prefill(self, batch: PrefillBatch) -> Sampled: ...

    def decode(self, batch: DecodeBatch) -> Sampled: ...

    def weights_changed(self) -> None:
        """The weights were replaced: what was prepared for others must be given up."""


class EagerRunner:
    """greedy: every row takes its likeliest token. rule: judges the drafts of a window (None: each position is drawn as plain decoding draws it). bank: the model's
    adapters. taps: hands out what a drafter wants of a forward's hidden states."""

    def __init__(
        self, model: CausalLM, pool: Pool, *, greedy: bool = False, rule: Rule | None = None, bank: Adapters | None = None, taps: Taps | None = None,
    ) -> None:
        self.model, self.pool, self.greedy, self.rule, self.bank, self.taps = model, pool, greedy, rule, bank, taps
        self.device: torch.device = model.lm_head.weight.device
        self._staged: Staged | None = None  # of the last shape: most steps have it again

    @torch.inference_mode()
    def begin_prefill(self, batch: PrefillBatch) -> Pending:
        """Launch a prefill."""
        packed = Packed.of(tuple(batch.counts), self.device)
        tokens, slots, tables, context = (sent(x, self.device) for x in (batch.tokens, batch.slots, batch.tables, batch.context))
        with self._adapters(batch.adapters, batch.rows, packed):
            out = prefill(self.model, self.pool, tokens, packed, slots, tables, context, contexts=batch.context.tolist())
        tapped = None if self.taps is None else self.taps().flatten(0, -2)  # of a packed row, [1, N, ...] or [N, ...]
        hidden = out.hidden.index_select(0, packed.bounds[1:] - 1)
        if batch.sample and batch.keys.size:
            first, logprobs = self._drawn(batch, hidden)
        else:
            first, logprobs = tokens.new_zeros(0), hidden.new_zeros(0, dtype=torch.float32)
        return Pending(Fetch([first[:, None], logprobs[:, None], out.routes.to(torch.int16)]), hidden[:, None], taps=tapped)

    def _drawn(self, batch: PrefillBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        adapters = batch.adapters
        if batch.behind is not None:
            hidden = hidden.index_select(0, sent(batch.behind, self.device))
            adapters = None if adapters is None else [adapters[i] for i in batch.behind]
        keys, positions, temperatures = (sent(x, self.device) for x in (batch.keys, batch.positions, batch.temperatures))
        with self._adapters(adapters, hidden.shape[0], None):
            return drawn(self.model, hidden, temperatures, device_uniforms(keys, positions), self._greedy(batch))

    @torch.inference_mode()
    def begin_decode(self, batch: DecodeBatch) -> Pending:
        """Launch a step of decoding, or of scoring drafts."""
        shape = shape_of(batch)
        if self._staged is None or self._staged.shape != shape:
            self._staged = Staged(shape, self.device)
        staged = self._staged
        staged.load(batch)
        with self._adapters(batch.adapters, batch.rows, None):
            longest = int(batch.lengths.max()) + batch.window
            out = step(self.model, partial(self._forward, longest=longest), staged.inputs, self._greedy(batch), self.rule, self.taps)
        return pending(out, batch.rows)

    def prefill(self, batch: PrefillBatch) -> Sampled:
        """Launch a prefill and wait for it."""
        return self.begin_prefill(batch).result()

    def decode(self, batch: DecodeBatch) -> Sampled:
        """Launch a step and wait for it."""
        return self.begin_decode(batch).result()

    def weights_changed(self) -> None:
        """Nothing is prepared for them."""

    def _forward(self, inputs: Inputs, longest: int | None = None) -> Computed:
        return decode(self.model, self.pool, inputs.tokens, inputs.slots, inputs.tables, inputs.lengths, inputs.accepted, longest=longest)

    def _greedy(self, batch: DecodeBatch | PrefillBatch) -> Greedy:
        likeliest = batch.temperatures <= 0
        every = self.greedy or bool(likeliest.all())
        return Greedy(some=bool(likeliest.any()) and not every, every=every)

    def _adapters(self, adapters: Sequence[int] | None, rows: int, packed: Packed | None) -> AbstractContextManager[Any]:
        if self.bank is None:
            if adapters is not None and max(adapters) >= 0:
                raise ValueError(f"a row has the adapter {max(adapters)} and the runner has no bank; give it the model's")
            return nullcontext()
        return self.bank.rows([-1] * rows if adapters is None else adapters, packed)


def shape_of(batch: DecodeBatch) -> Shape:
    """The batch's own, without padding."""
    shape = Shape(batch.rows, batch.window, batch.pages, batch.accepted is not None)
    return shape if batch.probs is None else shape._replace(vocabulary=int(batch.probs.shape[2]), probs=batch.probs.dtype)


def pending(out: Outputs, rows: int) -> Pending:
    """The first `rows` of a step's results, on their way."""
    wanted = [t[:rows] for t in (out.tokens, out.logprobs, out.routes, out.accepted) if t is not None]
    return Pending(Fetch(wanted), out.hidden[:rows], out.accepted is not None, None if out.taps is None else out.taps[:rows])
