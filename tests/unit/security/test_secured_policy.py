"""`driftline policy` on a broker with users: who may look, who may keep and collect, who may bring weights in, and what the others are told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from policy_commands import Said, policy, published, weights
from security_cases import RUN, Guarded, guarded

from driftline.policy_store.exchange import write_model
from driftline.services.security.permissions import Role

pytestmark = pytest.mark.slow

READS = (["ls"], ["show"], ["verify", "--all"], ["diff", "0", "1"], ["pins"], ["gc", "--dry-run"])


def model(folder: Path) -> Path:
    state = weights(7)
    folder.mkdir()
    write_model(folder, {name: tensor.layout for name, tensor in state.items()}, state.__getitem__, file_bytes=2**40)
    (folder / "config.json").write_text("{}")
    return folder


async def test_each_role_does_what_it_may_and_is_told_who_may_the_rest(tmp_path: Path) -> None:
    async with guarded(tmp_path) as broker:
        async with broker.bus(Role.LEARNER) as bus:
            await published(bus, RUN, 5)

        async def said(role: Role, command: str, *rest: object) -> Said:
            return await policy(command, RUN, *rest, url=broker.url, credentials=broker.file(role))

        for command, *rest in READS:
            for role in (Role.OBSERVER, Role.POLICY_STORE):
                found = await said(role, command, *rest)
                assert found.code == 0, (role, command, found)
        await takes_home_without_a_lease(broker, tmp_path)
        for command, *rest in (["pin", 1], ["unpin", 1, "--owner", "nobody"], ["gc", "--keep", 1, "--grace", "0"], ["rebase", 1]):
            found = await said(Role.OBSERVER, command, *rest)
            if command == "unpin":  # there is nothing to take off, so nothing is written
                assert found.code == 1
                continue
            assert found.code == 2, (command, found)
            assert "policy-store/credentials.json" in found.err.replace("\n", " "), found.err
            assert found.out == ""
        for command, *rest in (["pin", 1, "--owner", "me"], ["rebase", 1], ["unpin", 1, "--owner", "me"], ["gc", "--keep", 2, "--grace", "0"]):
            found = await said(Role.POLICY_STORE, command, *rest)
            assert found.code == 0, (command, found)
        folder = model(tmp_path / "model")
        for role in (Role.OBSERVER, Role.POLICY_STORE):
            refused = await policy("import", folder, "--run", RUN, "--as-next", url=broker.url, credentials=broker.file(role))
            assert refused.code == 2, refused
            assert "learner/credentials.json" in refused.err.replace("\n", " ")
        taken = await policy("import", folder, "--run", RUN, "--as-next", url=broker.url, credentials=broker.file(Role.LEARNER))
        assert taken.code == 0, taken
        # A folder of credentials: each command takes the role it needs.
        assert (await policy("pin", RUN, "head", url=broker.url, credentials=broker.folder())).code == 0
        assert (await policy("import", folder, "--run", RUN, "--as-next", url=broker.url, credentials=broker.folder())).code == 0
        assert (await policy("gc", RUN, "--orphans", "--grace", "0", url=broker.url, credentials=broker.folder())).code == 0
        assert (await policy("verify", RUN, "--all", url=broker.url, credentials=broker.folder())).code == 0


async def takes_home_without_a_lease(broker: Guarded, folder: Path) -> None:
    for role, warned in ((Role.OBSERVER, True), (Role.POLICY_STORE, False)):
        found = await policy("get", RUN, "head", "-o", folder / role, url=broker.url, credentials=broker.file(role))
        assert found.code == 0, found
        assert ("take no lease" in found.err) is warned
        assert "model.safetensors" in os.listdir(folder / role)


async def test_a_new_run_needs_streams_that_only_the_admin_makes(tmp_path: Path) -> None:
    async with guarded(tmp_path) as broker:
        said = await policy("import", model(tmp_path / "model"), "--run", "unknown", url=broker.url, credentials=broker.file(Role.LEARNER))
        assert said.code == 2
        assert "provision" in said.err
