"""The files beside the weights: kept with the run, read back as they were, and never a path or a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from driftline.messages.bus import Bus
from driftline.messages.errors import ConfigError
from driftline.messages.subjects import Subjects
from driftline.policy_store import model_files
from driftline.policy_store.model_files import KNOWN, ModelFile, files_in, load_files, store_files


async def test_the_newest_files_count_even_when_they_were_there_before(bus: Bus, fresh_run: str) -> None:
    """A, then B, then A again, all within the window of duplicates."""
    assert await load_files(bus, fresh_run) == {}
    first, second = {"config.json": b"{}", "tokenizer.json": b"[1]" * 300_000}, {"config.json": b'{"a": 1}', "LICENSE": b""}
    for files in (first, second, first):
        await store_files(bus, fresh_run, files)
        assert await load_files(bus, fresh_run) == files


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "modeling.py", "model.safetensors", "", "config.json/x", "CONFIG.JSON"])
def test_only_known_names_are_files(name: str) -> None:
    with pytest.raises(ValidationError):
        ModelFile(name=name, content=np.zeros(1, np.uint8))


def test_a_folder_gives_what_is_known_and_nothing_else(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "modeling.py", "pytorch_model.bin", "notes.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "tokenizer.json").mkdir()
    assert set(files_in(tmp_path)) == {"config.json", "tokenizer_config.json"}


def test_files_too_large_to_be_a_tokenizer_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "TOTAL_LIMIT", 10)
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "vocab.txt").write_text("abc")
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        files_in(tmp_path)


def test_no_name_is_code_or_a_path() -> None:
    assert not [name for name in KNOWN if "/" in name or name.endswith((".py", ".bin", ".pkl"))]


def test_whoever_reads_the_policy_stream_knows_the_message() -> None:
    """A service that follows the whole stream would keep it as a dead letter otherwise."""
    code = "import driftline.policy_store; from driftline.messages.registry import schema; schema('model_files', 1)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_subject_is_the_policy_s_and_no_manifest_s(fresh_run: str) -> None:
    assert model_files._subject(fresh_run) == f"{Subjects(fresh_run).root}.policy.files"
