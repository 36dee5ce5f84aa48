"""One pack from one peer: whole and verified, or a reason, within a bounded time.

Waiting and being dead are told apart: a peer that has not got the pack yet answers so within `hold_s` and is asked again, for `wait_s` in
all; one that does not answer at all is given up after `silence_s`. A transfer that breaks off is continued from where it stopped, at
the same peer once and then at the next. Wrong bytes are blamed on a peer only when all of them came from it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

import aiohttp
import xxhash
from yarl import URL

from driftline.messages.blobs import BlobRef
from driftline.messages.types import RelayPeer

__all__ = ["Partial", "Refusal", "RelayClient"]

CONNECT_S = 2.0
READ_BYTES = 256 * 1024


class Refusal(StrEnum):
    """Why a peer did not give a pack."""

    UNREACHABLE = "unreachable"
    """No connection, not HTTP, or not the certificate that it announced."""
    SILENT = "silent"
    """Connected, and no answer or no further byte for `silence_s`."""
    CUT = "cut"
    """The transfer broke off, and again when it was resumed."""
    SLOW = "slow"
    """The transfer took longer than `wait_s`."""
    WRONG = "wrong"
    """Bytes that are not the pack."""
    LACKS = "lacks"
    """It has not got the pack, and could not fetch it or need not."""
    BUSY = "busy"
    """It had not got the pack after `wait_s`, or serves too many others."""
    DENIED = "denied"
    """It does not take the token: another life of it has begun."""

    @property
    def is_fault(self) -> bool:
        """Whether the peer is better not asked again for a while."""
        return self not in (Refusal.LACKS, Refusal.BUSY)


class _Answer(StrEnum):
    WHOLE = "whole"
    NOT_YET = "not yet"
    CUT = "cut"


@dataclass
class Partial:
    """What has come of a pack so far, and from whom."""

    ref: BlobRef
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    sources: set[str] = field(default_factory=set)

    def add(self, chunk: bytes, source: str) -> None:
        self.parts.append(chunk)
        self.size += len(chunk)
        self.sources.add(source)

    def clear(self) -> None:
        self.parts, self.size, self.sources = [], 0, set()

    def whole(self) -> bytes | None:
        """The pack, or None when this is not it."""
        data = b"".join(self.parts)
        return data if len(data) == self.ref.size and xxhash.xxh3_128_hexdigest(data) == self.ref.digest else None


class RelayClient:
    """`async with` it; `me` is the name that the peers rank."""

    def __init__(self, me: str, *, wait_s: float, hold_s: float = 1.0, silence_s: float = 3.0) -> None:
        self._me, self._wait_s, self._hold_s, self._silence_s = me, wait_s, min(hold_s, wait_s), silence_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def ready(self) -> bool:
        return self._session is not None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            auto_decompress=False, trust_env=False, read_bufsize=READ_BYTES, cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._hold_s + self._silence_s),
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def fetch(self, peer: RelayPeer, partial: Partial, *, hold: bool = True) -> bytes | Refusal:
        """The pack, continuing `partial`, which keeps what came when this is refused. Not `hold`: only if the peer has it already."""
        until = asyncio.get_running_loop().time() + self._wait_s
        resumed = False
        # Counted too, so that a peer which says "not yet" without waiting is not asked in a tight loop.
        for _ in range(math.ceil(self._wait_s / self._hold_s) + 2):
            answer = await self._ask(peer, partial, self._hold_s if hold else 0.0)
            match answer:
                case Refusal():
                    return answer
                case _Answer.WHOLE:
                    data = partial.whole()
                    if data is not None:
                        return data
                    alone = partial.sources == {peer.peer}
                    partial.clear()
                    if alone:
                        return Refusal.WRONG
                case _Answer.CUT if resumed:
                    return Refusal.CUT
                case _Answer.CUT:
                    resumed = True
                case _Answer.NOT_YET if not hold or asyncio.get_running_loop().time() >= until:
                    return Refusal.BUSY
        return Refusal.BUSY

    async def _ask(self, peer: RelayPeer, partial: Partial, hold_s: float) -> _Answer | Refusal:
        session, ref = self._session, partial.ref
        if session is None:
            return Refusal.UNREACHABLE
        url = URL.build(scheme="https" if peer.certificate else "http", host=peer.host, port=peer.port, path=f"/packs/{ref.digest}",
                        query={"size": str(ref.size), "chunks": str(ref.chunks), "peer": self._me, "hold": f"{hold_s:g}"})
        ssl = aiohttp.Fingerprint(bytes.fromhex(peer.certificate)) if peer.certificate else True
        headers = {"Authorization": f"Bearer {peer.token}"}
        if partial.size:
            headers["Range"] = f"bytes={partial.size}-"
        before = partial.size
        try:
            async with asyncio.timeout(self._wait_s + hold_s), session.get(url, headers=headers, ssl=ssl, allow_redirects=False) as response:
                refusal = _judge(response, partial)
                if refusal is not None:
                    return refusal
                before = partial.size
                async for chunk, _ in response.content.iter_chunks():  # as they were received: joined once, at the end
                    partial.add(chunk, peer.peer)
                    if partial.size > ref.size:
                        partial.clear()
                        return Refusal.WRONG
        except aiohttp.ServerTimeoutError as error:
            return Refusal.UNREACHABLE if isinstance(error, aiohttp.ConnectionTimeoutError) else Refusal.SILENT
        except TimeoutError:
            return Refusal.SLOW
        except aiohttp.ClientPayloadError:
            return _Answer.CUT
        except (aiohttp.ClientError, OSError):
            return _Answer.CUT if partial.size > before else Refusal.UNREACHABLE
        return _Answer.WHOLE if partial.size == ref.size else _Answer.CUT


def _judge(response: aiohttp.ClientResponse, partial: Partial) -> _Answer | Refusal | None:
    """None: the body is the pack's bytes from `partial.size` on."""
    match response.status:
        case 200:
            partial.clear()
        case 206 if response.headers.get("Content-Range") == f"bytes {partial.size}-{partial.ref.size - 1}/{partial.ref.size}":
            pass
        case 202:
            return _Answer.NOT_YET
        case 401:
            return Refusal.DENIED
        case 404:
            return Refusal.LACKS
        case 503:
            return Refusal.BUSY
        case _:
            return Refusal.WRONG
    return None if response.content_length == partial.ref.size - partial.size else Refusal.WRONG
