"""Writing a recording: sections one after the other, each flushed whole; a file that was cut off is continued behind its last one.

A reader refuses the file until `close` has written the closing section, so what looks complete is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Self

import xxhash

from driftline.messages.errors import IntegrityError
from driftline.policy_store.tensor import State, state_digest, tensor_digest
from driftline.services.replay.format import (
    Closing,
    Header,
    Kind,
    StartTensor,
    StartTensors,
    Step,
    preamble,
    section_head,
)
from driftline.services.replay.reader import Recording
from driftline.services.replay.shipped import shipped_digests

__all__ = ["RecordingWriter"]


class RecordingWriter:
    """`next_version` is the version whose step is to be added next."""

    def __init__(self, file: BinaryIO, header: Header, digests: list[bytes], next_version: int) -> None:
        self.header, self.next_version = header, next_version
        self.groups = self.trajectories = 0
        self._file, self._digests = file, digests

    @classmethod
    def create(cls, path: Path, header: Header, state: State) -> Self:
        """A new file at `path`, replacing what is there, with `state` as its start."""
        if state_digest(state) != header.start_digest:
            raise IntegrityError("the state is another", field="start digest", value=header.start_digest)
        shipped = shipped_digests()
        tensors = []
        for name in sorted(state):
            tensor, digest = state[name], tensor_digest(name, state[name])
            tensors.append(StartTensor(name=name, dtype=tensor.dtype, shape=tensor.shape, digest=digest, shipped=shipped.get(name) == digest))
        start = StartTensors(tensors=tuple(tensors))
        file = path.open("wb")
        try:
            file.write(preamble())
            writer = cls(file, header, [], header.start_version + 1)
            writer._write(Kind.HEAD, header.model_dump_json().encode())
            writer._write(Kind.START, start.model_dump_json().encode())
            for entry in start.embedded:
                writer._write(Kind.TENSOR, state[entry.name].data.data)
        except BaseException:
            file.close()
            raise
        return writer

    @classmethod
    def resume(cls, path: Path) -> Self | None:
        """Continue a file without closing section: what is behind its last whole section is cut off. None when not even its start is
        whole. The bytes of every section are read again."""
        found = Recording.salvage(path)
        if found is None:
            return None
        file = path.open("r+b")
        try:
            file.truncate(found.sections[-1].end)
            file.seek(0, os.SEEK_END)
        except BaseException:
            file.close()
            raise
        writer = cls(file, found.header, [section.digest for section in found.sections], found.last_version + 1)
        for step in found.steps():
            writer._count(step)
        return writer

    def add(self, step: Step) -> None:
        if step.version != self.next_version:
            raise IntegrityError(f"the next version is {self.next_version}", field="version", value=step.version)
        self._write(Kind.STEP, *step.packed())
        self.next_version += 1
        self._count(step)

    def close(self) -> None:
        """Write the closing section; durable on return."""
        last = self.next_version - 1
        closing = Closing(sections=len(self._digests), versions=last - self.header.start_version, last_version=last,
                          groups=self.groups, trajectories=self.trajectories,
                          digest=xxhash.xxh3_128_hexdigest(b"".join(self._digests)))
        self._write(Kind.DONE, closing.model_dump_json().encode())
        os.fsync(self._file.fileno())
        self._file.close()

    def leave(self) -> None:
        """Let the file go without closing section; `resume` goes on."""
        self._file.close()

    def _count(self, step: Step) -> None:
        self.groups += step.facts.groups
        self.trajectories += step.facts.trajectories

    def _write(self, kind: Kind, *parts: bytes | memoryview) -> None:
        head, digest = section_head(kind, len(self._digests), parts)
        self._file.write(head)
        for part in parts:
            self._file.write(part)
        self._file.flush()
        self._digests.append(digest)
