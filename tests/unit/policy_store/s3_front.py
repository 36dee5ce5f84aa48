"""A front before the real object store: passes requests on untouched, counts them, and fails those it is told to."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Fault", "Front", "front_of"]


class Fault(Enum):
    """An answer of S3's, by status and code; or none."""

    BUSY = 503, "SlowDown"
    CONFLICT = 409, "ConditionalRequestConflict"
    NOT_IMPLEMENTED = 501, "NotImplemented"
    EXPIRED = 400, "ExpiredToken"
    SKEWED = 403, "RequestTimeTooSkewed"
    MOVED = 301, "PermanentRedirect"
    ODD = 400, "InvalidRequest"
    DROP = 0, "the connection ends without an answer"
    SILENT = 0, "no answer until the front is closed"


Script = Callable[[str, dict[str, str]], Fault | None]


@dataclass
class Front:
    """`script` says by method and headers (lower case) what befalls a request; `requests` are those that came, by method."""

    url: str = ""
    script: Script = lambda method, headers: None
    requests: list[str] = field(default_factory=list)
    connections: int = 0
    most_in_flight: int = 0
    closing: threading.Event = field(default_factory=threading.Event)
    _in_flight: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, method: str) -> None:
        with self._lock:
            self.requests.append(method)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)

    def leave(self) -> None:
        with self._lock:
            self._in_flight -= 1

    def count(self, method: str) -> int:
        return self.requests.count(method)


@contextmanager
def front_of(port: int) -> Iterator[Front]:
    """Before the server on `port` of this machine."""
    front = Front()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            front.connections += 1

        def handle_any(self) -> None:
            front.enter(self.command)
            try:
                headers = {name.lower(): value for name, value in self.headers.items()}
                body = self.rfile.read(int(headers.get("content-length", 0)))
                match front.script(self.command, headers):
                    case None:
                        self._pass_on(body)
                    case Fault.DROP:
                        self.close_connection = True
                    case Fault.SILENT:
                        front.closing.wait(60)
                        self.close_connection = True
                    case fault:
                        status, code = fault.value
                        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())
            finally:
                front.leave()

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

        def _pass_on(self, body: bytes) -> None:
            behind = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():  # the host too: it is signed
                    behind.putheader(name, value)
                behind.endheaders(body)
                answer = behind.getresponse()
                data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length", "0") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length)
                self.end_headers()
                self.wfile.write(data)
            finally:
                behind.close()

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a test says what matters."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        front.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield front
        finally:
            front.closing.set()
            server.shutdown()
            thread.join()
