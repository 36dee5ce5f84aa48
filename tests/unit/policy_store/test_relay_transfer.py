"""One pack between peers over HTTP: what is asked, what is refused, and what a peer that dies, hangs or lies costs."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_cases import TOKEN, CountingBlobs, Known, ahead_of, asking, ref_of, reply, scripted, until

from driftline.messages.blobs import BlobRef
from driftline.messages.errors import BrokerUnavailable, ConfigError, IntegrityError
from driftline.messages.types import RelayPeer
from driftline.policy_store import MemoryBlobs
from driftline.policy_store.cache import CachedBlobs
from driftline.policy_store.relay import WRONG_S, RelaySettings
from driftline.policy_store.relay_client import Refusal, RelayClient
from driftline.policy_store.relay_server import MAX_PACK_BYTES, RelayServer
from driftline.policy_store.relay_tls import make_identity
from driftline.policy_store.relay_tree import before

PACK = os.urandom(700_000)
REF = ref_of(PACK)
ME = "zz"
FIRST, SECOND, THIRD = ahead_of(ME, REF.digest, 3)  # THIRD is whom ME asks first when the fanout is 1


@asynccontextmanager
async def served(origin: MemoryBlobs, name: str = THIRD, *, uploads: int = 4, send_s: float = 30.0, tls: bool = False) -> AsyncIterator[tuple[RelayServer, RelayPeer]]:
    """A real server over a cache over `origin`."""
    identity = make_identity(name) if tls else None
    server = RelayServer(CachedBlobs(origin, MemoryBlobs(), max_bytes=2**24), name, TOKEN, uploads=uploads, send_s=send_s)
    async with asyncio.TaskGroup() as tasks:
        await server.start("127.0.0.1", 0, tasks, identity.context if identity else None)
        try:
            yield server, RelayPeer(run="r", peer=name, host="127.0.0.1", port=server.port, token=TOKEN, beat=1, at=0.0,
                                    certificate=identity.fingerprint if identity else "")
        finally:
            await server.stop()


async def origin_with(*packs: bytes) -> CountingBlobs:
    origin = CountingBlobs()
    for pack in packs:
        await origin.put(pack)
    return origin


async def http(server: RelayPeer, ref: BlobRef = REF, *, headers: Mapping[str, str] | None = None, path: str = "", **query: object) -> tuple[int, bytes, Mapping[str, str]]:
    asked = {"size": ref.size, "chunks": ref.chunks, "peer": ME, "hold": 5, **query}
    given = {"Authorization": f"Bearer {TOKEN}"} if headers is None else headers
    url = f"http://{server.host}:{server.port}{path or f'/packs/{ref.digest}'}"
    async with aiohttp.ClientSession() as session, session.get(url, params={key: str(value) for key, value in asked.items()}, headers=given) as response:
        return response.status, await response.read(), response.headers


async def test_a_pack_comes_from_a_peer_and_not_from_the_origin() -> None:
    mine, theirs = await origin_with(PACK), await origin_with(PACK)
    async with served(theirs) as (server, peer), asking(Known(ME, peer), mine) as blobs:
        assert await blobs.get(REF) == PACK
        assert (blobs.counts.hits, blobs.counts.bytes, blobs.counts.origin_bytes) == (1, len(PACK), 0)
        assert (server.counts.served, server.counts.served_bytes) == (1, len(PACK))
    assert not mine.reads


async def test_under_tls_too_and_only_from_the_process_that_announced_itself() -> None:
    mine, theirs = await origin_with(PACK), await origin_with(PACK)
    async with served(theirs, tls=True) as (server, peer):
        async with asking(Known(ME, peer), mine) as blobs:
            assert await blobs.get(REF) == PACK
            assert (blobs.counts.hits, server.counts.served) == (1, 1)
        between = peer.model_copy(update={"certificate": make_identity(peer.peer).fingerprint})
        view = Known(ME, between)
        async with asking(view, mine) as blobs:
            assert await blobs.get(REF) == PACK
            assert (blobs.counts.hits, set(view.avoided)) == (0, {THIRD})
        assert (server.counts.served, server.counts.refused) == (1, 0)  # whoever was there was told nothing, not even the token


async def test_a_peer_that_announced_tls_is_never_asked_without() -> None:
    heads: list[bytes] = []

    async def listens(head: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head)

    async with scripted(THIRD, listens) as peer:
        claimed = peer.model_copy(update={"certificate": "0" * 64})
        async with asking(Known(ME, claimed), await origin_with(PACK)) as blobs:
            assert await blobs.get(REF) == PACK
    assert not heads


async def test_a_range_is_the_rest_of_the_pack() -> None:
    async with served(await origin_with(PACK)) as (_, peer):
        auth = {"Authorization": f"Bearer {TOKEN}"}
        status, body, headers = await http(peer, headers={**auth, "Range": "bytes=699990-"})
        assert (status, body, headers["Content-Range"]) == (206, PACK[-10:], f"bytes 699990-699999/{len(PACK)}")
        for wrong in ("bytes=700000-", "bytes=1-5", "bytes=-5", "lines=1-"):
            assert (await http(peer, headers={**auth, "Range": wrong}))[0] == 400


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {TOKEN}0"}, {"Authorization": f"Basic {TOKEN}"}, {"Authorization": "Bearer \xe9"}])
async def test_without_the_token_nothing_is_told(headers: dict[str, str]) -> None:
    origin = await origin_with(PACK)
    async with served(origin) as (server, peer):
        assert (await http(peer, headers=headers))[:2] == (401, b"")
        assert server.counts.refused == 1
    assert not origin.reads


@pytest.mark.parametrize(
    ("path", "query"),
    [("/packs/..%2F..%2Fetc", {}), ("/packs/0", {}), ("", {"size": 0}), ("", {"size": MAX_PACK_BYTES + 1}), ("", {"size": "x"}), ("", {"chunks": -1}),
     ("", {"hold": "nan"}), ("", {"hold": -1}), ("", {"peer": "a/b"}), ("", {"peer": ""})],
)  # fmt: skip
async def test_what_is_not_a_request_for_a_pack_is_refused_before_anything_is_looked_up(path: str, query: dict[str, object]) -> None:
    origin = await origin_with(PACK)
    async with served(origin) as (_, peer):
        assert (await http(peer, path=path, **query))[0] == 400
    assert not origin.reads


async def test_a_pack_that_the_server_cannot_get_is_not_found() -> None:
    async with served(await origin_with()) as (_, peer):
        assert (await http(peer))[0] == 404


async def test_who_does_not_come_after_the_server_is_never_waited_for() -> None:
    origin = await origin_with(PACK)
    origin.open.clear()
    async with served(origin) as (_, peer):
        for other in (THIRD, SECOND, FIRST):
            assert not before(REF.digest, THIRD, other)
            assert (await http(peer, peer=other))[0] == 404
    assert not origin.reads


async def test_a_request_is_held_until_the_pack_is_there_and_many_share_one_fetch() -> None:
    mine, theirs = await origin_with(PACK), await origin_with(PACK)
    theirs.open.clear()
    async with served(theirs) as (_, peer), asking(Known(ME, peer), mine) as blobs:
        readers = [asyncio.create_task(blobs.get(REF)) for _ in range(5)]
        await until(lambda: theirs.reads[REF.digest] > 0, "it was not fetched")
        assert (await http(peer, hold=0.01))[0] == 202
        theirs.open.set()
        assert await asyncio.gather(*readers) == [PACK] * 5
    assert (theirs.reads[REF.digest], sum(mine.reads.values())) == (1, 0)


async def test_uploads_beyond_the_limit_wait_and_then_get_their_turn() -> None:
    origin = await origin_with(PACK)
    async with served(origin, uploads=1) as (server, peer), asking(Known(ME, peer), origin) as blobs:
        async with server._uploads:
            assert (await http(peer, hold=0.05))[0] == 202
            assert (await http(peer, hold=0))[0] == 503
            readers = [asyncio.create_task(blobs.get(REF)) for _ in range(3)]
            await asyncio.sleep(0)
        assert await asyncio.gather(*readers) == [PACK] * 3
        assert blobs.counts.hits == 3


async def test_a_reader_that_stops_reading_does_not_hold_an_upload_for_ever() -> None:
    large = os.urandom(32_000_000)
    async with served(await origin_with(large), uploads=1, send_s=0.3) as (server, peer):
        reader, writer = await asyncio.open_connection(peer.host, peer.port, limit=1024)
        ref = ref_of(large)
        name = next(f"n{i}" for i in range(99) if before(ref.digest, THIRD, f"n{i}"))
        path = f"/packs/{ref.digest}?size={ref.size}&chunks=1&peer={name}&hold=5"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        await until(lambda: not server._uploads.locked(), "the upload still holds its place")
        writer.close()


async def cut_off(head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(reply(PACK[:300_000], length=len(PACK)))
    await writer.drain()


async def test_a_transfer_that_breaks_off_is_resumed_where_it_stopped() -> None:
    heads: list[bytes] = []

    async def breaks_once(head: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        if len(heads) == 1:
            await cut_off(head, writer)
        else:
            writer.write(reply(PACK[300_000:], status="206 Partial Content", more=f"Content-Range: bytes 300000-{len(PACK) - 1}/{len(PACK)}\r\n"))
            await writer.drain()

    async with scripted(THIRD, breaks_once) as peer, asking(Known(ME, peer), await origin_with()) as blobs:
        assert await blobs.get(REF) == PACK
        assert b"Range: bytes=300000-" in heads[1]
        assert blobs.counts.bytes == len(PACK)
        assert not blobs.counts.refusals


async def test_the_next_peer_sends_only_what_the_dead_one_did_not() -> None:
    mine, theirs = await origin_with(PACK), await origin_with(PACK)
    async with scripted(THIRD, cut_off) as dying, served(theirs, SECOND) as (server, alive):
        view = Known(ME, dying, alive)
        async with asking(view, mine) as blobs:
            assert await blobs.get(REF) == PACK
        assert server.counts.served_bytes == len(PACK) - 300_000
        assert set(view.avoided) == {THIRD}
    assert not mine.reads


async def test_a_beginning_that_was_a_lie_is_not_blamed_on_who_sent_the_rest() -> None:
    async def lies_and_dies(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(bytes(300_000), length=len(PACK)))
        await writer.drain()

    mine = await origin_with(PACK)
    async with scripted(THIRD, lies_and_dies) as liar, served(await origin_with(PACK), SECOND) as (_, honest):
        view = Known(ME, liar, honest)
        async with asking(view, mine) as blobs:
            assert await blobs.get(REF) == PACK
            assert blobs.counts.refusals == {Refusal.CUT: 1}
        assert set(view.avoided) == {THIRD}
    assert not mine.reads


@given(st.lists(st.tuples(st.integers(0, len(PACK)), st.booleans()), min_size=3, max_size=12), st.booleans())
@settings(max_examples=25, deadline=None)
def test_wherever_transfers_break_off_and_whoever_ignores_ranges_the_pack_is_right(cuts: list[tuple[int, bool]], lies: bool) -> None:
    """Each answer sends so many bytes of what was asked, or of the whole where it does not know ranges; the first may be of another pack."""
    left = list(cuts)

    async def breaks(head: bytes, writer: asyncio.StreamWriter) -> None:
        count, ignores = left.pop(0) if left else (len(PACK), False)
        asked = re.search(rb"Range: bytes=([0-9]+)-", head)
        start = int(asked.group(1)) if asked and not ignores else 0
        source = bytes(len(PACK)) if lies and len(left) == len(cuts) - 1 else PACK
        body, whole = source[start : start + count], source[start:]
        more = f"Content-Range: bytes {start}-{len(PACK) - 1}/{len(PACK)}\r\n" if start else ""
        writer.write(reply(body, status="206 Partial Content" if start else "200 OK", length=len(whole), more=more))
        await writer.drain()

    async def play() -> None:
        async with AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(scripted(name, breaks)) for name in (FIRST, SECOND, THIRD)]
            blobs = await stack.enter_async_context(asking(Known(ME, *peers), await origin_with(PACK)))
            assert await blobs.get(REF) == PACK

    asyncio.run(play())


async def says(answer: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(answer)
    await writer.drain()


async def hangs(head: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def stalls(head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(reply(PACK[:1000], length=len(PACK)))
    await asyncio.Event().wait()


async def trickles(head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(reply(b"", length=len(PACK)))
    while True:
        writer.write(PACK[:1])
        await writer.drain()
        await asyncio.sleep(0.05)


FAULTS = {
    "hangs": (hangs, Refusal.SILENT),
    "stalls midway": (stalls, Refusal.SILENT),
    "trickles": (trickles, Refusal.SLOW),
    "lies": (lambda head, writer: says(reply(bytes(len(PACK))), writer), Refusal.WRONG),
    "flips one bit": (lambda head, writer: says(reply(PACK[:-1] + bytes([PACK[-1] ^ 1])), writer), Refusal.WRONG),
    "sends too little": (lambda head, writer: says(reply(PACK[:5]), writer), Refusal.WRONG),
    "promises too much": (lambda head, writer: says(reply(PACK + b"x"), writer), Refusal.WRONG),
    "promises no length": (lambda head, writer: says(b"HTTP/1.1 200 OK\r\n\r\n" + PACK, writer), Refusal.WRONG),
    "sends another part": (lambda head, writer: says(reply(PACK, status="206 Partial Content", more="Content-Range: bytes 5-9/10\r\n"), writer), Refusal.WRONG),
    "sends elsewhere": (lambda head, writer: says(reply(b"", status="302 Found", more="Location: http://127.0.0.1:1/\r\n"), writer), Refusal.WRONG),
    "is no web server": (lambda head, writer: says(b"SSH-2.0-x\r\n\r\n", writer), Refusal.UNREACHABLE),
    "hangs up": (lambda head, writer: says(b"", writer), Refusal.UNREACHABLE),
    "is of another life": (lambda head, writer: says(reply(b"", status="401 Unauthorized"), writer), Refusal.DENIED),
    "never has it": (lambda head, writer: says(reply(b"", status="202 Accepted"), writer), Refusal.BUSY),
    "lacks it": (lambda head, writer: says(reply(b"", status="404 Not Found"), writer), Refusal.LACKS),
    "is busy": (lambda head, writer: says(reply(b"", status="503 Service Unavailable"), writer), Refusal.BUSY),
}

# Short where the fault is that time passes, so that an honest peer on a slow machine is not taken for a faulty one elsewhere.
PATIENCE = {Refusal.SILENT: {"silence_s": 0.6}, Refusal.SLOW: {"wait_s": 1.2}}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_peer_with_a_fault_costs_one_attempt_and_is_counted(fault: str) -> None:
    script, refusal = FAULTS[fault]
    mine, theirs = await origin_with(), await origin_with(PACK)
    async with scripted(THIRD, script) as faulty, served(theirs, SECOND) as (_, honest):
        view = Known(ME, faulty, honest)
        async with asking(view, mine, **PATIENCE.get(refusal, {})) as blobs:
            assert await blobs.get(REF) == PACK
            assert blobs.counts.refusals == {refusal: 1}
        assert set(view.avoided) == ({THIRD} if refusal.is_fault else set())
        if refusal is Refusal.WRONG:
            assert view.avoided[THIRD] == WRONG_S


@pytest.mark.parametrize("fault", ["hangs", "trickles", "lies", "never has it"])
async def test_with_every_peer_at_fault_the_origin_is_asked(fault: str) -> None:
    mine = await origin_with(PACK)
    script, refusal = FAULTS[fault]
    async with scripted(THIRD, script) as a, scripted(SECOND, script) as b, asking(Known(ME, a, b), mine, **PATIENCE.get(refusal, {})) as blobs:
        assert await blobs.get(REF) == PACK
        assert set(blobs.counts.refusals) == {refusal}
    assert mine.reads[REF.digest] == 1


async def test_a_peer_that_is_gone_costs_a_refused_connection() -> None:
    mine = await origin_with(PACK)
    async with scripted(THIRD, hangs) as gone:
        pass
    async with asking(Known(ME, gone), mine) as blobs:
        assert await blobs.get(REF) == PACK
        assert blobs.counts.refusals == {Refusal.UNREACHABLE: 1}


async def test_a_peer_that_goes_while_it_is_asked_is_replaced_by_one_that_came_meanwhile() -> None:
    mine, asked = await origin_with(), asyncio.Event()

    async def dies(head: bytes, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await leave.wait()

    leave = asyncio.Event()
    async with scripted(THIRD, dies) as leaving, served(await origin_with(PACK), SECOND) as (_, coming):
        view = Known(ME, leaving)
        async with asking(view, mine, silence_s=20.0) as blobs:
            reader = asyncio.create_task(blobs.get(REF))
            await asked.wait()
            view.peers = {SECOND: coming}
            leave.set()
            assert await reader == PACK
    assert not mine.reads


async def test_without_peers_it_is_the_origin() -> None:
    mine = await origin_with(PACK)
    async with asking(Known(ME), mine) as blobs:
        assert await blobs.get(REF) == PACK
        assert (blobs.counts.origin_reads, blobs.counts.origin_bytes) == (1, len(PACK))
        with pytest.raises(IntegrityError):
            await blobs.get(ref_of(b"not there"))


async def test_before_it_serves_and_after_it_is_the_origin() -> None:
    mine = await origin_with(PACK)
    async with served(await origin_with(PACK)) as (_, peer):
        async with asking(Known(ME, peer), mine) as blobs:
            pass
        assert await blobs.get(REF) == PACK
    assert mine.reads[REF.digest] == 1


async def test_when_the_origin_is_down_any_peer_that_has_it_is_asked_also_one_that_comes_later() -> None:
    later = next(f"l{i}" for i in range(99) if before(REF.digest, ME, f"l{i}"))
    mine, theirs = await origin_with(), await origin_with(PACK)
    mine.down = True
    async with served(theirs, later) as (server, peer), asking(Known(ME, peer), mine) as blobs:
        with pytest.raises(BrokerUnavailable):  # it has not got it, and does not fetch it for who comes before it
            await blobs.get(REF)
        await server._blobs.get(REF)
        assert await blobs.get(REF) == PACK
        assert blobs.counts.rescued == 1


async def test_what_the_origin_lost_a_peer_still_has() -> None:
    mine = await origin_with(PACK)
    mine.blobs[REF.digest] = PACK[:-1]
    later = next(f"l{i}" for i in range(99) if before(REF.digest, ME, f"l{i}"))
    async with served(await origin_with(PACK), later) as (server, peer), asking(Known(ME, peer), mine) as blobs:
        await server._blobs.get(REF)
        assert await blobs.get(REF) == PACK


async def test_a_server_never_passes_on_what_is_damaged_in_its_own_memory() -> None:
    theirs, local = await origin_with(PACK), MemoryBlobs()
    async with asyncio.TaskGroup() as tasks:
        server = RelayServer(CachedBlobs(theirs, local, max_bytes=2**24), THIRD, TOKEN, uploads=4, send_s=30.0)
        await server.start("127.0.0.1", 0, tasks)
        peer = RelayPeer(run="r", peer=THIRD, host="127.0.0.1", port=server.port, token=TOKEN, beat=1, at=0.0)
        await server._blobs.get(REF)
        local.blobs[REF.digest] = bytes(len(PACK))
        async with asking(Known(ME, peer), await origin_with()) as blobs:
            assert await blobs.get(REF) == PACK
        await server.stop()
    assert theirs.reads[REF.digest] == 2


async def test_a_cancelled_read_leaves_the_client_usable() -> None:
    async with scripted(THIRD, hangs) as peer, RelayClient(ME, wait_s=30.0, silence_s=20.0) as client:
        view = Known(ME, peer)
        async with asking(view, await origin_with(PACK), silence_s=20.0) as blobs:
            reader = asyncio.create_task(blobs.get(REF))
            await asyncio.sleep(0.05)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            view.peers.clear()
            assert await blobs.get(REF) == PACK
        assert client.ready


async def test_stopping_ends_what_is_fetched_for_others() -> None:
    theirs = await origin_with(PACK)
    theirs.open.clear()
    async with served(theirs) as (server, peer):
        asked = asyncio.create_task(http(peer))
        await until(lambda: theirs.reads[REF.digest] > 0, "it was not fetched")
        await server.stop()
        assert (await asked)[0] == 404


async def test_an_address_that_is_taken_is_refused_with_the_remedy() -> None:
    async with served(await origin_with()) as (server, _), asyncio.TaskGroup() as tasks:
        other = RelayServer(CachedBlobs(MemoryBlobs(), MemoryBlobs(), max_bytes=1), "o", TOKEN, uploads=1, send_s=1.0)
        with pytest.raises(ConfigError, match=r"relay\.port"):
            await other.start("127.0.0.1", server.port, tasks)


@pytest.mark.parametrize(("host", "advertise"), [("0.0.0.0", ""), ("::", ""), ("0.0.0.0", "a b"), ("127.0.0.1", "http://x/")])
def test_an_address_that_others_cannot_call_is_refused(host: str, advertise: str) -> None:
    with pytest.raises(ConfigError, match=r"relay\.advertise"):
        RelaySettings(host=host, advertise=advertise)
