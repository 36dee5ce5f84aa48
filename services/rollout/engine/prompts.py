"""How prompts are computed: in turn, in pieces beside the decoding, each beginning once, and their rows started.

Guarantees: whoever is oldest gets memory, and the youngest make room; a prompt that begins like one that is being computed waits for it where they part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from driftline.services.rollout.engine.request import Request
from driftline.services.rollout.engine.row import Job, Span, hit_spans, spread
from driftline.services.rollout.engine.rows import Rows
from driftline.services.rollout.engine.scheduler import CHUNK, Chunk, common, pieces
from driftline.services.rollout.prefix import CacheKey, Lease, Parked
from driftline.services.rollout.runner import PrefillBatch

__all__ = ["Prompts"]


class Prompts(Rows):
    """Its scheduler's work, from `_fill`."""

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
            lease = self._lease(job, keys)
            if lease is None:
                if not self._rows and not self._filling:
                    raise self._no_memory()
                return
            scheduler.take()
            room -= len(job.rows)
            self._begin(job, keys, lease)

    def _lease(self, job: Job, keys: tuple[CacheKey, ...]) -> Lease | None:
        """On what is cached of its tokens: all of them where it only goes on, else all but the last, behind which something is drawn."""
        key = job.rows[0].cache_key if job.begun else None
        if key is None:
            return self.cache.begin(keys, job.tokens)
        lease = self.cache.restore(Parked(key, job.tokens, job.length))
        if lease is None or lease.hit or key == keys[0]:
            return lease
        self.cache.end(lease)
        return self.cache.begin(keys, job.tokens)

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
        if job.done == job.length:
            self._start(job)
            return
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
            assert job.lease is not None
            assert job.key is not None
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
        computed = () if job.written and job.written[-1].end == job.length else (Span(job.length, self.version),)
        for row, lease in zip((first, *others), (job.lease, *leases), strict=False):
            row.lease, row.cache_key, row.written = lease, job.key, (*job.written, *computed)
            self._rows.append(row)
        for row in job.rows:
            if row.prompt_routes is None:
                row.prompt_routes = job.routes
        for row in others[len(leases) :]:
            self._scheduler.interrupt(self._resumed(row, job.key))
        self._batch = None
