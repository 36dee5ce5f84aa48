"""A sequence being sampled: what it is for, what it has sampled, and what it holds of the pool."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from driftline.messages.types import Finish, Group, Trajectory
from driftline.models.tokenizer import Tokenizer
from driftline.services.rollout.engine.request import Completion, Progress, Request
from driftline.services.rollout.engine.scheduler import Work
from driftline.services.rollout.prefix import CacheKey, Lease

__all__ = ["Job", "Row", "Span", "hit_spans", "spread"]


class Span(NamedTuple):
    """Tokens up to `end`, behind those of the span before, were written by `version`."""

    end: int
    version: int


def hit_spans(hit: int, versions: Sequence[int]) -> tuple[Span, ...]:
    """Of `hit` tokens that were cached only the versions are known. They grow, so the last has most."""
    if not hit:
        return ()
    known = sorted(versions)[-hit:]
    return (*(Span(i + 1, version) for i, version in enumerate(known[:-1])), Span(hit, known[-1]))


def spread(spans: Sequence[Span]) -> list[int]:
    """The version of every token."""
    out: list[int] = []
    for span in spans:
        out += [span.version] * (span.end - len(out))
    return out


@dataclass(eq=False)
class Row:
    """One member of a group, or a request: 12 bytes a sampled token, boxed numbers would be ten times that. `prompt` and `prompt_routes` (int16 [prompt,
    layers, k]) belong to all members of the group; `routes` are those of its own tokens that were fed, as bytes.

    `lease` is what it holds of the pool while it runs, filled with all of its tokens but the last. `cache_key` is what wrote that, `mixed` once that were
    several versions: `written` says who wrote the first of them, and each of the others was written by what sampled the token behind it. `hit` tokens of its
    prompt were there already. `pending`: tokens of the last verified window that its state does not have yet.
    """

    owner: Group | Request
    member: int
    key: int
    prompt: array[int]
    started_at: float
    ends: frozenset[int] = frozenset()
    serial: int = -1
    prompt_routes: np.ndarray | None = None
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("i"))
    routes: bytearray = field(default_factory=bytearray)
    lease: Lease | None = None
    cache_key: CacheKey | None = None
    hit: int = 0
    written: tuple[Span, ...] = ()
    pending: int = 0
    told: int = 0

    @property
    def group(self) -> Group:
        """Of a member."""
        assert isinstance(self.owner, Group)
        return self.owner

    @property
    def name(self) -> str:
        """The group's, or the request's id."""
        return self.owner.id if isinstance(self.owner, Request) else self.owner.group

    @property
    def holder(self) -> str:
        """Whose rows these are, where they are of several versions: a session's or nobody else's."""
        if isinstance(self.owner, Request):
            return f"session {self.owner.session}" if self.owner.session else f"request {self.owner.id}"
        return f"{self.owner.group}/{self.member}"

    @property
    def adapter(self) -> str:
        return self.owner.adapter if isinstance(self.owner, Request) else ""

    @property
    def first_draw(self) -> int:
        return self.owner.first_draw if isinstance(self.owner, Request) else 0

    @property
    def temperature(self) -> float:
        return self.owner.sampling.temperature

    @property
    def max_tokens(self) -> int:
        return self.owner.sampling.max_tokens

    @property
    def oldest_version(self) -> int:
        return self.versions[0]  # versions only grow

    @property
    def length(self) -> int:
        """Tokens that are computed while it runs: all but the last."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def finish(self) -> Finish | None:
        if self.tokens[-1] in self.ends:
            return Finish.STOP
        return Finish.LENGTH if len(self.tokens) >= self.max_tokens else None

    def history(self) -> array[int]:
        """What must be computed before the next token."""
        return self.prompt + self.tokens[:-1] if self.tokens else self.prompt

    def computed_routes(self) -> np.ndarray | None:
        """int16 [length, layers, k]."""
        if self.prompt_routes is None or not self.routes:
            return self.prompt_routes
        return np.concatenate([self.prompt_routes, np.frombuffer(self.routes, dtype=np.int16).reshape(-1, *self.prompt_routes.shape[1:])])

    def written_by(self) -> list[int]:
        """Of each computed token, the version that wrote its rows."""
        return [*spread(self.written), *self._since()]

    def cache_versions(self) -> tuple[int, ...]:
        """Who wrote what the last token attended to."""
        return tuple(sorted({*(span.version for span in self.written), *self._since()}))

    def _since(self) -> array[int]:
        """Token i is fed by what samples token i + 1."""
        return self.versions[(self.written[-1].end if self.written else 0) - len(self.prompt) + 1 :]

    def _routes(self) -> np.ndarray | None:
        """int16 [all tokens, layers, k]: the last was sampled and never fed, so it has no route, and -1 says so."""
        if self.prompt_routes is None:
            return None
        prompt = len(self.prompt)
        routes = np.full((prompt + len(self.tokens), *self.prompt_routes.shape[1:]), -1, dtype="<i2")
        routes[:prompt] = self.prompt_routes
        routes[prompt:-1] = np.frombuffer(self.routes, dtype=np.int16).reshape(-1, *routes.shape[1:])
        return routes

    def trajectory(self, finish: Finish, tokenizer: Tokenizer, engine: str) -> Trajectory:
        """Of a group's member."""
        group, prompt = self.group, len(self.prompt)
        total = prompt + len(self.tokens)
        mask = np.zeros(total, dtype=bool)
        mask[prompt:] = True
        logprobs = np.zeros(total, dtype="<f4")
        logprobs[prompt:] = self.logprobs
        versions = np.full(total, -1, dtype="<i4")
        versions[prompt:] = self.versions
        return Trajectory(
            run=group.run, group=group.group, member=self.member, members=group.members, index=group.index, task=group.task, prompt_tokens=prompt,
            tokens=np.array(self.prompt + self.tokens, dtype="<i4"), action_mask=mask, logprobs=logprobs, versions=versions, routes=self._routes(),
            text=tokenizer.decode(self.tokens), finish=finish, temperature=self.temperature, engine=engine, started_at=self.started_at,
            finished_at=time.time(),
        )

    def completion(self, finish: Finish) -> Completion:
        """Of a request."""
        return Completion(
            self.name, np.array(self.tokens, dtype=np.int32), np.array(self.logprobs, dtype=np.float32), np.array(self.versions, dtype=np.int32),
            self._routes(), finish, len(self.prompt), self.hit, self.cache_versions(),
        )

    def progress(self) -> Progress | None:
        """What it has not told yet."""
        if self.told == len(self.tokens):
            return None
        told, self.told = self.told, len(self.tokens)
        return Progress(self.name, self.tokens[told:].tolist(), self.logprobs[told:].tolist())


@dataclass(eq=False, kw_only=True)
class Job(Work):
    """Rows that go on behind the same tokens: a group's members behind their prompt, or one row behind all it has. `keys`: under which of them its tokens may
    be cached; `key`: what writes the rest; `written`: who wrote
    what was cached. `routes` int16 [tokens, layers, k]: those of its prompt, filled as it is computed, where they are recorded."""

    rows: list[Row]
    keys: tuple[CacheKey, ...] = ()
    key: CacheKey | None = None
    lease: Lease | None = None
    routes: np.ndarray | None = None
    written: tuple[Span, ...] = ()

    @property
    def begun(self) -> bool:
        """Whether its rows have tokens already."""
        return bool(self.rows[0].tokens)

    @property
    def name(self) -> str:
        return self.rows[0].name

    def again(self) -> Job:
        """Itself, from the beginning."""
        self.lease, self.key, self.routes, self.written = None, None, None, ()
        return self
