"""Between a message and the bytes a stream holds: encoding, and the claim check for what is too large for a stream.

A frame above `CLAIM_ABOVE` is put into the run's claim stream and a `Claim` is stored in its place; opening a claim reads it
back. Both buses share this, so a service cannot tell. Frames above a megabyte, compressed or not, are decoded in a thread.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from driftline.messages.blobs import CLAIM_ABOVE, CLAIM_SPACE, Chunks, Claim, delete_blob, get_blob, put_blob
from driftline.messages.codec import MAX_DECODED_BYTES, decode, decoded_bytes, encode
from driftline.messages.dead_letters import run_of
from driftline.messages.errors import ConfigError, MalformedMessage
from driftline.messages.types import Message

__all__ = ["check_address", "claim_in", "drop_claim", "open_frame", "prepare"]

_IN_THREAD_ABOVE: Final = 1024 * 1024
_CLAIM_MARK: Final = b"\x83\xa1s\xa5claim"  # how a claim's map begins: do not decode every message twice to look for one

MAX_SUBJECT: Final = 1024
MAX_ID: Final = 4096
_SUBJECT: Final = re.compile(r"[^\s.*>\x00-\x20\x7f]+(\.[^\s.*>\x00-\x20\x7f]+)*")
_ID: Final = re.compile(r"[^\x00-\x1f\x7f]+")


def check_address(subject: str, id: str) -> None:
    """Refuse what is no subject to publish on and no header: a space or a line break in one is another command to the broker, and a
    line beyond its limit ends the connection for good."""
    if len(subject) > MAX_SUBJECT or not _SUBJECT.fullmatch(subject):
        raise ConfigError("not a subject to publish on", field="subject", value=subject, remedy="tokens of plain characters with dots between")
    if len(id) > MAX_ID or not _ID.fullmatch(id):
        raise ConfigError("not a message id", field="id", value=id, remedy=f"1 to {MAX_ID} printable characters")


async def prepare(bus: Chunks, message: Message) -> tuple[bytes, dict[str, str]]:
    """The bytes to store for `message`, its claim's blob already durable, and the headers that say what it is."""
    name = message.schema_name
    frame = encode(message)
    if len(frame) > CLAIM_ABOVE:
        ref = await put_blob(bus, message.run, frame, space=CLAIM_SPACE)
        claim = Claim(run=message.run, schema_of=name, digest=ref.digest, size=ref.size, chunks=ref.chunks)
        frame = encode(claim)
    return frame, {"Dl-Schema": f"{name}/{message.schema_version}"}


async def open_frame(bus: Chunks, subject: str, data: bytes) -> Message:
    """The message in stored bytes. Raises MalformedMessage, or IntegrityError when its claim is gone or damaged."""
    message = await _decode(data)
    if isinstance(message, Claim):
        # The run is the subject's, never the sender's word: a claim must not read another run's blobs.
        run, _ = run_of(subject)
        if message.run != run:
            raise MalformedMessage("a claim on another run's blob", field="run", value=message.run)
        if message.size > MAX_DECODED_BYTES:
            raise MalformedMessage(f"the limit is {MAX_DECODED_BYTES} bytes", field="claim size", value=message.size)
        message = await _decode(await get_blob(bus, run, message.ref, space=CLAIM_SPACE))
        if isinstance(message, Claim):
            raise MalformedMessage("a claim on a claim", field="claim", value=message.digest)
    return message


def claim_in(data: bytes) -> Claim | None:
    """The claim stored in place of a large message, if `data` is one."""
    if not data[16:].startswith(_CLAIM_MARK):
        return None
    try:
        message = decode(data)
    except MalformedMessage:
        return None
    return message if isinstance(message, Claim) else None


async def drop_claim(bus: Chunks, claim: Claim) -> None:
    """The message is acknowledged: nobody will open its claim again."""
    await delete_blob(bus, claim.run, claim.ref, space=CLAIM_SPACE)


async def _decode(data: bytes) -> Message:
    if max(len(data), decoded_bytes(data)) > _IN_THREAD_ABOVE:  # a kilobyte may decompress to a hundred megabytes
        return await asyncio.to_thread(decode, data)
    return decode(data)
