"""Applying: a version's encoding into a state, shard by shard in place, each checked before it is touched and after.

XOR is neither idempotent nor safe on a wrong base, so a shard is refused unless its base has the digest the delta was made
against, and its result the digest the manifest names. Working in place keeps memory at one copy of the weights plus a few packs;
the price is that a failure midway leaves a state that is no version at all. Such a state is **poisoned: it is emptied** before
the error is raised, so nobody can use, publish or advance it by mistake; the holder reloads. `apply_encoding` therefore takes
the state over: on success it is the new version, on any failure or cancellation it is `{}`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from driftline.messages.errors import IntegrityError
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.codec import Codec, apply
from driftline.policy_store.fetching import fetch
from driftline.policy_store.manifest import Encoding, Manifest, Placement
from driftline.policy_store.packing import PackHead
from driftline.policy_store.tensor import (
    DTYPES,
    Bytes1D,
    HostTensor,
    Shard,
    State,
    shard_digest,
    shard_digests,
)
from driftline.policy_store.workers import Workers, bounded

__all__ = ["Seen", "apply_encoding", "check_layout"]

Seen = Callable[[Shard, str, Bytes1D | None, Bytes1D], None]
"""Shown each shard that changes, in a worker thread: its tensor's dtype, its bytes before (None where there were none) and after."""

PACKS_IN_FLIGHT = 3
GROUP_BYTES = 8 * 1024 * 1024
"""Raw weights per job of a worker: long enough to hide the hand-over, short enough to spread over the cores."""


@dataclass(frozen=True)
class _Task:
    """One shard to apply, in a worker thread."""

    place: Placement
    out: Bytes1D
    dtype: str
    kept: bool
    base: bytes | None
    result: bytes
    version: int
    seen: Seen | None

    def apply(self, pack: memoryview) -> None:
        shard = self.place.shard
        payload = pack[self.place.offset : self.place.offset + self.place.length]
        if self.base is not None and shard_digest(self.out) != self.base:
            raise IntegrityError(f"shard {shard.number} of version {self.version}: the base has another digest",
                                 field=f"tensor {shard.name}", value=f"bytes {shard.start}:{shard.stop}",
                                 remedy="the state is not the version it was taken for: materialise")
        show = self.seen is not None and self.place.codec is not Codec.UNCHANGED
        before = self.out.copy() if show and self.kept else None
        try:
            apply(self.place.codec, payload, self.out, DTYPES[self.dtype].width, exponent=DTYPES[self.dtype].exponent)
        except IntegrityError as error:
            raise IntegrityError(f"shard {shard.number} of version {self.version}: {error}",
                                 field=f"tensor {shard.name}", value=f"bytes {shard.start}:{shard.stop}") from error
        if shard_digest(self.out) != self.result:
            raise IntegrityError(f"shard {shard.number} of version {self.version}: the result has another digest",
                                 field=f"tensor {shard.name}", value=f"bytes {shard.start}:{shard.stop}",
                                 remedy="a wrong base or damaged bytes: materialise")
        if self.seen is not None and show:
            self.seen(shard, self.dtype, before, self.out)


async def apply_encoding(
    state: State,
    manifest: Manifest,
    encoding: Encoding,
    blobs: BlobStore,
    workers: Workers,
    *,
    base: Manifest | None,
    check_base: bool = True,
    blob_timeout_s: float = 120.0,
    head: PackHead | None = None,
    seen: Seen | None = None,
) -> None:
    """Make `state` the version of `manifest`, which takes it over (see the module). `base` is the parent's manifest for a delta.

    `check_base=False` skips the digests of a base that this process has itself just verified. `head`: how the packs open, where the
    encoding is not the manifest's own; `base` is then what it is against. `seen` is shown every changed shard.
    """
    try:
        old = {} if base is None else shard_digests(base.layouts(), base.shard_digests.tobytes())
        if base is not None and check_base:
            check_layout(state, base)
        tensors = _prepare(state, manifest)
        groups: dict[int, list[_Task]] = {}
        for place in manifest.placements(encoding):
            tensor, kept = tensors[place.shard.name]
            if place.codec is not Codec.FULL and not kept:
                raise IntegrityError(f"shard {place.shard.number} of version {manifest.version} is a change of nothing",
                                     field=f"tensor {place.shard.name}", value=place.codec.name)
            base_digest = old.get((place.shard.name, place.shard.start)) if kept and check_base else None
            groups.setdefault(place.pack, []).append(_Task(
                place, tensor.data[place.shard.start : place.shard.stop], tensor.dtype, kept,
                base_digest, manifest.shard_digest(place.shard.number), manifest.version, seen))

        async def one(index: int) -> None:
            tasks = groups[index]
            data = b""
            if index >= 0:
                data = await fetch(blobs, encoding.packs[index].ref, blob_timeout_s)
                (head or PackHead(base is None, manifest.version, 0))._replace(number=index).check(data)
            view = memoryview(data)
            await workers.map(_apply_all, [(view, group) for group in _grouped(tasks)])

        await bounded(one, sorted(groups), PACKS_IN_FLIGHT)
        fresh = {name: tensors[name][0] for name in sorted(tensors)}
        state.clear()
        state.update(fresh)
    except BaseException:  # a cancellation poisons as a failure does
        state.clear()
        raise


def check_layout(state: State, manifest: Manifest) -> None:
    """Raise IntegrityError unless `state` has exactly the manifest's tensors."""
    wanted = manifest.layouts()
    for name in sorted(wanted.keys() | state.keys()):
        found = state[name].layout if name in state else None
        if found != wanted.get(name):
            raise IntegrityError(f"version {manifest.version} has {wanted.get(name)}", field=f"tensor {name}", value=found,
                                 remedy="the state is not the version it was taken for: materialise")


def _prepare(state: State, manifest: Manifest) -> dict[str, tuple[HostTensor, bool]]:
    """Per tensor of the new version its buffer, and whether that holds the base."""
    tensors: dict[str, tuple[HostTensor, bool]] = {}
    for name, layout in manifest.layouts().items():
        tensor = state.get(name)
        if tensor is None or tensor.layout != layout:
            tensors[name] = (HostTensor.empty(layout), False)
        else:
            tensors[name] = (tensor if tensor.data.flags.writeable else tensor.copy(), True)
    return tensors


def _apply_all(work: tuple[memoryview, list[_Task]]) -> None:
    pack, tasks = work
    for task in tasks:
        task.apply(pack)


def _grouped(tasks: list[_Task]) -> list[list[_Task]]:
    """Consecutive tasks of about `GROUP_BYTES` of weights together."""
    groups: list[list[_Task]] = []
    size = GROUP_BYTES
    for task in tasks:
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(task)
        size += task.out.size
    return groups
