"""Where a starting policy lies: every service, and the tokenizer beside it, finds the same files by the same words.

`base` is the policy shipped with the package; `package:NAME` the one .gguf file of an installed Python package; anything else a directory or a .gguf file.
"""

from __future__ import annotations

from pathlib import Path

from driftline.messages.errors import ConfigError
from driftline.models.gguf.installed import installed_gguf

__all__ = ["BASE", "GGUF", "PACKAGE", "located"]

BASE = "base"
GGUF = ".gguf"
PACKAGE = "package:"


def located(init: str) -> Path:
    """The checkpoint directory, or the .gguf file. Raises ConfigError when there is none."""
    if init.startswith(PACKAGE):
        return installed_gguf(init.removeprefix(PACKAGE))
    path = Path(__file__).parent / BASE if init == BASE else Path(init)
    if not path.is_dir() and not (path.suffix == GGUF and path.is_file()):
        raise ConfigError("no such checkpoint directory", field="policy.init", value=init,
                          remedy=f'use "{BASE}", a directory with config.json and model.safetensors as `driftline pretrain` and runs write them, '
                                 f'a {GGUF} file, or "{PACKAGE}NAME" of a package with one')
    return path
