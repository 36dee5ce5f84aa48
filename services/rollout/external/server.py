"""What is asked of a server of another system, whichever it is.

Guarantees: an answer has as many log-probabilities as tokens, all of them finite, or it is refused; a server that does not answer is told apart from one that refuses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from driftline.messages.errors import DriftlineError, IntegrityError
from driftline.messages.types import Finish

__all__ = ["Http", "Sampled", "Server", "ServerRefused", "ServerUnavailable", "Wanted", "checked", "finish_of"]


class ServerUnavailable(DriftlineError, ConnectionError):
    """It does not answer, or says that it cannot now. As a ConnectionError it is the machine's doing, and no group's."""


class ServerRefused(DriftlineError):
    """It answers, and not with what was asked for. `status` is HTTP's."""

    def __init__(self, problem: str, *, field: str = "", value: object = None, remedy: str = "", status: int = 0) -> None:
        super().__init__(problem, field=field, value=value, remedy=remedy)
        self.status = status


@dataclass(frozen=True)
class Wanted:
    """Tokens to go on from. `adapter` "" is the base. `seed`: 63 bits."""

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    adapter: str = ""


@dataclass(frozen=True)
class Sampled:
    """What was sampled, the token that ended it included. ABORT: it was stopped from outside, and these are what there was by then. `version` is the server's own
    stamp of its weights, where it has one."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    cached_tokens: int = 0
    version: str | None = None


class Server(Protocol):
    """All but `sample` raise ServerRefused when the server did not do it."""

    name: str

    async def ready(self) -> str:
        """Wait for nothing; the base model's name. Raises ServerUnavailable."""
        ...

    async def sample(self, wanted: Wanted) -> Sampled: ...

    async def abort(self, id: str) -> None:
        """End a request early; no failure when it has ended."""
        ...

    async def load_adapter(self, name: str, directory: str) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def pause(self) -> None:
        """Abort everything and begin nothing until `resume`."""
        ...

    async def reload(self, directory: str, version: int) -> None:
        """Replace the weights by those of a checkpoint directory, and forget what was computed with the old ones. Only while paused."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class Http:
    """JSON over HTTP/1.1 to one address. Use it in one event loop."""

    def __init__(self, url: str, *, api_key: str = "", answer_s: float = 3600.0, connections: int = 1024) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=answer_s, sock_connect=10.0)
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str) -> Any:
        return await self._request("GET", path, None, {})

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, query: Mapping[str, str] | None = None) -> Any:
        """The answer's JSON, or its text, or None when it is empty."""
        return await self._request("POST", path, body, query or {})

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, connector=aiohttp.TCPConnector(limit=self._connections))
        try:
            async with self._session.request(method, self.url + path, json=body, params=query) as response:
                raw = await response.text()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerUnavailable(f"{type(error).__name__}: {error}", field="rollout.engine_url", value=self.url + path, remedy="is the server running there?") from error
        answer = _parsed(raw)
        if status in (429, 502, 503, 504):
            raise ServerUnavailable(f"answers {status}: {_said(answer)}", field="rollout.engine_url", value=self.url + path, remedy="it is busy or starting")
        if status >= 400:
            raise ServerRefused(f"answers {status}: {_said(answer)}", field="rollout.engine_url", value=self.url + path, status=status,
                                remedy="is the route switched on? see docs/interoperability.md" if status == 404 else "")
        return answer


def checked(tokens: Any, logprobs: Any, *, at: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and their log-probabilities, or IntegrityError."""
    if not isinstance(tokens, list) or not isinstance(logprobs, list) or len(tokens) != len(logprobs):
        raise IntegrityError("not one log-probability for each token", field=at, value=(_count(tokens), _count(logprobs)), remedy="is the server of a version that returns token ids?")
    for token, logprob in zip(tokens, logprobs, strict=True):
        whole = isinstance(token, int) and not isinstance(token, bool) and token >= 0
        real = isinstance(logprob, int | float) and not isinstance(logprob, bool) and math.isfinite(logprob) and -9999.0 < logprob <= 1e-4
        if not whole or not real:  # -9999 is what vLLM writes where it has none
            raise IntegrityError("not a token and its log-probability", field=at, value=(token, logprob), remedy="nothing can be trained from it")
    return tuple(tokens), tuple(min(float(logprob), 0.0) for logprob in logprobs)


def _count(found: Any) -> object:
    return len(found) if isinstance(found, list) else found


def _parsed(raw: str) -> Any:
    if not raw:
        return None
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def _said(answer: Any) -> str:
    """The sentence in an error, in the shapes there are."""
    if isinstance(answer, dict):
        inner = answer.get("error", answer.get("detail", answer.get("message", answer)))
        answer = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(answer)[:300]


def finish_of(reason: object, server: str) -> Finish:
    """Why a completion ended, in the words that both servers use. Raises IntegrityError for another."""
    match reason:
        case "stop":
            return Finish.STOP
        case "length":
            return Finish.LENGTH
        case "abort":
            return Finish.ABORT
        case _:
            raise IntegrityError("not a reason to end that is known here", field=f"{server}'s finish_reason", value=reason, remedy="stop, length or abort")
