"""`driftline policy` against a real broker: what it prints, in both forms, what it exits with, and what it says about bad input."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from policy_commands import Said, declared, policy, published

from driftline.messages.subjects import Subjects
from driftline.policy_store import JetStreamBlobs, PolicyReader

LIST_KEYS = {"version", "kind", "digest", "learner_step", "consumed", "bytes_raw", "bytes_full", "bytes_delta", "delta_share", "density", "at", "age_s", "pins"}
SHOW_KEYS = {
    "run", "version", "kind", "digest", "seal", "learner_step", "parent", "chain", "consumed", "numerics", "batch", "paths", "tensors", "bytes_raw",
    "bytes_full", "bytes_delta", "density", "at",
}
TENSOR_KEYS = {"name", "dtype", "shape", "nbytes", "digest", "shards", "codecs"}
DIFF_KEYS = {
    "name", "change", "dtype", "shape", "elements", "changed", "share", "largest", "ulps", "not_finite", "old_digest", "new_digest",
}


async def test_ls_is_newest_first_with_pins_and_in_one_document(nats_url: str, fresh_run: str) -> None:
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 5)
    assert (await policy("pin", fresh_run, 1, "--owner", "me", url=nats_url)).code == 0
    said = await policy("ls", fresh_run, "--json", url=nats_url)
    assert said.code == 0
    assert said.document["run"] == fresh_run
    assert said.document["head"] == 4
    rows = said.document["versions"]
    assert [row["version"] for row in rows] == [4, 3, 2, 1, 0]
    assert [row["kind"] for row in rows] == ["delta", "full+delta", "delta", "delta", "full"]
    assert all(row.keys() == LIST_KEYS for row in rows)
    assert [row["pins"] for row in rows] == [[], [], [], ["me"], []]
    assert rows[0]["density"] == pytest.approx(0.02 * 40_000 / (80_000 + 33 + 64), rel=0.01)
    assert rows[0]["delta_share"] == rows[0]["bytes_delta"] / rows[0]["bytes_raw"]
    assert rows[-1]["delta_share"] is None
    table = await policy("ls", fresh_run, url=nats_url)
    assert table.code == 0
    assert [line.split()[0] for line in table.out.splitlines() if line.strip()][2:] == ["4", "3", "2", "1", "0"]
    assert "me" in table.out
    two = await policy("ls", fresh_run, "--limit", "2", "--json", url=nats_url)
    assert [row["version"] for row in two.document["versions"]] == [4, 3]
    every = await policy("ls", fresh_run, "--limit", "2", "--all", "--json", url=nats_url)
    assert len(every.document["versions"]) == 5


async def test_a_run_without_versions_lists_none(nats_url: str, fresh_run: str) -> None:
    async with declared(nats_url, fresh_run):
        said = await policy("ls", fresh_run, "--json", url=nats_url)
        assert (said.code, said.document) == (0, {"run": fresh_run, "head": None, "versions": []})
        assert "has no version yet" in (await policy("ls", fresh_run, url=nats_url)).out
        refused = await policy("show", fresh_run, "head", url=nats_url)
        assert refused.code == 2
        assert "no version yet" in refused.err


async def test_show_says_what_a_version_is_made_of_and_the_ways_to_it(nats_url: str, fresh_run: str) -> None:
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 5)
    said = await policy("show", fresh_run, "head", "--json", url=nats_url)
    assert said.code == 0
    found = said.document
    assert found.keys() >= SHOW_KEYS
    assert (found["version"], found["parent"], found["chain"]) == (4, 3, [3])
    assert [path["path"] for path in found["paths"]] == ["full 3 + delta 4", "full 0 + delta 1 + delta 2 + delta 3 + delta 4"]
    assert found["paths"][0]["nbytes"] < found["paths"][1]["nbytes"]
    assert found["numerics"] == {"lr": 0.1, "worst": "nan"}
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert all(tensor.keys() == TENSOR_KEYS for tensor in tensors.values())
    assert tensors["frozen"]["codecs"] == {"unchanged": 1}
    table = await policy("show", fresh_run, "4", url=nats_url)
    assert table.code == 0
    assert found["digest"] in table.out
    assert "layers.0.weight" in table.out
    assert "full 3 + delta 4" in table.out


@pytest.mark.parametrize(("name", "number"), [("0", 0), ("3", 3), ("head", 4), ("head~0", 4), ("head~3", 1), ("start", 0)])
async def test_a_version_has_several_names(nats_url: str, fresh_run: str, name: str, number: int) -> None:
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 5)
    assert (await policy("show", fresh_run, name, "--json", url=nats_url)).document["version"] == number


BAD: list[tuple[list[str], int, list[str]]] = [
    (["show", "RUN", "newest"], 2, ["VERSION", "newest", "head~3"]),
    (["show", "RUN", "head~9"], 2, ["VERSION", "head~9", "the head is at 2"]),
    (["show", "RUN", "head^"], 2, ["VERSION", "head^"]),
    (["show", "RUN", "9"], 1, ["version", "9", "the head is at 2"]),
    (["show", "RUN", "9" * 400], 2, ["VERSION"]),
    (["show", "absent", "1"], 2, ["run", "absent", "no such run"]),
    (["ls", "absent"], 2, ["run", "absent"]),
    (["ls", "RUN", "--limit", "0"], 2, ["--limit"]),
    (["ls", "RUN", "--store", "ftp://x"], 2, ["ftp://x"]),
    (["verify", "RUN", "1", "--all"], 2, ["VERSION", "in one way"]),
    (["verify", "RUN", "--all", "--last", "2"], 2, ["in one way"]),
    (["verify", "RUN", "--last", "0"], 2, ["--last"]),
    (["diff", "RUN", "0", "seven"], 2, ["VERSION", "seven"]),
    (["get", "RUN", "1"], 2, ["--out"]),
    (["get", "RUN", "7", "-o", "OUT/x"], 1, ["version", "7"]),
    (["get", "RUN", "1", "-o", "/proc/nothing/here"], 2, ["/proc/nothing/here"]),
    (["get", "RUN", "1", "-o", "OUT"], 2, ["is there already", "--force"]),
    (["export", "RUN", "1", "-o", "OUT/x"], 2, ["config.json", "--files"]),
    (["export", "RUN", "1", "-o", "OUT/x", "--files", "/absent"], 2, ["--files", "/absent"]),
    (["export", "RUN", "1", "-o", "OUT/x", "--shard-size", "huge"], 2, ["--shard-size", "huge"]),
    (["export", "RUN", "1", "-o", "OUT/x", "--shard-size", "0"], 2, ["--shard-size"]),
    (["export", "RUN", "1", "-o", "OUT/x", "--merge"], 2, ["--merge", "no adapters"]),
    (["pin", "RUN", "1", "--for", "soon"], 2, ["--for", "soon"]),
    (["pin", "RUN", "1", "--owner", "x" * 65], 2, ["--owner"]),
    (["pin", "RUN", "1", "--owner", "a\nb"], 2, ["--owner"]),
    (["pin", "RUN", "9"], 1, ["version", "9"]),
    (["unpin", "RUN", "1", "--owner", "me", "--all-owners"], 2, ["--owner"]),
]


async def test_bad_input_of_every_kind_is_a_sentence_and_an_exit_code(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 3)
    for arguments, code, named in BAD:
        given = [part.replace("OUT", str(tmp_path)) if part != "RUN" else fresh_run for part in arguments]
        said: Said = await policy(*given, url=nats_url)
        assert said.code == code, (arguments, said)
        assert not [word for word in named if word not in said.err.replace("\n", " ")], (arguments, said.err)
        assert said.out == "", arguments
    assert os.listdir(tmp_path) == []


async def test_no_broker_is_said_with_its_address() -> None:
    said = await policy("ls", "run", url="nats://127.0.0.1:9")
    assert said.code == 3
    assert "127.0.0.1:9" in said.err


async def test_verify_reads_every_way_and_fails_when_one_is_damaged(nats_url: str, fresh_run: str) -> None:
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 5)
        whole = await policy("verify", fresh_run, "--json", url=nats_url)
        assert whole.code == 0
        assert whole.document["intact"] is True
        (version,) = whole.document["versions"]
        assert (version["version"], version["ok"], version["intact"]) == (4, True, True)
        assert [path["path"] for path in version["paths"]] == ["full 3 + delta 4", "full 0 + delta 1 + delta 2 + delta 3 + delta 4"]
        full = (await PolicyReader(bus, JetStreamBlobs(bus, fresh_run), fresh_run).manifest(3)).full
        assert full is not None
        await bus.purge(Subjects(fresh_run).stream("BLOB"), Subjects(fresh_run).chunk("blob", full.packs[0].digest, "*"))
        damaged = await policy("verify", fresh_run, "4", "--json", url=nats_url)
        assert damaged.code == 1
        (version,) = damaged.document["versions"]
        assert (version["ok"], version["intact"]) == (True, False)
        assert full.packs[0].digest in version["paths"][0]["error"]
        text = await policy("verify", fresh_run, "--last", "2", url=nats_url)
        assert text.code == 1
        lines = text.out.splitlines()
        assert [line[:4] for line in lines if "full 3" in line] == ["FAIL", "FAIL"]
        assert [line[:4] for line in lines if "full 0" in line] == ["ok  ", "ok  "]
        assert full.packs[0].digest in text.out
        every = await policy("verify", fresh_run, "--all", "--json", url=nats_url)
        assert [entry["version"] for entry in every.document["versions"]] == [4, 3, 2, 1, 0]
        assert [entry["intact"] for entry in every.document["versions"]] == [False, False, True, True, True]


async def test_diff_says_how_much_changed_and_by_how_many_ulps(nats_url: str, fresh_run: str) -> None:
    async with declared(nats_url, fresh_run) as bus:
        states = await published(bus, fresh_run, 3)
    said = await policy("diff", fresh_run, "start", "head", "--json", url=nats_url)
    assert said.code == 0
    found = said.document
    assert (found["old"], found["new"], found["tensors_changed"], found["elements_changed"]) == (0, 2, 1, 1600)
    (tensor,) = found["tensors"]
    assert tensor.keys() == DIFF_KEYS
    assert (tensor["name"], tensor["change"], tensor["changed"], tensor["ulps"], tensor["not_finite"]) == ("layers.0.weight", "values", 1600, 1, 0)
    assert tensor["elements"] == states[0]["layers.0.weight"].elements
    assert 0 < tensor["largest"] < 0.05
    same = await policy("diff", fresh_run, "1", "1", "--json", url=nats_url)
    assert same.document["tensors"] == []
    table = await policy("diff", fresh_run, "0", "--top", "1", url=nats_url)
    assert table.code == 0
    assert "layers.0.weight" in table.out


async def test_pins_are_listed_kept_and_let_go(nats_url: str, fresh_run: str) -> None:
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 3)
    assert (await policy("pins", fresh_run, url=nats_url)).out == "no pins\n"
    assert (await policy("pin", fresh_run, "head", "--json", "--owner", "evaluation", url=nats_url)).document["version"] == 2
    assert (await policy("pin", fresh_run, "start", "--for", "2h", url=nats_url)).code == 0
    listed = (await policy("pins", fresh_run, "--json", url=nats_url)).document["pins"]
    assert [pin["version"] for pin in listed] == [0, 2]
    assert all(pin.keys() == {"version", "seal", "owner", "at", "until"} for pin in listed)
    assert "@" in listed[0]["owner"]
    assert listed[0]["until"] - listed[0]["at"] == pytest.approx(7200, abs=60)
    assert listed[1]["until"] is None
    assert (await policy("unpin", fresh_run, "head", url=nats_url)).code == 1
    gone = await policy("unpin", fresh_run, "head", "--all-owners", "--json", url=nats_url)
    assert (gone.code, gone.document["unpinned"]) == (0, ["evaluation"])
    assert (await policy("unpin", fresh_run, "0", url=nats_url)).code == 0
    assert (await policy("pins", fresh_run, "--json", url=nats_url)).document["pins"] == []
