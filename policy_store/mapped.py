"""Weights in a file the kernel pages in and out: a state larger than memory, or one that should not count as memory.

The file has no name once it is open, so nothing is left behind by a process that dies. It is scratch space and not a checkpoint: what
is in it after a power cut is undefined.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from driftline.messages.errors import ConfigError
from driftline.policy_store.tensor import HostTensor, Layout, State

__all__ = ["Allocate", "in_memory", "mapped_in", "mapped_state"]

Allocate: TypeAlias = Callable[[Mapping[str, Layout]], State]
"""Room for tensors of these layouts, contents undefined: where a reader or writer keeps its copy of the weights."""


def in_memory(layouts: Mapping[str, Layout]) -> State:
    return {name: HostTensor.empty(layout) for name, layout in layouts.items()}


def mapped_in(folder: Path) -> Allocate:
    """An `Allocate` that puts every state into a file of its own under `folder`, which must exist."""
    return partial(mapped_state, folder)


def mapped_state(folder: Path, layouts: Mapping[str, Layout]) -> State:
    """A state over one nameless file in `folder`, each tensor from a page boundary on; the tail of the last page is unused.

    Raises ConfigError when the folder cannot hold it: the blocks are taken now, not when a page is first written.
    """
    starts: dict[str, int] = {}
    size = 0
    for name, layout in layouts.items():
        starts[name] = size
        size += -(-layout.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if size == 0:
        return in_memory(layouts)
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise ConfigError(f"no room for {size} bytes of weights: {error.strerror}", field="folder", value=str(folder),
                              remedy="free space there, or name another folder") from error
        mapping = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    return {
        name: HostTensor(layout.dtype, layout.shape, mapping[starts[name] : starts[name] + layout.nbytes])
        for name, layout in layouts.items()
    }
