"""`driftline policy get`: a version comes home whole, and an interrupted one goes on where it was."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from policy_commands import declared, policy

from driftline.messages.blobs import BlobRef
from driftline.messages.errors import IntegrityError
from driftline.policy_store import HostTensor, JetStreamBlobs, PolicyReader, PolicyWriter, state_digest
from driftline.policy_store.exchange import ModelFolder
from driftline.policy_store.pins import pins


def large(tensors: int = 3) -> dict[str, HostTensor]:
    """Bits that do not compress: a pack or so for each tensor."""
    rng = np.random.default_rng(0)
    return {f"w{n}": HostTensor.from_numpy(rng.integers(0, 2**32, 1_000_000, np.uint32)) for n in range(tensors)}


async def test_an_interrupted_get_reads_only_what_it_lacks(
    nats_url: str, fresh_run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = large(9)  # more packs than are asked for at once, so the first is home before the last is missed
    async with declared(nats_url, fresh_run) as bus:
        store = JetStreamBlobs(bus, fresh_run)
        writer = PolicyWriter(bus, store, fresh_run)
        await writer.resume()
        manifest = await writer.publish(state, version=0, learner_step=0)
        asked: list[str] = []
        original = JetStreamBlobs.get

        async def until_the_last(self: JetStreamBlobs, ref: BlobRef) -> bytes:
            asked.append(ref.digest)
            if ref.digest == manifest.packs[-1].digest:
                raise IntegrityError("cut off", field="blob", value=ref.digest)
            return await original(self, ref)

        with monkeypatch.context() as patch:
            patch.setattr(JetStreamBlobs, "get", until_the_last)
            cut = await policy("get", fresh_run, 0, "-o", tmp_path / "out", url=nats_url)
        assert cut.code == 1, cut
        assert "cut off" in cut.err
        assert os.listdir(tmp_path) == ["out.packs"]
        first = set(asked)
        asked.clear()

        async def counted(self: JetStreamBlobs, ref: BlobRef) -> bytes:
            asked.append(ref.digest)
            return await original(self, ref)

        with monkeypatch.context() as patch:
            patch.setattr(JetStreamBlobs, "get", counted)
            done = await policy("get", fresh_run, 0, "-o", tmp_path / "out", "--json", url=nats_url)
        assert done.code == 0, done
        assert manifest.packs[0].digest in first - set(asked)
        assert manifest.packs[-1].digest in asked
        assert os.listdir(tmp_path) == ["out"]
        assert done.document["digest"] == manifest.digest
        found = ModelFolder.open(tmp_path / "out")
        assert state_digest({name: found.tensor(name) for name in found.layouts}) == manifest.digest
        assert await pins(bus, fresh_run) == ()


async def test_a_version_is_leased_while_it_is_read(nats_url: str, fresh_run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with declared(nats_url, fresh_run) as bus:
        store = JetStreamBlobs(bus, fresh_run)
        writer = PolicyWriter(bus, store, fresh_run)
        await writer.resume()
        await writer.publish(large(), version=0, learner_step=0)
        assert (await policy("pin", fresh_run, "head", url=nats_url)).code == 0
        (pinned,) = await pins(bus, fresh_run)
        during: list[str] = []
        original = PolicyReader.materialise_manifest

        async def watched(self: PolicyReader, target: object) -> object:
            during.extend(pin.owner for pin in await pins(self._bus, fresh_run) if pin.link.version == 0)
            return await original(self, target)  # type: ignore[arg-type]

        monkeypatch.setattr(PolicyReader, "materialise_manifest", watched)
        assert (await policy("get", fresh_run, "head", "-o", tmp_path / "out", url=nats_url)).code == 0
        assert len(during) == 2
        assert pinned.owner in during
        assert await pins(bus, fresh_run) == (pinned,)  # the lease is over, the person's pin is not


async def test_an_existing_folder_is_replaced_only_when_told_and_whole(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    async with declared(nats_url, fresh_run) as bus:
        store = JetStreamBlobs(bus, fresh_run)
        writer = PolicyWriter(bus, store, fresh_run)
        await writer.resume()
        manifest = await writer.publish(large(), version=0, learner_step=0)
        refused = await policy("get", fresh_run, 0, "-o", out, url=nats_url)
        assert refused.code == 2
        last = await store.get(manifest.packs[-1].ref)
        await store.delete(manifest.packs[-1].ref)
        assert (await policy("get", fresh_run, 0, "-o", out, "--force", url=nats_url)).code == 1
        assert os.listdir(out) == ["mine"]
        await store.put(last)
        assert (await policy("get", fresh_run, 0, "-o", out, "--force", url=nats_url)).code == 0
        assert os.listdir(out) == ["model.safetensors"]
