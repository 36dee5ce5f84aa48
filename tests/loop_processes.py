"""Services as the processes they are in a deployment: `python -m driftline NAME`, ended with the test whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from driftline.services.config import Config, to_toml

WAIT_S = 120.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass
class Ended:
    code: int
    output: str


class Process:
    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self._log = process, log

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    async def ended(self) -> Ended:
        async with asyncio.timeout(WAIT_S):
            code = await self._process.wait()
        return Ended(code, self.log)


@asynccontextmanager
async def driftline(folder: Path, *arguments: str, cwd: Path | None = None) -> AsyncIterator[Process]:
    """One command of ours. Its output is `folder`/<command>.log."""
    log = folder / f"{arguments[0]}.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "driftline", *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, env=ENVIRONMENT,
            start_new_session=True, cwd=cwd or folder,
        )
    try:
        yield Process(process, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def write_config(config: Config, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(config))
    return path


def service_arguments(name: str, config: Path, url: str) -> Sequence[str]:
    return (name, "--config", str(config), "--run-dir", str(config.parent), "--set", f'broker.url="{url}"')
