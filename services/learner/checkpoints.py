"""Optimizer state on disk, written beside the training and never in its way.

A checkpoint is the state of one version: masters, moments, random generators. It is written in a thread while the next steps go
on; the file appears whole or not at all, and its label, which names the policy's digest and the file's, comes last and makes it
count. At most one is being written, so memory holds at most one copy. `Checkpointer.before` makes a step wait rather than let a
crash cost more than `bound` recomputed steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from driftline.messages.errors import IntegrityError
from driftline.services.learner.trainer import Trainer

__all__ = ["CheckpointFiles", "Checkpointer", "Label"]

log = structlog.get_logger("learner")

_NAME = re.compile(r"^checkpoint-(\d{8})-([0-9a-f]{32})\.json$")
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Label:
    """A checkpoint that is whole: the version it belongs to and the digest of that version's policy."""

    version: int
    digest: str

    @property
    def stem(self) -> str:
        return f"checkpoint-{self.version:08d}-{self.digest}"


class CheckpointFiles:
    def __init__(self, root: Path) -> None:
        self.root = root

    def save(self, label: Label, tensors: Mapping[str, torch.Tensor]) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        partial = self.root / f".{label.stem}.{os.getpid()}"
        try:
            save_file(dict(tensors), partial)
            file_digest = _file_digest(partial)
            _sync(partial)
            partial.replace(self._tensors(label))
            partial.write_text(json.dumps({"version": label.version, "digest": label.digest, "file": file_digest}))
            _sync(partial)
            partial.replace(self._label(label))
            _sync(self.root)
        finally:
            partial.unlink(missing_ok=True)

    def found(self, at_most: int) -> list[Label]:
        """What there is for versions up to `at_most`, newest first."""
        names = [m for p in self.root.glob("checkpoint-*.json") if (m := _NAME.match(p.name))]
        labels = [Label(int(m[1]), m[2]) for m in names if int(m[1]) <= at_most]
        return sorted(labels, key=lambda label: label.version, reverse=True)

    def load(self, label: Label) -> dict[str, torch.Tensor]:
        """Raises IntegrityError when the files are not what was saved."""
        path = self._tensors(label)
        try:
            named = json.loads(self._label(label).read_text())
            if named != {"version": label.version, "digest": label.digest, "file": _file_digest(path)}:
                raise IntegrityError("its bytes are not those of its label", field="checkpoint", value=str(path))
            return load_file(path)
        except (OSError, json.JSONDecodeError, SafetensorError) as error:
            raise IntegrityError(f"cannot be read: {error}", field="checkpoint", value=str(path)) from error

    def keep_newest(self, count: int) -> None:
        labels = self.found(at_most=10**8)
        for label in labels[count:]:
            self._label(label).unlink(missing_ok=True)
            self._tensors(label).unlink(missing_ok=True)
        named = {self._tensors(label).name for label in labels[:count]}
        for path in self.root.glob("checkpoint-*.safetensors"):  # of a save that was cut off before its label
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _label(self, label: Label) -> Path:
        return self.root / f"{label.stem}.json"

    def _tensors(self, label: Label) -> Path:
        return self.root / f"{label.stem}.safetensors"


class Checkpointer:
    """Writes every `every` versions in the background; at most `bound` versions are newer than the newest that is whole."""

    def __init__(self, files: CheckpointFiles, *, every: int, bound: int, durable: int = 0) -> None:
        """`durable`: the newest version whose state can be had without recomputing (0: the starting checkpoint's)."""
        self.files, self.durable = files, durable
        self._every, self._bound = every, bound
        self._writing: asyncio.Task[None] | None = None
        self.waited_s = 0.0
        self.written = 0

    async def before(self, trainer: Trainer, version: int, digest: str) -> None:
        """Before the step that follows `version`. Waits while its loss would cost more than the bound."""
        began = time.monotonic()
        while version + 1 - self.durable > self._bound:
            if self._writing is None:
                await self._begin(trainer, Label(version, digest))
            await self._settle()
        self.waited_s += time.monotonic() - began

    async def after(self, trainer: Trainer, version: int, digest: str) -> None:
        """After `version` was published: begin its checkpoint if it is due and none is being written."""
        if self._writing is not None and self._writing.done():
            await self._settle()
        if self._writing is None and version - self.durable >= self._every:
            await self._begin(trainer, Label(version, digest))

    async def last(self, trainer: Trainer, version: int, digest: str) -> None:
        """At the end of a run: the state of its last version, whole on return, so that it can be continued."""
        await self._settle()
        if version > self.durable:
            await self._begin(trainer, Label(version, digest))
            await self._settle()

    async def close(self) -> None:
        """Let what is being written end; its failure has no consequence any more."""
        if self._writing is not None:
            self._writing.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await self._writing
            self._writing = None

    async def _begin(self, trainer: Trainer, label: Label) -> None:
        tensors = await asyncio.to_thread(trainer.snapshot)
        self._writing = asyncio.create_task(self._write(label, tensors), name=f"checkpoint {label.version}")

    async def _write(self, label: Label, tensors: Mapping[str, torch.Tensor]) -> None:
        await asyncio.to_thread(self.files.save, label, tensors)
        self.durable = label.version
        self.written += 1
        await asyncio.to_thread(self.files.keep_newest, 2)

    async def _settle(self) -> None:
        """The writing in progress, to its end. Raises what it raised: a disk that is full must not be noticed at the crash."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing


def _file_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
