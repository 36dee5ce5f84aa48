"""`driftline run` as a person starts it: to its end, and to its end with a rollout process killed on the way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from loop_cases import head_at, tiny_document
from loop_processes import WAIT_S, Ended, driftline, write_config

from driftline.messages.dead_letters import dead_letters
from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer
from driftline.messages.subjects import Subjects
from driftline.messages.types import Admitted, Outcome, OutcomeEvent
from driftline.policy_store.blobs import JetStreamBlobs
from driftline.policy_store.reader import PolicyReader
from driftline.services.config import Config
from driftline.services.runtime import run_topology
from driftline.services.watch.summary import KEYS

pytestmark = pytest.mark.slow


def folder_of(ended: Ended) -> Path:
    """The last line that `driftline run` prints."""
    return Path(ended.output.strip().splitlines()[-1])


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def tiny_run(name: str, folder: Path, **sections: dict[str, Any]) -> Config:
    document = tiny_document(name, **sections)
    document["run"]["dir"] = str(folder / "runs")
    return Config.model_validate(document)


def processes_of(folder: Path) -> dict[int, list[str]]:
    """Of this run, by command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:  # it ended while we looked
            continue
        if any(word.startswith(str(folder)) for word in words):
            found[int(entry.name)] = words
    return found


async def test_a_run_goes_to_its_end_and_leaves_a_complete_folder(tmp_path: Path) -> None:
    config = tiny_run("small", tmp_path, rollout={"engines": 2})
    async with driftline(tmp_path, "run", str(write_config(config, tmp_path / "small.toml")), "--plain") as run:
        ended = await run.ended()
    assert ended.code == 0, ended.output
    folder = folder_of(ended)
    assert folder.parent == tmp_path / "runs"
    assert {path.name for path in folder.iterdir()} >= {
        "config.toml", "summary.json", "report.md", "curves.png", "metrics.jsonl", "tensorboard", "logs", "policy", "learner", "broker",
        "audit.json", "run.dlr",
    }
    assert {path.stem for path in (folder / "logs").glob("*.log")} == {
        "supervisor", "learner", "rollout-0", "rollout-1", "dispatcher", "grader", "evaluator", "policy-store",
    }
    summary = summary_of(folder)
    assert tuple(summary) == KEYS
    assert (summary["versions"], summary["steps"], summary["dead_letters"], summary["restarts"]) == (4, 3, 0, 0), ended.output
    assert summary["max_lag_seen"] <= summary["max_lag"] == 1
    assert summary["k3_lag0_mean"] is not None
    assert summary["k3_lag0_mean"] <= 1e-6
    assert summary["outcomes"]["trained"] == 6
    assert summary["outcomes"]["expired"] == summary["outcomes"]["failed"] == 0
    assert 0.0 <= summary["heldout_first"] <= 1.0
    assert 0.0 <= summary["heldout_last"] <= 1.0
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if s["service"] == "learner"] == [1, 2, 3]
    assert not processes_of(folder)
    assert summary["audit_findings"] == 0, (folder / "audit.json").read_text()
    async with driftline(tmp_path, "replay", str(folder / "run.dlr"), "--learner-only", "--json") as replaying:
        replayed = await replaying.ended()
    assert replayed.code == 0, replayed.output


async def ledger(bus: NatsBus, run: str) -> tuple[list[str], list[OutcomeEvent]]:
    subjects = Subjects(run)
    newest = await bus.last(subjects.stream("LEDGER"), subjects.ledger)
    assert newest is not None
    admitted, ended = [], []
    async for stored in bus.follow(subjects.stream("LEDGER"), subjects.ledger):
        match stored.message:
            case Admitted() as event:
                admitted.append(event.group.group)
            case OutcomeEvent() as event:
                ended.append(event)
        if stored.seq >= newest.seq:
            break
    return admitted, ended


async def test_a_run_whose_rollout_process_is_killed_completes_and_every_group_ends_once(tmp_path: Path) -> None:
    name = "killed"
    async with NatsServer(tmp_path / "broker") as server, await NatsBus.connect(server.url, name="test") as bus:
        config = tiny_run(name, tmp_path, run={"steps": 12}, broker={"url": server.url})
        await bus.declare(run_topology(config))
        async with driftline(tmp_path, "run", str(write_config(config, tmp_path / "killed.toml")), "--plain") as run, asyncio.timeout(WAIT_S):
            blobs = JetStreamBlobs(bus, name)
            await head_at(bus, blobs, name, 1)
            (victim,) = (pid for pid, words in processes_of(tmp_path / "runs").items() if "rollout" in words)
            os.kill(victim, signal.SIGKILL)
            ended = await run.ended()
        assert ended.code == 0, ended.output
        admitted, outcomes = await ledger(bus, name)
        assert await dead_letters(bus, name) == []
        manifests = [await PolicyReader(bus, blobs, name).manifest(version) for version in range(1, 13)]
    summary = summary_of(folder_of(ended))
    assert summary["audit_findings"] == 0, (folder_of(ended) / "audit.json").read_text()
    assert summary["restarts"] >= 1
    assert summary["steps"] == 12
    assert summary["max_lag_seen"] <= 1
    assert len(admitted) == len(set(admitted))
    assert Counter(event.group for event in outcomes) == Counter(admitted)
    consumed = [member for manifest in manifests for member in manifest.consumed]
    assert len(consumed) == len(set(consumed))
    trained = {event.group for event in outcomes if event.outcome is Outcome.TRAINED}
    assert trained == {member.split("/")[1] for member in consumed}
    assert len(trained) == 24

