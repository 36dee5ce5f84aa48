"""The real commands against a broker with users: what they say, what they exit with, and no secret in any of it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from loop_cases import tiny
from security_cases import ACCOUNT, RUN, Guarded, guarded

from driftline.services.config import Config, to_toml
from driftline.services.security.permissions import Role
from driftline.services.supervisor.folder import RunFolder


@dataclass(frozen=True)
class Said:
    code: int
    text: str


async def driftline(*arguments: str, credentials: Path | None = None) -> Said:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DRIFTLINE_")}
    if credentials is not None:
        environment["DRIFTLINE_CREDENTIALS"] = str(credentials)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "driftline", *arguments, env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(150):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Said(process.returncode or 0, out.decode())


def secrets(broker: Guarded) -> list[str]:
    return [json.loads(broker.file(role).read_text())["password"] for role in Role]


def run_file(broker: Guarded, folder: Path, role: Role, **section: object) -> tuple[Config, str]:
    config = tiny(RUN, broker={"url": broker.url, "credentials": str(broker.file(role)), "connect_timeout_s": 60.0, **section})
    path = folder / "run.toml"
    path.write_text(to_toml(config))
    return config, str(path)


async def test_status_reads_with_an_observer_s_file_however_it_is_given(broker: Guarded) -> None:
    file = broker.file(Role.OBSERVER)
    for said in (
        await driftline("--credentials", str(file), "status", RUN, "--url", broker.url),
        await driftline("status", RUN, "--url", broker.url, credentials=file),
        await driftline("status", RUN, "--url", broker.url, credentials=broker.folder()),
    ):
        assert said.code == 0, said.text
        assert "denied" not in said.text


async def test_without_credentials_a_command_says_what_is_missing(broker: Guarded) -> None:
    said = await driftline("status", RUN, "--url", broker.url)
    assert said.code == 2
    assert "error: broker.url" in said.text
    assert "credentials" in said.text
    assert "Traceback" not in said.text


async def test_a_password_in_an_address_is_not_repeated(broker: Guarded) -> None:
    secret = "pa55word-in-an-address"
    for url in (broker.url.replace("//", f"//acme.admin:{secret}@"), f"nats://acme.admin:{secret}@127.0.0.1:1"):
        said = await driftline("status", RUN, "--url", url)
        assert said.code in (2, 3), said.text
        assert "***@127.0.0.1" in said.text
        assert secret not in said.text


async def test_provision_is_the_admin_s(broker: Guarded, tmp_path: Path) -> None:
    _, path = run_file(broker, tmp_path, Role.ROLLOUT)
    done = await driftline("provision", "--config", path, "--credentials", str(broker.file(Role.ADMIN)))
    assert done.code == 0, done.text
    assert RUN in done.text
    refused = await driftline("provision", "--config", path)
    assert refused.code == 2
    assert "admin" in refused.text
    assert not [secret for secret in secrets(broker) if secret in done.text + refused.text]


async def test_a_service_with_the_wrong_role_ends_with_the_subject_and_without_a_secret(broker: Guarded, tmp_path: Path) -> None:
    """An observer's file given to the dispatcher: it may read, and its first admission is refused."""
    _, path = run_file(broker, tmp_path, Role.OBSERVER, provision=False)
    said = await driftline("dispatcher", "--config", path, "--run-dir", str(tmp_path))
    assert said.code == 2, said.text
    assert f"dl.v1.{RUN}.ledger.admitted.g00000000" in said.text
    assert "BrokerDenied" in said.text
    assert not [secret for secret in secrets(broker) if secret in said.text]
    async with broker.bus(Role.ADMIN) as admin:
        assert await admin.last(f"DL-{RUN}-LEDGER", f"dl.v1.{RUN}.ledger.>") is None


async def test_a_service_with_a_wrong_password_ends_at_once(broker: Guarded, tmp_path: Path) -> None:
    secret = "a-password-that-is-wrong-and-secret"
    document = json.loads(broker.file(Role.GRADER).read_text()) | {"password": secret, "ca": str(broker.file(Role.GRADER).parent / "ca.crt")}
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps(document))
    _, path = run_file(broker, tmp_path, Role.GRADER, credentials=str(file), provision=False)
    said = await driftline("grader", "--config", path, "--run-dir", str(tmp_path))
    assert said.code == 2
    assert "refused the credentials" in said.text
    assert secret not in said.text


async def test_what_a_run_prints_and_stores_of_its_configuration_holds_no_secret(broker: Guarded, tmp_path: Path) -> None:
    config, path = run_file(broker, tmp_path, Role.ADMIN)
    stored = RunFolder.create(config.model_copy(update={"run": config.run.model_copy(update={"dir": str(tmp_path / "runs")})}))
    printed = (await driftline("run", path, "--dry-run")).text
    assert f'credentials = "{broker.file(Role.ADMIN)}"' in printed
    assert ACCOUNT in stored.config.read_text()
    assert not [secret for secret in secrets(broker) if secret in printed + stored.config.read_text()]


@pytest.mark.slow
async def test_a_whole_run_takes_each_service_s_credentials_from_a_folder(tmp_path: Path) -> None:
    async with guarded(tmp_path) as broker:
        section = {"url": broker.url, "credentials": str(broker.folder())}
        config = tiny(RUN, broker=section, run={"steps": 2, "groups_per_step": 2, "group_size": 4, "max_lag": 1, "dir": str(tmp_path / "runs")})
        path = tmp_path / "run.toml"
        path.write_text(to_toml(config))
        said = await driftline("run", str(path), "--plain")
        assert said.code == 0, said.text
        written = "".join(file.read_text() for file in (tmp_path / "runs").rglob("*.log")) + said.text
        assert "broker denied" not in written
        assert not [secret for secret in secrets(broker) if secret in written]
