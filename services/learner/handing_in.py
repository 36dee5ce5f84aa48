"""From the trainer's thread into a draft of the next version: tensors go in while the optimizer makes the rest.

`emit` is called in a thread. It waits there while `ROOM_BYTES` are on their way, so that the optimizer is held up and never memory; it raises
once `run` has ended, so a thread is not left waiting for a draft that failed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque

import torch

from driftline.messages.errors import IntegrityError
from driftline.policy_store.draft import Draft
from driftline.policy_store.forms import Changes
from driftline.services.learner.trainer import Emitted
from driftline.services.tensors import host_tensor

__all__ = ["ROOM_BYTES", "HandingIn"]

ROOM_BYTES = 64 * 1024 * 1024
_LOOK_S = 1.0  # how often a thread that waits looks whether the loop it waits for still runs


class HandingIn:
    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._items: deque[tuple[str, Emitted]] = deque()
        self._changed = threading.Condition()
        self._held = 0
        self._last = self._ended = False

    def emit(self, name: str, content: Emitted) -> None:
        """`content`: contiguous on the CPU, and nobody else's."""
        size = _size(content)
        with self._changed:
            while self._held and self._held + size > ROOM_BYTES and not self._gone:
                self._changed.wait(_LOOK_S)
            if self._gone:
                raise IntegrityError("nobody takes it any more", field="tensor", value=name, remedy="see what ended the publication")
            self._items.append((name, content))
            self._held += size
        self._loop.call_soon_threadsafe(self._arrived.set)

    @property
    def _gone(self) -> bool:
        return self._ended or not self._loop.is_running()

    def close(self) -> None:
        """Nothing more comes; called in the loop."""
        self._last = True
        self._arrived.set()

    async def run(self) -> None:
        """Put what is emitted, until `close`."""
        try:
            while not (self._last and not self._items):
                await self._arrived.wait()
                self._arrived.clear()
                while self._items:
                    name, content = self._items.popleft()
                    if isinstance(content, torch.Tensor):
                        await self._draft.put(name, host_tensor(content))
                    else:
                        await self._draft.put_changes(name, content)
                    with self._changed:
                        self._held -= _size(content)
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


def _size(content: Emitted) -> int:
    if isinstance(content, torch.Tensor):
        return content.nbytes
    return sum(shard.at.nbytes + shard.xor.nbytes if isinstance(shard, Changes) else shard.nbytes for shard in content if shard is not None)
