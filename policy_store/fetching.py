"""Fetching a pack: what a broker or a store did not give is asked for again, and only then is the version given up.

The wait is bounded by `within_s` for each blob, attempts included; what was damaged or is missing is not asked for twice.
"""

from __future__ import annotations

import asyncio
import time

from driftline.messages.blobs import BlobRef
from driftline.messages.errors import BrokerUnavailable
from driftline.policy_store.blobs import BlobStore

__all__ = ["fetch"]

BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)


async def fetch(blobs: BlobStore, ref: BlobRef, within_s: float) -> bytes:
    """The blob's bytes. Raises the last BrokerUnavailable when `within_s` seconds are over, IntegrityError at once."""
    until = time.monotonic() + within_s
    attempt = 0
    while True:
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                return await blobs.get(ref)
        except TimeoutError as error:
            raise BrokerUnavailable(f"no blob within {within_s} s", field="blob", value=ref.digest) from error
        except BrokerUnavailable:
            pause = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
            if time.monotonic() + pause >= until:
                raise
        attempt += 1
        await asyncio.sleep(pause)
