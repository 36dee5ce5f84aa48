"""Quarantine: when a step fails, which group is to blame, and what becomes of the others.

Guarantees: only a group that failed while nothing else was in the engine is blamed; one that was blamed `tries` times is condemned; every other group
that was in the engine is sampled again. The groups of a failed step are tried one at a time, in order; nothing else enters meanwhile. What no
data can be blamed for (the device, memory, files) is infrastructure, and never counted against a group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

__all__ = ["Quarantine", "is_infrastructure"]

# What torch raises as a plain RuntimeError when a device or an allocator fails.
_DEVICE = ("CUDA", "CUBLAS", "cuDNN", "CUDNN", "NCCL", "out of memory", "not enough memory", "can't allocate memory")
_KINDS = (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError, OSError)


def is_infrastructure(error: BaseException) -> bool:
    """Whether an error is the machine's doing and not a group's."""
    return isinstance(error, _KINDS) or (isinstance(error, RuntimeError) and any(word in str(error) for word in _DEVICE))


class Quarantine:
    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._blamed: dict[str, int] = {}
        self._suspects: deque[str] = deque()
        self._on_trial: str | None = None

    @property
    def active(self) -> bool:
        return bool(self._suspects) or self._on_trial is not None

    def blame(self, name: str) -> bool:
        """A failure that is this group's alone; true when it is condemned. Otherwise it is tried once more."""
        self._blamed[name] = self._blamed.get(name, 0) + 1
        if self._blamed[name] >= self._tries:
            self.forget(name)
            return True
        return False

    def failed(self, names: Sequence[str]) -> str | None:
        """A step failed with these groups in the engine, which has forgotten them. Returns the one that is condemned, if any."""
        self._on_trial = None
        if len(names) == 1 and self.blame(names[0]):
            return names[0]
        known = set(self._suspects)
        self._suspects.extend(name for name in names if name not in known)
        return None

    def admit(self, ready: Sequence[str], *, engine_idle: bool) -> list[str]:
        """Which of the groups that could enter the engine may do so now."""
        if not self.active:
            return list(ready)
        if not engine_idle:
            return []
        self._on_trial = None
        while self._suspects:
            name = self._suspects.popleft()
            if name in ready:  # not one that ended, or was lost, meanwhile
                self._on_trial = name
                return [name]
        return list(ready)

    def forget(self, name: str) -> None:
        """The group is out of hand: its failures no longer count."""
        self._blamed.pop(name, None)
