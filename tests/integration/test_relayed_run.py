"""`driftline run` with the relay on: two engines, a run to its end, and versions that came from an engine and not from the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from loop_cases import tiny_document
from loop_processes import driftline, write_config

from driftline.services.config import Config

pytestmark = pytest.mark.slow


async def test_a_run_with_the_relay_on_goes_to_its_end_and_its_engines_read_from_each_other(tmp_path: Path) -> None:
    document = tiny_document("relayed", rollout={"engines": 2}, relay={"enabled": True}, run={"dir": str(tmp_path / "runs")})
    config = Config.model_validate(document)
    async with driftline(tmp_path, "run", str(write_config(config, tmp_path / "relayed.toml")), "--plain") as run:
        ended = await run.ended()
    assert ended.code == 0, ended.output
    folder = Path(ended.output.strip().splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["dead_letters"], summary["restarts"]) == (3, 0, 0), ended.output
    last: dict[str, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        said = json.loads(line)
        if said.get("service") == "rollout" and "relay_hits" in said:
            last[said["instance"]] = said
    assert set(last) == {"0", "1"}
    assert sum(values["relay_hits"] for values in last.values()) > 0
    assert sum(values["relay_wrong"] + values["relay_rescued"] for values in last.values()) == 0, last
