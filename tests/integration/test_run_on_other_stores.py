"""`driftline run` with its versions outside the broker: to its end, audited, recorded and replayed, with the bytes where they were said to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loop_cases import tiny_document
from loop_processes import ENVIRONMENT, driftline, write_config
from s3_server import BUCKET, S3Server, environment

from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer
from driftline.messages.subjects import Subjects
from driftline.policy_store.location import located_store
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import state_digest
from driftline.services.config import Config
from driftline.services.runtime import run_topology

pytestmark = pytest.mark.slow


async def check_run(tmp_path: Path, name: str, **policy: str) -> None:
    """Run to the end and ask everybody who reads a run afterwards."""
    async with NatsServer(tmp_path / "broker") as server, await NatsBus.connect(server.url, name="test") as bus:
        document = tiny_document(name, run={"steps": 2, "dir": str(tmp_path / "runs")}, policy=policy, broker={"url": server.url})
        config = Config.model_validate(document)
        await bus.declare(run_topology(config))
        async with driftline(tmp_path, "run", str(write_config(config, tmp_path / f"{name}.toml")), "--plain") as run:
            ended = await run.ended()
        assert ended.code == 0, ended.output
        assert await bus.subjects(Subjects(name).stream("BLOB"), ">") == {}, "no byte of a version is in the broker"
        reader = PolicyReader(bus, await located_store(bus, name), name)  # told by the run alone
        head = await reader.head()
        assert head is not None
        assert head.version == 2
        assert state_digest(await reader.materialise(2)) == head.digest
        async with driftline(tmp_path, "audit", name, "--url", server.url) as auditing:
            audited = await auditing.ended()
        assert audited.code == 0, audited.output
    folder = Path(ended.output.strip().splitlines()[-1])
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert (summary["versions"], summary["steps"], summary["dead_letters"], summary["audit_findings"]) == (3, 2, 0, 0)
    async with driftline(tmp_path, "replay", str(folder / "run.dlr"), "--learner-only", "--json") as replaying:
        replayed = await replaying.ended()
    assert replayed.code == 0, replayed.output


async def test_a_run_on_a_shared_folder_goes_to_its_end_and_is_audited_and_replayed(tmp_path: Path) -> None:
    await check_run(tmp_path, "infolder", store=f"file:{tmp_path}/shared")
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["infolder"]


async def test_a_run_on_an_object_store_goes_to_its_end_and_is_audited_and_replayed(
    tmp_path: Path, s3_keys: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(endpoint=s3_keys.url).items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
        monkeypatch.setenv(name, value)
    await check_run(tmp_path, "inbucket", store=f"s3://{BUCKET}/runs", s3_endpoint=s3_keys.url)
