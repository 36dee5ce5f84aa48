"""The engine: continuous batching on one model, a version stamp on every token, weights replaced between decode steps.

Guarantees: a token's version is that of the weights that made its logits; a member's draws depend on (run seed, group, member,
position) alone, so its tokens depend on what else is in the batch only through rounding, and in deterministic mode not at all; members of a group share one prefill of their prompt, and one copy
of its tokens and routes; a prompt that does not fit the model is refused before it enters; after a step that failed, `forget` makes the engine as good as new. No I/O and no clock of its own: `submit` work, `step`, take what finished.

A new version meets running rows in one of three ways: IN_FLIGHT goes on with the rows' caches (their stamps say which version made which token), INTERRUPT
recomputes the caches under the new weights, DRAIN is the caller's: it loads only when `active` is zero.

What prompts have in common at their beginning (a template's, solved examples) is computed once under the weights there are, and forked.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from driftline.messages.errors import ConfigError, DriftlineError, IntegrityError
from driftline.messages.types import Finish, Group, Trajectory
from driftline.models.cache import Cache
from driftline.models.causal_lm import CausalLM
from driftline.models.state import load_state
from driftline.models.tokenizer import ByteTokenizer, Tokenizer
from driftline.services.rollout.conversation import conversation
from driftline.services.rollout.prompt_prefix import Prefix, common_beginning
from driftline.services.rollout.randomness import member_key, uniforms
from driftline.services.rollout.sampler import draw

__all__ = ["Engine"]

SHARED_PREFIX = 64
"""Tokens that prompts must have in common to be worth a forward of their own."""


@dataclass
class _Row:
    """One member being sampled, 12 bytes a token: boxed numbers would be ten times that. `prompt` and `prompt_routes` belong to all
    members of the group; `routes` int16 [sampled - 1, layers, k] as bytes."""

    group: Group
    member: int
    key: int
    prompt: array[int]
    started_at: float
    prompt_routes: np.ndarray | None = None
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("i"))
    routes: bytearray = field(default_factory=bytearray)

    @property
    def oldest_version(self) -> int:
        return self.versions[0]  # versions only grow


@dataclass(frozen=True)
class _Waiting:
    group: Group
    members: tuple[int, ...]
    prompt: array[int]


class Engine:
    """Sample groups with `model`. `max_batch` bounds the rows decoded together; a whole group enters at once. `tokenizer` (None: bytes) is the model's: a
    completion ends at any of its `eos_ids`. ConfigError when it has ids that the model has not."""

    def __init__(
        self, model: CausalLM, *, version: int, max_batch: int = 64, name: str = "engine", greedy_decoding: bool = False,
        record_routes: bool = False, tokenizer: Tokenizer | None = None,
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
        self._torn = False
        self._waiting: deque[_Waiting] = deque()
        self._rows: list[_Row] = []
        self._cache: Cache | None = None
        self._prefix: Prefix | None = None  # of the weights there are
        self._newest: array[int] = array("i")

    @property
    def active(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return sum(len(w.members) for w in tuple(self._waiting))  # a copy: a step in another thread may take from it meanwhile

    @property
    def idle(self) -> bool:
        return not self._rows and not self._waiting

    def submit(self, group: Group, members: Sequence[int] | None = None) -> None:
        """Queue the given members of a group (None: all it asks for). DriftlineError when its prompt cannot be sampled from."""
        wanted = group.to_sample if members is None else tuple(members)
        if wanted:
            self._waiting.append(_Waiting(group, wanted, self._encoded(group)))

    def _encoded(self, group: Group) -> array[int]:
        prompt = array("i", self.tokenizer.encode_chat(conversation(group.task)))
        room = self.model.config.max_position_embeddings - group.sampling.max_tokens
        if len(prompt) > room:
            raise DriftlineError(f"a prompt of {len(prompt)} tokens", field=f"task {group.task.id}", value=group.task.prompt,
                                 remedy=f"the model leaves {room} beside sampling.max_tokens = {group.sampling.max_tokens}")
        return prompt

    def cancel(self, group: str) -> int:
        """Forget a group's members, running or waiting; returns how many there were."""
        before = self.active + self.waiting
        self._waiting = deque(w for w in self._waiting if w.group.group != group)
        self._keep([i for i, row in enumerate(self._rows) if row.group.group != group])
        return before - self.active - self.waiting

    def forget(self) -> None:
        """Drop everything, running or waiting. After a step that raised, what the engine holds is of no version and no group."""
        self._waiting.clear()
        self._rows, self._cache, self._prefix = [], None, None

    def overdue(self, oldest: int) -> list[str]:
        """The groups with a running member whose oldest token is of a version before `oldest`."""
        return list(dict.fromkeys(row.group.group for row in self._rows if row.oldest_version < oldest))

    def give_up(self, group: str) -> list[Trajectory]:
        """Forget a group's members; those that have a token are returned as they are, aborted."""
        aborted = [self._trajectory(row, Finish.ABORT) for row in self._rows if row.group.group == group]
        self.cancel(group)
        return aborted

    @torch.inference_mode()
    def load(self, version: int, state: Mapping[str, torch.Tensor], *, recompute: bool = False) -> None:
        """Replace the weights between steps. `recompute` rebuilds running rows' caches under them (INTERRUPT)."""
        torn, self._torn = self._torn, True
        try:
            load_state(self.model, state)
        except IntegrityError:
            self._torn = torn  # refused before anything was copied
            raise
        self.version, self._torn, self._prefix = version, False, None
        if recompute:
            self.recompute()

    @torch.inference_mode()
    def adopt(self, version: int, write: Callable[[], None]) -> None:
        """Become `version` between steps: `write` changes the weights in place. When it raises, they are of no version, and `step` refuses
        to work until a later `load` or `adopt` went well."""
        self._torn = True
        write()
        self.version, self._torn, self._prefix = version, False, None

    @torch.inference_mode()
    def recompute(self) -> None:
        """Rebuild the running rows' caches under the weights there are."""
        if self._rows:
            histories = [row.prompt + row.tokens[:-1] for row in self._rows]
            self._cache = self._prefill(histories)[0]

    @torch.inference_mode()
    def step(self) -> list[Trajectory]:
        """Admit waiting groups that fit, advance every running row by one token, return the members that finished."""
        if self._torn:
            raise DriftlineError("an update failed midway", field="weights", value=f"neither version {self.version} nor the next",
                                 remedy="load a whole version")
        if self._rows:
            self._decode()
        self._admit()
        return self._collect()

    def _admit(self) -> None:
        entering: list[_Waiting] = []
        room = self.max_batch - len(self._rows)
        while self._waiting and (len(self._waiting[0].members) <= room or (not self._rows and not entering)):
            entering.append(self._waiting.popleft())
            room -= len(entering[-1].members)
        if not entering:
            return
        prompts = [w.prompt for w in entering]
        now = time.time()
        cache, hidden, routes = self._prefill(prompts)
        index = torch.tensor([i for i, w in enumerate(entering) for _ in w.members], device=self.device)
        rows = [
            _Row(w.group, m, member_key(w.group.seed, w.group.group, m), prompts[i], now, routes[i])
            for i, w in enumerate(entering) for m in w.members
        ]
        self._append(rows, hidden.index_select(0, index))
        fresh = cache.take(index)
        self._cache = fresh if self._cache is None else Cache.cat([self._cache, fresh])
        self._rows += rows

    def _prefill(self, prompts: list[array[int]]) -> tuple[Cache, torch.Tensor, list[np.ndarray | None]]:
        """Caches after the prompts, hidden [N, D] of their last positions, and int16 [tokens, layers, k] of each, where routes are recorded."""
        prefix = self._shared(prompts)
        if prefix is None:
            return self._forward(prompts, None)
        begun = len(prefix.tokens)
        cache, hidden, routes = self._forward([prompt[begun:] for prompt in prompts], prefix.cache.repeat(len(prompts)))
        return cache, hidden, [rest if rest is None or prefix.routes is None else np.concatenate([prefix.routes, rest]) for rest in routes]

    def _shared(self, prompts: list[array[int]]) -> Prefix | None:
        """The beginning of these prompts, and of the one before them, that is computed already or worth it."""
        before, self._newest = self._newest, prompts[-1]
        if self._prefix is None or not self._prefix.begins(prompts):
            common = common_beginning([*prompts, before])
            if len(common) < SHARED_PREFIX and len(prompts) > 1:
                common = common_beginning(prompts)
            common = common[: min(map(len, prompts)) - 1]  # a row's last token is its own
            if len(common) < SHARED_PREFIX:
                return None
            cache, _, routes = self._forward([common], None)
            self._prefix = Prefix(common, cache, routes[0])
        return self._prefix

    def _forward(self, prompts: list[array[int]], cache: Cache | None) -> tuple[Cache, torch.Tensor, list[np.ndarray | None]]:
        """As `_prefill`, of what comes behind `cache`."""
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        width = int(lengths.max())
        padded = np.full((len(prompts), width), self.tokenizer.pad, dtype=np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        tokens = torch.from_numpy(padded).to(self.device)
        ragged = bool((lengths != width).any())
        out = self.model(tokens, lengths=lengths if ragged else None, cache=cache)
        last = out.hidden[torch.arange(len(prompts), device=self.device), lengths - 1]
        self.prompt_tokens += int(lengths.sum())
        routes: list[np.ndarray | None] = [None] * len(prompts)
        if self.record_routes:
            table = out.routes.to(torch.int16).cpu().numpy()
            routes = [table[i, : len(p)].copy() for i, p in enumerate(prompts)]  # a view would keep the longest prompt's padding alive
        return out.cache, last, routes

    def _decode(self) -> None:
        assert self._cache is not None
        last = torch.tensor([row.tokens[-1] for row in self._rows], device=self.device)
        out = self.model(last[:, None], cache=self._cache)
        self._cache = out.cache
        if self.record_routes:
            table = out.routes[:, 0].to(torch.int16).cpu().numpy()
            for row, ids in zip(self._rows, table, strict=True):
                row.routes += ids.tobytes()
        self._append(self._rows, out.hidden[:, 0])

    def _append(self, rows: list[_Row], hidden: torch.Tensor) -> None:
        """hidden [N, D]: of the position before each row's next token."""
        temperature = torch.tensor([row.group.sampling.temperature for row in rows], device=self.device)
        keys = np.array([row.key for row in rows], dtype=np.uint64)
        positions = np.array([len(row.tokens) for row in rows])
        draws = None if self.greedy_decoding else uniforms(keys, positions)
        tokens, logprobs = draw(self.model, hidden, temperature, draws)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.version)
        self.tokens_sampled += len(rows)

    def _finish(self, row: _Row) -> Finish | None:
        if row.tokens[-1] in self._ends:
            return Finish.STOP
        return Finish.LENGTH if len(row.tokens) >= row.group.sampling.max_tokens else None

    def _collect(self) -> list[Trajectory]:
        done, keep = [], []
        for i, row in enumerate(self._rows):
            finish = self._finish(row)
            if finish is None:
                keep.append(i)
            else:
                done.append(self._trajectory(row, finish))
        if done:
            self._keep(keep)
        return done

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in rows]
        if not rows:
            self._cache = None
        elif self._cache is not None:
            self._cache = self._cache.take(torch.tensor(rows, device=self.device)).compact()

    def _trajectory(self, row: _Row, finish: Finish) -> Trajectory:
        prompt, sampled = len(row.prompt), len(row.tokens)
        total = prompt + sampled
        mask = np.zeros(total, dtype=bool)
        mask[prompt:] = True
        logprobs = np.zeros(total, dtype="<f4")
        logprobs[prompt:] = row.logprobs
        versions = np.full(total, -1, dtype="<i4")
        versions[prompt:] = row.versions
        routes = None
        if row.prompt_routes is not None:
            # The last token was sampled and never fed back: it has no route, and -1 says so.
            routes = np.full((total, *row.prompt_routes.shape[1:]), -1, dtype="<i2")
            routes[:prompt] = row.prompt_routes
            routes[prompt:-1] = np.frombuffer(row.routes, dtype=np.int16).reshape(-1, *routes.shape[1:])
        return Trajectory(
            run=row.group.run, group=row.group.group, member=row.member, members=row.group.members, index=row.group.index,
            task=row.group.task, prompt_tokens=prompt, tokens=np.array(row.prompt + row.tokens, dtype="<i4"), action_mask=mask,
            logprobs=logprobs, versions=versions, routes=routes, text=self.tokenizer.decode(row.tokens), finish=finish,
            temperature=row.group.sampling.temperature, engine=self.name, started_at=row.started_at, finished_at=time.time(),
        )
