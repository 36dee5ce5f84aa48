"""The rows of an engine and what they hold: pages and states of the pool by a lease each, given back, left for a next turn, or handed over when memory is short.

Guarantees: a row that runs has a lease, and every lease of the cache's is a row's or a prompt's that is being computed; what is cached is filed under what wrote
it, and what several versions wrote only its own session finds; a state is up to date before it is cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from driftline.messages.errors import ConfigError, DriftlineError
from driftline.models.causal_lm import CausalLM
from driftline.models.drafter.taps import Taps as DrafterTaps
from driftline.models.mlp import route_shape
from driftline.models.paged import Pool
from driftline.models.tokenizer import ByteTokenizer, Tokenizer
from driftline.services.rollout.engine.batch import Batch
from driftline.services.rollout.engine.drafting import Drafting
from driftline.services.rollout.engine.memory import EngineMemory, plan
from driftline.services.rollout.engine.request import Completion, Request
from driftline.services.rollout.engine.row import Job, Row
from driftline.services.rollout.engine.scheduler import CHUNK, Scheduler
from driftline.services.rollout.prefix import CacheKey, HostTier, Lease, PrefixCache
from driftline.services.rollout.runner import Adapters, Rule, Runner, Taps, runner_for
from driftline.services.rollout.speculation import Speculator
from driftline.services.rollout.speculation.judging import judge
from driftline.services.rollout_config import SpeculationRule

__all__ = ["Rows", "RunnerOf"]

SESSIONS = 1 << 16
"""Sessions whose last rows are remembered to be of an older policy."""


class RunnerOf(Protocol):
    """Makes what computes: `runner_for`, with the rest of its arguments given."""

    def __call__(
        self, model: CausalLM, pool: Pool, max_batch: int, *, greedy: bool, rule: Rule | None, bank: Adapters | None, taps: Taps | None
    ) -> Runner: ...


class Rows:
    """What an engine has, and what becomes of it; `Engine` says what the arguments are."""

    def __init__(
        self, model: CausalLM, *, version: int, max_batch: int = 64, name: str = "engine", greedy_decoding: bool = False,
        record_routes: bool = False, tokenizer: Tokenizer | None = None, memory: EngineMemory | None = None, prefill_tokens: int = 2048,
        queue_bytes: int = 256 * 2**20, speculator: Speculator | None = None, runner: RunnerOf | None = None, resume_stale: bool = False,
        adapters: Mapping[str, int] | None = None, bank: Adapters | None = None,
    ) -> None:
        if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
            raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} ids", field="vocab_size", value=model.config.vocab_size,
                              remedy="the tokenizer beside the weights must be the model's own")
        self.model = model.eval()
        self.version, self.max_batch, self.name = version, max_batch, name
        self.greedy_decoding, self.record_routes = greedy_decoding, record_routes
        self.tokenizer: Tokenizer = tokenizer or ByteTokenizer()
        self._ends = frozenset(self.tokenizer.eos_ids)
        self.device = next(model.parameters()).device
        self.tokens_sampled = 0
        self.prompt_tokens = 0
        self.preemptions = 0
        self.prefill_tokens = max(prefill_tokens, CHUNK)
        self.resume_stale, self._adapters = resume_stale, dict(adapters or {})
        shape = route_shape(model) if record_routes else None
        self._routes = (shape.layers, shape.top_k) if shape is not None else None
        self._torn = False
        memory = memory or EngineMemory()
        window = speculator.window if speculator is not None else 1
        pages, slots, self.longest = plan(model, memory, max_batch=max_batch, window=window)
        self.pool = Pool.make(model, pages=pages, slots=slots, window=window)
        host = HostTier(memory.host_bytes, self.device) if memory.host_bytes else None
        self.cache = PrefixCache(self.pool, enabled=memory.prefix_cache, host=host, routed=self._routes is not None)
        self.runner: Runner = (runner or _eager)(
            model, self.pool, max_batch, greedy=greedy_decoding, rule=_rule(speculator), bank=bank, taps=_taps(model, speculator),
        )
        self._drafting = Drafting(speculator) if speculator is not None else None
        self._queue_bytes = queue_bytes
        self._scheduler: Scheduler[Job] = Scheduler(queue_bytes=queue_bytes)
        self._filling: list[Job] = []
        self._rows: list[Row] = []
        self._batch: Batch | None = None
        self._made_room = False
        self._completions: list[tuple[Row, Completion]] = []
        self._sessions: OrderedDict[str, CacheKey] = OrderedDict()

    def cache_key(self, adapter: str = "") -> CacheKey:
        """What is computed now is cached under it."""
        return CacheKey(type(self.model).__name__, adapter, self.version)

    # Rows.

    def _append(self, rows: Sequence[Row], tokens: np.ndarray, logprobs: np.ndarray) -> None:
        version = self.version
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(version)
        self.tokens_sampled += len(rows)

    def _keep(self, rows: list[Row]) -> None:
        if len(rows) != len(self._rows):
            self._rows, self._batch = rows, None

    def _adapters_of(self, rows: Sequence[Row]) -> list[int] | None:
        return [self._adapters[row.adapter] if row.adapter else -1 for row in rows] if self._adapters else None

    def _fold(self, rows: Sequence[Row]) -> None:
        """Bring their states up to date with what they kept of their windows."""
        behind = [row for row in rows if row.pending and row.lease is not None]
        if not behind:
            return
        slots = torch.tensor([row.lease.slot for row in behind if row.lease is not None], dtype=torch.int32)
        self.pool.fold(slots.to(self.device), torch.tensor([row.pending for row in behind], dtype=torch.int32).to(self.device))
        for row in behind:
            row.pending = 0
        if self._batch is not None:
            self._batch.accepted = np.array([row.pending for row in self._batch.rows], dtype=np.int32)

    # What they hold.

    def _release(self, lease: Lease | None) -> None:
        if lease is not None:
            self.cache.end(lease)

    def _filed_under(self, row: Row) -> CacheKey:
        """What wrote all that a row holds."""
        key = row.cache_key
        assert key is not None
        return key if key.mixed or key.version == row.versions[-1] else CacheKey.of_mixed(key.base, key.adapter, row.holder)

    def _leave(self, row: Row) -> None:
        """A request is done: what it holds stays for its session's next turn."""
        self._fold([row])
        lease, row.lease = row.lease, None
        assert lease is not None
        key, of_session = self._filed_under(row), isinstance(row.owner, Request) and row.owner.session
        if key.version != self.version and not (of_session and self.resume_stale):
            self.cache.end(lease)
            return
        self.cache.end(lease, key, row.prompt + row.tokens, row.length, routes=row.computed_routes() if self._routes is not None else None,
                       versions=row.written_by() if key.mixed else None)
        if of_session and self.resume_stale:
            self._sessions[of_session] = key
            self._sessions.move_to_end(of_session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)

    def _resumed(self, row: Row, key: CacheKey | None) -> Job:
        """A row without a lease as work: `key` is what its rows may still be cached under."""
        self._retire(row)
        row.lease, row.cache_key, row.pending = None, key, 0
        return Job(tokens=row.history(), rows=[row], serial=row.serial)

    def _make_room(self) -> None:
        """The youngest gives its memory back. DriftlineError when there is only one."""
        self._made_room = True
        row = max(self._rows_with_lease(), key=lambda r: (r.serial, r.member), default=None)
        job = max(self._filling, key=lambda j: j.serial, default=None)
        if (row is None or job is None) and len(self._rows_with_lease()) + len(self._filling) == 1:
            raise self._no_memory()
        self.preemptions += 1
        if job is not None and (row is None or job.serial > row.serial):
            self._filling.remove(job)
            self._release(job.lease)
            self._scheduler.interrupt(job.again())
        elif row is not None and row.lease is not None:
            self._fold([row])
            lease, key = row.lease, self._filed_under(row)
            self.cache.preempt(lease, key, row.prompt + row.tokens, row.length, routes=row.computed_routes() if self._routes is not None else None,
                               versions=row.written_by() if key.mixed else None)
            self._scheduler.interrupt(self._resumed(row, key))

    def _no_memory(self) -> DriftlineError:
        return DriftlineError("no memory for one sequence", field="rollout.cache_mb", value=self.pool.pages * self.pool.page_bytes / 2**20,
                              remedy="give the cache more, or shorten sampling.max_tokens")

    def _retire(self, row: Row) -> None:
        if self._drafting is not None:
            self._drafting.retire(row)

    def _rows_with_lease(self) -> list[Row]:
        return [row for row in self._rows if row.lease is not None]


def _eager(
    model: CausalLM, pool: Pool, max_batch: int, *, greedy: bool, rule: Rule | None, bank: Adapters | None, taps: Taps | None
) -> Runner:
    return runner_for(model, pool, max_batch, cuda_graphs=False, greedy=greedy, rule=rule, bank=bank, taps=taps)


def _taps(model: CausalLM, speculator: Speculator | None) -> Taps | None:
    return DrafterTaps(model, speculator.taps).take if speculator is not None and speculator.taps else None


def _rule(speculator: Speculator | None) -> Rule | None:
    return judge if speculator is not None and speculator.rule is SpeculationRule.REJECTION else None
