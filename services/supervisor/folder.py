"""The run folder: one directory per run that holds all a run leaves behind, complete whatever the ending.

    config.toml  summary.json  audit.json  run.dlr  report.md  curves.png  metrics.jsonl  tensorboard/  logs/<service>.log
    broker/  policy/  learner/
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from driftline.messages.errors import ConfigError
from driftline.services.config import Config, to_toml

__all__ = ["RunFolder"]


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """`<run.dir>/<run.name>-<time>`, new: two runs in one second get two folders."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for suffix in ("", *(f"-{number}" for number in range(2, 100))):
            path = Path(config.run.dir).resolve() / f"{config.run.name}-{stamp}{suffix}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(f"cannot create {path}: {error.strerror}", field="run.dir", value=config.run.dir,
                                  remedy="name a directory that can be written to") from None
            folder = cls(path)
            folder.logs.mkdir()
            folder.config.write_text(to_toml(config))
            return folder
        raise ConfigError("a hundred runs of this name started this second", field="run.name", value=config.run.name)

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.md"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def audit(self) -> Path:
        return self.path / "audit.json"

    @property
    def recording(self) -> Path:
        return self.path / "run.dlr"

    @property
    def broker(self) -> Path:
        return self.path / "broker"
