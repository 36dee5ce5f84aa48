"""The runner that replays: a step of decoding is one launch, whatever the model's depth.

Guarantees: a graph is made once for a bucket of rows, a window, a width of tables and a mode of numerics, when such a step first comes, and never while a batch's rows could be
changed by it: it is warmed and captured on rows of padding. A batch that no graph is for, or whose graph cannot be made, is computed eagerly, and `refused` says why.
Weights may change in place between steps; after that, or any other replacement, `weights_changed` drops the graphs if a weight lies elsewhere than before.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import structlog
import torch

from driftline.kernels.mode import Numerics, numerics
from driftline.models.causal_lm import CausalLM
from driftline.models.paged import Pool
from driftline.services.rollout.runner.batch import DecodeBatch
from driftline.services.rollout.runner.buckets import page_bucket, row_bucket, row_buckets
from driftline.services.rollout.runner.capture import Capture, Captured, CudaCapture
from driftline.services.rollout.runner.eager import Adapters, EagerRunner, Pending, pending, shape_of
from driftline.services.rollout.runner.staging import Shape, Staged
from driftline.services.rollout.runner.step import Greedy, Rule, Taps, step

__all__ = ["MOST_GRAPHS", "GraphRunner", "Key", "Tally"]

MOST_GRAPHS = 128
"""Kept at a time; the one that was not used for longest goes first."""

log = structlog.get_logger("rollout.runner")


class Key(NamedTuple):
    """What a graph is of."""

    shape: Shape
    greedy: Greedy
    numerics: Numerics


class _Graph(NamedTuple):
    staged: Staged
    captured: Captured


@dataclass
class Tally:
    """Steps replayed and computed eagerly, rows of padding that were replayed, graphs made and the seconds that took."""

    replayed: int = 0
    eager: int = 0
    padding: int = 0
    captured: int = 0
    seconds: float = 0.0


class GraphRunner(EagerRunner):
    """As `EagerRunner`. max_batch: the most rows that there are graphs for. capture: how a step is captured (None: as a CUDA graph)."""

    def __init__(
        self, model: CausalLM, pool: Pool, max_batch: int, *, greedy: bool = False, rule: Rule | None = None, bank: Adapters | None = None, taps: Taps | None = None,
        capture: Capture | None = None, most_graphs: int = MOST_GRAPHS,
    ) -> None:
        super().__init__(model, pool, greedy=greedy, rule=rule, bank=bank, taps=taps)
        if most_graphs < 1:
            raise ValueError(f"most_graphs is {most_graphs}; keep at least one, or use an EagerRunner")
        row_buckets(max_batch)
        self.max_batch, self.most_graphs = max_batch, most_graphs
        self.tally = Tally()
        self.refused: dict[Key, str] = {}
        self._capture: Capture = capture or CudaCapture(self.device)
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._places = self._weights()

    @property
    def graphs(self) -> tuple[Key, ...]:
        """What there is a graph for, the longest unused first."""
        return tuple(self._graphs)

    @torch.inference_mode()
    def begin_decode(self, batch: DecodeBatch) -> Pending:
        """Launch a step: by replaying it if it can be."""
        adapted = batch.adapters is not None and max(batch.adapters) >= 0
        graph = None if adapted or batch.rows > self.max_batch else self._graph(self.key(batch))
        if graph is None:
            self.tally.eager += 1
            return super().begin_decode(batch)
        graph.staged.load(batch)
        graph.captured.replay()
        self.tally.replayed += 1
        self.tally.padding += graph.staged.shape.rows - batch.rows
        return pending(graph.captured.outputs, batch.rows)

    def key(self, batch: DecodeBatch) -> Key:
        """The graph that a batch would take. Raises ValueError for more rows than `max_batch`."""
        shape = shape_of(batch)._replace(rows=row_bucket(batch.rows, self.max_batch), pages=page_bucket(batch.pages))
        return Key(shape, self._greedy(batch), numerics())

    @torch.inference_mode()
    def warm(self, *, window: int = 1, replays: bool | None = None, pages: int = 1) -> int:
        """Make the graphs of all buckets of rows for windows of so many tokens over tables of so many pages; returns how many there are of them. Largest first, so that
        the others find room in its memory. replays: None for whether the window has drafts."""
        made = 0
        for rows in reversed(row_buckets(self.max_batch)[-self.most_graphs :]):
            shape = Shape(rows, window, page_bucket(pages), window > 1 if replays is None else replays)
            made += self._graph(Key(shape, Greedy(some=False, every=self.greedy), numerics())) is not None
        return made

    def weights_changed(self) -> None:
        """Drop the graphs, and what was refused, if a weight is no longer where they read it."""
        places = self._weights()
        if places != self._places:
            self._places = places
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # none of them is running when its memory goes
            self._graphs.clear()
            self.refused.clear()

    def _weights(self) -> tuple[int, ...]:
        return tuple(t.data_ptr() for ts in (self.model.parameters(), self.model.buffers()) for t in ts)

    def _graph(self, key: Key) -> _Graph | None:
        if key in self.refused:
            return None
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._made(key)
            if graph is None:
                return None
            self._graphs[key] = graph
            if len(self._graphs) > self.most_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return graph

    def _made(self, key: Key) -> _Graph | None:
        begun = time.perf_counter()
        try:
            staged = Staged(key.shape, self.device)
            with self._adapters(None, key.shape.rows, None):
                captured = self._capture(lambda: step(self.model, self._forward, staged.inputs, key.greedy, self.rule, self.taps))
        except RuntimeError as error:
            self.refused[key] = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("decoding without a graph", rows=key.shape.rows, window=key.shape.window, pages=key.shape.pages, reason=self.refused[key])
            return None
        self.tally.captured += 1
        self.tally.seconds += time.perf_counter() - begun
        return _Graph(staged, captured)
