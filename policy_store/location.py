"""Where a run's policy bytes live: said once in the run's policy stream, so that whoever reads the run finds them.

The first service that writes says it (`locate`); a second, different place is refused, because versions would be torn between the two.
A reader asks (`located_store`) and is told by the broker, so it trusts no more than it must: a folder is used only for files named
by digests inside it, and keys for an object store are sent to an endpoint only if the reader's own environment or its caller names it.

Each run has a folder or a prefix of its own, because collection deletes what the run's manifests do not name.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, Self, TypeAlias

from pydantic import Field, model_validator

from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerDenied, ConfigError, HeadConflict, IntegrityError
from driftline.messages.registry import register
from driftline.messages.subjects import Subjects
from driftline.messages.types import Message
from driftline.policy_store.blobs import BlobStore, DirectoryBlobs, JetStreamBlobs
from driftline.policy_store.s3 import KEYS, S3Blobs, endpoint_of

__all__ = ["InBroker", "InBucket", "InFolder", "Place", "StoreLocated", "consented", "locate", "located", "located_store", "open_store", "own_endpoint", "place_of"]

JETSTREAM: Final = "jetstream"
FILE: Final = "file:"
S3: Final = "s3://"
ATTEMPTS: Final = 3

_BUCKET = re.compile(r"[a-z0-9](?:[a-z0-9-]|\.(?!\.)){1,61}[a-z0-9]")
_PREFIX = re.compile(r"(?:[A-Za-z0-9_=-][A-Za-z0-9._=-]*(?:/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*)?")
_REGION = re.compile(r"[a-z0-9-]{0,32}")  # part of Amazon's host name: anything else in it could name another host
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@dataclass(frozen=True)
class InBroker:
    """In the run's blob stream."""

    def __str__(self) -> str:
        return JETSTREAM


@dataclass(frozen=True)
class InFolder:
    path: Path

    def __str__(self) -> str:
        return f"{FILE}{self.path}"


@dataclass(frozen=True)
class InBucket:
    """`endpoint` is empty for Amazon's own; `region` for the reader's AWS_REGION."""

    bucket: str
    prefix: str
    endpoint: str
    region: str

    def __str__(self) -> str:
        return f"{S3}{self.bucket}/{self.prefix}".rstrip("/") + (f" at {self.endpoint}" if self.endpoint else "")


Place: TypeAlias = InBroker | InFolder | InBucket


def place_of(store: str, *, endpoint: str = "", region: str = "") -> Place:
    """What `policy.store`, `policy.s3_endpoint` and `policy.s3_region` say. Raises ConfigError."""
    if store == JETSTREAM:
        return InBroker()
    if store.startswith(S3) and "@" in store:
        raise ConfigError("holds credentials, or what looks like them", field="policy.store", value=f"{S3}(not shown)",
                          remedy=f"use '{S3}bucket/prefix'; {KEYS}")
    if store.startswith(FILE):
        path = store.removeprefix(FILE)
        if not path or "\0" in path:
            raise ConfigError("not a folder", field="policy.store", value=store, remedy=f"use '{FILE}/shared/folder'")
        return InFolder(Path(path))
    if store.startswith(S3):
        bucket, _, prefix = store.removeprefix(S3).strip("/").partition("/")
        if not _BUCKET.fullmatch(bucket) or not _PREFIX.fullmatch(prefix):
            raise ConfigError("not a bucket and a prefix", field="policy.store", value=store, remedy=f"use '{S3}bucket/prefix'")
        if not _REGION.fullmatch(region):
            raise ConfigError("not a region", field="policy.s3_region", value=region, remedy="use one like 'eu-central-1'")
        return InBucket(bucket, prefix, endpoint_of(endpoint), region)
    raise ConfigError("not a place for versions", field="policy.store", value=store,
                      remedy=f"use '{JETSTREAM}', '{FILE}/shared/folder' or '{S3}bucket/prefix'")


def own_endpoint(environment: Mapping[str, str] | None = None) -> str:
    """The object store that the environment names, as other S3 programs understand it; empty for Amazon's."""
    values = os.environ if environment is None else environment
    return endpoint_of(next((values[name] for name in _ENDPOINT_VARIABLES if values.get(name)), ""))


def open_store(store: str, bus: Bus, run: str, *, endpoint: str = "", region: str = "") -> BlobStore:
    """The store a configuration names. Raises ConfigError; nothing is connected to yet."""
    return _open(_with_own_endpoint(place_of(store, endpoint=endpoint, region=region)), bus, run)


def _with_own_endpoint(place: Place) -> Place:
    return replace(place, endpoint=own_endpoint()) if isinstance(place, InBucket) and not place.endpoint else place


def _open(place: Place, bus: Bus, run: str) -> BlobStore:
    if not _RUN.fullmatch(run):
        raise ConfigError("not the name of a run", field="run", value=run, remedy="letters, digits, - and _, at most 64")
    match place:
        case InBroker():
            return JetStreamBlobs(bus, run)
        case InFolder(path):
            return DirectoryBlobs(path / run)
        case InBucket(bucket, prefix, endpoint, region):
            return S3Blobs(bucket, f"{prefix}/{run}".lstrip("/"), endpoint=endpoint, region=region)


@register
class StoreLocated(Message):
    """Where the bytes of this run's versions are. Holds no credentials."""

    schema_name: ClassVar[str] = "store_located"

    store: str = Field(max_length=2048)
    endpoint: str = Field(default="", max_length=2048)
    region: str = Field(default="", max_length=32)
    at: float

    @model_validator(mode="after")
    def _is_a_place(self) -> Self:
        try:
            place = self.place
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if isinstance(place, InFolder) and not place.path.is_absolute():
            raise ValueError(f"store = {self.store!r}: a folder of whoever wrote it, not of whoever reads it")
        return self

    @property
    def place(self) -> Place:
        return place_of(self.store, endpoint=self.endpoint, region=self.region)


async def locate(bus: Bus, run: str, store: str, *, endpoint: str = "", region: str = "") -> Place:
    """Say that the run's versions live at `store`, a configuration's words, or find it said. A folder is made.

    Raises ConfigError when another place was said, or the folder cannot be made.
    """
    place = _with_own_endpoint(place_of(store, endpoint=endpoint, region=region))
    if isinstance(place, InFolder):
        place = InFolder(place.path.absolute())
        await asyncio.to_thread(_make, place.path)
    said = _said(place, run)
    for _ in range(ATTEMPTS):
        there = await located(bus, run)
        if there is None:
            try:
                # An id of its own: by one that two writers share, the second would take the first's place for its own.
                await bus.publish(_subject(run), said, id=f"{run}/store/{uuid.uuid4().hex}", expect_last=0)
            except HeadConflict:
                continue  # said by another, meanwhile
            return place
        if there.place != place:
            raise ConfigError(f"this run's versions are in {there.place}", field="policy.store", value=str(place),
                              remedy="configure that place, or give the run another name")
        return place
    raise HeadConflict("said and unsaid by others", field="policy.store", value=str(place), remedy="is the policy stream purged?")


async def located(bus: Bus, run: str) -> StoreLocated | None:
    """What was said, or None. Raises MalformedMessage or IntegrityError when it makes no sense."""
    stored = await bus.last(Subjects(run).stream("POLICY"), _subject(run))
    if stored is None:
        return None
    if not isinstance(stored.message, StoreLocated):
        raise IntegrityError("does not say where the versions are", field="policy.store", value=type(stored.message).__name__,
                             remedy="who may write policy.store?")
    return stored.message


async def located_store(bus: Bus, run: str, *, endpoint: str | None = None) -> BlobStore:
    """The store a run's services use, for whoever has only the broker: JetStream where nothing was said.

    `endpoint`: of the object store as the caller knows it (empty: Amazon's), which is then used whatever was said. Raises ConfigError
    when the folder is not here, or when nobody here has named the endpoint.
    """
    said = await located(bus, run)
    place: Place = InBroker() if said is None else said.place
    match place:
        case InFolder(path) if not await asyncio.to_thread(path.is_dir):
            raise ConfigError("the run's versions are in a folder that is not here", field="policy.store", value=str(place),
                              remedy="mount it, or do this on a machine that has it")
        case InBucket():
            given = None if endpoint is None else endpoint_of(endpoint)
            place = replace(place, endpoint=consented(place.endpoint, own_endpoint(), given))
        case _:
            pass
    return _open(place, bus, run)


def consented(said: str, own: str, given: str | None) -> str:
    """The endpoint to send signed requests to: `given` by the caller, or `said` by the run if it is the reader's `own`."""
    if given is not None:
        return given
    if said != own:
        remedy = f"if you trust it, set AWS_ENDPOINT_URL={said}" if said else "unset AWS_ENDPOINT_URL to use Amazon's"
        raise ConfigError(f"the run's versions are behind {said or 'Amazon S3'}, and your keys are sent there only if you say so",
                          field="AWS_ENDPOINT_URL", value=own, remedy=remedy)
    return said


def _said(place: Place, run: str) -> StoreLocated:
    match place:
        case InBucket(bucket, prefix, endpoint, region):
            return StoreLocated(run=run, store=f"{S3}{bucket}/{prefix}".rstrip("/"), endpoint=endpoint, region=region, at=time.time())
        case _:
            return StoreLocated(run=run, store=str(place), at=time.time())


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except PermissionError as error:
        raise BrokerDenied("may not be made", field="policy.store", value=str(path), remedy="let this user write there") from error
    except OSError as error:
        raise ConfigError(f"cannot be made: {error.strerror}", field="policy.store", value=str(path), remedy="name a folder") from error


def _subject(run: str) -> str:
    return f"{Subjects(run).root}.policy.store"
