"""The recording format: a run's start and every batch it trained on, in one file that needs nothing else to be replayed.

Guarantees: a byte that is not what was written, a file that ends early and a format this build does not know are errors that name
the section and its offset, never another recording. Nothing is allocated on the word of a length that exceeds its limit or the file.

    file     = magic (8 bytes), format u32, zero u32, section...
    section  = kind (4 bytes), number u32, length u64, xxh3-128 of the payload, xxh3-64 of these 32 bytes; payload
    sections = HEAD, STRT, TNSR per embedded tensor, STEP per version, DONE

Little-endian throughout. docs/replay.md describes every byte. `writer` and `reader` are the two users; no torch here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final, Self, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from driftline.messages.errors import IntegrityError, MalformedMessage
from driftline.messages.recording import RecordedGroup, unpack_batch
from driftline.policy_store.tensor import DTYPES, Layout

__all__ = [
    "FORMAT",
    "LIMITS",
    "PREAMBLE",
    "SECTION_HEAD",
    "Closing",
    "Header",
    "Kind",
    "Section",
    "StartTensor",
    "StartTensors",
    "Step",
    "StepFacts",
    "check_preamble",
    "parse",
    "preamble",
    "section_head",
]

FORMAT: Final = 1
MAGIC: Final = b"\x89DLR\r\n\x1a\n"  # as PNG's: a transfer that rewrites line ends or strips the eighth bit damages it
PREAMBLE: Final = struct.Struct("<8sII")
SECTION_HEAD: Final = struct.Struct("<4sIQ16sQ")
_META: Final = struct.Struct("<I")
_COVERED: Final = 32  # bytes of a section's head that its own check covers
MIB: Final = 1024 * 1024

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
T = TypeVar("T", bound=BaseModel)


class Kind(Enum):
    """What a section holds; in the order in which they stand in a file."""

    HEAD = b"HEAD"
    START = b"STRT"
    TENSOR = b"TNSR"
    STEP = b"STEP"
    DONE = b"DONE"


LIMITS: Final = {
    Kind.HEAD: 16 * MIB, Kind.START: 256 * MIB, Kind.TENSOR: 64 * 1024 * MIB, Kind.STEP: 4 * 1024 * MIB, Kind.DONE: MIB,
}
"""The longest payload of each kind. A batch is read into memory whole, a tensor too."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Header(_Part):
    """`config` is the run file as TOML without what is secret or of one machine; `model` the checkpoint's config.json;
    `numerics` how the learner computes, as it was when the start was made."""

    run: str = Field(min_length=1, max_length=64)
    driftline: str
    created_at: float
    start_version: int = Field(ge=0)
    start_digest: Digest
    config: str
    model: str
    numerics: dict[str, Any]


class StartTensor(_Part):
    """One tensor of the starting policy. `shipped`: it is that of the shipped checkpoint, and its bytes are not in the file."""

    name: str = Field(min_length=1, max_length=1024)
    dtype: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    digest: Digest
    shipped: bool

    @property
    def layout(self) -> Layout:
        if self.dtype not in DTYPES:
            raise IntegrityError("unknown dtype", field=f"tensor {self.name}", value=self.dtype)
        return Layout(self.dtype, self.shape)


class StartTensors(_Part):
    """The policy's layout, in sorted order of names. The TNSR sections are those not `shipped`, in this order."""

    tensors: tuple[StartTensor, ...] = Field(min_length=1)

    @property
    def embedded(self) -> tuple[StartTensor, ...]:
        return tuple(tensor for tensor in self.tensors if not tensor.shipped)


class StepFacts(_Part):
    """A version beside the batch that made it: `digest` is that of the policy after the step, `seal` its manifest's."""

    version: int = Field(ge=1)
    digest: Digest
    seal: str
    learner_step: int
    batch: Digest
    groups: int = Field(ge=1)
    trajectories: int = Field(ge=1)
    numerics: dict[str, Any]
    at: float


class Closing(_Part):
    """What a whole file holds. `digest` is xxh3-128 over the payload digests of all sections before it, end to end."""

    sections: int
    versions: int
    last_version: int
    groups: int
    trajectories: int
    digest: Digest


@dataclass(frozen=True)
class Section:
    """A section's head, and where it stands."""

    kind: Kind
    number: int
    length: int
    digest: bytes
    offset: int

    @property
    def payload(self) -> int:
        return self.offset + SECTION_HEAD.size

    @property
    def end(self) -> int:
        return self.payload + self.length

    def __str__(self) -> str:
        return f"section {self.number} ({self.kind.name}) at offset {self.offset}"

    @classmethod
    def of(cls, head: bytes, number: int, offset: int, room: int) -> Self:
        """The section whose head this is. `room`: bytes of the file behind the head."""
        where = f"section {number} at offset {offset}"
        name, found, length, digest, check = SECTION_HEAD.unpack(head)
        if xxhash.xxh3_64_intdigest(head[:_COVERED]) != check:
            raise IntegrityError("its head is damaged", field=where, value=head[:4])
        if found != number:
            raise IntegrityError("sections are missing or out of order before it", field=where, value=found)
        try:
            kind = Kind(name)
        except ValueError:
            raise IntegrityError("unknown kind of section", field=where, value=name) from None
        section = cls(kind, number, length, digest, offset)
        if length > LIMITS[kind]:
            raise IntegrityError(f"longer than the limit of {LIMITS[kind]} bytes", field=str(section), value=length)
        if length > room:
            raise IntegrityError(f"the file ends after {room} of its bytes", field=str(section), value=length,
                                 remedy="the file is cut off: copy it again, or record it again")
        return section


@dataclass(frozen=True)
class Step:
    """One version: what came out, and the packed batch it was made from."""

    facts: StepFacts
    batch: bytes

    @property
    def version(self) -> int:
        return self.facts.version

    def groups(self, run: str) -> tuple[RecordedGroup, ...]:
        groups = unpack_batch(self.batch)
        if any(group.run != run or group.version != self.version for group in groups):
            raise MalformedMessage("not the batch of this version and run", field="version", value=self.version)
        return groups

    def packed(self) -> tuple[bytes, bytes]:
        """The payload in two parts, so that a large batch is not copied to be written."""
        facts = self.facts.model_dump_json().encode()
        return _META.pack(len(facts)) + facts, self.batch

    @classmethod
    def unpacked(cls, payload: bytes, where: str) -> Self:
        length = _META.unpack_from(payload)[0] if len(payload) >= _META.size else len(payload)
        if length > len(payload) - _META.size:
            raise IntegrityError("its facts are longer than itself", field=where, value=length)
        facts = parse(StepFacts, payload[_META.size : _META.size + length], where)
        batch = payload[_META.size + length :]
        if xxhash.xxh3_128_hexdigest(batch) != facts.batch:
            raise IntegrityError("its batch is another", field=where, value=facts.batch)
        return cls(facts, batch)


def preamble() -> bytes:
    return PREAMBLE.pack(MAGIC, FORMAT, 0)


def check_preamble(data: bytes) -> None:
    """Raises IntegrityError for what is not a recording, or one of another format."""
    where = "file head at offset 0"
    if len(data) < PREAMBLE.size:
        raise IntegrityError("too short for a recording", field=where, value=data)
    magic, number, zero = PREAMBLE.unpack(data)
    if magic != MAGIC or zero:
        raise IntegrityError("not a recording, or damaged", field=where, value=data)
    if number != FORMAT:
        raise IntegrityError(f"this build reads format {FORMAT}", field=f"format in the {where}", value=number,
                             remedy="replay it with the version of driftline that recorded it")


def section_head(kind: Kind, number: int, parts: tuple[bytes | memoryview, ...]) -> tuple[bytes, bytes]:
    """The head of a section with this payload, and the payload's digest."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    length = sum(len(part) for part in parts)
    if length > LIMITS[kind]:
        raise IntegrityError(f"a recording holds at most {LIMITS[kind]} bytes of it", field=f"section {kind.name}", value=length)
    covered = struct.pack("<4sIQ16s", kind.value, number, length, hasher.digest())
    return covered + struct.pack("<Q", xxhash.xxh3_64_intdigest(covered)), hasher.digest()


def parse(model: type[T], payload: bytes, where: str) -> T:
    try:
        return model.model_validate_json(payload)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise IntegrityError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}", field=where,
                             value=payload[:40]) from None
