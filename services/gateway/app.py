"""The gateway's HTTP: five routes of other people's protocols, a health and a metrics page.

Guarantees: a client that goes away, in the middle of a stream or while it waits, takes its sampling with it; a full engine is a 429 with Retry-After before
anything is said; a failure before the first token is a status, and after it an error event; every refusal has OpenAI's error object.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send

from driftline.messages.errors import DriftlineError
from driftline.services.gateway.answers import Answers
from driftline.services.gateway.client import EngineBusy, EngineClient, EngineFailed
from driftline.services.gateway.errors import BadRequest, error_object, status_of
from driftline.services.gateway.metrics import GatewayMetrics
from driftline.services.gateway.orders import Order, Route, read_order
from driftline.services.gateway.sampling import Choice, Delta, sampled

__all__ = ["Gateway"]

log = structlog.get_logger("gateway")

T = TypeVar("T")

BODY_BYTES = 64 * 1024 * 1024
GONE = 499
"""What the count of a request says whose client went away; nobody receives it."""


class Gateway:
    """`app` is the ASGI application. `api_key` "" lets everybody in; with one, requests need `Authorization: Bearer KEY`."""

    def __init__(self, client: EngineClient, *, api_key: str = "", body_bytes: int = BODY_BYTES) -> None:
        self._client, self._api_key, self._body_bytes = client, api_key, body_bytes
        self.metrics = GatewayMetrics()
        self.app = Starlette(
            routes=[
                Path("/inference/v1/generate", self._route(Route.GENERATE), methods=["POST"]),
                Path("/v1/completions", self._route(Route.COMPLETIONS), methods=["POST"]),
                Path("/v1/chat/completions", self._route(Route.CHAT), methods=["POST"]),
                Path("/v1/models", self._models, methods=["GET"]),
                Path("/v1/models/{name:path}", self._model, methods=["GET"]),
                Path("/health", self._health, methods=["GET"]),
                Path("/metrics", self._metrics, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _not_found, DriftlineError: _refused, Exception: _failed},
        )

    def _route(self, route: Route) -> Any:
        async def endpoint(request: Request) -> Response:
            began = time.monotonic()
            try:
                self._authorise(request)
                order = await self._order(route, request)
                response = await self._answer(order, request, began)
            except ClientDisconnect:
                return self._gone(route)
            except DriftlineError as error:
                response = _error(error)
            if not isinstance(response, _Events):  # a stream is counted when it ends
                self.metrics.requests.labels(route.value, str(response.status_code)).inc()
            return response

        return endpoint

    async def _order(self, route: Route, request: Request) -> Order:
        raw = bytearray()
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > self._body_bytes:
                raise BadRequest(f"longer than {self._body_bytes} bytes", field="body", value=len(raw), remedy="send less in a request", status=413)
        client = self._client
        headers = request.headers
        return await asyncio.to_thread(  # a long prompt takes its time to be tokenized
            read_order, route, bytes(raw), client.card, client.text, session=headers.get("x-session-id", ""), default_id=headers.get("x-request-id", ""))

    async def _answer(self, order: Order, request: Request, began: float) -> Response:
        if self._client.failure:
            raise _unhealthy(self._client)
        deltas = sampled(self._client, order)
        answers = Answers(order, self._client.text)
        if order.stream:
            first = await _or_gone(request, anext(deltas))
            if first is None:
                await deltas.aclose()
                raise ClientDisconnect
            self.metrics.first_s.observe(time.monotonic() - began)
            return _Events(self._events(order, answers, first, deltas, began))
        choices = [Choice() for _ in order.asks]
        whole = await _or_gone(request, self._collect(deltas, choices, began))
        if whole is None:
            raise ClientDisconnect
        self._count(order, choices, began)
        return JSONResponse(answers.whole(choices))

    async def _collect(self, deltas: AsyncGenerator[Delta, None], choices: list[Choice], began: float) -> bool:
        async with aclosing(deltas):
            heard = False
            async for delta in deltas:
                if not heard:
                    heard = True
                    self.metrics.first_s.observe(time.monotonic() - began)
                choices[delta.index].add(delta)
        return True

    async def _events(self, order: Order, answers: Answers, first: Delta, deltas: AsyncGenerator[Delta, None], began: float) -> AsyncGenerator[dict[str, Any] | str, None]:
        """The events of a stream that has begun: dictionaries, and the last word."""
        choices, status = [Choice() for _ in order.asks], str(GONE)
        try:
            async with aclosing(deltas):
                for opening in answers.opening():
                    yield opening
                delta: Delta | None = first
                while delta is not None:
                    choices[delta.index].add(delta)
                    event = answers.event(delta)
                    if event is not None:
                        yield event
                    delta = await anext(deltas, None)
            closing = answers.closing(choices)
            if closing is not None:
                yield closing
            status = "200"
            self._count(order, choices, began)
            yield "[DONE]"
        except DriftlineError as error:  # the status is sent: what remains is to say it
            status = str(status_of(error))
            log.warning("a stream ended early", request=order.id, cause=str(error))
            yield error_object(error)
        finally:
            self.metrics.requests.labels(order.route.value, status).inc()
            if status == str(GONE):
                self.metrics.cancelled.labels(order.route.value).inc()

    def _count(self, order: Order, choices: list[Choice], began: float) -> None:
        metrics = self.metrics
        metrics.whole_s.observe(time.monotonic() - began)
        metrics.prompt_tokens.inc(sum(map(len, order.prompts)))
        metrics.cached_tokens.inc(sum(choice.cached_tokens for choice in choices[:: order.n]))
        metrics.sampled_tokens.inc(sum(len(choice.tokens) for choice in choices))

    def _gone(self, route: Route) -> Response:
        self.metrics.requests.labels(route.value, str(GONE)).inc()
        self.metrics.cancelled.labels(route.value).inc()
        return Response(status_code=GONE)

    def _authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._api_key and not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise BadRequest("not the key", field="authorization", remedy="send Authorization: Bearer KEY", status=401, code="invalid_api_key")

    async def _models(self, request: Request) -> Response:
        self._authorise(request)
        return JSONResponse({"object": "list", "data": self._cards()})

    async def _model(self, request: Request) -> Response:
        self._authorise(request)
        name = request.path_params["name"]
        for card in self._cards():
            if card["id"] == name:
                return JSONResponse(card)
        raise BadRequest("no such model", field="model", value=name, remedy="GET /v1/models lists them", status=404, code="model_not_found")

    def _cards(self) -> list[dict[str, Any]]:
        card = self._client.card
        return [{"id": name, "object": "model", "created": card.created, "owned_by": "driftline", "root": card.name, "parent": None if name == card.name else card.name,
                 "max_model_len": card.context, "policy_version": card.version} for name in (card.name, *card.adapters)]

    async def _health(self, _: Request) -> Response:
        failure = self._client.failure
        return JSONResponse({"ok": not failure, "cause": failure or None, "version": self._client.card.version}, status_code=503 if failure else 200)

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.page(self._client.numbers()), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Events(Response):
    """A stream of server-sent events; when the client goes away, whatever makes them is closed there and then."""

    def __init__(self, events: AsyncGenerator[dict[str, Any] | str, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send(send), name="events")
        gone = asyncio.create_task(_disconnected(receive), name="disconnect")
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            ended = (await asyncio.gather(sending, gone, return_exceptions=True))[0]
            await self._events.aclose()
        if isinstance(ended, Exception) and not isinstance(ended, OSError):  # OSError: the client went away while it was being sent to
            raise ended

    async def _send(self, send: Send) -> None:
        async for event in self._events:
            text = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"), allow_nan=False)
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _or_gone(request: Request, work: Awaitable[T]) -> T | None:
    """What `work` returns, or None when the client went away first; `work` has ended either way."""
    working, gone = asyncio.ensure_future(work), asyncio.create_task(_disconnected(request.receive), name="disconnect")
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def _unhealthy(client: EngineClient) -> DriftlineError:
    return EngineFailed(client.failure, field="engine", remedy="start the server again")


def _error(error: DriftlineError) -> JSONResponse:
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, EngineBusy) else {}
    if status_of(error) >= 500:
        log.error("request failed", cause=str(error), exc_info=error)
    return JSONResponse(error_object(error), status_code=status_of(error), headers=headers)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, DriftlineError)
    return _error(error)


async def _not_found(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(BadRequest(error.detail, field="path", remedy="GET /v1/models, /health, /metrics; POST /v1/chat/completions, /v1/completions, /inference/v1/generate",
                             status=error.status_code))


async def _failed(_: Request, error: Exception) -> Response:
    log.error("request failed", exc_info=error)
    return JSONResponse(error_object(DriftlineError("the gateway failed")), status_code=500)
