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
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from driftline.messages.errors import ConfigError, DriftlineError, IntegrityError
from driftline.messages.types import Finish, Group, Trajectory
from driftline.models.state import load_state
from driftline.services.rollout.conversation import conversation
from driftline.services.rollout.engine.batch import Batch
from driftline.services.rollout.engine.prompts import Prompts
from driftline.services.rollout.engine.request import Completion, Progress, Request
from driftline.services.rollout.engine.row import Job, Row
from driftline.services.rollout.engine.scheduler import Scheduler
from driftline.services.rollout.randomness import member_key
from driftline.services.rollout.runner import DecodeBatch, Sampled
from driftline.services.rollout.speculation import Drafts

__all__ = ["Engine"]

RECOMPUTED = 8192
"""Tokens computed together when a version comes."""


class Engine(Prompts):
    """Sample with `model`. `max_batch` bounds the rows decoded together; a whole group enters at once, and one that is larger does so in parts. `tokenizer`
    (None: bytes) is the model's: a completion ends at any of its `eos_ids`. `resume_stale`: a session's next turn may go on with what an older policy
    computed for it, stamped. `adapters`: their rows in the model's `bank`, by name. `runner` makes what computes. ConfigError when the tokenizer has ids that
    the model has not."""

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

    def numbers(self) -> dict[str, float]:
        """Of its cache, its memory and its drafts, since it began."""
        stats = self.cache.stats
        out = {
            "prefix_hit_rate": stats.hit_rate, "prefix_hit_tokens": stats.hit_tokens, "preemptions": self.preemptions, "queued_bytes": self._scheduler.queued_bytes,
            "cached_bytes": stats.cached_page_bytes + stats.cached_state_bytes, "leased_bytes": stats.leased_page_bytes + stats.leased_state_bytes,
        }
        if self._drafting is not None:
            out["acceptance_length"] = self._drafting.speculator.acceptance.length
        return out

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
            self._scheduler.interrupt(job.again())
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
        drafting.speculator.finish_step(known, drafts, None if stood is None else kept - 1, time.perf_counter() - began)

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

    # Prompts.
