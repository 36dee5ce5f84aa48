"""Bypasses: the store's shortcuts over 2, 4, 8, ... versions, made from what it sees while it verifies each version.

Guarantees: a shortcut that is stored leads from the base's digests to the target's; making them holds at most half a copy of the weights
besides the one the store has anyway (`driftline.policy_store.fold`); a store without room, or a fold that went wrong, costs the shortcut and
never the version. A store that starts anew goes on with the spans that begin after it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog

from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerFull, BrokerUnavailable, IntegrityError
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.fold import Fold, Folds
from driftline.policy_store.forms import DeltaForm, EncodedShard
from driftline.policy_store.manifest import Manifest
from driftline.policy_store.shortcuts import MAX_SPAN, WORTH
from driftline.policy_store.squash import make_shortcut
from driftline.policy_store.tensor import Shard, State
from driftline.policy_store.workers import Workers

__all__ = ["Bypasses"]

log = structlog.get_logger("policy-store")


class Bypasses:
    def __init__(self, bus: Bus, blobs: BlobStore, workers: Workers, *, form: DeltaForm = DeltaForm.SMALL, max_span: int = MAX_SPAN) -> None:
        self._bus, self._blobs, self._workers, self._form = bus, blobs, workers, form
        self._folds = Folds(workers, max_span)
        self.stored = 0
        self.stored_bytes = 0
        self.seconds = 0.0
        # Bytes of a shortcut for one of its fold, as it was the last time: whether the next is worth making is known without making it.
        self._ratio = 0.0

    def begin(self, base: Manifest, target: Manifest) -> Fold:
        """What to show the shards of the delta to while it is applied."""
        return Fold(base, target.version, 0 if target.delta is None else target.delta.nbytes)

    def broken(self) -> None:
        """The version was not made from the one before it: nothing gathered leads to it."""
        self._folds.clear()

    async def add(self, fold: Fold, target: Manifest, state: State) -> None:
        """Take in a version whose weights are `state`, and store the shortcuts it completes."""
        began = time.monotonic()
        async for longer in self._folds.add(fold, target.nbytes):
            if longer.nbytes * self._ratio > WORTH * longer.replaces:
                continue
            try:
                await self._store(longer, target, state)
            except IntegrityError as error:
                log.error("a shortcut is left out", version=target.version, base=longer.base.version, cause=str(error))
                self._folds.clear()
                break
            except (BrokerFull, BrokerUnavailable) as error:
                log.warning("a shortcut is left out", version=target.version, base=longer.base.version, cause=str(error))
        self.seconds += time.monotonic() - began

    async def _store(self, fold: Fold, target: Manifest, state: State) -> None:
        sizes: list[int] = []
        shards = _measured(fold.shards(target, state, self._workers, self._form), sizes)
        made = await make_shortcut(self._bus, self._blobs, target, fold.base.link, shards, fold.replaces)
        self._ratio = sum(sizes) / max(1, fold.nbytes)
        if made is None:
            return
        fold.replaces = made.encoding.nbytes  # from now on the cheapest way over this span
        self.stored += 1
        self.stored_bytes += made.encoding.nbytes
        log.info("shortcut stored", version=target.version, base=fold.base.version, bytes=made.encoding.nbytes)


async def _measured(
    shards: AsyncGenerator[tuple[Shard, EncodedShard], None], sizes: list[int]
) -> AsyncGenerator[tuple[Shard, EncodedShard], None]:
    async with aclosing(shards):
        async for shard, coded in shards:
            sizes.append(len(coded.payload))
            yield shard, coded
