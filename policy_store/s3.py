"""Blobs in an S3-compatible object store: one object a blob, `<prefix>/<digest>` in the bucket.

A `put` that returned is durable, as S3 is; an object of the right size under a digest is not sent again; a `get` is checked against
the digest. At most `concurrency` requests are in flight, on connections that are kept. Transient failures are tried again until the
deadline. The keys come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or, where these are not set, from the machine's
role; they are in no message, error or log of ours. A request is signed for the endpoint alone.

What S3 holds is S3's to keep: an object that changed there without changing its size is found by `get`, and repaired by `delete` and `put`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import xxhash

from driftline.messages.blobs import BlobRef
from driftline.messages.errors import (
    BrokerDenied,
    ConfigError,
    DriftlineError,
    IntegrityError,
    StoreUnavailable,
)
from driftline.policy_store.blobs import StoredBlob, checked_digest, missing, verified
from driftline.policy_store.deadlines import DEADLINE_S, patiently, within

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Store

__all__ = ["KEYS", "S3Blobs", "endpoint_of"]

KEYS = "the keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"

CONCURRENCY = 16
"""Requests in flight: a 4 MiB pack each fills a link of several gigabytes a second at the 20 ms an object store takes to answer."""

CONNECT_S = 5.0
REQUEST_S = 30.0
PAGE = 1000  # the most that S3 lists at a time

_EXPIRED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")  # said with status 400
_PASSING = (408, 409, 429)  # 409: somebody else is putting the same object
_PORTS = {"http": 80, "https": 443}
_DIGEST = re.compile(r"[0-9a-f]{32}")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")

T = TypeVar("T")


class S3Blobs:
    """`endpoint`: URL of the server, empty for Amazon's; http:// only inside a network you trust. `region`: empty for AWS_REGION."""

    def __init__(
        self, bucket: str, prefix: str, *, endpoint: str = "", region: str = "", deadline_s: float = DEADLINE_S, concurrency: int = CONCURRENCY
    ) -> None:
        self.name = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._prefix, self._endpoint, self._region = bucket, prefix, endpoint_of(endpoint), region
        self._deadline_s = deadline_s
        self._slots = asyncio.Semaphore(concurrency)
        self._opened: S3Store | None = None
        self._conditional = True  # until the server says that it cannot put on condition of absence

    async def put(self, data: bytes) -> BlobRef:
        ref = BlobRef(xxhash.xxh3_128_hexdigest(data), len(data), 1)
        await self._asked(lambda: self._put(ref, data), ref.digest)
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        checked_digest(ref.digest)
        return await self._asked(lambda: self._get(ref), ref.digest)

    async def has(self, ref: BlobRef) -> bool:
        checked_digest(ref.digest)
        return await self._asked(lambda: self._size(ref.digest), ref.digest) is not None

    async def delete(self, ref: BlobRef) -> None:
        checked_digest(ref.digest)
        await self._asked(lambda: self._delete(ref), ref.digest)

    async def list(self) -> AsyncIterator[StoredBlob]:
        import obstore

        pages = obstore.list(self._store(), chunk_size=PAGE).__aiter__()
        while True:
            try:
                async with within(self._deadline_s, store=self.name, blob=""):
                    page = await anext(pages)
            except StopAsyncIteration:
                return
            except _failures() as error:
                raise _refusal(error, self.name, "", self._endpoint) from None
            for entry in page:
                if _DIGEST.fullmatch(entry["path"]):  # what else lies there is not ours
                    yield StoredBlob(entry["path"], entry["size"], entry["last_modified"].timestamp())

    async def _asked(self, ask: Callable[[], Awaitable[T]], digest: str) -> T:
        async def attempt() -> T:
            try:
                return await ask()
            except _failures() as error:
                # Not chained: what the library says may hold the signed request, and in it the key's id.
                raise _refusal(error, self.name, digest, self._endpoint) from None

        async with self._slots:  # the deadline is of the request, and each that is ahead in the queue has one too
            return await patiently(attempt, store=self.name, blob=digest, deadline_s=self._deadline_s)

    async def _put(self, ref: BlobRef, data: bytes) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError, GenericError, NotSupportedError

        stored = await self._size(ref.digest)
        while stored != ref.size:
            create = stored is None and self._conditional
            try:
                await obstore.put_async(self._store(), ref.digest, data, mode="create" if create else "overwrite", use_multipart=False)
                return
            except AlreadyExistsError:  # by another writer of the same bytes, meanwhile: its size is looked at like any other's
                stored = await self._size(ref.digest)
            except (NotSupportedError, NotImplementedError, GenericError) as error:
                if not create or _status(str(error)) not in (400, 501):
                    raise
                self._conditional = False  # some compatible servers refuse the header; the name says the content, so plain is safe

    async def _get(self, ref: BlobRef) -> bytes:
        import obstore

        try:
            found = await obstore.get_async(self._store(), ref.digest)
        except FileNotFoundError as error:
            if _code(str(error)) == "NoSuchBucket":
                raise
            raise missing(ref, self.name) from None
        if found.meta["size"] != ref.size:  # before it is read into memory
            raise IntegrityError(f"{found.meta['size']} bytes instead of {ref.size} in {self.name}", field="blob", value=ref.digest,
                                 remedy="the store is damaged; another path or copy is needed")
        return verified((await found.bytes_async()).to_bytes(), ref, self.name)

    async def _size(self, digest: str) -> int | None:
        """Of the object under `digest`, None when there is none: nothing of it is read."""
        import obstore

        try:
            return (await obstore.head_async(self._store(), digest))["size"]
        except FileNotFoundError:
            return None

    async def _delete(self, ref: BlobRef) -> None:
        import obstore

        try:
            await obstore.delete_async(self._store(), ref.digest)
        except FileNotFoundError as error:
            if _code(str(error)) == "NoSuchBucket":
                raise

    def _store(self) -> S3Store:
        """Opened at the first use, because importing the library costs what a store in the broker need not pay."""
        if self._opened is None:
            from obstore.store import S3Store

            config: S3Config = {}
            if self._endpoint:
                config["endpoint"] = self._endpoint
            if self._region:
                config["region"] = self._region
            try:
                self._opened = S3Store(
                    self._bucket,
                    prefix=self._prefix or None,
                    config=config,
                    client_options={
                        "allow_http": self._endpoint.startswith("http://"),
                        "connect_timeout": timedelta(seconds=min(CONNECT_S, self._deadline_s)),
                        "timeout": timedelta(seconds=min(REQUEST_S, self._deadline_s)),
                    },
                    # One quick repetition on a fresh connection; waiting longer is `patiently`'s, which looks what is stored first.
                    retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=self._deadline_s),
                                  "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2}},
                )
            except _failures() as error:
                raise ConfigError(_brief(error), field="policy.store", value=self.name,
                                  remedy="check policy.s3_endpoint and the AWS_* variables") from None
        return self._opened


def endpoint_of(text: str) -> str:
    """The URL of a server in one spelling, so that two can be compared; empty stays empty. ConfigError when it is none."""
    if not text:
        return ""
    try:
        url = urlsplit(text)
        host, port = url.hostname or "", url.port
    except ValueError:
        host, port = "", None
    # Checked on what was given, because it is stored where every reader of the run sees it.
    if not host or url.scheme not in _PORTS or "@" in url.netloc or url.query or url.fragment or not text.isprintable() or " " in text:
        shown = text if "@" not in text else "(not shown: it holds credentials)"
        raise ConfigError("not the URL of a server", field="policy.s3_endpoint", value=shown,
                          remedy=f"use http://HOST:PORT or https://HOST; {KEYS}")
    shown_host = f"[{host}]" if ":" in host else host
    return f"{url.scheme}://{shown_host}" + (f":{port}" if port and port != _PORTS[url.scheme] else "") + url.path.rstrip("/")


def _failures() -> tuple[type[Exception], ...]:
    """What obstore raises; some of its errors are Python's own."""
    from obstore.exceptions import BaseError

    return (BaseError, FileNotFoundError, FileExistsError, NotImplementedError, PermissionError, ValueError)


def _code(text: str) -> str:
    found = _CODE.search(text)
    return found[1] if found else ""


def _status(text: str) -> int:
    """The HTTP status in an error of the library's; 0 when no server answered."""
    found = _STATUS.search(text)
    return int(found[1]) if found else 0


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def _refusal(error: Exception, store: str, blob: str, endpoint: str) -> DriftlineError:
    """The object store's error as ours. Made from its code and status only: its text may quote a signed request."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text, server = str(error), endpoint or "Amazon S3"
    code, status = _code(text), _status(text)
    said = code or (f"status {status}" if status else "no connection")
    if "/latest/" in text or ("metadata" in text.lower() and "token" in text.lower()):  # it has asked the machine for its role
        return BrokerDenied("no credentials", field="policy.store", value=store, remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if code == "NoSuchBucket":
        return ConfigError(f"no such bucket at {server}", field="policy.store", value=store, remedy="create it: services do not")
    if status == 301 or "incorrectly configured region" in text or code == "AuthorizationHeaderMalformed":
        return ConfigError("the bucket is in another region", field="policy.s3_region", value=store, remedy="name the bucket's region")
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError, PermissionError)) or status in (401, 403) or code in _EXPIRED:
        remedy = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what they may do with the bucket"
        if code == "RequestTimeTooSkewed":
            remedy = "set this machine's clock: requests are signed with the time"
        return BrokerDenied(f"{server} refuses the credentials ({said})", field="policy.store", value=store, remedy=remedy)
    if 400 <= status < 500 and status not in _PASSING:
        return ConfigError(f"{server} refuses the request ({said})", field="policy.store", value=store,
                           remedy="check policy.store, policy.s3_endpoint and policy.s3_region")
    return StoreUnavailable(f"{server} does not answer ({said})", field="blob", value=f"{store}/{blob}",
                            remedy="is policy.s3_endpoint right, and the server up and reachable from here?")
