"""A server of another system as the rollout service's engine: groups in, trajectories out, versions handed over as files.

    a member        a chain of requests, each sampled under one version: what an update aborts goes on from its tokens under the next
    adapters        a version is an adapter of its own name; what runs goes on with the one it began with, unless INTERRUPT aborts it
    checkpoints     the server aborts everything, every request comes back with what it had, then the weights change, then the chains go on

Guarantees: every token's version is that of the weights that drew it, compared with the server's own stamp where it has one; a completion ends at one of the model's end
tokens or at its length; while an update is midway, or after it failed, nothing is sampled. A server that is away is waited for `outage_s`, then the failure is
the machine's. What it cannot keep of our own engine: draws by our counters, routes, and log-probabilities of our kernels (docs/interoperability.md).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import queue
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import structlog
import torch
import xxhash

from driftline.messages.errors import ConfigError, DriftlineError, IntegrityError
from driftline.messages.types import Finish, Group, Trajectory
from driftline.models.tokenizer import Tokenizer
from driftline.policy_store.tensor import Bytes1D, Shard, State
from driftline.services.rollout.conversation import conversation
from driftline.services.rollout.external.files import HandOver
from driftline.services.rollout.external.server import (
    Sampled,
    Server,
    ServerRefused,
    ServerUnavailable,
    Wanted,
)
from driftline.services.rollout.randomness import member_key
from driftline.services.rollout.weights import Staged

__all__ = ["ExternalEngine", "FileWeights", "Finished"]

log = structlog.get_logger("external")

T = TypeVar("T")

STEP_S = 0.02
RETRY_S = 0.5
ABORTED_S = 60.0
"""How long the requests of a paused server may take to come back."""

CLOSING_S = 0.5
ABORTS = 8
"""Times a request may come back aborted without an update of ours."""


@dataclass(eq=False)
class _Row:
    """One member being sampled. Only the event loop's thread touches it."""

    group: Group
    member: int
    key: int
    prompt: array[int]
    started_at: float
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("i"))
    asking: str = ""  # the request that runs
    asked: int = 0
    task: asyncio.Task[None] | None = None


class Finished(NamedTuple):
    """A member that ended, or the failure that it ended with."""

    row: _Row
    finish: Finish
    error: Exception | None = None


class _Serving(NamedTuple):
    version: int
    adapter: str


class ExternalEngine:
    """`max_batch` bounds the requests in flight, `context` a sequence, `vocab` a token; `temperatures` are those
    that will be asked for (`check`). Close it at the end."""

    record_routes = False

    def __init__(
        self, server: Server, files: HandOver, *, tokenizer: Tokenizer, context: int, vocab: int, version: int = -1, max_batch: int = 64, name: str = "engine",
        outage_s: float = 60.0, step_s: float = STEP_S, temperatures: Sequence[float] = (),
    ) -> None:
        self._server, self._files, self.tokenizer, self._context, self._vocab = server, files, tokenizer, context, vocab
        self.version, self.max_batch, self.name = version, max_batch, name
        self._outage_s, self._step_s, self._temperatures = outage_s, step_s, tuple(temperatures)
        self._ends = frozenset(tokenizer.eos_ids)
        self._nonce = secrets.token_hex(3)  # an adapter of an earlier life may still lie in the server's cache
        self.tokens_sampled = self.prompt_tokens = self.cached_tokens = 0
        self._serving = _Serving(version, "")
        self._loaded: dict[int, str] = {}
        self._torn, self._known, self._closed = True, False, False
        self._checked: set[float] = set()
        self._waiting: deque[_Row] = deque()
        self._rows: dict[_Row, _Serving] = {}
        self._done: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._back = asyncio.Event()  # no request is in flight
        self._in_flight = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name} http", daemon=True)
        self._thread.start()

    # -- what the rollout service asks, from its worker thread -------------------------------------------------------------------------

    @property
    def active(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        return not self._rows and not self._waiting and self._done.empty()

    def submit(self, group: Group, members: Sequence[int] | None = None) -> None:
        """Queue the given members of a group (None: all it asks for). DriftlineError when its prompt cannot be sampled from."""
        prompt = array("i", self.tokenizer.encode_chat(conversation(group.task)))
        room = self._context - group.sampling.max_tokens
        if len(prompt) > room:
            raise DriftlineError(f"a prompt of {len(prompt)} tokens", field=f"task {group.task.id}", value=group.task.prompt,
                                 remedy=f"the model leaves {room} beside sampling.max_tokens = {group.sampling.max_tokens}")
        wanted = group.to_sample if members is None else tuple(members)
        rows = [_Row(group, member, member_key(group.seed, group.group, member), prompt, time.time()) for member in wanted]
        self._call(self._queue(rows))

    def step(self) -> list[Trajectory]:
        """Begin what may run; wait a moment for what ends; return it. Raises a member's failure: afterwards, `forget`."""
        if self._torn:
            raise DriftlineError("an update failed midway", field="weights", value=f"neither version {self.version} nor the next", remedy="load a whole version")
        self._call(self._begin())
        found: list[Finished] = []
        try:
            found.append(self._done.get(timeout=self._step_s))
            while True:
                found.append(self._done.get_nowait())
        except queue.Empty:
            pass
        failed = next((done.error for done in found if done.error is not None), None)
        if failed is not None:
            for done in found:  # what ended well beside it is not lost
                if done.error is None:
                    self._done.put(done)
            raise failed
        return [self._trajectory(done.row, done.finish) for done in found]

    def cancel(self, group: str) -> int:
        """Forget a group's members, running or waiting; returns how many there were."""
        return self._gone(lambda row: row.group.group == group)

    def forget(self) -> None:
        """Drop everything, running, waiting or ended."""
        self._gone(lambda row: True)

    def _gone(self, which: Callable[[_Row], bool]) -> int:
        dropped = len(self._call(self._drop(which)))
        ended = [self._done.get_nowait() for _ in range(self._done.qsize())]
        for done in ended:
            if which(done.row):
                dropped += 1
            else:
                self._done.put(done)
        return dropped

    def overdue(self, oldest: int) -> list[str]:
        """The groups with a running member whose oldest token is of a version before `oldest`."""
        return list(dict.fromkeys(row.group.group for row in tuple(self._rows) if row.versions and row.versions[0] < oldest))

    def give_up(self, group: str) -> list[Trajectory]:
        """Forget a group's members; those that have a token are returned as they are, aborted."""
        dropped = self._call(self._drop(lambda row: row.group.group == group))
        return [self._trajectory(row, Finish.ABORT) for row in dropped if row.tokens]

    def load(self, version: int, state: Mapping[str, torch.Tensor], *, recompute: bool = False) -> None:
        """Hand a version over, and wait until the server has it. When that fails nothing is sampled until a later `load` went well."""
        if version in self._loaded or (version == self.version and not self._torn):
            raise IntegrityError("is served already", field="version", value=version, remedy="versions are handed over once")
        if not self._known:
            log.info("server found", server=self._server.name, model=self._call(self._patiently(self._server.ready)))
            self._known = True
        directory = self._files.write(version, state)
        torn, self._torn = self._torn, True
        try:
            if self._files.adapters:
                self._call(self._load_adapter(version, str(directory)))
            else:
                self._call(self._reload(version, str(directory)))
        except ServerRefused:
            if self._files.adapters:
                self._torn = torn  # nothing has changed
            raise
        self.version, self._torn = version, False
        self._files.keep({version, *self._loaded})
        for temperature in self._temperatures:
            self.check(temperature)
        if recompute:
            self.recompute()

    def adopt(self, version: int, write: Callable[[], None]) -> None:
        raise DriftlineError("weights of another server are not written in place", field="version", value=version, remedy="load the version: FileWeights always asks for it")

    def recompute(self) -> None:
        """Have what runs go on under the weights there are: with adapters, each request of an older one is aborted and continued."""
        self._call(self._abort(lambda serving: serving.version != self.version))

    def close(self) -> None:
        """From any thread; a call that another thread waits in ends with ServerUnavailable."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def check(self, temperature: float) -> None:
        """Hold the server's log-probabilities to the distribution it samples from, once for a temperature other than 1. ConfigError when they are the model's own.

        Far above any use, at temperature 100, the distribution is nearly uniform over a vocabulary of V and a token's log-probability -ln V; the model's own of such tokens
        is several nats below.
        """
        if temperature == 1.0 or temperature in self._checked:
            return
        self._call(self._probe())
        self._checked.add(temperature)

    # -- in the event loop --------------------------------------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise self._gone_away()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(CLOSING_S)
            except concurrent.futures.CancelledError:
                raise self._gone_away() from None
            except TimeoutError:
                if future.done():
                    raise  # the work's own
                if not self._thread.is_alive():  # it came behind the last of what was ended
                    raise self._gone_away() from None

    def _gone_away(self) -> ServerUnavailable:
        return ServerUnavailable("the engine is closed", field="rollout.engine_url", value=self._server.name, remedy="open another")

    async def _end(self) -> None:
        """Cancel everything, what is called for by other threads too."""
        await self._drop(lambda row: True)
        own = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not own]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._server.close()

    async def _queue(self, rows: list[_Row]) -> None:
        self._waiting.extend(rows)

    async def _begin(self) -> None:
        while self._waiting and len(self._rows) < self.max_batch:
            row = self._waiting.popleft()
            self._rows[row] = self._serving
            row.task = asyncio.create_task(self._sample(row), name=f"{row.group.group}/{row.member}")

    async def _sample(self, row: _Row) -> None:
        finish, error = Finish.ABORT, None
        try:
            finish = await self._chain(row)
        except Exception as failure:  # raised again by `step`
            error = failure
        self._done.put(Finished(row, finish, error))  # before it stops being active: an engine with a result is not idle
        self._rows.pop(row, None)

    async def _chain(self, row: _Row) -> Finish:
        limit, aborts = row.group.sampling.max_tokens, 0
        while True:
            await self._open.wait()
            serving = self._rows[row] = self._serving
            answer = await self._ask(row, serving, limit - len(row.tokens))
            self._take(row, answer, serving)
            if answer.finish is not Finish.ABORT:
                return self._ended(row, answer.finish, limit)
            if len(row.tokens) >= limit or (row.tokens and row.tokens[-1] in self._ends):
                return self._ended(row, Finish.LENGTH if len(row.tokens) >= limit and row.tokens[-1] not in self._ends else Finish.STOP, limit)
            aborts = aborts + 1 if serving == self._serving and self._open.is_set() else 0
            if aborts > ABORTS:
                raise ServerUnavailable(f"aborted a request {aborts} times", field="rollout.engine_url", value=self._server.name, remedy="who else stops its requests?")

    async def _ask(self, row: _Row, serving: _Serving, room: int) -> Sampled:
        """One request, sent again while the server is away. A failed one has sampled nothing that is kept."""
        until = time.monotonic() + self._outage_s
        while True:
            row.asked += 1
            row.asking = f"{self.name}-{self._nonce}-{row.group.group}-{row.member}-{row.asked}"
            seed = xxhash.xxh3_64_intdigest(f"{row.key}/{len(row.tokens)}".encode()) >> 1
            wanted = Wanted(row.asking, (*row.prompt, *row.tokens), room, row.group.sampling.temperature, seed, serving.adapter)
            self._in_flight += 1
            try:
                return await self._server.sample(wanted)
            except ServerUnavailable as error:
                if time.monotonic() > until:
                    raise
                log.warning("the server is away, asking again", id=row.asking, cause=str(error))
            finally:
                row.asking = ""
                self._in_flight -= 1
                if not self._in_flight:
                    self._back.set()
            await asyncio.sleep(RETRY_S)
            if not self._open.is_set() or serving != self._serving:
                return Sampled((), (), Finish.ABORT)  # the weights change meanwhile: under the new ones

    def _take(self, row: _Row, answer: Sampled, serving: _Serving) -> None:
        if answer.version is not None and not serving.adapter and answer.version != str(serving.version):
            raise IntegrityError(f"the server samples with version {answer.version}", field="version", value=serving.version,
                                 remedy="does another run hand over to the same server?")
        wrong = next((token for token in answer.tokens if token >= self._vocab), None)
        if wrong is not None:
            raise IntegrityError("not a token of this model", field="token", value=wrong, remedy="the server serves another model")
        row.tokens.extend(answer.tokens)
        row.logprobs.extend(answer.logprobs)
        row.versions.extend([serving.version] * len(answer.tokens))
        self.tokens_sampled += len(answer.tokens)
        self.prompt_tokens += len(row.prompt) + len(row.tokens) - len(answer.tokens) - answer.cached_tokens
        self.cached_tokens += answer.cached_tokens

    def _ended(self, row: _Row, finish: Finish, limit: int) -> Finish:
        if finish is Finish.STOP and (not row.tokens or row.tokens[-1] not in self._ends):
            raise IntegrityError("a completion stopped without an end token", field=f"group {row.group.group}, member {row.member}",
                                 value=row.tokens[-1] if row.tokens else None, remedy=f"the server must end at {sorted(self._ends)} alone, and return the token that ended it")
        if finish is Finish.LENGTH and len(row.tokens) != limit:
            raise IntegrityError("a completion ended for its length and has another", field=f"group {row.group.group}, member {row.member}", value=len(row.tokens),
                                 remedy=f"sampling.max_tokens = {limit}: is the server's context shorter than the model's?")
        return finish

    async def _drop(self, which: Callable[[_Row], bool]) -> list[_Row]:
        dropped = [row for row in (*self._rows, *self._waiting) if which(row)]
        self._waiting = deque(row for row in self._waiting if not which(row))
        running = [row for row in dropped if row in self._rows]
        aborted = [row.asking for row in running if row.asking]
        for row in running:
            if row.task is not None:
                row.task.cancel()
            self._rows.pop(row, None)
        await asyncio.gather(*(row.task for row in running if row.task is not None), return_exceptions=True)
        await self._told(aborted)
        return dropped

    async def _told(self, ids: Sequence[str]) -> None:
        for result in await asyncio.gather(*(self._server.abort(name) for name in ids), return_exceptions=True):
            if isinstance(result, BaseException):
                log.warning("a request was not aborted", cause=str(result))

    async def _abort(self, which: Callable[[_Serving], bool]) -> None:
        """End requests of theirs early and have their members go on."""
        for row, serving in list(self._rows.items()):
            if row.asking and which(serving) and row.task is not None:
                asking = row.asking
                row.task.cancel()
                await asyncio.gather(row.task, return_exceptions=True)
                await self._told([asking])
                if row in self._rows:  # what the request had is lost: it was never answered
                    row.task = asyncio.create_task(self._sample(row), name=f"{row.group.group}/{row.member}")

    async def _load_adapter(self, version: int, directory: str) -> None:
        name = f"{self.name}-{self._nonce}-v{version}"
        await self._patiently(lambda: self._server.load_adapter(name, directory))
        self._loaded[version] = name
        self._serving = _Serving(version, name)
        self._open.set()
        used = {serving.version for serving in self._rows.values()} | {version}
        for old in [v for v in self._loaded if v not in used]:
            try:
                await self._server.unload_adapter(self._loaded[old])
            except DriftlineError as error:  # it takes memory there, and is never asked for again
                log.warning("an old adapter stays loaded", version=old, cause=str(error))
            del self._loaded[old]

    async def _reload(self, version: int, directory: str) -> None:
        self._open.clear()
        began = time.monotonic()
        await self._patiently(self._server.pause)
        await self._all_back()
        await self._patiently(lambda: self._server.reload(directory, version))
        await self._patiently(self._server.resume)
        self._serving = _Serving(version, "")
        self._open.set()
        log.info("weights handed over", server=self._server.name, version=version, pause_s=round(time.monotonic() - began, 3))

    async def _all_back(self) -> None:
        try:
            async with asyncio.timeout(ABORTED_S):
                while self._in_flight:
                    self._back.clear()
                    await self._back.wait()
        except TimeoutError:
            raise ServerUnavailable(f"{self._in_flight} requests did not come back from a paused server", field="rollout.engine_url", value=self._server.name,
                                    remedy="it must abort what runs when it is paused") from None

    async def _patiently(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        until = time.monotonic() + self._outage_s
        while True:
            try:
                return await work()
            except ServerUnavailable as error:
                if time.monotonic() > until:
                    raise
                log.warning("the server is away, asking again", cause=str(error))
            await asyncio.sleep(RETRY_S)

    async def _probe(self) -> None:
        prompt = tuple(self.tokenizer.encode_prompt("?"))
        answer = await self._server.sample(Wanted(f"{self.name}-{self._nonce}-probe", prompt, 16, 100.0, 1, self._serving.adapter))
        mean, uniform = sum(answer.logprobs) / max(len(answer.logprobs), 1), -math.log(self._vocab)
        if abs(mean - uniform) > 1.0:
            raise ConfigError(f"at temperature 100 the server's log-probabilities are {mean:.2f} on average, those of the sampling distribution about {uniform:.2f}",
                              field="sampling.temperature", value="not 1", remedy="vLLM: start it with --logprobs-mode processed_logprobs; or sample at temperature 1")

    def _trajectory(self, row: _Row, finish: Finish) -> Trajectory:
        prompt, sampled = len(row.prompt), len(row.tokens)
        mask = np.zeros(prompt + sampled, dtype=bool)
        mask[prompt:] = True
        logprobs = np.zeros(prompt + sampled, dtype="<f4")
        logprobs[prompt:] = row.logprobs
        versions = np.full(prompt + sampled, -1, dtype="<i4")
        versions[prompt:] = row.versions
        return Trajectory(
            run=row.group.run, group=row.group.group, member=row.member, members=row.group.members, index=row.group.index, task=row.group.task,
            prompt_tokens=prompt, tokens=np.array(row.prompt + row.tokens, dtype="<i4"), action_mask=mask, logprobs=logprobs, versions=versions, routes=None,
            text=self.tokenizer.decode(row.tokens), finish=finish, temperature=row.group.sampling.temperature, engine=self.name,
            started_at=row.started_at, finished_at=time.time(),
        )


class FileWeights:
    """In the place of EngineWeights: nothing is carried over piece by piece, every version is loaded whole."""

    def seen(self, shard: Shard, dtype: str, before: Bytes1D | None, after: Bytes1D) -> None:
        """Nothing to keep."""

    def afresh(self) -> None:
        """Nothing to keep."""

    def stage(self, state: State) -> Staged:
        return Staged(reload=True)

    def apply(self, staged: Staged) -> None:
        raise DriftlineError("nothing is staged for another server", field="weights", value=staged.changed, remedy="load the version")
