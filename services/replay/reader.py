"""Reading a recording: its sections are indexed and its closing section checked when it is opened, its batches are read one at a time.

Guarantees: a file that opens is whole, in order and of one recording (the closing digest covers every section's); what `start` and
`steps` return has been compared with its digest. At most one batch is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import xxhash

from driftline.messages.errors import ConfigError, IntegrityError, MalformedMessage
from driftline.messages.recording import RecordedGroup
from driftline.policy_store.tensor import HostTensor, State, state_digest, tensor_digest
from driftline.services.replay.format import (
    PREAMBLE,
    SECTION_HEAD,
    Closing,
    Header,
    Kind,
    Section,
    StartTensors,
    Step,
    check_preamble,
    parse,
)
from driftline.services.replay.shipped import shipped_state

__all__ = ["Recording"]

_CHUNK = 4 * 1024 * 1024


@dataclass(frozen=True)
class Recording:
    path: Path
    header: Header
    tensors: StartTensors
    sections: tuple[Section, ...]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises ConfigError when there is no such file, IntegrityError when it is not a whole recording."""
        try:
            with path.open("rb") as file:
                return cls._of(path, file, _index(file))
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", field="recording", value=str(path)) from None

    @classmethod
    def salvage(cls, path: Path) -> Self | None:
        """The whole sections of a file without closing section, every payload compared with its digest; None when its start is not
        whole. For whoever continues the file."""
        with path.open("rb") as file:
            sections = [section for section in _whole(file) if section.kind is not Kind.DONE]
            try:
                return cls._of(path, file, tuple(sections))
            except IntegrityError:
                return None

    @classmethod
    def _of(cls, path: Path, file: BinaryIO, sections: tuple[Section, ...]) -> Self:
        if [section.kind for section in sections[:2]] != [Kind.HEAD, Kind.START]:
            raise IntegrityError("does not begin with HEAD and STRT", field="sections", value=len(sections))
        header = parse(Header, _payload(file, sections[0]), str(sections[0]))
        tensors = parse(StartTensors, _payload(file, sections[1]), str(sections[1]))
        names = [tensor.name for tensor in tensors.tensors]
        if names != sorted(set(names)):
            raise IntegrityError("names are not unique and sorted", field=str(sections[1]), value=len(names))
        embedded = [section for section in sections if section.kind is Kind.TENSOR]
        if len(embedded) != len(tensors.embedded):
            raise IntegrityError(f"{len(embedded)} tensors are in the file", field=str(sections[1]), value=len(tensors.embedded))
        for section, tensor in zip(embedded, tensors.embedded, strict=True):
            if section.length != tensor.layout.nbytes:
                raise IntegrityError(f"{tensor.name} has {tensor.layout.nbytes} bytes", field=str(section), value=section.length)
        return cls(path, header, tensors, sections)

    @property
    def last_version(self) -> int:
        return self.header.start_version + sum(section.kind is Kind.STEP for section in self.sections)

    @property
    def versions(self) -> range:
        """The versions that can be made again."""
        return range(self.header.start_version + 1, self.last_version + 1)

    def start(self) -> State:
        """The starting policy, every tensor and the whole compared with their digests."""
        state: State = {}
        sections = iter([section for section in self.sections if section.kind is Kind.TENSOR])
        with self.path.open("rb") as file:
            for entry in self.tensors.tensors:
                if entry.shipped:
                    found, where = shipped_state().get(entry.name), "shipped checkpoint"
                else:
                    section = next(sections)
                    data, where = np.frombuffer(_payload(file, section), np.uint8).copy(), str(section)
                    found = HostTensor(entry.dtype, entry.shape, data)
                if found is None or found.layout != entry.layout or tensor_digest(entry.name, found) != entry.digest:
                    raise IntegrityError("another tensor than the recorded one", field=f"{where}: {entry.name}", value=entry.digest,
                                         remedy="replay with the version of driftline that recorded it" if entry.shipped else "")
                state[entry.name] = found.copy() if entry.shipped else found
        if state_digest(state) != self.header.start_digest:
            raise IntegrityError("is not that of the tensors", field=f"{self.sections[0]}: start_digest", value=self.header.start_digest)
        return state

    def steps(self, to: int | None = None) -> Iterator[Step]:
        """The steps in order, up to version `to`, read as they are asked for."""
        last = self.last_version if to is None else to
        with self.path.open("rb") as file:
            wanted = (section for section in self.sections if section.kind is Kind.STEP)
            for version, section in zip(range(self.header.start_version + 1, last + 1), wanted, strict=False):
                step = Step.unpacked(_payload(file, section), str(section))
                if step.version != version:
                    raise IntegrityError(f"version {version} belongs here", field=str(section), value=step.version)
                yield step

    def groups(self, step: Step) -> tuple[RecordedGroup, ...]:
        """A step's batch, decoded."""
        try:
            return step.groups(self.header.run)
        except MalformedMessage as error:
            raise IntegrityError(f"its batch cannot be read: {error}", field="version", value=step.version) from error


def _index(file: BinaryIO) -> tuple[Section, ...]:
    """The sections of a whole file, the closing one left out."""
    sections = list(_heads(file))
    if not sections or sections[-1].kind is not Kind.DONE:
        end = sections[-1].end if sections else PREAMBLE.size
        after = str(sections[-1]) if sections else "the file head"
        raise IntegrityError(f"the file ends at offset {end}, after {after}, without its closing section", field="section",
                             value=len(sections), remedy="its recording was cut off: `driftline record` continues a .partial file; "
                             "copy any other again")
    *others, last = sections
    closing = parse(Closing, _payload(file, last), str(last))
    steps = sum(section.kind is Kind.STEP for section in others)
    digest = xxhash.xxh3_128_hexdigest(b"".join(section.digest for section in others))
    if (closing.sections, closing.versions, closing.digest) != (len(others), steps, digest):  # the digest covers what they hold
        raise IntegrityError("the sections before it are not those it closes", field=str(last), value=closing.sections)
    return tuple(others)


def _heads(file: BinaryIO) -> Iterator[Section]:
    """Every section's head, in order; payloads are skipped."""
    size = file.seek(0, 2)
    file.seek(0)
    check_preamble(file.read(PREAMBLE.size))
    offset, number, last = PREAMBLE.size, 0, Kind.HEAD
    order = list(Kind)
    while offset < size:
        file.seek(offset)
        head = file.read(SECTION_HEAD.size)
        if last is Kind.DONE:
            raise IntegrityError("bytes follow the closing section", field=f"offset {offset}", value=head[:8])
        if len(head) < SECTION_HEAD.size:
            raise IntegrityError(f"the file ends inside its head, at offset {size}", field=f"section {number} at offset {offset}",
                                 value=head, remedy="the file is cut off: copy it again, or record it again")
        section = Section.of(head, number, offset, size - offset - SECTION_HEAD.size)
        place = order.index(section.kind)
        if place < order.index(last) or (min(number, place) < 2 and place != number):  # HEAD and STRT stand first, once
            raise IntegrityError(f"cannot follow a section {last.name}", field=str(section), value=section.kind.name)
        yield section
        offset, number, last = section.end, number + 1, section.kind


def _whole(file: BinaryIO) -> Iterator[Section]:
    """Sections as long as they are whole: the first damaged or missing byte ends them."""
    try:
        for section in _heads(file):
            _check(file, section)
            yield section
    except IntegrityError:
        return


def _check(file: BinaryIO, section: Section) -> None:
    """Compare a payload with its digest without holding it."""
    hasher = xxhash.xxh3_128()
    file.seek(section.payload)
    left = section.length
    while left and (part := file.read(min(left, _CHUNK))):
        hasher.update(part)
        left -= len(part)
    if hasher.digest() != section.digest:
        raise _damaged(section)


def _payload(file: BinaryIO, section: Section) -> bytes:
    file.seek(section.payload)
    data = file.read(section.length)
    if xxhash.xxh3_128_digest(data) != section.digest:
        raise _damaged(section)
    return data


def _damaged(section: Section) -> IntegrityError:
    return IntegrityError("its bytes have another digest", field=str(section), value=section.digest.hex(),
                          remedy="the file is damaged: copy it again, or record it again")
