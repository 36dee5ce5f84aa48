"""Making shortcuts: a delta of deltas, and a full made afterwards. Neither needs a copy of the weights.

`squash` and `rebase` unfold the shards of the versions one by one from their packs. A store that is following anyway folds instead
(`fold.py`). Both hold every shard of the base and of the result to the digests of the manifests before anything is stored, and store the
shortcut after its packs: a reader finds it whole or not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from driftline.messages.bus import Bus
from driftline.messages.errors import IntegrityError
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.codec import encode_delta, encode_full
from driftline.policy_store.forms import DeltaForm, EncodedShard
from driftline.policy_store.manifest import Encoding, Link, Manifest
from driftline.policy_store.packing import Packer
from driftline.policy_store.paths import Edge, Path, descend
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.shortcuts import (
    WORTH,
    Shortcut,
    bases,
    load_shortcut,
    shortcut_head,
    store_shortcut,
)
from driftline.policy_store.tensor import DTYPES, Shard
from driftline.policy_store.unfold import Unfolded, unfold
from driftline.policy_store.workers import Workers, bounded, shared_workers

__all__ = ["make_shortcut", "rebase", "squash"]

HAS_IN_FLIGHT = 8


async def squash(
    bus: Bus, blobs: BlobStore, reader: PolicyReader, target: Manifest, base: int, *,
    form: DeltaForm = DeltaForm.SMALL, workers: Workers | None = None,
) -> Shortcut | None:
    """One delta from version `base` to `target`, stored; None where that would not be worth it (`shortcuts.WORTH`).

    Raises IntegrityError when the span is not an aligned power of two, or a version on the way is damaged or collected.
    """
    if base not in bases(target.version, base):
        raise IntegrityError("a squash spans an aligned power of two", field="base", value=base,
                             remedy=f"version {target.version} can be reached from {list(bases(target.version, 0))}")
    there = await _existing(reader, blobs, target.link, base)
    if there is not None:
        return there
    bottom, steps = await descend(reader, target, base, {Edge(target.seal, base, True)})
    if bottom.version != base:
        raise IntegrityError(f"no steps lead below version {bottom.version}", field="base", value=base, remedy="it was collected")
    ways = await reader.paths(bottom)
    if not ways:
        raise IntegrityError("no path leads to it", field="base", value=base, remedy="it was collected")
    path = Path((*ways[0].steps, *steps))
    workers = workers or shared_workers()

    def encode(item: Unfolded) -> EncodedShard:
        kind = DTYPES[item.dtype]
        if item.base is None:
            return encode_full(item.data, kind.width)
        return encode_delta(item.base, item.data, kind.width, exponent=kind.exponent, form=form)

    shards = unfold(path, blobs, workers, encode, mark=len(ways[0].steps) - 1)
    return await make_shortcut(bus, blobs, target, bottom.link, shards, Path(steps).nbytes)


async def rebase(bus: Bus, blobs: BlobStore, reader: PolicyReader, target: Manifest, *, workers: Workers | None = None) -> Shortcut:
    """A full of an existing version, stored: nothing older is needed for it from then on."""
    there = await _existing(reader, blobs, target.link, None)
    if there is not None:
        return there
    ways = await reader.paths(target)
    if not ways:
        raise IntegrityError("no path leads to it", field="version", value=target.version, remedy="it was collected")

    def encode(item: Unfolded) -> EncodedShard:
        return encode_full(item.data, DTYPES[item.dtype].width)

    shards = unfold(ways[0], blobs, workers or shared_workers(), encode)
    made = await make_shortcut(bus, blobs, target, None, shards, 0)
    assert made is not None  # only a squash may turn out not to be worth it
    return made


async def make_shortcut(
    bus: Bus, blobs: BlobStore, target: Manifest, base: Link | None, shards: AsyncGenerator[tuple[Shard, EncodedShard], None], replaces: int
) -> Shortcut | None:
    """The shards in packs, and then the shortcut that they make; None, and no packs, where a squash is not worth it.

    Raises BrokerFull when the store has no room: what was put by then is taken back.
    """
    span = 0 if base is None else target.version - base.version
    packer = Packer(blobs, shortcut_head(target.version, span), len(target.shard_digests))
    try:
        async with aclosing(shards), asyncio.TaskGroup() as puts:
            async for shard, coded in shards:
                await packer.place(shard.number, coded, puts)
            await packer.close(puts)
    except BaseExceptionGroup as failures:
        if isinstance(failures, ExceptionGroup):  # not when cancelled: orphans are found later
            await _take_back(bus, blobs, target, base, packer.encoding())
        raise failures.exceptions[0] from failures
    encoding = packer.encoding()
    if base is not None and encoding.nbytes > WORTH * replaces:
        await _take_back(bus, blobs, target, base, encoding)
        return None
    made = Shortcut(run=target.run, target=target.link, base=base, encoding=encoding, replaces=replaces, at=time.time()).with_seal()
    await store_shortcut(bus, made)
    return made


async def _existing(reader: PolicyReader, blobs: BlobStore, target: Link, base: int | None) -> Shortcut | None:
    """The shortcut that is there already, if it is readable and whole."""
    try:
        there = await reader.shortcut(target, base)
    except IntegrityError:
        return None
    if there is not None and all(await bounded(lambda pack: blobs.has(pack.ref), there.encoding.packs, HAS_IN_FLIGHT)):
        return there
    return None


async def _take_back(bus: Bus, blobs: BlobStore, target: Manifest, base: Link | None, encoding: Encoding) -> None:
    """Delete packs that nothing came to refer to. The same bytes may be those of the same shortcut made before."""
    before = await load_shortcut(bus, target.run, target.link, None if base is None else base.version)
    named = set() if before is None else {pack.digest for pack in before.encoding.packs}
    for pack in encoding.packs:
        if pack.digest not in named:
            await blobs.delete(pack.ref)
