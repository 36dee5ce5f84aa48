"""A run from a GGUF file with a chat template, solved examples and adapters: through every service, as a pretrained model goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_cases import small_llama
from loop_cases import tiny_document
from loop_processes import driftline, write_config

from driftline.models.gguf.llama import GgufModel
from driftline.policy_store.exchange import ModelFolder
from driftline.services.config import Config

pytestmark = pytest.mark.slow

TASKS = '''
def tasks(index, rng):
    a = rng.randint(0, 99999)
    return f"say something about {a}", str(a % 7)


def reward(prompt, answer, completion):
    return len(completion.encode()) % 5 / 4
'''


def pretrained_run(folder: Path, **sections: dict[str, Any]) -> Config:
    (folder / "own.py").write_text(TASKS)
    document = tiny_document("pretrained", **sections)
    document["run"] |= {"dir": str(folder / "runs"), "steps": 2}
    document["policy"] = {**document.get("policy", {}), "init": str(small_llama(folder, llama__context_length=512))}
    document["tasks"] = {"source": f"python:{folder / 'own.py'}", "family": "", "few_shot": 2, "heldout": 4}
    document["learner"] = {**document.get("learner", {}), "lora_rank": 4, "lora_targets": r".*_proj"}
    return Config.model_validate(document)


async def test_a_run_from_a_gguf_file_trains_adapters_and_leaves_a_hugging_face_model(tmp_path: Path) -> None:
    config = pretrained_run(tmp_path)
    async with driftline(tmp_path, "run", str(write_config(config, tmp_path / "pretrained.toml")), "--plain") as run:
        ended = await run.ended()
    assert ended.code == 0, ended.output
    folder = Path(ended.output.strip().splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["dead_letters"], summary["restarts"]) == (2, 0, 0), ended.output
    assert summary["outcomes"]["failed"] == summary["outcomes"]["expired"] == 0
    assert summary["k3_lag0_mean"] is not None
    assert summary["k3_lag0_mean"] <= 1e-6, "engine and learner ask and answer with the same tokens"
    assert summary["audit_findings"] == 0, (folder / "audit.json").read_text()
    async with driftline(tmp_path, "replay", str(folder / "run.dlr"), "--learner-only", "--json") as replaying:
        replayed = await replaying.ended()
    assert replayed.code == 0, replayed.output
    mirrored = next(path for path in sorted((folder / "policy").rglob("config.json")))
    found = ModelFolder.open(mirrored.parent)
    model = GgufModel.open(tmp_path / "small.gguf")
    assert json.loads(mirrored.read_text())["model_type"] == "llama"
    assert set(model.shapes) <= set(found.layouts), "under the public names"
    assert any("lora_A" in name for name in found.layouts)
