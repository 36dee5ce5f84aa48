"""Where a run's versions live: said once, found by readers, and no reason to write elsewhere or to hand keys to a stranger."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from s3_front import front_of
from s3_server import BUCKET, S3Server

from driftline.messages.bus import Bus
from driftline.messages.errors import ConfigError, DriftlineError, IntegrityError, MalformedMessage
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import RunFinished
from driftline.policy_store import (
    BlobRef,
    DirectoryBlobs,
    JetStreamBlobs,
    StoreLocated,
    located_store,
    open_store,
)
from driftline.policy_store.location import (
    InBucket,
    InFolder,
    consented,
    locate,
    located,
    own_endpoint,
    place_of,
)
from driftline.policy_store.s3 import S3Blobs


@pytest.fixture(autouse=True)
def no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_ENDPOINT")]:
        monkeypatch.delenv(name)


async def say(bus: Bus, run: str, store: str, endpoint: str = "") -> None:
    """As whoever may write to the run's policy stream could."""
    await bus.publish(f"{Subjects(run).root}.policy.store", StoreLocated(run=run, store=store, endpoint=endpoint, at=0.0), id=f"{store}{endpoint}")


async def test_a_reader_finds_the_folder_the_services_write_to(bus: Bus, fresh_run: str, tmp_path: Path) -> None:
    store = f"file:{tmp_path}/shared"
    await locate(bus, fresh_run, store)
    ref = await open_store(store, bus, fresh_run).put(b"weights")
    found = await located_store(bus, fresh_run)
    assert isinstance(found, DirectoryBlobs)
    assert await found.get(ref) == b"weights"


async def test_where_nothing_was_said_the_versions_are_in_the_broker(bus: Bus, fresh_run: str) -> None:
    assert isinstance(await located_store(bus, fresh_run), JetStreamBlobs)
    await locate(bus, fresh_run, "jetstream")
    assert isinstance(await located_store(bus, fresh_run), JetStreamBlobs)


async def test_a_second_different_place_is_refused_and_the_first_stays(bus: Bus, fresh_run: str, tmp_path: Path) -> None:
    first = await locate(bus, fresh_run, f"file:{tmp_path}/a")
    for other in (f"file:{tmp_path}/b", "jetstream", "s3://bucket/prefix"):
        with pytest.raises(ConfigError, match=f"versions are in file:{tmp_path}/a") as caught:
            await locate(bus, fresh_run, other)
        assert caught.value.field == "policy.store"
        assert "another name" in caught.value.remedy
    assert await locate(bus, fresh_run, f"file:{tmp_path}/a") == first
    said = await located(bus, fresh_run)
    assert said is not None
    assert said.place == InFolder(tmp_path / "a")


async def test_of_services_that_start_at_once_in_different_places_all_but_one_kind_are_refused(bus: Bus, fresh_run: str, tmp_path: Path) -> None:
    places = [f"file:{tmp_path}/a", f"file:{tmp_path}/b"] * 3
    answers = await asyncio.gather(*(locate(bus, fresh_run, place) for place in places), return_exceptions=True)
    said = await located(bus, fresh_run)
    assert said is not None
    for place, answer in zip(places, answers, strict=True):
        assert (answer == said.place) if place == said.store else isinstance(answer, ConfigError)


async def test_another_region_or_server_is_another_place(quick_bus: MemoryBus, fresh_run: str) -> None:
    await locate(quick_bus, fresh_run, "s3://bucket/prefix", endpoint="http://host:9000", region="eu-central-1")
    await locate(quick_bus, fresh_run, "s3://bucket/prefix/", endpoint="HTTP://HOST:9000/", region="eu-central-1")
    for endpoint, region in (("http://host:9001", "eu-central-1"), ("http://host:9000", "us-east-1"), ("", "eu-central-1")):
        with pytest.raises(ConfigError, match="versions are in"):
            await locate(quick_bus, fresh_run, "s3://bucket/prefix", endpoint=endpoint, region=region)


async def test_what_stands_there_and_is_no_place_is_an_error_and_not_the_broker(quick_bus: MemoryBus, fresh_run: str) -> None:
    await quick_bus.publish(f"{Subjects(fresh_run).root}.policy.store", RunFinished(run=fresh_run, version=1, reason="x"), id="x")
    with pytest.raises(IntegrityError, match="does not say where"):
        await located_store(quick_bus, fresh_run)
    await quick_bus.publish_bytes(f"{Subjects(fresh_run).root}.policy.store", b"noise", id="y")
    with pytest.raises(MalformedMessage):
        await located_store(quick_bus, fresh_run)


async def test_a_folder_that_is_not_here_is_said_and_not_made(quick_bus: MemoryBus, fresh_run: str, tmp_path: Path) -> None:
    await say(quick_bus, fresh_run, f"file:{tmp_path}/elsewhere")
    with pytest.raises(ConfigError, match="not here") as caught:
        await located_store(quick_bus, fresh_run)
    assert "mount it" in caught.value.remedy
    assert not (tmp_path / "elsewhere").exists()


async def test_a_folder_that_cannot_be_made_is_an_error_before_anything_is_said(quick_bus: MemoryBus, fresh_run: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DriftlineError, match="cannot be made") as caught:
        await locate(quick_bus, fresh_run, f"file:{tmp_path}/file/below")
    assert caught.value.remedy
    assert await located(quick_bus, fresh_run) is None


async def test_runs_in_one_folder_do_not_see_or_delete_each_other_s_blobs(quick_bus: MemoryBus, tmp_path: Path) -> None:
    one, other = (open_store(f"file:{tmp_path}", quick_bus, run) for run in ("one", "other"))
    ref = await one.put(b"the same start")
    await other.put(b"the same start")
    await other.put(b"more")
    assert [blob.digest async for blob in one.list()] == [ref.digest]
    await other.delete(ref)
    assert await one.get(ref) == b"the same start"


@pytest.mark.parametrize("store", ["file:relative/folder", "file:", "file:/a\0b", "s3://", "s3://key:secret@bucket/x", "s3://b/../other", "s3://bucket/a//b",
                                   "s3://bucket/./a", "s3://Bucket", "s3://a..b/c", "ftp://x", "", "jetstream "])
def test_what_is_no_place_for_every_reader_is_no_message(store: str) -> None:
    with pytest.raises(ValidationError) as caught:
        StoreLocated(run="r", store=store, at=0.0)
    assert "key:secret" not in str(caught.value.errors()[0]["msg"])


@pytest.mark.parametrize(("endpoint", "region"), [("http://key:secret@host", ""), ("nonsense", ""), ("", "x.evil.example/"), ("", "eu/../..")])
def test_an_endpoint_or_a_region_that_could_name_another_host_is_no_message(endpoint: str, region: str) -> None:
    """The region becomes part of Amazon's host name."""
    with pytest.raises(ValidationError):
        StoreLocated(run="r", store="s3://bucket/prefix", endpoint=endpoint, region=region, at=0.0)


@pytest.mark.parametrize("digest", ["../../secret", "..", "/etc/passwd", "a" * 31 + "/"])
async def test_a_folder_off_the_wire_is_used_for_nothing_but_digests_inside_it(quick_bus: MemoryBus, fresh_run: str, tmp_path: Path, digest: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "store").mkdir()
    await say(quick_bus, fresh_run, f"file:{tmp_path}/store")
    store, ref = await located_store(quick_bus, fresh_run), BlobRef(digest, 6, 1)
    for ask in (store.get, store.has, store.delete):
        with pytest.raises(IntegrityError, match="not a digest"):
            await ask(ref)
    await store.put(b"new")
    assert sorted(os.listdir(tmp_path)) == ["secret", "store"]
    assert os.listdir(tmp_path / "store") == [fresh_run]


@pytest.mark.parametrize("run", ["../other", "a/b", "", "a.b", "x" * 65])
def test_a_run_that_is_no_name_never_becomes_part_of_a_path(quick_bus: MemoryBus, tmp_path: Path, run: str) -> None:
    for store in (f"file:{tmp_path}", "s3://bucket/prefix"):
        with pytest.raises(ConfigError, match="not the name of a run"):
            open_store(store, quick_bus, run)


@given(st.text(), st.text(max_size=8), st.text(max_size=8))
def test_whatever_is_said_is_a_place_or_refused(store: str, endpoint: str, region: str) -> None:
    for text in (store, f"s3://{store}", f"file:{store}"):
        try:
            place = place_of(text, endpoint=endpoint, region=region)
        except ConfigError:
            continue
        if isinstance(place, InBucket):
            assert ".." not in f"{place.bucket}/{place.prefix}".split("/")


SAID, OWN = "http://said:9000", "http://own:9000"


@pytest.mark.parametrize(
    ("said", "own", "given_", "used"),
    [(SAID, SAID, None, SAID), ("", "", None, ""), (SAID, OWN, SAID, SAID), (SAID, OWN, "", ""), (SAID, "", OWN, OWN), ("", OWN, OWN, OWN)],
)
def test_keys_go_to_the_reader_s_own_endpoint_or_to_the_one_it_is_told(said: str, own: str, given_: str | None, used: str) -> None:
    assert consented(said, own, given_) == used


@pytest.mark.parametrize(("said", "own"), [(SAID, ""), (SAID, OWN), ("", OWN)])
def test_keys_do_not_go_to_an_endpoint_that_only_the_run_names(said: str, own: str) -> None:
    with pytest.raises(ConfigError, match="only if you say so") as caught:
        consented(said, own, None)
    assert "AWS_ENDPOINT_URL" in caught.value.remedy


def test_the_environment_names_an_endpoint_as_other_s3_programs_read_it() -> None:
    assert own_endpoint({}) == ""
    assert own_endpoint({"AWS_ENDPOINT": "http://c"}) == "http://c"
    assert own_endpoint({"AWS_ENDPOINT_URL": "http://B/", "AWS_ENDPOINT": "http://c"}) == "http://b"
    assert own_endpoint({"AWS_ENDPOINT_URL_S3": "http://a", "AWS_ENDPOINT_URL": "http://b"}) == "http://a"


async def test_a_stranger_s_endpoint_in_the_stream_gets_no_request_without_consent(
    s3_keys: S3Server, quick_bus: MemoryBus, fresh_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await S3Blobs(BUCKET, f"located/{fresh_run}", endpoint=s3_keys.url).put(b"weights")
    with front_of(s3_keys.port) as stranger:
        await say(quick_bus, fresh_run, f"s3://{BUCKET}/located", stranger.url)
        with pytest.raises(ConfigError, match=f"behind {stranger.url}") as caught:
            await located_store(quick_bus, fresh_run)
        assert f"AWS_ENDPOINT_URL={stranger.url}" in caught.value.remedy
        assert not stranger.requests
        assert await (await located_store(quick_bus, fresh_run, endpoint=s3_keys.url)).get(ref) == b"weights"
        assert not stranger.requests
        monkeypatch.setenv("AWS_ENDPOINT_URL", stranger.url)
        assert await (await located_store(quick_bus, fresh_run)).get(ref) == b"weights"
        assert stranger.requests == ["GET"]


async def test_services_that_take_the_endpoint_from_the_environment_say_it(
    s3_keys: S3Server, quick_bus: MemoryBus, fresh_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_keys.url)
    store = f"s3://{BUCKET}/located"
    place = await locate(quick_bus, fresh_run, store)
    assert place == InBucket(BUCKET, "located", s3_keys.url, "")
    ref = await open_store(store, quick_bus, fresh_run).put(b"weights")
    assert await (await located_store(quick_bus, fresh_run)).get(ref) == b"weights"
