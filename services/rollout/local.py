"""An engine of this process behind the gateway's EngineClient: a thread of its own steps it, and whoever asks hears of every token.

Guarantees: only that thread touches the engine; what is done between two steps (a cancellation, new weights) is done there, in the order asked; an ask that is left is
cancelled before the next step; a step that raises fails the asks it had, with its cause, and no later one, unless the machine is what failed. Memory: asks that the
engine has not taken yet are bounded in bytes, as are those that wait in it (its own `queue_mb`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from driftline.messages.errors import DriftlineError
from driftline.messages.types import Sampling
from driftline.models.tokenizer import Role, Tokenizer, Turn
from driftline.services.gateway.client import Ask, EngineBusy, EngineFailed, Message, ModelCard, Piece
from driftline.services.rollout.engine import Completion, Engine, QueueFull, Request
from driftline.services.rollout.quarantine import is_infrastructure
from driftline.services.rollout.randomness import member_key

__all__ = ["LocalEngine", "TokenizerText"]

log = structlog.get_logger("serve")

T = TypeVar("T")

ASK_BYTES = 512
"""Of an ask beside its tokens, which are 8 bytes each in a tuple."""


class TokenizerText:
    """A model's tokenizer as the gateway's Text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size, self.eos_ids = tokenizer.vocab_size, tokenizer.eos_ids

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self._tokenizer.encode_chat([Turn(Role(message.role), message.content) for message in messages])

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


@dataclass(eq=False)
class _Asked:
    """An ask, and where its pieces go."""

    ask: Ask
    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[Piece | DriftlineError] = field(default_factory=asyncio.Queue)
    sent: int = 0

    @property
    def nbytes(self) -> int:
        return 8 * len(self.ask.tokens) + ASK_BYTES


class LocalEngine:
    """`context`: the longest sequence served. Use it as an async context manager, or call `start` and `close`."""

    def __init__(self, engine: Engine, *, name: str, context: int, queue_bytes: int = 256 * 1024 * 1024, adapters: Sequence[str] = ()) -> None:
        self._engine, self._name, self._context, self._adapters = engine, name, context, tuple(adapters)
        self._created = int(time.time())
        self._text = TokenizerText(engine.tokenizer)
        self._queue_bytes, self._handed_bytes = queue_bytes, 0
        self._changed = threading.Condition()
        self._work: list[Callable[[], None]] = []
        self._asked: dict[str, _Asked] = {}  # of the engine's thread alone
        self._closing = False
        self._failure = ""
        self._steps = self._failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def __aenter__(self) -> LocalEngine:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """After the step that runs; what is asked for by then fails."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def card(self) -> ModelCard:
        return ModelCard(self._name, self._context, self._engine.version, self._adapters, self._created)

    @property
    def text(self) -> TokenizerText:
        return self._text

    @property
    def failure(self) -> str:
        return self._failure

    def numbers(self) -> Mapping[str, float]:
        engine = self._engine
        return {"active": engine.active, "waiting": engine.waiting, "tokens_sampled": engine.tokens_sampled, "prompt_tokens": engine.prompt_tokens,
                "version": engine.version, "steps": self._steps, "failed_steps": self._failed_steps, "handed_bytes": self._handed_bytes}

    async def sample(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        asked = _Asked(ask, asyncio.get_running_loop())
        self._hand_in(asked)
        ended = False
        try:
            while not ended:
                got = await asked.pieces.get()
                if isinstance(got, DriftlineError):
                    ended = True
                    raise got
                ended = got.finish is not None
                yield got
        finally:
            if not ended:
                self._do(lambda: self._cancel(asked))

    async def between_steps(self, work: Callable[[Engine], T]) -> T:
        """Run `work` with the engine while it stands still: new weights, say. Raises what it raises."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work(self._engine))
            except BaseException as error:
                done.set_exception(error)

        if not self._do(run):
            raise EngineFailed(self._failure or "closed", field="engine", remedy="start the server again")
        return await asyncio.wrap_future(done)

    def _hand_in(self, asked: _Asked) -> None:
        with self._changed:
            if self._handed_bytes + asked.nbytes > self._queue_bytes:
                raise EngineBusy("more is asked than the engine has taken", field="queue_mb", value=self._queue_bytes // 2**20, remedy="ask again later")
            self._handed_bytes += asked.nbytes
        if not self._do(lambda: self._submit(asked)):
            raise EngineFailed(self._failure or "closed", field="engine", remedy="start the server again")

    def _do(self, work: Callable[[], None]) -> bool:
        """Have it done by the engine's thread; False when that has ended."""
        with self._changed:
            if self._closing or self._failure:
                return False
            self._work.append(work)
            self._changed.notify()
            return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._work or self._closing) and self._engine.idle:
                    self._changed.wait()
                if self._closing:
                    break
                work, self._work = self._work, []
            try:
                for each in work:
                    each()
                if not self._engine.idle:
                    self._engine.step()
                    self._steps += 1
                self._tell()
            except Exception as error:
                self._failed(error)
                if self._failure:
                    break
        with self._changed:
            work, self._work, self._closing = self._work, [], True
        for each in work:  # who asked is told, and who waits for something between steps has it
            each()
        self._fail_all(EngineFailed(self._failure or "the server is closing", field="engine"))

    def _submit(self, asked: _Asked) -> None:
        ask = asked.ask
        with self._changed:
            self._handed_bytes -= asked.nbytes
        stop_ids = ask.stop_ids if ask.ignore_eos else ask.stop_ids.union(self._engine.tokenizer.eos_ids)
        request = Request(ask.id, ask.tokens, Sampling(temperature=ask.temperature, max_tokens=ask.max_tokens), member_key(ask.seed, "serve", ask.draw),
                          adapter=ask.adapter, session=ask.session, priority=-ask.priority, stop_ids=tuple(stop_ids))  # there a higher one goes first
        try:
            if ask.id in self._asked:
                raise DriftlineError("is being sampled already", field="request_id", value=ask.id, remedy="give every request an id of its own, or none")
            self._engine.submit_request(request)
        except QueueFull as error:
            self._send({asked: EngineBusy(error.problem, field=error.field, value=error.value, remedy=error.remedy)})
        except DriftlineError as error:
            self._send({asked: error})
        else:
            self._asked[ask.id] = asked

    def _cancel(self, asked: _Asked) -> None:
        if self._asked.get(asked.ask.id) is asked:
            del self._asked[asked.ask.id]
            self._engine.cancel(asked.ask.id)

    def _tell(self) -> None:
        """Whoever has a token, or an end, hears of it: the tokens first, as a completion that was taken is forgotten."""
        news: dict[_Asked, Piece | DriftlineError] = {}
        version = self._engine.version
        for name, tokens, logprobs in self._engine.take_progress():
            asked = self._asked.get(name)
            if asked is not None:
                asked.sent += len(tokens)
                news[asked] = Piece(tuple(tokens), tuple(logprobs), (version,) * len(tokens))
        for done in self._engine.take_completions():
            asked = self._asked.pop(done.id, None)
            if asked is not None:
                first = asked.sent - len(piece.tokens) if isinstance(piece := news.get(asked), Piece) else asked.sent
                news[asked] = _last(done, first)
        self._send(news)

    def _failed(self, error: Exception) -> None:
        log.error("a step failed", cause=f"{type(error).__name__}: {error}", asks=len(self._asked), exc_info=error)
        self._failed_steps += 1
        cause = EngineFailed(f"a step failed: {type(error).__name__}: {error}", field="engine")
        if is_infrastructure(error):
            self._failure = cause.problem
        else:
            self._engine.forget()
        self._fail_all(cause)

    def _fail_all(self, cause: EngineFailed) -> None:
        asked, self._asked = self._asked, {}
        self._send(dict.fromkeys(asked.values(), cause))

    @staticmethod
    def _send(news: Mapping[_Asked, Piece | DriftlineError]) -> None:
        """One call into each event loop, however many pieces."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Asked, Piece | DriftlineError]]] = {}
        for asked, piece in news.items():
            by_loop.setdefault(asked.loop, []).append((asked, piece))
        for loop, pieces in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, pieces)
            except RuntimeError:  # the loop is closed: nobody listens any more
                log.debug("nobody listens", asks=len(pieces))


def _put(pieces: Sequence[tuple[_Asked, Piece | DriftlineError]]) -> None:
    for asked, piece in pieces:
        asked.pieces.put_nowait(piece)


def _last(done: Completion, first: int) -> Piece:
    """A completion from its token `first` on."""
    return Piece(tuple(done.tokens[first:].tolist()), tuple(done.logprobs[first:].tolist()), tuple(done.versions[first:].tolist()), done.finish, done.cached_tokens)
