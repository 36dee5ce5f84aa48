"""The engine: continuous batching on one model, a version stamp on every token, weights replaced between steps, and no prefix computed twice.

Guarantees: a token's version is that of the weights that made its logits; a member's draws depend on (run seed, group, member, position) alone, so its tokens
depend on what else is in the batch, on what was cached and on when it had to make room only through rounding, and in deterministic mode not at all; a prompt
that does not fit is refused before it enters; whoever is oldest always goes on; after a step that failed, `forget` makes the engine as good as new. No I/O
and no clock of its own: `submit` work, `step`, take what finished.

A step decodes every running row and computes at most about `prefill_tokens` of prompts beside it. When memory runs out, the youngest row makes room: what it
had computed stays cached as long as it can, and it goes on before anything new begins.

A new version meets running rows in one of three ways: IN_FLIGHT goes on with what they hold (the stamps say which version made which token, and no new prompt
hits what they leave), INTERRUPT recomputes it under the new weights, DRAIN is the caller's: it loads only when `active` is zero. A prompt that is halfway
computed begins again.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from driftline.messages.errors import ConfigError, DriftlineError, IntegrityError
from driftline.messages.types import Finish, Group, Trajectory
from driftline.models.causal_lm import CausalLM
from driftline.models.drafter.taps import Taps as DrafterTaps
from driftline.models.mlp import route_shape
from driftline.models.paged import Pool
from driftline.models.state import load_state
from driftline.models.tokenizer import ByteTokenizer, Tokenizer
from driftline.services.rollout.conversation import conversation
from driftline.services.rollout.engine.batch import Batch
from driftline.services.rollout.engine.drafting import Drafting
from driftline.services.rollout.engine.memory import EngineMemory, plan
from driftline.services.rollout.engine.request import Completion, Progress, Request
from driftline.services.rollout.engine.row import Job, Row, Span, hit_spans, spread
from driftline.services.rollout.engine.scheduler import CHUNK, Chunk, Scheduler, common, pieces
from driftline.services.rollout.prefix import CacheKey, HostTier, Lease, PrefixCache
from driftline.services.rollout.randomness import member_key
from driftline.services.rollout.runner import Adapters, DecodeBatch, PrefillBatch, Rule, Runner, Sampled, Taps, runner_for
from driftline.services.rollout.speculation import Drafts, Speculator
from driftline.services.rollout.speculation.judging import judge
from driftline.services.rollout_config import SpeculationRule

__all__ = ["Engine", "RunnerOf"]

RECOMPUTED = 8192
"""Tokens computed together when a version comes."""
SESSIONS = 1 << 16
"""Sessions whose last rows are remembered to be of an older policy."""

class RunnerOf(Protocol):
    """Makes what computes: `runner_for`, with the rest of its arguments given."""

    def __call__(
        self, model: CausalLM, pool: Pool, max_batch: int, *, greedy: bool, rule: Rule | None, bank: Adapters | None, taps: Taps | None
    ) -> Runner: ...


class Engine:
    """Sample with `model`. `max_batch` bounds the rows decoded together; a whole group enters at once, and one that is larger does so in parts. `tokenizer`
    (None: bytes) is the model's: a completion ends at any of its `eos_ids`. `resume_stale`: a session's next turn may go on with what an older policy
    computed for it, stamped. `adapters`: their rows in the model's `bank`, by name. `runner` makes what computes. ConfigError when the tokenizer has ids that
    the model has not."""

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
        with torch.inference_mode():
            window = speculator.window if speculator is not None else 1
            pages, slots, self.longest = plan(model, memory, max_batch=max_batch, window=window)
            self.pool = Pool.make(model, pages=pages, slots=slots, window=window)
            host = HostTier(memory.host_bytes, self.device) if memory.host_bytes else None
            self.cache = PrefixCache(self.pool, enabled=memory.prefix_cache, host=host, routed=self._routes is not None)
            self.runner: Runner = (runner or _eager)(model, self.pool, max_batch, greedy=greedy_decoding, rule=_rule(speculator), bank=bank, taps=_taps(model, speculator))
        self._drafting = Drafting(speculator) if speculator is not None else None
        self._queue_bytes = queue_bytes
        self._scheduler: Scheduler[Job] = Scheduler(queue_bytes=queue_bytes)
        self._filling: list[Job] = []
        self._rows: list[Row] = []
        self._batch: Batch | None = None
        self._made_room = False
        self._completions: list[tuple[Row, Completion]] = []
        self._sessions: OrderedDict[str, CacheKey] = OrderedDict()

    # What there is.

    @property
    def active(self) -> int:
        """Rows that have begun: they run, their prompt is being computed, or they made room and wait to go on."""
        return len(self._rows) + sum(len(job.rows) for job in tuple(self._filling)) + self._scheduler.interrupted_members

    @property
    def waiting(self) -> int:
        return self._scheduler.members - self._scheduler.interrupted_members

    @property
    def idle(self) -> bool:
        return not self._rows and not self._filling and not self._scheduler

    def cache_key(self, adapter: str = "") -> CacheKey:
        """What is computed now is cached under it."""
        return CacheKey(type(self.model).__name__, adapter, self.version)

    # What comes in.

    def submit(self, group: Group, members: Sequence[int] | None = None) -> None:
        """Queue the given members of a group (None: all it asks for). DriftlineError when its prompt cannot be sampled from, QueueFull when too much waits."""
        wanted = group.to_sample if members is None else tuple(members)
        if not wanted:
            return
        prompt = array("i", self.tokenizer.encode_chat(conversation(group.task)))
        self._fits(prompt, group.sampling.max_tokens, f"task {group.task.id}", group.task.prompt)
        now = time.time()
        for begin in range(0, len(wanted), self.max_batch):
            rows = [Row(group, m, member_key(group.seed, group.group, m), prompt, now, self._ends) for m in wanted[begin : begin + self.max_batch]]
            self._scheduler.submit(Job(tokens=prompt, members=len(rows), rows=rows))

    def submit_request(self, request: Request) -> None:
        """Queue one sequence; its completion is taken by `take_completions`. DriftlineError when it cannot be sampled from, QueueFull when too much waits."""
        prompt = request.tokens if isinstance(request.tokens, array) else array("i", (int(t) for t in request.tokens))
        vocabulary = self.model.config.vocab_size
        if not prompt or not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise DriftlineError("a prompt is token ids of the model", field=f"request {request.id}: tokens", value=list(prompt[:8]),
                                 remedy=f"give at least one, each from 0 to {vocabulary - 1}")
        if request.adapter and request.adapter not in self._adapters:
            raise ConfigError("no such adapter is loaded", field=f"request {request.id}: adapter", value=request.adapter,
                              remedy=f"one of {sorted(self._adapters)}, or empty for the base")
        self._fits(prompt, request.sampling.max_tokens, f"request {request.id}", request.id)
        ends = self._ends if request.stop_ids is None else frozenset(request.stop_ids)
        row = Row(request, 0, request.key & (2**64 - 1), prompt, time.time(), ends)
        self._scheduler.submit(Job(tokens=prompt, rows=[row], priority=request.priority, tenant=request.tenant))

    def _fits(self, prompt: array[int], max_tokens: int, what: str, value: str) -> None:
        if len(prompt) > self.longest - max_tokens:
            least = self.longest < self.model.config.max_position_embeddings
            raise DriftlineError(f"a prompt of {len(prompt)} tokens", field=what, value=value,
                                 remedy=f"the {'cache' if least else 'model'} leaves {self.longest - max_tokens} beside sampling.max_tokens = {max_tokens}"
                                        f"{'; give rollout.cache_mb more' if least else ''}")

    def cancel(self, name: str) -> int:
        """Forget a group's members, or a request, running or waiting; returns how many rows there were."""
        dropped = sum(len(job.rows) for job in self._scheduler.drop(lambda job: job.name == name))
        for job in [job for job in self._filling if job.name == name]:
            self._filling.remove(job)
            self._release(job.lease)
            dropped += len(job.rows)
        gone = [row for row in self._rows if row.name == name]
        for row in gone:
            self._retire(row)
            self._release(row.lease)
        self._keep([row for row in self._rows if row.name != name])
        return dropped + len(gone)

    def forget(self) -> None:
        """Drop everything, running, waiting or cached. After a step that raised, what the engine holds is of no version and no group."""
        self._scheduler = Scheduler(queue_bytes=self._queue_bytes)
        self._filling, self._rows, self._batch = [], [], None
        self._sessions.clear()
        if self._drafting is not None:
            self._drafting.clear()
        self.cache.reset()
        self.pool.clear()

    def overdue(self, oldest: int) -> list[str]:
        """The groups with a member, begun, whose oldest token is of a version before `oldest`."""
        return list(dict.fromkeys(row.name for row in self._begun() if isinstance(row.owner, Group) and row.oldest_version < oldest))

    def give_up(self, group: str) -> list[Trajectory]:
        """Forget a group's members; those that have a token are returned as they are, aborted."""
        aborted = [row.trajectory(Finish.ABORT, self.tokenizer, self.name) for row in self._begun() if row.name == group]
        self.cancel(group)
        return aborted

    def _begun(self) -> list[Row]:
        """The rows that have a token."""
        return self._rows + [row for job in (*self._filling, *self._scheduler) for row in job.rows if row.tokens]

    # What goes out.

    def take_completions(self) -> list[Completion]:
        """Of the requests that finished since the last call. Take their progress first: it goes with them."""
        done, self._completions = self._completions, []
        return [completion for _, completion in done]

    def take_progress(self) -> list[Progress]:
        """What requests sampled since the last call."""
        rows = [row for row, _ in self._completions] + [row for row in self._begun() if isinstance(row.owner, Request)]
        return [told for row in rows if (told := row.progress()) is not None]

    # Weights.

    @torch.inference_mode()
    def load(self, version: int, state: Mapping[str, torch.Tensor], *, recompute: bool = False) -> None:
        """Replace the weights between steps. `recompute` computes what running rows hold again under them (INTERRUPT)."""
        self._fold(self._rows)  # by the weights that scored them
        torn, self._torn = self._torn, True
        try:
            load_state(self.model, state)
        except IntegrityError:
            self._torn = torn  # refused before anything was copied
            raise
        self._become(version)
        if recompute:
            self.recompute()

    @torch.inference_mode()
    def adopt(self, version: int, write: Callable[[], None]) -> None:
        """Become `version` between steps: `write` changes the weights in place. When it raises, they are of no version, and `step` refuses
        to work until a later `load` or `adopt` went well."""
        self._fold(self._rows)
        self._torn = True
        write()
        self._become(version)

    def _become(self, version: int) -> None:
        self.version, self._torn = version, False
        self.runner.weights_changed()
        for job in self._filling:  # halfway through a prompt of a policy that is gone
            self._release(job.lease)
            self._scheduler.interrupt(_again(job))
        self._filling = []
        kept = set(self._sessions.values()) | {row.cache_key for job in self._scheduler for row in job.rows}  # those that made room go on like those that run
        self.cache.forget(lambda key: key.version != version and key not in kept)

    @torch.inference_mode()
    def recompute(self) -> None:
        """Compute what the running rows hold again, under the weights there are."""
        for job in self._scheduler:
            for row in job.rows:
                row.cache_key = None
        for row in self._rows:
            self._release(row.lease)
            self._scheduler.interrupt(self._resumed(row, None))
        self._keep([])
        self._made_room = False
        while (self._scheduler.interrupted_members or self._filling) and self._fill(RECOMPUTED, new=False):
            pass

    # A step.

    @torch.inference_mode()
    def step(self) -> list[Trajectory]:
        """Advance every running row, compute prompts beside them, and return the members that finished."""
        if self._torn:
            raise DriftlineError("an update failed midway", field="weights", value=f"neither version {self.version} nor the next",
                                 remedy="load a whole version")
        self._made_room = False
        if self._rows:
            self._decode()
        self._fill(self.prefill_tokens)
        return self._collect()

    def _decode(self) -> None:
        drafting = self._drafting
        batch = self._batch_with_room(1 if drafting is None else drafting.window)
        if batch is None:
            return
        if drafting is None:
            self._take_steps(batch, self._scored(batch), None)
            return
        began = time.perf_counter()
        known, drafts = drafting.begin(self._rows)
        rows, stood = self._rows, None
        if drafts is None:
            self._fold(rows)
            sampled, kept = self._scored(batch), np.ones(len(rows), dtype=np.int32)
            self._take_steps(batch, sampled, None)
        else:
            sampled = self._scored(batch, drafts)
            stood, kept = drafting.kept(rows, drafts, sampled)
            self._take_steps(batch, sampled, kept)
        drafting.saw(rows, sampled, kept.tolist())
        drafting.speculator.finish_step(known, drafts, stood, time.perf_counter() - began)

    def _scored(self, batch: Batch, drafts: Drafts | None = None) -> Sampled:
        """The runner over each row's last token, and its drafts."""
        tokens = batch.tokens[:, None]
        return self.runner.decode(DecodeBatch(
            tokens if drafts is None else np.concatenate([tokens, drafts.tokens], axis=1), batch.slots, batch.tables, batch.lengths, batch.keys,
            batch.positions, batch.temperatures, None if drafts is None else batch.accepted, None if drafts is None else drafts.counts,
            None if drafts is None else drafts.probs, self._adapters_of(self._rows),
        ))

    def _take_steps(self, batch: Batch, sampled: Sampled, kept: np.ndarray | None) -> None:
        """Each row goes on by one token, or by the first `kept` int32 [B] of its window."""
        if kept is None:
            tokens = sampled.tokens[:, 0]
            if self._routes is not None:
                for row, ids in zip(self._rows, np.ascontiguousarray(sampled.routes[:, 0], dtype=np.int16), strict=True):
                    row.routes += ids.tobytes()
            self._append(self._rows, tokens, sampled.logprobs[:, 0])
            batch.advance(tokens)
            return
        for i, (row, count) in enumerate(zip(self._rows, kept.tolist(), strict=True)):
            row.tokens.extend(sampled.tokens[i, :count].tolist())
            row.logprobs.extend(sampled.logprobs[i, :count].tolist())
            row.versions.extend([self.version] * count)
            row.pending = count
            if self._routes is not None:
                row.routes += np.ascontiguousarray(sampled.routes[i, :count], dtype=np.int16).tobytes()
        self.tokens_sampled += int(kept.sum())
        batch.advance(sampled.tokens[np.arange(len(kept)), kept - 1], kept)
        batch.accepted = kept

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

    def _batch_with_room(self, steps: int) -> Batch | None:
        """The running rows, each with a page for so many more tokens; the youngest make room for the others. None: nobody is left."""
        if self._batch is None:
            self._batch = Batch(self._rows)
        batch = self._batch
        for i in sorted(batch.short(steps), key=lambda i: batch.rows[i].serial):
            row = batch.rows[i]
            while row.lease is not None and not self.cache.grow(row.lease, row.length + steps):
                self._make_room()
            if row.lease is not None:
                batch.grew(i)
        if any(row.lease is None for row in batch.rows):
            self._keep([row for row in self._rows if row.lease is not None])
            self._batch = batch = Batch(self._rows)
        return batch if self._rows else None

    def _append(self, rows: Sequence[Row], tokens: np.ndarray, logprobs: np.ndarray) -> None:
        version = self.version
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(version)
        self.tokens_sampled += len(rows)

    def _adapters_of(self, rows: Sequence[Row]) -> list[int] | None:
        return [self._adapters[row.adapter] if row.adapter else -1 for row in rows] if self._adapters else None

    def _collect(self) -> list[Trajectory]:
        done: list[Trajectory] = []
        keep: list[Row] = []
        for row in self._rows:
            finish = row.finish
            if finish is None:
                keep.append(row)
                continue
            self._retire(row)
            if isinstance(row.owner, Request):
                self._leave(row)
                self._completions.append((row, row.completion(finish)))
            else:
                self._release(row.lease)
                done.append(row.trajectory(finish, self.tokenizer, self.name))
        self._keep(keep)
        return done

    def _keep(self, rows: list[Row]) -> None:
        if len(rows) != len(self._rows):
            self._rows, self._batch = rows, None

    # What rows hold.

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
            raise DriftlineError("no memory for one sequence", field="rollout.cache_mb", value=self.pool.pages * self.pool.page_bytes / 2**20,
                                 remedy="give the cache more, or shorten sampling.max_tokens")
        self.preemptions += 1
        if job is not None and (row is None or job.serial > row.serial):
            self._filling.remove(job)
            self._release(job.lease)
            self._scheduler.interrupt(_again(job))
        elif row is not None and row.lease is not None:
            self._fold([row])
            lease, key = row.lease, self._filed_under(row)
            self.cache.preempt(lease, key, row.prompt + row.tokens, row.length, routes=row.computed_routes() if self._routes is not None else None,
                               versions=row.written_by() if key.mixed else None)
            self._scheduler.interrupt(self._resumed(row, key))

    def _retire(self, row: Row) -> None:
        if self._drafting is not None:
            self._drafting.retire(row)

    def _rows_with_lease(self) -> list[Row]:
        return [row for row in self._rows if row.lease is not None]

    # Prompts.

    def _fill(self, budget: int, *, new: bool = True) -> bool:
        """Compute about `budget` tokens of prompts, in rounds: what one leaves in the cache the next one hits. Whether anything was computed."""
        any_computed = False
        while budget > 0:
            self._enter(new)
            chunks = self._with_pages(pieces(self._filling, budget))
            if not chunks:
                break
            self._compute(chunks)
            any_computed = True
            budget -= sum(chunk.end - chunk.begin for chunk in chunks)
        return any_computed

    def _enter(self, new: bool) -> None:
        """Begin what waits, in turn, while there is room for it and nobody computes its beginning already."""
        scheduler = self._scheduler
        room = self.max_batch - len(self._rows) - sum(len(job.rows) for job in self._filling)
        while (job := scheduler.first()) is not None and len(job.rows) <= room and (new or scheduler.interrupted_members):
            if self._made_room and (self._rows or self._filling):
                return  # what left just now would come back to be asked to leave
            keys = self._keys(job)
            if self._held_back(job, keys) or not self._has_memory(job, keys):
                return
            lease = self.cache.begin(keys, job.tokens)
            if lease is None:
                return
            scheduler.take()
            room -= len(job.rows)
            self._begin(job, keys, lease)

    def _keys(self, job: Job) -> tuple[CacheKey, ...]:
        row = job.rows[0]
        current = self.cache_key(row.adapter)
        others = [row.cache_key] if row.tokens and row.cache_key is not None else []
        if self.resume_stale and isinstance(row.owner, Request) and row.owner.session in self._sessions:
            others.append(self._sessions[row.owner.session])
        return (current, *(key for key in dict.fromkeys(others) if key != current))

    def _has_memory(self, job: Job, keys: tuple[CacheKey, ...]) -> bool:
        """Whether there is memory for it and a page more for everybody."""
        if not self._rows and not self._filling:
            return True
        needed = (job.length - self.cache.length_of_hit(keys, job.tokens)) // CHUNK + 2 * len(job.rows)
        return self.cache.available >= needed + len(self._rows) + sum((f.length - f.done) // CHUNK + 2 * len(f.rows) for f in self._filling)

    def _held_back(self, job: Job, keys: tuple[CacheKey, ...]) -> bool:
        """Whether another prompt that is being computed begins like this one: it is waited for there."""
        if not self.cache.enabled:
            return False
        for leader in self._filling:
            if leader.key != keys[0]:
                continue
            until = min(common(leader.tokens, job.tokens), job.length - 1) // CHUNK * CHUNK
            if until > leader.done and until > self.cache.length_of_hit(keys, job.tokens):
                if until not in leader.stops:
                    leader.stops.append(until)
                return True
        return False

    def _begin(self, job: Job, keys: tuple[CacheKey, ...], lease: Lease) -> None:
        row, written = job.rows[0], lease.key if lease.hit else keys[0]
        job.lease, job.done, job.keys, job.written = lease, lease.hit, keys, hit_spans(lease.hit, lease.versions)
        job.key = keys[0] if written == keys[0] else CacheKey.of_mixed(keys[0].base, keys[0].adapter, row.holder)
        if (stop := self.cache.snapshot_at(keys, job.tokens)) is not None:
            job.stops.append(stop)
        if not job.begun:
            for one in job.rows:
                one.hit, one.serial = lease.hit, job.serial
        if self._routes is not None:
            job.routes = row.computed_routes() if job.begun else np.full((job.length, *self._routes), -1, dtype=np.int16)
            if not job.begun and lease.hit and lease.routes is not None and job.routes is not None:
                job.routes[: lease.hit] = lease.routes
        self._filling.append(job)
        self._filling.sort(key=lambda j: j.serial)

    def _with_pages(self, chunks: list[Chunk[Job]]) -> list[Chunk[Job]]:
        """The chunks that have memory; the youngest make room for the oldest."""
        ready: list[Chunk[Job]] = []
        for chunk in chunks:
            job = chunk.work
            while job.lease is not None and job in self._filling and not self.cache.grow(job.lease, chunk.end):
                if not self._younger(job.serial) and (self._rows or job is not self._filling[0]):
                    break
                self._make_room()
            else:
                ready.append(chunk)
        return [chunk for chunk in ready if chunk.work in self._filling]

    def _younger(self, serial: int) -> bool:
        return any(row.serial > serial for row in self._rows_with_lease()) or any(job.serial > serial for job in self._filling)

    def _compute(self, chunks: Sequence[Chunk[Job]]) -> None:
        """One forward over the next tokens of several prompts; rows whose prompt it completes draw their first token."""
        jobs = [chunk.work for chunk in chunks]
        leases = [job.lease for job in jobs if job.lease is not None]
        tables = np.zeros((len(jobs), max(len(lease.pages) for lease in leases)), dtype=np.int32)
        for table, lease in zip(tables, leases, strict=True):
            table[: len(lease.pages)] = lease.pages
        drawing = [(i, row) for i, (job, _, end) in enumerate(chunks) if end == job.length and not job.begun for row in job.rows]
        computed = self.runner.prefill(PrefillBatch(
            tokens=np.concatenate([np.frombuffer(job.tokens, dtype=np.int32)[begin:end] for job, begin, end in chunks]).astype(np.int64),
            counts=[end - begin for _, begin, end in chunks], slots=np.array([lease.slot for lease in leases], dtype=np.int32), tables=tables,
            context=np.array([begin for _, begin, _ in chunks], dtype=np.int32), behind=np.array([i for i, _ in drawing], dtype=np.int64),
            keys=np.array([row.key for _, row in drawing], dtype=np.uint64), positions=np.array([row.first_draw for _, row in drawing], dtype=np.int64),
            temperatures=np.array([row.temperature for _, row in drawing], dtype=np.float32), sample=bool(drawing),
            adapters=self._adapters_of([job.rows[0] for job in jobs]),
        ))
        self.prompt_tokens += sum(end - begin for _, begin, end in chunks)
        self._file(chunks, computed.routes)
        if drawing:
            self._append([row for _, row in drawing], computed.tokens[:, 0], computed.logprobs[:, 0])
            if self._drafting is not None:
                ends = np.cumsum([end - begin for _, begin, end in chunks]).tolist()
                self._drafting.saw_prompts([row for _, row in drawing], computed, [(ends[i] - chunks[i].end + chunks[i].begin, ends[i]) for i, _ in drawing])
        for job, _, end in chunks:
            if end == job.length:
                self._filling.remove(job)
                self._start(job)

    def _file(self, chunks: Sequence[Chunk[Job]], routes: np.ndarray | None) -> None:
        """What was computed is known to be, and cached where others may go on from it."""
        at = 0
        for job, begin, end in chunks:
            if routes is not None and job.routes is not None and not job.begun:
                job.routes[begin:end] = routes[at : at + end - begin]
            at += end - begin
            job.done = end
            assert job.lease is not None and job.key is not None
            if end % CHUNK == 0:
                versions = spread((*job.written, Span(end, self.version))) if job.key.mixed else None
                self.cache.commit(job.lease, job.key, job.tokens, end, routes=job.routes, versions=versions, keep=end in job.stops)

    def _start(self, job: Job) -> None:
        """Its rows run, each with a lease of its own; those for which there is no memory wait."""
        assert job.lease is not None
        first, others = job.rows[0], job.rows[1:]
        leases: list[Lease] = []
        if others:
            made = self.cache.forks(job.lease, job.length, len(others))
            while made is None and len(leases) < len(others) and (fork := self.cache.fork(job.lease, job.length)) is not None:
                leases.append(fork)
            leases = made if made is not None else leases
        for row, lease in zip((first, *others), (job.lease, *leases), strict=False):
            row.lease, row.cache_key, row.written = lease, job.key, (*job.written, Span(job.length, self.version))
            self._rows.append(row)
        for row in job.rows:
            if row.prompt_routes is None:
                row.prompt_routes = job.routes
        for row in others[len(leases) :]:
            self._scheduler.interrupt(self._resumed(row, job.key))
        self._batch = None


def _eager(
    model: CausalLM, pool: Pool, max_batch: int, *, greedy: bool, rule: Rule | None, bank: Adapters | None, taps: Taps | None
) -> Runner:
    return runner_for(model, pool, max_batch, cuda_graphs=False, greedy=greedy, rule=rule, bank=bank, taps=taps)


def _taps(model: CausalLM, speculator: Speculator | None) -> Taps | None:
    return DrafterTaps(model, speculator.taps).take if speculator is not None and speculator.taps else None


def _rule(speculator: Speculator | None) -> Rule | None:
    return judge if speculator is not None and speculator.rule is SpeculationRule.REJECTION else None


def _again(job: Job) -> Job:
    """From the beginning."""
    job.lease, job.key, job.routes, job.stops = None, None, None, []
    return job
