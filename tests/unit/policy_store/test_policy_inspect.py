"""What `driftline policy` shows is what is stored."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from policy_cases import Policy, copy_of, publish_chain
from safetensors import safe_open

from driftline.messages.errors import IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.policy_store import HostTensor, MemoryBlobs, PolicyReader, VersionKind, state_digest
from driftline.policy_store.checkpoint import WEIGHTS, checkpoints, keep_newest, latest, write_checkpoint
from driftline.policy_store.inspect import TensorChange, diff, diff_states, ls, show, verify


@pytest.fixture
async def reader(quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, policy: Policy) -> PolicyReader:
    await publish_chain(quick_bus, quick_blobs, fresh_run, policy, 5)
    return PolicyReader(quick_bus, quick_blobs, fresh_run)


async def test_a_listing_is_newest_first_and_says_what_each_version_cost(reader: PolicyReader) -> None:
    rows = await ls(reader)
    assert [row.version for row in rows] == [4, 3, 2, 1, 0]
    assert [row.kind for row in rows] == [VersionKind.DELTA, VersionKind.BOTH] + [VersionKind.DELTA] * 2 + [VersionKind.FULL]
    assert rows[0].density == pytest.approx(0.01, rel=0.1)
    assert rows[0].bytes_full == 0
    assert rows[-1].density is None
    assert 0 < rows[0].bytes_delta < rows[1].bytes_full / 50
    assert [row.version for row in await ls(reader, limit=2)] == [4, 3]


async def test_a_version_is_shown_with_its_tensors_and_codecs(reader: PolicyReader) -> None:
    detail = await show(reader, 4)
    tensors = {row.name: row for row in detail.tensors}
    assert (detail.parent, detail.chain_from, detail.consumed) == (3, 3, ("g4",))
    assert tensors["layers.0.weight"].codecs == {"ranked": 2}
    assert tensors["frozen"].codecs == {"unchanged": 1}
    assert tensors["empty"].codecs == {}


async def test_verify_tries_every_path_and_names_what_is_damaged(reader: PolicyReader, quick_blobs: MemoryBlobs) -> None:
    report = await verify(reader, 4)
    assert report.intact
    assert [str(path.path) for path in report.paths] == ["full 3 + delta 4", "full 0 + delta 1 + delta 2 + delta 3 + delta 4"]
    full = (await reader.manifest(3)).full
    assert full is not None
    blob = full.packs[0].digest
    quick_blobs.blobs[blob] = quick_blobs.blobs[blob][:-1] + b"\x00"
    report = await verify(reader, 4)
    assert report.ok
    assert not report.intact
    assert blob in report.paths[0].error


async def test_diff_counts_changed_elements_per_tensor(reader: PolicyReader, policy: Policy) -> None:
    changes = {change.name: change for change in await diff(reader, 3, 4)}
    delta = (await reader.manifest(4)).delta
    assert delta is not None
    assert sum(change.changed for change in changes.values()) == delta.changed
    assert set(changes) == {"layers.0.weight", "norm"}
    old = copy_of(policy.state)
    new = copy_of(policy.state)
    del new["frozen"]
    new["more"] = HostTensor.from_numpy(np.zeros(3, np.float32))
    new["norm"] = HostTensor.from_numpy(np.zeros((3, 2), np.float32))
    assert diff_states(old, new) == [
        TensorChange("frozen", "removed", 64, 64),
        TensorChange("more", "added", 3, 3),
        TensorChange("norm", "layout", 6, 6),
    ]


def test_a_checkpoint_is_read_by_safetensors_bit_for_bit(tmp_path: Path, policy: Policy) -> None:
    written = write_checkpoint(tmp_path, 7, policy.state, {"version": "7"}, {"config.json": b"{}"})
    assert latest(tmp_path) == written
    assert json.loads((written / "config.json").read_bytes()) == {}
    raw = (written / WEIGHTS).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    with safe_open(written / WEIGHTS, framework="numpy") as file:
        assert file.metadata() == {"version": "7"}
        assert set(file.keys()) == set(policy.state)
        for name, tensor in policy.state.items():
            begin, end = header[name]["data_offsets"]
            assert body[begin:end] == tensor.data.tobytes()
            assert file.get_slice(name).get_shape() == list(tensor.shape)
            if tensor.dtype != "bfloat16":
                assert np.array_equal(file.get_tensor(name), tensor.numpy())


def test_a_checkpoint_cut_off_is_not_one(tmp_path: Path, small_policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, 1, small_policy.state, {})
    from driftline.policy_store import checkpoint

    def crash(*_: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", crash)
        with pytest.raises(OSError, match="power cut"):
            write_checkpoint(tmp_path, 2, small_policy.step(), {})
    assert list(checkpoints(tmp_path)) == [1]
    assert latest(tmp_path) == tmp_path / "version-00000001"
    write_checkpoint(tmp_path, 2, small_policy.state, {})
    write_checkpoint(tmp_path, 3, small_policy.state, {})
    assert keep_newest(tmp_path, 2) == [1]
    assert list(checkpoints(tmp_path)) == [2, 3]
    (tmp_path / "LATEST").write_text("version-00000099")
    with pytest.raises(IntegrityError, match="names no checkpoint"):
        latest(tmp_path)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest(tmp_path) is None


async def test_the_digest_of_a_mirrored_state_is_the_manifests(reader: PolicyReader) -> None:
    assert state_digest(await reader.materialise(4)) == (await reader.manifest(4)).digest
