"""One connection to the broker whose every wait ends: with an answer, on loss of the connection, or at its deadline.

What nats-py leaves open is closed here. Its callbacks never raise (an exception in `error_cb` leaves a connection that looks
alive and reads nothing). A watchdog measures round trips and forces a reconnect when two in a row fail. Reconnects are
unlimited; a connection that nats-py nevertheless closes for good is a fatal state, raised by every later call. A denied
subject fails its callers at once, where the client would let them time out. Requests in flight when the connection is lost
fail at once, so that a retry (under the same message id) starts as soon as the broker is back. Replies come through inboxes of
our own, so cancelling a caller never disturbs another, and nothing is delivered to no one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Self

import nats.aio.client
import nats.errors
import structlog
from nats.aio.msg import Msg

from driftline.messages.credentials import Credentials, redacted
from driftline.messages.errors import BrokerDenied, BrokerUnavailable, DriftlineError

__all__ = ["Connection", "ConnectionLost", "Credentials", "Inbox", "NoResponders", "RequestTimeout"]

log = structlog.get_logger(__name__)

PENDING_BYTES: Final = 64 * 1024 * 1024
INBOX_BYTES: Final = 256 * 1024 * 1024
PING_INTERVAL_S: Final = 10
WATCHDOG_S: Final = 2.0
STUCK_RECONNECT_S: Final = 10.0
_DENIED = re.compile(r"permissions violation for (publish|subscription) to \"?([^\" ]+)", re.IGNORECASE)
# The client does not tell its stream that TLS is under it, and asyncio complains of that whenever a connection ends.
logging.getLogger("asyncio").addFilter(lambda record: "eof_received() has no effect" not in str(record.msg))
_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})


class RequestTimeout(BrokerUnavailable):
    """No answer to this attempt; the caller may try again within its own deadline."""


class ConnectionLost(RequestTimeout):
    """The connection went away with the request in flight: it may or may not have been carried out."""


class NoResponders(RequestTimeout):
    """Nobody listens on the subject: the stream or consumer does not exist, or JetStream is still starting."""


class Inbox:
    """A private subject and its queue. `get` raises what killed the connection, or the denial of a subject it asked on."""

    def __init__(self, connection: Connection, subject: str) -> None:
        self.subject = subject
        self.asked: set[str] = set()
        self._connection = connection
        self._queue: asyncio.Queue[Msg | DriftlineError] = asyncio.Queue()
        self._subscription: Any = None

    async def open(self) -> Self:
        self._subscription = await self._connection.client.subscribe(
            self.subject, cb=self._receive, pending_bytes_limit=INBOX_BYTES
        )
        return self

    async def _receive(self, message: Msg) -> None:
        # Bounded by what was asked for: an inbox only ever receives the answer to its own pull requests.
        self._queue.put_nowait(message)

    def fail(self, error: DriftlineError) -> None:
        self._queue.put_nowait(error)

    async def get(self, timeout_s: float) -> Msg | None:
        """The next message, or None after `timeout_s`."""
        if self._queue.empty():
            try:
                async with asyncio.timeout(max(timeout_s, 0.0)):
                    item = await self._queue.get()
            except TimeoutError:
                return None
        else:
            item = self._queue.get_nowait()
        if isinstance(item, DriftlineError):
            raise item
        return item

    def take(self) -> list[Msg]:
        """Everything already received."""
        taken = []
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if not isinstance(item, DriftlineError):
                taken.append(item)
        return taken

    async def close(self) -> None:
        self._connection.forget(self)
        if self._subscription is None:
            return
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._subscription.unsubscribe()


class Connection:
    """See the module. `epoch` grows each time the connection is lost, so a reader knows that deliveries may be missing."""

    def __init__(self, url: str, name: str, credentials: Credentials) -> None:
        self.url = redacted(url)  # what logs and errors may show
        self._address = url
        self.name = name
        self.client = nats.aio.client.Client()
        self.epoch = 0
        self.last_error = ""
        self._credentials = credentials
        self._connected = asyncio.Event()
        self._refused: asyncio.Future[DriftlineError] = asyncio.get_running_loop().create_future()
        self._fatal: DriftlineError | None = None
        self._closing = False
        self._inboxes: set[Inbox] = set()
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}
        self._reply_prefix = ""
        self._token = 0
        self._watchdog: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, url: str, *, name: str, timeout_s: float, credentials: Credentials) -> Self:
        """Connect within `timeout_s`. Refused credentials fail at once; an absent broker is waited for until the deadline."""
        connection = cls(url, name, credentials)
        await connection._connect(timeout_s)
        return connection

    async def _connect(self, timeout_s: float) -> None:
        c = self._credentials
        more: dict[str, Any] = {k: v for k in ("user", "password", "token", "tls") if (v := getattr(c, k)) is not None}
        if c.tls is not None:
            # The client would otherwise believe a plaintext greeting that asks for no TLS, and send the password in the clear.
            more["tls_handshake_first"] = True
        attempt = asyncio.ensure_future(
            self.client.connect(
                self._address,
                name=self.name,
                error_cb=_survived(self._on_error),
                disconnected_cb=_survived(self._on_disconnected),
                reconnected_cb=_survived(self._on_reconnected),
                closed_cb=_survived(self._on_closed),
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.1,  # type: ignore[arg-type]
                connect_timeout=2,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=2,
                pending_size=PENDING_BYTES,
                flush_timeout=5.0,
                drain_timeout=5,
                inbox_prefix=c.inbox_prefix,
                **more,
            )
        )
        waiting: set[asyncio.Future[Any]] = {attempt, self._refused}
        try:
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._refused.done():
                raise self._refused.result()
            if not attempt.done():
                raise BrokerUnavailable(
                    f"no broker answered within {timeout_s:g} s ({self.last_error or 'no answer'})", field="broker.url",
                    value=self.url, remedy="start nats-server there, or correct the address",
                )  # fmt: skip
            try:
                attempt.result()
            except (nats.errors.Error, OSError, ValueError, TypeError) as error:
                raise BrokerUnavailable(str(error) or type(error).__name__, field="broker.url", value=self.url) from error
        except BaseException:
            await self._abandon(attempt)
            raise
        self._connected.set()
        self._reply_prefix = self.client.new_inbox()
        await self.client.subscribe(f"{self._reply_prefix}.*", cb=self._on_reply, pending_bytes_limit=INBOX_BYTES)
        self._watchdog = asyncio.create_task(self._watch(), name=f"watchdog {self.name}")
        self._watchdog.add_done_callback(self._on_watchdog_done)

    async def _abandon(self, attempt: asyncio.Future[None]) -> None:
        self._closing = True
        attempt.cancel()
        await asyncio.wait({attempt}, timeout=1.0)
        if attempt.done() and not attempt.cancelled():
            attempt.exception()
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError, AssertionError):
            async with asyncio.timeout(1.0):
                await self.client.close()

    @property
    def connected(self) -> bool:
        return self._fatal is None and self._connected.is_set() and self.client.is_connected

    @property
    def _was_connected(self) -> bool:
        return self._connected.is_set() or self.epoch > 0

    @property
    def max_payload(self) -> int:
        return self.client.max_payload

    def check(self) -> None:
        """Raise the fatal error, if there is one."""
        if self._fatal is not None:
            raise self._fatal
        if self._closing:
            raise BrokerUnavailable("this bus is closed", field="bus", value=self.name)

    async def wait_connected(self, timeout_s: float) -> None:
        """Return when connected; ConnectionLost after `timeout_s`."""
        self.check()
        if self.connected:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
        except TimeoutError:
            raise ConnectionLost(
                f"no connection for {timeout_s:.3g} s ({self.last_error or 'no answer'})", field="broker.url", value=self.url
            ) from None
        self.check()

    async def request(
        self, subject: str, payload: bytes = b"", *, headers: Mapping[str, str] | None = None, timeout_s: float
    ) -> Msg:
        """One attempt: the answer, or RequestTimeout, ConnectionLost, NoResponders or BrokerDenied."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await self.wait_connected(timeout_s)
        self._token += 1
        token = str(self._token)
        future: asyncio.Future[Msg] = loop.create_future()
        self._waiting[token] = (subject, future)
        try:
            async with asyncio.timeout_at(deadline):
                await self._send(subject, payload, reply=f"{self._reply_prefix}.{token}", headers=headers)
                answer = await future
        except TimeoutError:
            raise RequestTimeout(f"no answer in {timeout_s:.3g} s", field="request", value=subject) from None
        finally:
            del self._waiting[token]
            if future.done() and not future.cancelled():
                future.exception()  # retrieved: a denial may arrive after the deadline
        if answer.headers and answer.headers.get("Status") == "503":
            raise NoResponders("nobody answers on this subject", field="request", value=subject)
        return answer

    async def api(self, verb: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        """One JetStream API call; the answer may hold an `error`."""
        payload = json.dumps(body).encode() if body is not None else b""
        answer = await self.request(f"$JS.API.{verb}", payload, timeout_s=timeout_s)
        parsed = json.loads(answer.data)
        return parsed if isinstance(parsed, dict) else {}

    async def ask(self, inbox: Inbox, subject: str, payload: bytes) -> None:
        """Send a request whose answers go to `inbox`."""
        inbox.asked.add(subject.lower())
        await self._send(subject, payload, reply=inbox.subject)

    async def tell(self, subject: str, payload: bytes = b"") -> None:
        """Send without an answer, best effort."""
        with contextlib.suppress(BrokerUnavailable):
            await self._send(subject, payload)

    async def inbox(self) -> Inbox:
        self.check()
        inbox = Inbox(self, self.client.new_inbox())
        self._inboxes.add(inbox)
        try:
            return await inbox.open()
        except (nats.errors.Error, OSError) as error:
            self._inboxes.discard(inbox)
            raise ConnectionLost(str(error), field="broker.url", value=self.url) from error

    def forget(self, inbox: Inbox) -> None:
        self._inboxes.discard(inbox)

    async def rtt(self, timeout_s: float) -> float:
        """Round trip in seconds; raises BrokerUnavailable.

        Not `client.rtt`: at its timeout it cancels a future that the read loop still completes when the pong does come,
        which ends the read loop and leaves the very zombie this is to find.
        """
        self.check()
        loop = asyncio.get_running_loop()
        asked = loop.time()
        pong: asyncio.Future[bool] = loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self.client._send_ping(pong)
            await asyncio.wait({pong}, timeout=timeout_s - (loop.time() - asked))
        except (TimeoutError, nats.errors.Error, OSError, AttributeError, AssertionError, RuntimeError) as error:
            # RuntimeError: what uvloop raises for a write to a socket that has just been lost.
            raise RequestTimeout(f"no pong in {timeout_s:g} s", field="broker.url", value=self.url) from error
        if not pong.done():
            raise RequestTimeout(f"no pong in {timeout_s:g} s", field="broker.url", value=self.url)
        return loop.time() - asked

    async def close(self, timeout_s: float = 5.0) -> None:
        """Flush what was sent (acknowledgements among it), then drain and disconnect. Never raises."""
        if self._closing:
            return
        self._closing = True
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.wait({self._watchdog})
        try:
            async with asyncio.timeout(timeout_s):
                if self.client.is_connected:
                    await self.client.flush()
                    await self.client.drain()
        except (TimeoutError, nats.errors.Error, OSError) as error:
            log.warning("broker connection did not drain", name=self.name, error=repr(error))
        finally:
            if not self.client.is_closed:
                with contextlib.suppress(TimeoutError, nats.errors.Error, OSError):
                    async with asyncio.timeout(1.0):
                        await self.client.close()
            self._fail_all(BrokerUnavailable("this bus is closed", field="bus", value=self.name))

    async def _send(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self.check()
        try:
            await self.client.publish(subject, payload, reply=reply, headers=dict(headers) if headers else None)
        except (nats.errors.Error, OSError) as error:
            self.check()
            raise ConnectionLost(str(error) or type(error).__name__, field="request", value=subject) from error

    async def _on_reply(self, message: Msg) -> None:
        entry = self._waiting.get(message.subject.rsplit(".", 1)[-1])
        if entry is not None and not entry[1].done():
            entry[1].set_result(message)

    async def _on_error(self, error: Exception) -> None:
        self.last_error = str(error) or type(error).__name__
        if (refusal := self._refusal(error)) is not None:
            if not self._refused.done():
                self._refused.set_result(refusal)
            if self._was_connected:  # its user is gone, or has another password
                self._die(refusal)
        elif (denied := _DENIED.search(self.last_error)) is not None:
            self._deny(denied[1].lower(), denied[2].lower())
        elif isinstance(error, nats.errors.SlowConsumerError):
            # Messages were dropped in this process: whoever reads in order must start over.
            self._lose(ConnectionLost("messages were dropped", field="broker.url", value=self.url))
        log.debug("broker connection error", name=self.name, error=self.last_error)

    def _refusal(self, error: Exception) -> DriftlineError | None:
        """What no further attempt will change."""
        if isinstance(error, nats.errors.AuthorizationError) or "authorization violation" in str(error).lower():
            return BrokerDenied("the broker refused the credentials", field="broker.url", value=self.url,
                                remedy="check broker.credentials: user, password and certificates")  # fmt: skip
        if isinstance(error, ssl.SSLCertVerificationError):
            return BrokerDenied(f"the broker's certificate is refused: {error.verify_message}", field="broker.url", value=self.url,
                                remedy="use credentials made with this broker's certificate; `driftline keys show` says when it expires "
                                "and `driftline keys make --host` for which names it is")  # fmt: skip
        if isinstance(error, ssl.SSLError) and error.reason in _NOT_TLS and not self._was_connected:
            # Not a denial: a client that was very late meets a plaintext greeting too.
            return BrokerUnavailable("the broker does not start with TLS", field="broker.url", value=self.url,
                                     remedy="start it with the auth.conf of `driftline keys make`, or use no credentials")  # fmt: skip
        return None

    def _deny(self, action: str, subject: str) -> None:
        error = BrokerDenied(f"no permission for {action}", field="subject", value=subject,
                             remedy="this user's role does not have it: see docs/security.md")  # fmt: skip
        log.error("broker denied", name=self.name, action=action, subject=subject)
        for asked, future in self._waiting.values():
            if not future.done() and (asked.lower() == subject or subject.startswith(self._reply_prefix.lower())):
                future.set_exception(error)
        for inbox in self._inboxes:
            if subject in inbox.asked or subject == inbox.subject.lower():
                inbox.fail(error)

    async def _on_disconnected(self) -> None:
        self._connected.clear()
        self._lose(ConnectionLost("the connection was lost", field="broker.url", value=self.url))

    def _lose(self, error: ConnectionLost) -> None:
        self.epoch += 1
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        for inbox in self._inboxes:
            inbox.fail(error)

    async def _on_reconnected(self) -> None:
        self._connected.set()
        log.info("broker connection restored", name=self.name, url=self.url)

    async def _on_closed(self) -> None:
        last = self.client.last_error
        if not self._closing and last is not None and (refusal := self._refusal(last)) is not None:
            self._die(refusal)
        elif not self._closing:
            why = f"the client closed the connection for good ({self.last_error or self.client.last_error})"
            self._die(self._unavailable(why))

    def _unavailable(self, why: str) -> BrokerUnavailable:
        return BrokerUnavailable(why, field="broker.url", value=self.url, remedy="restart the service")

    def _die(self, error: DriftlineError) -> None:
        if self._fatal is None:
            self._fatal = error
            log.error("broker connection is dead", name=self.name, why=error.problem)
            self._fail_all(error)

    def _fail_all(self, error: DriftlineError) -> None:
        self._connected.set()  # wakes the waiting, whose next check raises
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        for inbox in list(self._inboxes):
            inbox.fail(error)

    async def _watch(self) -> None:
        failures, since_lost, loop = 0, None, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCHDOG_S)
            if self.client.is_connected:
                since_lost = None
                try:
                    await self.rtt(WATCHDOG_S)
                    failures = 0
                except RequestTimeout:
                    failures += 1
                if failures >= 2:
                    log.warning("broker does not answer pings; reconnecting", name=self.name)
                    failures = 0
                    await self.client.force_reconnect()
            elif (reconnecting := self.client._reconnection_task) is not None and reconnecting.done():
                self._die(self._unavailable("the client stopped reconnecting"))
            elif since_lost is None:
                since_lost = loop.time()
            elif loop.time() - since_lost > STUCK_RECONNECT_S and self._connected.is_set():
                # Still waiting for the old socket to close, which on a black-holed link takes a quarter of an hour.
                _abort_socket(self.client)
                since_lost = None

    def _on_watchdog_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(self._unavailable(f"the watchdog failed: {error!r}"))


def _survived(callback: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A callback the client may await: an exception in it would end the client's reading or reconnecting, and say nothing."""

    async def call(*args: Exception) -> None:
        try:
            await callback(*args)
        except Exception as error:  # whatever it is: see above
            log.error("a broker connection's callback failed", callback=getattr(callback, "__name__", ""), error=repr(error))

    return call


def _abort_socket(client: nats.aio.client.Client) -> None:
    writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
    if writer is not None:
        writer.transport.abort()
