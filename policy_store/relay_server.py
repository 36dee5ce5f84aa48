"""What an engine serves to others: `GET /packs/<digest>`, whole or from an offset, verified before the first byte leaves.

A pack that is not here yet is fetched for who asks, up the same tree, and the request is held meanwhile: for as long as it says (`hold`,
seconds), then it is answered "not yet" (202) and comes again. Only a peer that comes after us in the pack's order is held, so requests that
wait for each other never form a circle, whatever anyone sends. `uploads` packs at most are on their way out at once, in small pieces
between which the loop does its other work: serving yields to sampling.

    200, 206  the pack, or the rest of it (`Range: bytes=N-`)
    202       not yet: ask again
    401       not this process's token
    404       not here, and not fetched for you
    503       too much is asked of us at the moment
"""

from __future__ import annotations

import asyncio
import hmac
import re
import ssl
from dataclasses import dataclass

import structlog
from aiohttp import web

from driftline.messages.blobs import BlobRef
from driftline.messages.errors import ConfigError, DriftlineError
from driftline.policy_store.cache import CachedBlobs
from driftline.policy_store.relay_tree import before

__all__ = ["RelayServer", "ServerCounts"]

log = structlog.get_logger("relay")

MAX_PACK_BYTES = 64 * 1024 * 1024
"""A pack is closed at 4 MiB and a shard of 2 MiB: what claims to be this large is none."""

PULLS = 16
PULL_S = 120.0
MAX_HOLD_S = 10.0
PIECE_BYTES = 256 * 1024
AHEAD_BYTES = 1024 * 1024
STOP_S = 5.0

_DIGEST = re.compile(r"[0-9a-f]{32}")
_RANGE = re.compile(r"bytes=([0-9]{1,12})-")
_PEER = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass
class ServerCounts:
    served: int = 0
    served_bytes: int = 0
    refused: int = 0
    """Requests with a wrong token, or that could not be read."""


class _Request:
    """What was asked. Raises ValueError, KeyError on what is not a request of ours."""

    def __init__(self, request: web.Request) -> None:
        query = request.query
        digest, size, chunks = request.match_info["digest"], int(query["size"]), int(query["chunks"])
        self.peer, self.hold_s = query["peer"], min(float(query["hold"]), MAX_HOLD_S)
        asked = request.headers.get("Range")
        found = _RANGE.fullmatch(asked) if asked is not None else None
        if not _DIGEST.fullmatch(digest) or not _PEER.fullmatch(self.peer) or (asked is not None and found is None):
            raise ValueError(digest)
        self.start = int(found.group(1)) if found is not None else 0
        self.is_range = found is not None
        if not 0 < size <= MAX_PACK_BYTES or not 0 <= chunks <= size or not self.start < size or not self.hold_s >= 0:
            raise ValueError(size)
        self.ref = BlobRef(digest, size, chunks)


class RelayServer:
    def __init__(self, blobs: CachedBlobs, me: str, token: str, *, uploads: int, send_s: float) -> None:
        """`send_s`: how long one pack may take to leave."""
        self.counts = ServerCounts()
        self._blobs, self._me, self._authorization = blobs, me, f"Bearer {token}".encode()
        self._uploads, self._send_s = asyncio.Semaphore(uploads), send_s
        self._pulls: dict[BlobRef, asyncio.Task[bytes | None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        assert self._runner is not None
        return int(self._runner.addresses[0][1])

    async def start(self, host: str, port: int, tasks: asyncio.TaskGroup, tls: ssl.SSLContext | None = None) -> None:
        """Listen; packs that are fetched for others are fetched in `tasks`. ConfigError when the address cannot be had."""
        app = web.Application()
        app.router.add_get("/packs/{digest}", self._pack, allow_head=False)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=STOP_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(f"cannot listen: {error.strerror or error}", field="relay.port", value=f"{host}:{port}",
                              remedy="set relay.host to an address of this machine, and relay.port to a free port or to 0") from None
        self._runner, self._tasks = runner, tasks

    async def stop(self) -> None:
        """Take no more requests, let those that are being answered end within `STOP_S`, and drop what is fetched for others."""
        runner, self._runner, self._tasks = self._runner, None, None
        pulls = list(self._pulls.values())
        for pull in pulls:
            pull.cancel()
        if pulls:
            await asyncio.wait(pulls)
        if runner is not None:
            await runner.cleanup()

    async def _pack(self, request: web.Request) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(errors="surrogateescape"), self._authorization):
            self.counts.refused += 1
            return web.Response(status=401)
        try:
            asked = _Request(request)
        except (KeyError, ValueError):
            self.counts.refused += 1
            return web.Response(status=400)
        until = asyncio.get_running_loop().time() + asked.hold_s
        found = await self._find(asked, until)
        if isinstance(found, int):
            return web.Response(status=found)
        try:
            async with asyncio.timeout_at(until):
                await self._uploads.acquire()
        except TimeoutError:
            return web.Response(status=202 if asked.hold_s else 503)
        try:
            return await self._send(request, asked, found)
        finally:
            self._uploads.release()

    async def _find(self, asked: _Request, until: float) -> bytes | int:
        """The pack, or the status that says why not."""
        data = await self._blobs.held(asked.ref)
        if data is not None:
            return data
        if not asked.hold_s or not before(asked.ref.digest, self._me, asked.peer):
            return 404
        pull = self._pulls.get(asked.ref)
        if pull is None:
            if len(self._pulls) >= PULLS or self._tasks is None:
                return 503
            pull = self._pulls[asked.ref] = self._tasks.create_task(self._pull(asked.ref), name=f"pack {asked.ref.digest}")
        # Not cancelled when the hold ends: who asks again finds it under way.
        done, _ = await asyncio.wait([pull], timeout=max(0.0, until - asyncio.get_running_loop().time()))
        if not done:
            return 202
        data = None if pull.cancelled() else pull.result()
        return 404 if data is None else data

    async def _pull(self, ref: BlobRef) -> bytes | None:
        try:
            async with asyncio.timeout(PULL_S):
                return await self._blobs.get(ref)
        except (DriftlineError, OSError) as error:  # a TimeoutError is an OSError
            log.info("pack not fetched for another", blob=ref.digest, cause=str(error) or type(error).__name__)
            return None
        finally:
            del self._pulls[ref]

    async def _send(self, request: web.Request, asked: _Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(status=206 if asked.is_range else 200)
        response.content_type = "application/octet-stream"
        response.content_length = len(data) - asked.start
        if asked.is_range:
            response.headers["Content-Range"] = f"bytes {asked.start}-{len(data) - 1}/{len(data)}"
        view = memoryview(data)[asked.start :]
        try:
            async with asyncio.timeout(self._send_s):
                await response.prepare(request)
                if request.transport is not None:
                    request.transport.set_write_buffer_limits(high=AHEAD_BYTES)
                for at in range(0, len(view), PIECE_BYTES):
                    piece = view[at : at + PIECE_BYTES]
                    await response.write(piece)
                    self.counts.served_bytes += len(piece)
                    await asyncio.sleep(0)
                await response.write_eof()
        except (TimeoutError, ConnectionError):  # it does not read, or is gone: it knows what it lacks
            if request.transport is not None:
                request.transport.abort()
            return response
        self.counts.served += 1
        return response
