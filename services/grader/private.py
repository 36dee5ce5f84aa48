"""What no reward may read: where this run keeps its secrets and its state."""

from __future__ import annotations

from pathlib import Path

from driftline.policy_store.location import FILE
from driftline.services.config import Config

__all__ = ["private_paths"]


def private_paths(config: Config, run_dir: Path | None = None) -> tuple[str, ...]:
    """Files and folders for `GraderPool(hidden=)`: the run folders, the broker's store and credentials, the policies."""
    credentials = Path(config.broker.credentials) if config.broker.credentials else None
    found = [
        Path(config.run.dir), run_dir, credentials, credentials.parent if credentials else None,
        Path(config.broker.store_dir) if config.broker.store_dir else None,
        Path(config.policy.store.removeprefix(FILE)) if config.policy.store.startswith(FILE) else None,
    ]  # fmt: skip
    return tuple(str(path.absolute()) for path in found if path is not None)
