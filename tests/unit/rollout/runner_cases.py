"""A model of one state a row, and a capture that remembers, so that what a runner does around a graph can be seen on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from driftline.services.rollout.runner.batch import DecodeBatch
from driftline.services.rollout.runner.capture import Captured
from driftline.services.rollout.runner.eager import EagerRunner
from driftline.services.rollout.runner.graphs import GraphRunner
from driftline.services.rollout.runner.staging import Inputs
from driftline.services.rollout.runner.step import Outputs
from driftline.services.rollout.runner.watch import Watch

VOCABULARY, WIDTH, SLOTS = 50, 16, 12


class Model(nn.Module):
    """hidden to logits; `embed` feeds the state. In fp64, so that a row's log-probability in fp32 does not show how many rows a BLAS was given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=torch.float64), requires_grad=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64).requires_grad_(False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(hidden)
        return out

    def logprobs(self, hidden: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logp = torch.log_softmax(self.logits(hidden) / temperature[:, None], -1).gather(-1, tokens[:, None]).squeeze(-1)
        return logp, logp


class Computed(NamedTuple):
    hidden: torch.Tensor
    routes: torch.Tensor


class States:
    """What a step leaves behind: a slot's state, which every token moves; the last one is for padding."""

    def __init__(self) -> None:
        self.held = torch.zeros(SLOTS + 1, WIDTH, dtype=torch.float64)
        self.reads_host = False

    def __call__(self, model: Model, inputs: Inputs) -> Computed:
        slots = torch.where(inputs.slots < 0, SLOTS, inputs.slots).long()
        state, hidden = self.held[slots], []
        for column in inputs.tokens.T:
            state = 0.5 * state + model.embed[column] * (1 + inputs.lengths[:, None] / 100 + inputs.tables.sum(1, keepdim=True) / 1000)
            hidden.append(state)
        if self.reads_host:
            assert float(state.sum()) == float(state.sum())
        self.held[slots] = state
        routes = torch.stack([inputs.tokens % 7, inputs.tokens % 5], -1)[:, :, None]
        return Computed(torch.stack(hidden, 1), routes)


class Eager(EagerRunner):
    def __init__(self, model: Model, states: States, **settings: Any) -> None:
        super().__init__(model, None, **settings)  # type: ignore[arg-type]
        self.states = states

    def _forward(self, inputs: Inputs, longest: int | None = None) -> Computed:
        return self.states(self.model, inputs)  # type: ignore[arg-type]


class Graphs(GraphRunner):
    def __init__(self, model: Model, states: States, capture: Remembers, max_batch: int = 8, **settings: Any) -> None:
        super().__init__(model, None, max_batch, capture=capture, **settings)  # type: ignore[arg-type]
        self.states = states

    def _forward(self, inputs: Inputs, longest: int | None = None) -> Computed:
        return self.states(self.model, inputs)  # type: ignore[arg-type]


class Remembers:
    """In a graph's place: the memory of the results stays where it is, and a replay computes into it from what the inputs' memory holds by then. watched: reads of
    values are refused, as some of the operators of a CPU make them."""

    def __init__(self, fails: Exception | None = None, *, watched: bool = True) -> None:
        self.made, self.fails, self.watched = 0, fails, watched

    def __call__(self, compute: Callable[[], Outputs]) -> Captured:
        self.made += 1
        with Watch() if self.watched else nullcontext():
            outputs = compute()
        if self.fails is not None:
            raise self.fails

        def replay() -> None:
            with torch.inference_mode():
                for held, new in zip(outputs, compute(), strict=True):
                    if held is not None and new is not None:
                        held.copy_(new)

        context = copy_context()  # a graph replays what was chosen when it was made
        return Captured(lambda: context.run(replay), outputs, ())


class Bank:
    """Adapters that write down whose rows they were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    @contextmanager
    def rows(self, index: Sequence[int], packed: object = None) -> Iterator[None]:
        self.asked.append(tuple(index))
        yield


def batch(slots: Sequence[int], *, step: int = 0, window: int = 1, temperature: float | Sequence[float] = 1.0, pages: int = 2, **changes: Any) -> DecodeBatch:
    """Rows whose tokens, places and draws follow from their slots and the step."""
    at = np.array(slots)
    temperatures = np.broadcast_to(np.array(temperature, dtype=np.float32), at.shape).copy()
    whole: dict[str, Any] = {
        "tokens": ((at[:, None] * 7 + step * 3 + np.arange(window)) % VOCABULARY).astype(np.int64), "slots": at.astype(np.int32),
        "tables": np.repeat(at[:, None] + 1, pages, 1).astype(np.int32), "lengths": (at + step).astype(np.int32),
        "keys": (at.astype(np.uint64) + np.uint64(2**63)) * np.uint64(3), "positions": np.full(at.shape, step, dtype=np.int64), "temperatures": temperatures,
        "accepted": np.zeros(at.shape, dtype=np.int32) if window > 1 else None,
    }
    return DecodeBatch(**(whole | changes))
