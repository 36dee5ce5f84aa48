"""`driftline policy gc | squash | rebase` against a real broker: what goes, what stays and why, and what makes the way shorter."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from policy_commands import declared, policy, published, stepped, weights

from driftline.messages.nats_bus import NatsBus
from driftline.messages.subjects import Subjects
from driftline.policy_store import DirectoryBlobs, HostTensor, JetStreamBlobs, PolicyReader, PolicyWriter
from driftline.policy_store.location import locate

GC_KEYS = {
    "run", "head", "dry_run", "blocked", "keep", "delete", "shortcuts", "stored", "orphans", "lacking", "unreadable", "collected",
}
NOW = ("--grace", "0")


async def versions(run: str, url: str) -> list[int]:
    return [row["version"] for row in (await policy("ls", run, "--all", "--json", url=url)).document["versions"]]


async def test_a_dry_run_says_what_would_go_and_deletes_nothing(nats_url: str, fresh_run: str) -> None:
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 10)
    dry = await policy("gc", fresh_run, "--keep", 2, "--dry-run", "--json", url=nats_url)
    assert dry.code == 0, dry
    found = dry.document
    assert found.keys() == GC_KEYS
    # Version 9 has a full; 8 is made from 6's; version 0 is where a replay begins.
    assert [entry["version"] for entry in found["delete"]] == [1, 2, 3, 4, 5]
    assert found["keep"] == [0, 6, 7, 8, 9]
    assert found["collected"] is None
    assert found["orphans"] == {"blobs": 0, "nbytes": 0, "young": 0}
    assert await versions(fresh_run, nats_url) == list(range(9, -1, -1))
    text = await policy("gc", fresh_run, "--keep", 2, "--dry-run", url=nats_url)
    assert "5 versions and 0 shortcuts may go" in text.out


async def test_a_collection_takes_what_nobody_needs_and_the_rest_still_verifies(nats_url: str, fresh_run: str) -> None:
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 10)
    assert (await policy("pin", fresh_run, 4, "--owner", "me", url=nats_url)).code == 0
    done = await policy("gc", fresh_run, "--keep", 2, "--json", *NOW, url=nats_url)
    assert done.code == 0, done
    assert [entry["version"] for entry in done.document["delete"]] == [1, 2, 5]
    assert done.document["collected"]["versions"] == 3
    assert done.document["collected"]["nbytes"] == sum(entry["nbytes"] for entry in done.document["delete"]) > 0
    assert await versions(fresh_run, nats_url) == [9, 8, 7, 6, 4, 0]
    assert (await policy("verify", fresh_run, "--all", url=nats_url)).code == 0
    assert (await policy("verify", fresh_run, 4, url=nats_url)).code == 0
    gone = await policy("show", fresh_run, 5, url=nats_url)
    assert gone.code == 1
    assert (await policy("unpin", fresh_run, 4, "--owner", "me", url=nats_url)).code == 0
    rest = await policy("gc", fresh_run, "--keep", 1, "--drop-start", "--json", *NOW, url=nats_url)
    assert sorted(entry["version"] for entry in rest.document["delete"]) == [0, 3, 4, 6, 7, 8]
    assert await versions(fresh_run, nats_url) == [9]
    async with await NatsBus.connect(nats_url, name="test") as bus:
        blobs = {blob.digest async for blob in JetStreamBlobs(bus, fresh_run).list()}
        head = await PolicyReader(bus, JetStreamBlobs(bus, fresh_run), fresh_run).manifest(9)
        assert blobs == {pack.digest for pack in head.packs}


async def test_a_missing_manifest_in_a_chain_blocks_and_is_said(nats_url: str, fresh_run: str) -> None:
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 6)
        manifest = await PolicyReader(bus, JetStreamBlobs(bus, fresh_run), fresh_run).manifest(4)
        await bus.purge(Subjects(fresh_run).stream("POLICY"), f"{Subjects(fresh_run).manifest(4)}.{manifest.seal}")
    said = await policy("gc", fresh_run, "--keep", 1, "--json", *NOW, url=nats_url)
    assert said.code == 1
    assert "not known to its full" in said.document["blocked"]
    assert said.document["collected"]["versions"] == 0
    assert "blocked:" in (await policy("gc", fresh_run, "--dry-run", url=nats_url)).out


async def test_a_blob_that_is_gone_is_found_without_reading_weights_and_blocks(nats_url: str, fresh_run: str) -> None:
    """The full of version 9 is damaged: the way around it leads over versions that would have gone."""
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 10)
        full = (await PolicyReader(bus, JetStreamBlobs(bus, fresh_run), fresh_run).manifest(9)).full
        assert full is not None
        await JetStreamBlobs(bus, fresh_run).delete(full.packs[0].ref)
    said = await policy("gc", fresh_run, "--keep", 1, "--drop-start", "--json", *NOW, url=nats_url)
    assert said.code == 1
    assert said.document["lacking"] == [{"version": 9, "digest": full.packs[0].digest}]
    assert "version 9 stays and lacks bytes" in said.document["blocked"]
    assert said.document["collected"]["versions"] == 0
    assert full.packs[0].digest in (await policy("gc", fresh_run, "--dry-run", url=nats_url)).out
    way = (await policy("verify", fresh_run, 9, "--json", url=nats_url)).document["versions"][0]
    assert (way["ok"], way["intact"]) == (True, False)
    assert (await policy("verify", fresh_run, 8, url=nats_url)).code == 0


async def test_what_a_cut_off_collection_left_is_taken_by_the_next(nats_url: str, fresh_run: str) -> None:
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 10)
        delta = (await PolicyReader(bus, JetStreamBlobs(bus, fresh_run), fresh_run).manifest(2)).delta
        assert delta is not None
        await JetStreamBlobs(bus, fresh_run).delete(delta.packs[0].ref)  # blobs go first, the manifest last
    said = await policy("gc", fresh_run, "--keep", 1, "--json", *NOW, url=nats_url)
    assert said.code == 0, said
    assert 2 in [entry["version"] for entry in said.document["delete"]]
    assert said.document["blocked"] == ""
    after = (await policy("gc", fresh_run, "--dry-run", "--json", url=nats_url)).document
    assert (after["lacking"], after["orphans"]["blobs"]) == ([], 0)


async def test_orphans_are_counted_and_go_when_they_are_old_and_no_learner_is_there(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    async with declared(nats_url, fresh_run) as bus:
        await locate(bus, fresh_run, f"file:{tmp_path}")
        store = DirectoryBlobs(tmp_path / fresh_run)
        writer = PolicyWriter(bus, store, fresh_run)
        await writer.resume()
        await writer.publish(weights(), version=0, learner_step=0)
        old, young = await store.put(b"left by a crash"), await store.put(b"on its way")
        os.utime(store.path(old.digest), (time.time() - 7200,) * 2)
        counted = (await policy("gc", fresh_run, "--dry-run", "--json", url=nats_url)).document["orphans"]
        assert counted == {"blobs": 2, "nbytes": len(b"left by a crash") + len(b"on its way"), "young": 1}
        kept = await policy("gc", fresh_run, "--json", *NOW, url=nats_url)
        assert kept.document["collected"]["orphans"] == 0
        done = await policy("gc", fresh_run, "--orphans", "--json", *NOW, url=nats_url)
        assert (done.code, done.document["collected"]["orphans"]) == (0, 1), done
        assert [await store.has(ref) for ref in (old, young)] == [False, True]
        from driftline.messages.errors import HeadConflict

        with pytest.raises(HeadConflict):  # whoever was about to name the orphan cannot any more
            await writer.publish(stepped(weights(), 1), version=1, learner_step=1)


async def test_a_squash_and_a_rebase_shorten_the_way(nats_url: str, fresh_run: str) -> None:
    async with declared(nats_url, fresh_run) as bus:
        writer = PolicyWriter(bus, JetStreamBlobs(bus, fresh_run), fresh_run, 100)
        await writer.resume()
        state = weights()
        for version in range(9):
            # The same weights move there and back: eight deltas say much more than their sum.
            state = stepped(state, 1) if version else state
            await writer.publish(state, version=version, learner_step=version)
        done = await policy("squash", fresh_run, 8, "--json", url=nats_url)
        assert done.code == 0, done
        assert done.document.keys() == {"run", "version", "base", "stored", "nbytes", "replaces"}
        assert (done.document["version"], done.document["base"], done.document["stored"]) == (8, 0, True)
        assert done.document["nbytes"] < done.document["replaces"]
        ways = (await policy("show", fresh_run, 8, "--json", url=nats_url)).document["paths"]
        assert ways[0]["path"] == "full 0 + shortcut 0-8"
        rebased = await policy("rebase", fresh_run, 7, "--json", url=nats_url)
        assert rebased.code == 0, rebased
        assert rebased.document.keys() == {"run", "version", "nbytes"}
        ways = (await policy("show", fresh_run, 7, "--json", url=nats_url)).document["paths"]
        assert "rebase 7" in [way["path"] for way in ways]
        assert (await policy("verify", fresh_run, "--all", url=nats_url)).code == 0
        for arguments, code, named in (
            (["squash", 7], 2, "2^k"), (["squash", 8, "--base", 5], 2, "--base"), (["rebase", 0], 2, "it has a full"), (["squash", 99], 1, "99"),
        ):
            said = await policy(arguments[0], fresh_run, *arguments[1:], url=nats_url)
            assert said.code == code, (arguments, said)
            assert named in said.err.replace("\n", " ")


async def test_a_squash_that_saves_nothing_is_not_stored(nats_url: str, fresh_run: str) -> None:
    """Two steps that change different weights by random bits: together they are about as long as one after the other."""
    rng = np.random.default_rng(0)
    async with declared(nats_url, fresh_run) as bus:
        writer = PolicyWriter(bus, JetStreamBlobs(bus, fresh_run), fresh_run, 100)
        await writer.resume()
        bits = rng.integers(0, 2**16, 100_000, np.uint16)
        for version in range(3):
            if version:
                bits[version::2][rng.choice(49_000, 2_000, replace=False)] ^= rng.integers(1, 2**16, 2_000, np.uint16)
            await writer.publish({"w": HostTensor.from_numpy(bits, "bfloat16")}, version=version, learner_step=version)
    said = await policy("squash", fresh_run, 2, "--json", url=nats_url)
    assert (said.code, said.document["stored"]) == (1, False), said
    ways = (await policy("show", fresh_run, 2, "--json", url=nats_url)).document["paths"]
    assert [way["path"] for way in ways] == ["full 0 + delta 1 + delta 2"]
    assert "hardly smaller" in (await policy("squash", fresh_run, 2, url=nats_url)).out


@pytest.mark.parametrize(("arguments", "named"), [
    (["--keep", "0"], "--keep"), (["--keep-for", "old"], "--keep-for"), (["--keep-bytes", "-3"], "--keep-bytes"), (["--grace", "soon"], "--grace"),
    (["--run-file", "/absent.toml"], "absent.toml"),
])
async def test_bad_settings_of_a_collection_are_refused(nats_url: str, fresh_run: str, arguments: list[str], named: str) -> None:
    async with declared(nats_url, fresh_run):
        said = await policy("gc", fresh_run, *arguments, url=nats_url)
        assert said.code == 2, said
        assert named in said.err
        assert said.out == ""


async def test_a_run_s_settings_say_what_stays(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[run]\nname = "{fresh_run}"\n[policy_store]\nkeep_versions = 3\nkeep_start = false\n')
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 10, full_every=1)
    said = await policy("gc", fresh_run, "--run-file", file, "--dry-run", "--json", url=nats_url)
    assert said.document["keep"] == [7, 8, 9]
    file.write_text(file.read_text().replace("= 3", "= 0"))
    refused = await policy("gc", fresh_run, "--run-file", file, url=nats_url)
    assert refused.code == 2
    assert "keep_versions" in refused.err
    other = await policy("gc", f"{fresh_run}-x", "--run-file", file, url=nats_url)
    assert other.code == 2
    assert "--run-file" in other.err
