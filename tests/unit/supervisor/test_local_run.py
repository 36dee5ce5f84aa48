"""A whole run of stand-in services over a real broker: it ends by itself, in order, and leaves a complete folder."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from driftline.messages.server import NatsServer
from driftline.messages.types import Message
from driftline.services.config import Config
from driftline.services.supervisor.children import ServiceSpec
from driftline.services.supervisor.folder import RunFolder
from driftline.services.supervisor.local import Ending, LocalRun, service_specs
from driftline.services.supervisor.restarts import RestartPolicy
from driftline.services.watch.picture import Picture
from driftline.services.watch.summary import KEYS

SCRIPT = Path(__file__).with_name("scripted_child.py")
WAIT_S = 120.0
QUICK = RestartPolicy(budget=2, first_s=0.01, longest_s=0.02)


class Notes:
    """A screen that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def see(self, message: Message, picture: Picture) -> None:
        pass

    async def draw(self, picture: Picture) -> None:
        await asyncio.get_running_loop().create_future()


def specs(folder: Path, url: str, *roles: str) -> list[ServiceSpec]:
    return [ServiceSpec(role, (sys.executable, str(SCRIPT), role, "trial", url, str(folder))) for role in roles]


def trial(tmp_path: Path, url: str = "") -> tuple[Config, RunFolder]:
    config = Config.model_validate({
        "run": {"name": "trial", "steps": 2, "dir": str(tmp_path / "runs")}, "broker": {"url": url},
        "telemetry": {"drain_s": 5},
    })
    return config, RunFolder.create(config)


def both_started(folder: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while len(list(folder.glob("*.pids"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)


async def go(run: LocalRun) -> Ending:
    async with asyncio.timeout(WAIT_S):
        return await run.run()


async def test_a_finished_run_leaves_a_complete_folder(tmp_path: Path) -> None:
    (tmp_path / "flaky is expected").touch()
    async with NatsServer(tmp_path / "nats") as server:
        config, folder = trial(tmp_path, server.url)
        ending = await go(LocalRun(config, folder, Notes(), specs(tmp_path, server.url, "learner", "rollout", "flaky")))
    assert ending is Ending.FINISHED
    summary = json.loads(folder.summary.read_text())
    assert tuple(summary) == KEYS
    assert summary["audit_findings"] > 0  # stand-ins keep no books: their run has outcomes of groups that nobody admitted
    assert json.loads((folder.path / "audit.json").read_text())["run"] == "trial"
    assert summary | {"wall_s": 0, "audit_findings": 0} == {
        "run": "trial", "seed": 0, "max_lag": 2, "max_lag_seen": 1, "versions": 3, "steps": 2, "wall_s": 0,
        "heldout_first": 0.25, "heldout_last": 0.75, "train_reward_first": 0.1, "train_reward_last": 0.2,
        "k3_lag0_mean": 1e-9, "k3_mean": 1e-4,
        "outcomes": {"trained": 2, "zero_variance": 0, "stale": 1, "failed": 0, "expired": 0, "cancelled": 0},
        "dead_letters": 0, "restarts": 1, "policy_bytes_full": 0, "policy_bytes_delta": 0, "tokens_sampled": 100,
        "tokens_trained": 100, "audit_findings": 0, "k3_numerics_mean": None, "k3_staleness_mean": None, "divergence_alarms": 0, "divergence_halt": None,
    }
    assert {path.name for path in folder.path.iterdir()} >= {
        "config.toml", "summary.json", "report.md", "curves.png", "metrics.jsonl", "tensorboard", "logs"
    }
    assert folder.curves.read_bytes().startswith(b"\x89PNG")
    assert "flaky: first life ends" in (folder.logs / "flaky.log").read_text()
    assert any(folder.tensorboard.iterdir())
    records = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [r["step"] for r in records if r["service"] == "learner"] == [1, 2]
    assert "lag 3 > 2" in folder.report.read_text()
    assert_gone(tmp_path)


def assert_gone(folder: Path) -> None:
    for file in folder.glob("*.pids"):
        for pid in file.read_text().split():
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)


async def test_a_service_that_cannot_be_kept_fails_the_run_with_its_log(tmp_path: Path) -> None:
    """H3 (docs/field_failures.md)."""
    async with NatsServer(tmp_path / "nats") as server:
        config, folder = trial(tmp_path, server.url)
        notes = Notes()
        ending = await go(LocalRun(config, folder, notes, specs(tmp_path, server.url, "rollout", "hopeless"), QUICK))
    assert ending is Ending.FAILED
    assert "hopeless: the disk is on fire" in notes.lines[-1]
    assert "hopeless: the disk is on fire" in folder.report.read_text()
    assert json.loads(folder.summary.read_text())["restarts"] == 2
    assert_gone(tmp_path)


async def test_one_interrupt_drains_and_still_writes_the_summary(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "nats") as server:
        config, folder = trial(tmp_path, server.url)
        run = asyncio.create_task(go(LocalRun(config, folder, Notes(), specs(tmp_path, server.url, "rollout", "grader"))))
        await asyncio.to_thread(both_started, tmp_path)
        os.kill(os.getpid(), signal.SIGINT)
        assert await run is Ending.STOPPED
    assert json.loads(folder.summary.read_text())["heldout_last"] is None
    assert_gone(tmp_path)


async def test_the_embedded_broker_is_started_again_when_it_dies(tmp_path: Path) -> None:
    (tmp_path / "broker-killer is expected").touch()
    config, folder = trial(tmp_path)
    local = LocalRun(config, folder, Notes(), policy=QUICK)
    seen: list[str] = []

    def fakes(config: Config, folder: RunFolder, url: str) -> tuple[ServiceSpec, ...]:
        seen.append(url)
        (tmp_path / "broker.pid").write_text((folder.broker / "nats-server.pid").read_text())
        return tuple(specs(tmp_path, url, "broker-killer", "learner"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("driftline.services.supervisor.local.service_specs", fakes)
        assert await go(local) is Ending.FINISHED
    assert json.loads(folder.summary.read_text())["restarts"] >= 2
    assert not (folder.broker / "nats-server.pid").exists()
    assert_gone(tmp_path)


async def test_an_unreachable_broker_fails_the_run_with_its_address(tmp_path: Path) -> None:
    config, folder = trial(tmp_path, "nats://127.0.0.1:1")
    short = config.model_copy(update={"broker": config.broker.model_copy(update={"connect_timeout_s": 0.3})})
    notes = Notes()
    assert await go(LocalRun(short, folder, notes)) is Ending.NO_BROKER
    assert "nats://127.0.0.1:1" in notes.lines[-1]


def test_every_service_of_a_run_is_started_with_the_runs_own_configuration(tmp_path: Path) -> None:
    config, folder = trial(tmp_path)
    found = service_specs(config, folder, "nats://127.0.0.1:9")
    assert sorted(spec.name for spec in found) == [
        "dispatcher", "evaluator", "grader", "learner", "policy-store", "rollout-0", "rollout-1"
    ]
    assert all(str(folder.config) in spec.argv and 'broker.url="nats://127.0.0.1:9"' in spec.argv for spec in found)


def test_two_runs_in_one_second_get_two_folders(tmp_path: Path) -> None:
    """D3 (docs/field_failures.md)."""
    config, first = trial(tmp_path)
    assert RunFolder.create(config).path != first.path
