"""A version handed in tensor by tensor: the same version, the base moved with it, and a writer that knows when it does not know."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from policy_cases import Policy, copy_of, publish_chain, same

from driftline.messages.blobs import BlobRef
from driftline.messages.errors import BrokerUnavailable, HeadConflict, IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import topology
from driftline.policy_store import HostTensor, MemoryBlobs, PolicyReader, PolicyWriter, State
from driftline.policy_store.draft import Draft
from driftline.policy_store.forms import Changes
from driftline.policy_store.manifest import Manifest
from driftline.policy_store.mapped import mapped_in
from driftline.policy_store.tensor import SHARD_BYTES, Layout, state_digest


def layouts_of(state: State) -> dict[str, Layout]:
    return {name: tensor.layout for name, tensor in state.items()}


async def hand_in(writer: PolicyWriter, state: State, version: int, names: list[str] | None = None) -> Manifest:
    async with writer.draft(layouts_of(state), version=version, learner_step=version) as draft:
        for name in names or sorted(state):
            await draft.put(name, state[name])
        return await draft.commit(consumed=[f"g{version}"])


@pytest.fixture
async def writer(quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, policy: Policy) -> PolicyWriter:
    made, _ = await publish_chain(quick_bus, quick_blobs, fresh_run, policy, 2)
    return made


@pytest.fixture
def reader(quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str) -> PolicyReader:
    return PolicyReader(quick_bus, quick_blobs, fresh_run)


async def test_a_draft_is_the_version_that_publishing_the_whole_state_makes(
    quick_bus: MemoryBus, fresh_run: str, policy: Policy, writer: PolicyWriter, quick_blobs: MemoryBlobs
) -> None:
    new = policy.step()
    drafted = await hand_in(writer, new, 2)
    other = MemoryBlobs()
    async with MemoryBus() as bus:
        await bus.declare(topology(fresh_run))
        again = Policy()
        twin, _ = await publish_chain(bus, other, fresh_run, again, 2)
        whole = await twin.publish(again.step(), version=2, learner_step=2)
    assert drafted.delta is not None
    assert whole.delta is not None
    assert (drafted.digest, drafted.delta.packs) == (whole.digest, whole.delta.packs)
    assert quick_blobs.blobs == other.blobs


async def test_tensors_may_come_in_any_order_and_the_next_delta_is_against_them(
    policy: Policy, writer: PolicyWriter, reader: PolicyReader
) -> None:
    for version, names in enumerate((None, ["scale", "norm", "layers.0.weight", "empty", "frozen"]), start=2):
        new = policy.step()
        await hand_in(writer, new, version, names)
        assert same(await reader.materialise(version), new)
    small = await writer.publish(policy.step(0.001), version=4, learner_step=4)
    assert small.delta is not None
    assert small.delta.nbytes < small.nbytes / 50
    assert state_digest(await reader.materialise(4)) == state_digest(policy.state)


async def test_what_changed_is_enough(policy: Policy, writer: PolicyWriter, reader: PolicyReader, quick_blobs: MemoryBlobs) -> None:
    old = copy_of(policy.state)
    new = policy.step()
    async with writer.draft(layouts_of(new), version=2, learner_step=2) as draft:
        for name in new:
            await draft.put_changes(name, changes_of(old[name], new[name]))
        manifest = await draft.commit()
    assert same(await reader.materialise(2), new)
    assert same(await writer.base(), new)
    assert manifest.digest == state_digest(new)


def changes_of(old: HostTensor, new: HostTensor) -> list[Changes | np.ndarray | None]:
    """One shard whole, one as changes, the untouched ones as nothing."""
    found: list[Changes | np.ndarray | None] = []
    for start in range(0, new.data.size, SHARD_BYTES):
        part = slice(start, start + SHARD_BYTES)
        xor = old.data[part].view(f"<u{new.width}") ^ new.data[part].view(f"<u{new.width}")
        at = np.flatnonzero(xor)
        if at.size == 0:
            found.append(None)
        elif start:
            found.append(new.data[part])
        else:
            found.append(Changes(at.astype(np.int32), xor[at]))
    return found


async def test_tensors_added_reshaped_and_removed(policy: Policy, writer: PolicyWriter, reader: PolicyReader) -> None:
    new = policy.step()
    del new["frozen"]
    new["norm"] = HostTensor.from_numpy(np.ones((3, 11), np.float32))
    new["added"] = HostTensor.from_numpy(np.arange(10, dtype=np.int32))
    await hand_in(writer, new, 2)
    assert same(await reader.materialise(2), new)
    assert same(await reader.advance(await reader.materialise(1), 1, 2, fallback=False), new)
    assert same(await writer.base(), new)


async def put_twice(writer: PolicyWriter, state: State) -> None:
    async with writer.draft(layouts_of(state), version=2, learner_step=2) as draft:
        await draft.put("norm", state["norm"])
        await draft.put("norm", state["norm"])


async def put_a_stranger(writer: PolicyWriter, state: State) -> None:
    async with writer.draft(layouts_of(state), version=2, learner_step=2) as draft:
        await draft.put("other", state["norm"])


async def put_another_shape(writer: PolicyWriter, state: State) -> None:
    async with writer.draft(layouts_of(state), version=2, learner_step=2) as draft:
        await draft.put("norm", state["scale"])


async def leave_one_out(writer: PolicyWriter, state: State) -> None:
    async with writer.draft(layouts_of(state), version=2, learner_step=2) as draft:
        await draft.put("norm", state["norm"])
        await draft.commit()


async def forget_to_commit(writer: PolicyWriter, state: State) -> None:
    async with writer.draft(layouts_of(state), version=2, learner_step=2) as draft:
        for name in state:
            await draft.put(name, state[name])


async def change_what_is_not_there(writer: PolicyWriter, state: State) -> None:
    layouts = {**layouts_of(state), "new": Layout("float32", (4,))}
    async with writer.draft(layouts, version=2, learner_step=2) as draft:
        await draft.put_changes("new", [None])


async def too_few_shards(writer: PolicyWriter, state: State) -> None:
    async with writer.draft(layouts_of(state), version=2, learner_step=2) as draft:
        await draft.put_changes("layers.0.weight", [None])


async def change_beyond_the_shard(writer: PolicyWriter, state: State) -> None:
    beyond = Changes(np.asarray([1, state["norm"].elements], np.int32), np.asarray([1, 1], np.uint32))
    async with writer.draft(layouts_of(state), version=2, learner_step=2) as draft:
        await draft.put_changes("norm", [beyond])
        await hand_in_rest(draft, state)


async def a_shard_cut_short(writer: PolicyWriter, state: State) -> None:
    async with writer.draft(layouts_of(state), version=2, learner_step=2) as draft:
        await draft.put_changes("norm", [state["norm"].data[:-4]])
        await hand_in_rest(draft, state)


async def hand_in_rest(draft: Draft, state: State) -> None:
    for name in state.keys() - {"norm"}:
        await draft.put(name, state[name])
    await draft.commit()


async def discard_too_late(writer: PolicyWriter, state: State) -> None:
    async with writer.draft(layouts_of(state), version=2, learner_step=2) as draft:
        await draft.put("norm", state["norm"])
        draft.discard()


@pytest.mark.parametrize(("mistake", "words"), [
    (put_twice, "put twice"), (put_a_stranger, "not in the draft's layouts"), (put_another_shape, "declared as"),
    (leave_one_out, "4 tensors were not put"), (forget_to_commit, "without a commit"), (change_what_is_not_there, "the base does not have"),
    (too_few_shards, "it has 2"), (change_beyond_the_shard, "tensor norm.*must ascend within 33"), (a_shard_cut_short, "tensor norm.*new 128"), (discard_too_late, "were put already"),
])  # fmt: skip
async def test_a_mistake_is_named_publishes_nothing_and_the_writer_can_go_on(
    policy: Policy, writer: PolicyWriter, reader: PolicyReader, mistake: object, words: str
) -> None:
    old, new = copy_of(policy.state), policy.step()
    with pytest.raises(IntegrityError, match=words):
        await mistake(writer, new)  # type: ignore[operator]
    head = await reader.head()
    assert head is not None
    assert head.version == 1
    await writer.resume()
    assert same(await writer.base(), old)
    await hand_in(writer, new, 2)
    assert same(await reader.materialise(2), new)


async def test_a_draft_that_was_begun_and_failed_leaves_the_writer_unready(policy: Policy, writer: PolicyWriter) -> None:
    with pytest.raises(IntegrityError):
        await forget_to_commit(writer, policy.step())
    with pytest.raises(HeadConflict, match=r"resume\(\)"):
        await writer.publish(policy.state, version=2, learner_step=2)


async def test_a_discarded_draft_leaves_it_ready(policy: Policy, writer: PolicyWriter, reader: PolicyReader) -> None:
    new = policy.step()
    async with writer.draft(layouts_of(new), version=2, learner_step=2) as draft:
        draft.discard()
    await hand_in(writer, new, 2)
    assert same(await reader.materialise(2), new)


class Refusing(MemoryBlobs):
    """Takes `left` blobs and no more."""

    def __init__(self, blobs: Mapping[str, bytes], left: int) -> None:
        super().__init__()
        self.blobs, self.left = dict(blobs), left

    async def put(self, data: bytes) -> BlobRef:
        if self.left <= 0:
            raise BrokerUnavailable("no answer", field="blob", value=len(data))
        self.left -= 1
        return await super().put(data)


@pytest.mark.parametrize("left", [0, 1])
async def test_an_upload_that_fails_ends_the_draft_with_its_cause(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, writer: PolicyWriter, left: int
) -> None:
    big = {f"w{i}": HostTensor.from_numpy(np.random.default_rng(i).integers(0, 255, 3 << 20).astype(np.uint8)) for i in range(4)}
    blobs = Refusing(quick_blobs.blobs, left)
    failing = PolicyWriter(quick_bus, blobs, fresh_run)
    await failing.resume()
    with pytest.raises(BrokerUnavailable, match="no answer"):
        async with asyncio.timeout(20):
            await hand_in(failing, big, 2)
    blobs.left = 100
    await failing.resume()
    await hand_in(failing, big, 2)
    assert same(await PolicyReader(quick_bus, blobs, fresh_run).materialise(2), big)


async def test_a_full_comes_when_following_the_deltas_costs_more_than_one(
    quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, policy: Policy
) -> None:
    writer = PolicyWriter(quick_bus, quick_blobs, fresh_run, 1000, full_share=0.5)
    await writer.resume()
    kinds = []
    for version in range(8):
        manifest = await hand_in(writer, policy.step(0.25) if version else copy_of(policy.state), version)
        kinds.append(manifest.full is not None)
        if version == 5:
            writer = PolicyWriter(quick_bus, quick_blobs, fresh_run, 1000, full_share=0.5)
            await writer.resume()  # which counts again what the chain costs
    assert kinds[0]
    assert not kinds[1]
    assert 1 <= sum(kinds[1:]) < 7
    # Between two fulls the deltas stay about the share of one.
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    since = 0
    for version in range(8):
        manifest = await reader.manifest(version)
        if manifest.full is not None:
            full, since = manifest.full.nbytes, 0
        else:
            assert since <= 0.5 * full
            assert manifest.delta is not None
            since += manifest.delta.nbytes


async def test_the_base_may_live_in_a_file(quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str, policy: Policy, tmp_path: Path) -> None:
    writer = PolicyWriter(quick_bus, quick_blobs, fresh_run, allocate=mapped_in(tmp_path))
    await writer.resume()
    for version in range(3):
        await hand_in(writer, policy.step() if version else copy_of(policy.state), version)
    assert same(await writer.base(), policy.state)
    assert names_in(tmp_path) == []


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
