"""From the trainer's thread into a draft of the next version: tensors go in while the optimizer makes the rest."""

from __future__ import annotations

import asyncio

import torch

from driftline.policy_store.draft import Draft
from driftline.services.tensors import host_tensor

__all__ = ["HandingIn"]


class HandingIn:
    """`emit` is called in a thread and waits there while the draft has no room: the optimizer is held up, never memory.

    `keep`: remember the tensors, for who needs the whole policy beside the store.
    """

    def __init__(self, draft: Draft, *, keep: bool = False) -> None:
        self._draft, self._keep = draft, keep
        self._loop = asyncio.get_running_loop()
        self.kept: dict[str, torch.Tensor] = {}

    def emit(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor`: on the CPU, contiguous, and nobody else's. Raises what the draft raises."""
        if self._keep:
            self.kept[name] = tensor
        asyncio.run_coroutine_threadsafe(self._draft.put(name, host_tensor(tensor)), self._loop).result()
