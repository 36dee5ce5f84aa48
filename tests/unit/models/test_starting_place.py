"""What a run starts from: the same files whether the weights are a folder's or one .gguf file's, and a refusal where there are none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_cases import small_llama

from driftline.messages.errors import ConfigError
from driftline.services.config import Config, resolve
from driftline.services.starting import starting_config, starting_files, starting_place


def started(init: Path | str) -> Config:
    return resolve({"policy": {"init": str(init)}})


def test_a_gguf_file_has_the_files_of_a_folder(tmp_path: Path) -> None:
    config = started(small_llama(tmp_path))
    files = starting_files(config)
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= files.keys()
    assert json.loads(starting_config(config))["model_type"] == "llama"
    assert starting_place(config).suffix == ".gguf"


def test_a_folder_has_its_own(tmp_path: Path) -> None:
    config = started("base")
    assert starting_files(config)["config.json"] == (starting_place(config) / "config.json").read_bytes()


def test_a_folder_without_weights_is_refused_by_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.safetensors missing"):
        starting_place(started(tmp_path))
    with pytest.raises(ConfigError, match="no such checkpoint"):
        starting_place(started(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="absent_package"):
        starting_place(started("package:absent_package"))


def test_reading_them_needs_no_torch(tmp_path: Path) -> None:
    """The services without torch tell others what a run started from."""
    code = (
        "import sys; from driftline.services.config import resolve; from driftline.services.starting import starting_files\n"
        f"starting_files(resolve({{'policy': {{'init': {str(small_llama(tmp_path))!r}}}}}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
