"""The S3 store against a real S3-compatible server, and against one that fails."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import obstore
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import S3Store
from policy_cases import Policy, publish_chain, same
from s3_front import Fault, Front, front_of
from s3_server import BUCKET, OWNER, READER, Keys, S3Server

from driftline.messages.errors import (
    BrokerDenied,
    ConfigError,
    DriftlineError,
    IntegrityError,
    StoreUnavailable,
)
from driftline.messages.memory import MemoryBus
from driftline.policy_store import BlobRef, PolicyReader
from driftline.policy_store.s3 import S3Blobs, endpoint_of

DATA = b"weights" * 1000
REF = BlobRef(xxhash.xxh3_128_hexdigest(DATA), len(DATA), 1)


@pytest.fixture
def front(s3_keys: S3Server) -> Iterator[Front]:
    with front_of(s3_keys.port) as opened:
        yield opened


def blobs_at(url: str, prefix: str, **options: Any) -> S3Blobs:
    return S3Blobs(options.pop("bucket", BUCKET), prefix, endpoint=url, **options)


def raw(server: S3Server, prefix: str) -> S3Store:
    """Past ours, to look and to damage."""
    return S3Store(BUCKET, prefix=prefix, endpoint=server.url, region="us-east-1", access_key_id=OWNER.id, secret_access_key=OWNER.secret,
                   client_options={"allow_http": True})


def told(caught: pytest.ExceptionInfo[DriftlineError]) -> DriftlineError:
    """The error, which has a field, a value and a remedy, and no keys, in its text or in what a traceback shows."""
    error = caught.value
    assert error.field
    assert error.value
    assert error.remedy
    shown = "".join(traceback.format_exception(error))
    assert not [secret for keys in (OWNER, READER) for secret in keys if secret in shown]
    assert "Signature=" not in shown
    return error


async def test_a_bucket_that_is_not_there_is_named_with_what_to_do(s3_keys: S3Server, fresh_run: str) -> None:
    blobs = blobs_at(s3_keys.url, fresh_run, bucket="no-such-bucket")
    for ask in (lambda: blobs.put(DATA), lambda: blobs.get(REF), lambda: blobs.delete(REF), lambda: anext(blobs.list())):
        with pytest.raises(ConfigError, match="no such bucket") as caught:
            await ask()
        assert told(caught).value == f"s3://no-such-bucket/{fresh_run}"
        assert "create it" in caught.value.remedy


@pytest.mark.parametrize("keys", [Keys("nobody", "x" * 20), Keys(OWNER.id, "wrong-" + OWNER.secret)], ids=["unknown key", "wrong secret"])
async def test_keys_that_are_refused_are_an_error_at_once_that_does_not_show_them(
    s3_keys: S3Server, fresh_run: str, monkeypatch: pytest.MonkeyPatch, keys: Keys
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys.id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys.secret)
    blobs = blobs_at(s3_keys.url, fresh_run)
    for ask in (lambda: blobs.put(DATA), lambda: blobs.get(REF), lambda: blobs.has(REF), lambda: anext(blobs.list())):
        with pytest.raises(BrokerDenied, match="refuses the credentials") as caught:
            await ask()
        assert "AWS_ACCESS_KEY_ID" in told(caught).remedy
        assert keys.secret not in str(caught.value)


async def test_a_reader_s_keys_read_and_may_not_write(s3_keys: S3Server, fresh_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await blobs_at(s3_keys.url, fresh_run).put(DATA)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER.id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER.secret)
    blobs = blobs_at(s3_keys.url, fresh_run)
    assert await blobs.get(REF) == DATA
    with pytest.raises(BrokerDenied, match="AccessDenied") as caught:
        await blobs.put(b"other")
    told(caught)


async def test_no_keys_at_all_says_which_to_set(s3_keys: S3Server, fresh_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")  # what a cloud machine would be asked for its role
    with pytest.raises(BrokerDenied, match="no credentials") as caught:
        await blobs_at(s3_keys.url, fresh_run).put(DATA)
    assert "AWS_SECRET_ACCESS_KEY" in told(caught).remedy


async def test_a_server_nobody_reaches_is_given_up_after_the_deadline(s3_keys: S3Server, fresh_run: str) -> None:
    blobs = blobs_at("http://127.0.0.1:1", fresh_run, deadline_s=0.5)
    for ask in (lambda: blobs.put(DATA), lambda: blobs.get(REF)):
        with pytest.raises(StoreUnavailable, match=r"http://127.0.0.1:1 does not answer.*given up after 0.5 s") as caught:
            await ask()
        assert told(caught).value == REF.digest
        assert "reachable" in caught.value.remedy


@pytest.mark.parametrize("url", ["nonsense", "ftp://host", "http://", "http://key:secret@host", "http://ho st", "http://host?x=1", "http://host:99999"])
def test_an_endpoint_that_is_no_server_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(ConfigError, match="not the URL of a server") as caught:
        blobs_at(url, "prefix")
    assert told(caught).field == "policy.s3_endpoint"
    assert "secret" not in str(caught.value)


@given(st.text(max_size=40))
def test_an_endpoint_has_one_spelling_or_is_refused(text: str) -> None:
    try:
        spelled = endpoint_of(text)
    except ConfigError:
        return
    assert endpoint_of(spelled) == spelled
    assert spelled == "" or urlsplit(spelled).hostname


def test_the_same_server_written_otherwise_is_the_same() -> None:
    assert {endpoint_of(text) for text in ("http://Host:80/", "http://host", "HTTP://host:80")} == {"http://host"}
    assert endpoint_of("https://[::1]:9000/s3/") == "https://[::1]:9000/s3"


async def test_what_is_stored_already_is_not_sent_again(front: Front, fresh_run: str) -> None:
    blobs = blobs_at(front.url, fresh_run)
    assert await blobs.put(DATA) == REF
    assert (front.count("HEAD"), front.count("PUT")) == (1, 1)
    await blobs_at(front.url, fresh_run).put(DATA)  # another process, after a crash
    assert (front.count("HEAD"), front.count("PUT")) == (2, 1)


async def test_an_object_cut_off_is_repaired_by_the_next_put(s3_keys: S3Server, fresh_run: str) -> None:
    await obstore.put_async(raw(s3_keys, fresh_run), REF.digest, DATA[:-1])
    blobs = blobs_at(s3_keys.url, fresh_run)
    with pytest.raises(IntegrityError, match=f"{len(DATA) - 1} bytes instead of {len(DATA)}") as caught:
        await blobs.get(REF)
    assert told(caught).value == REF.digest
    await blobs.put(DATA)
    assert await blobs.get(REF) == DATA


async def test_an_object_with_other_bytes_is_found_and_deleting_it_lets_it_be_stored_again(s3_keys: S3Server, fresh_run: str) -> None:
    await obstore.put_async(raw(s3_keys, fresh_run), REF.digest, DATA[::-1])
    blobs = blobs_at(s3_keys.url, fresh_run)
    with pytest.raises(IntegrityError, match="has digest") as caught:
        await blobs.get(REF)
    told(caught)
    await blobs.delete(REF)
    await blobs.put(DATA)
    assert await blobs.get(REF) == DATA


@pytest.mark.parametrize("digest", ["../other-run/" + "0" * 32, "", "G" * 32])
async def test_a_digest_that_is_no_digest_never_becomes_a_key(front: Front, fresh_run: str, digest: str) -> None:
    blobs = blobs_at(front.url, fresh_run)
    for ask in (blobs.get, blobs.has, blobs.delete):
        with pytest.raises(IntegrityError, match="not a digest"):
            await ask(BlobRef(digest, 1, 1))
    assert front.requests == []


async def test_more_blobs_than_one_page_are_listed_and_nothing_of_another_run(s3_keys: S3Server, fresh_run: str) -> None:
    count, store = 1050, raw(s3_keys, fresh_run)
    names = [f"{index:032x}" for index in range(count)]
    for start in range(0, count, 50):
        await asyncio.gather(*(obstore.put_async(store, name, b"x") for name in names[start : start + 50]))
    await obstore.put_async(store, "notes.txt", b"theirs")
    await obstore.put_async(store, "deeper/" + "0" * 32, b"theirs")
    await obstore.put_async(raw(s3_keys, f"{fresh_run}-other"), "f" * 32, b"theirs")
    found = [blob async for blob in blobs_at(s3_keys.url, fresh_run).list()]
    assert sorted(blob.digest for blob in found) == names
    assert {blob.size for blob in found} == {1}


async def test_a_server_without_conditional_puts_gets_plain_ones(front: Front, fresh_run: str) -> None:
    front.script = lambda method, headers: Fault.NOT_IMPLEMENTED if "if-none-match" in headers else None
    blobs = blobs_at(front.url, fresh_run)
    await blobs.put(DATA)
    assert await blobs.get(REF) == DATA
    tried = front.count("PUT")
    await blobs.put(b"second")
    assert front.count("PUT") == tried + 1, "it is not asked twice for what it cannot do"


async def test_two_writers_of_the_same_bytes_both_succeed(front: Front, fresh_run: str) -> None:
    writers = [blobs_at(front.url, fresh_run) for _ in range(6)]
    assert await asyncio.gather(*(blobs.put(DATA) for blobs in writers)) == [REF] * 6
    assert await writers[0].get(REF) == DATA


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.DROP, Fault.CONFLICT])
async def test_a_request_that_fails_is_made_again(front: Front, fresh_run: str, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    monkeypatch.setattr("driftline.policy_store.deadlines.PAUSES_S", (0.01,))
    faults = {"HEAD": 3, "PUT": 3, "GET": 3, "POST": 3}

    def script(method: str, headers: dict[str, str]) -> Fault | None:
        faults[method] -= 1
        return fault if faults[method] >= 0 else None

    front.script = script
    blobs = blobs_at(front.url, fresh_run)
    await blobs.put(DATA)
    assert await blobs.get(REF) == DATA
    await blobs.delete(REF)
    assert not await blobs.has(REF)
    assert all(left < 0 for left in faults.values())


@pytest.mark.parametrize(
    ("fault", "kind", "remedy"),
    [(Fault.EXPIRED, BrokerDenied, "AWS_ACCESS_KEY_ID"), (Fault.SKEWED, BrokerDenied, "clock"), (Fault.MOVED, ConfigError, "region"),
     (Fault.ODD, ConfigError, "policy.store")],
)
async def test_a_refusal_that_will_not_pass_is_an_error_at_once(
    front: Front, fresh_run: str, fault: Fault, kind: type[DriftlineError], remedy: str
) -> None:
    front.script = lambda method, headers: fault
    blobs = blobs_at(front.url, fresh_run)
    for ask in (lambda: blobs.get(REF), lambda: anext(blobs.list())):
        with pytest.raises(kind) as caught:
            await ask()
        assert remedy in told(caught).remedy
    assert len(front.requests) == 2, "nothing is asked twice"


async def test_a_server_that_never_answers_is_given_up_after_the_deadline(front: Front, fresh_run: str) -> None:
    front.script = lambda method, headers: Fault.SILENT
    blobs = blobs_at(front.url, fresh_run, deadline_s=0.3)
    for ask in (lambda: blobs.put(DATA), lambda: blobs.get(REF), lambda: anext(blobs.list())):
        with pytest.raises(StoreUnavailable) as caught:
            await ask()
        assert f"s3://{BUCKET}/{fresh_run}" in str(caught.value) or front.url in str(caught.value)


async def test_requests_in_flight_are_bounded_and_connections_are_kept(front: Front, fresh_run: str) -> None:
    blobs = blobs_at(front.url, fresh_run, concurrency=3)
    refs = await asyncio.gather(*(blobs.put(os.urandom(20_000)) for _ in range(24)))
    await asyncio.gather(*(blobs.get(ref) for ref in refs))
    assert front.most_in_flight <= 3
    assert len(front.requests) == 72
    assert front.connections <= 6


async def test_versions_are_published_to_and_followed_from_an_object_store(s3_keys: S3Server, quick_bus: MemoryBus, fresh_run: str) -> None:
    writes, reads = (blobs_at(s3_keys.url, f"chains/{fresh_run}") for _ in range(2))
    _, states = await publish_chain(quick_bus, writes, fresh_run, Policy(elements=300_000), 5)
    reader = PolicyReader(quick_bus, reads, fresh_run)
    state = await reader.materialise(0)
    for version in range(1, 5):
        state = await reader.advance(state, version - 1, version)
        assert same(state, states[version])
    assert same(await PolicyReader(quick_bus, reads, fresh_run).materialise(4), states[4])
    lost = (await reader.manifest(4)).packs[0].ref
    await writes.delete(lost)
    with pytest.raises(IntegrityError, match=lost.digest):
        await PolicyReader(quick_bus, reads, fresh_run).advance(dict(states[3]), 3, 4, fallback=False)


def test_a_store_in_the_broker_does_not_pay_for_the_library() -> None:
    code = "import driftline.policy_store, sys; assert not [name for name in sys.modules if name.partition('.')[0] == 'obstore']"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
