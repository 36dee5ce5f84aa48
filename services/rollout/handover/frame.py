"""A hand-over as bytes and back: one head, one header of JSON, the tensors behind one another, and a digest over everything.

    "DLHO" | format u32 = 1 | header length u64 | digest 16 bytes (xxh3-128 of what follows) | header | tensor | tensor | ...

Guarantees: bytes that are cut, changed or of another format are refused by name before a tensor is made; no size is believed that the bytes at hand do not
have; tensors are views of the one buffer. The digest finds accidents, not attackers: both halves are the run's own processes.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from typing import Any

import numpy as np
import torch
import xxhash
from pydantic import ValidationError

from driftline.messages.errors import MalformedMessage
from driftline.messages.types import Sampling
from driftline.services.rollout.engine import Request
from driftline.services.rollout.handover.record import Handover, Layout, Part

__all__ = ["from_bytes", "to_bytes"]

_HEAD = struct.Struct("<4sIQ16s")
_MAGIC, _FORMAT = b"DLHO", 1
_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


def to_bytes(handover: Handover) -> bytes:
    """The same record gives the same bytes."""
    request = handover.request
    routes = handover.routes
    header = json.dumps({
        "id": request.id, "tokens": [int(t) for t in request.tokens], "temperature": request.sampling.temperature, "max_tokens": request.sampling.max_tokens,
        "key": request.key, "first_draw": request.first_draw, "adapter": request.adapter, "session": request.session, "priority": request.priority,
        "stop_ids": request.stop_ids, "tenant": request.tenant, "base": handover.layout.base, "rows": handover.layout.rows, "states": handover.layout.states,
        "version": handover.version, "first_token": handover.first_token, "first_logprob": handover.first_logprob, "cached_tokens": handover.cached_tokens,
        "routes": None if routes is None else list(routes.shape),
    }, separators=(",", ":")).encode()
    body = [header, *(_raw(t) for t in (*handover.rows, *handover.states)), *([] if routes is None else [np.ascontiguousarray(routes, "<i2").tobytes()])]
    digest = xxhash.xxh3_128()
    for part in body:
        digest.update(part)
    return b"".join([_HEAD.pack(_MAGIC, _FORMAT, len(header), digest.digest()), *body])


def from_bytes(data: bytes | bytearray | memoryview) -> Handover:
    """Raises MalformedMessage."""
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise _malformed("shorter than a head", len(view))
    magic, version, length, digest = _HEAD.unpack_from(view)
    if magic != _MAGIC or version != _FORMAT:
        raise _malformed(f"{magic!r} of format {version}; this build reads {_MAGIC!r} of format {_FORMAT}", version)
    if xxhash.xxh3_128_digest(view[_HEAD.size :]) != digest:
        raise _malformed("the bytes are not those that were sent", len(view))
    try:
        header = json.loads(bytes(view[_HEAD.size : _HEAD.size + length]))
        return _record(header, view[_HEAD.size + length :])
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise _malformed(f"the header says what cannot be: {error}", length) from error


def _record(header: dict[str, Any], body: memoryview) -> Handover:
    layout = Layout(header["base"], *(tuple(Part(tuple(shape), dtype) for shape, dtype in header[name]) for name in ("rows", "states")))
    tokens = array("i", header["tokens"])
    shapes = [Part((len(tokens), *part.shape), part.dtype) for part in layout.rows] + list(layout.states)
    sizes = [_DTYPES[dtype].itemsize * math.prod(shape) for shape, dtype in shapes]
    of_routes = header["routes"]
    if sum(sizes) + (2 * math.prod(of_routes) if of_routes else 0) != len(body):
        raise ValueError(f"{len(body)} bytes behind a header that names {sum(sizes)} and routes {of_routes}")
    flat = np.frombuffer(bytearray(body), dtype=np.uint8)  # aligned and writable, as torch wants it
    tensors, at = [], 0
    for (shape, dtype), size in zip(shapes, sizes, strict=True):
        tensors.append(torch.from_numpy(flat[at : at + size].copy()).view(_DTYPES[dtype]).reshape(shape))
        at += size
    request = Request(
        header["id"], tokens, Sampling(temperature=header["temperature"], max_tokens=header["max_tokens"]), header["key"], header["first_draw"], header["adapter"],
        header["session"], header["priority"], None if header["stop_ids"] is None else tuple(header["stop_ids"]), header["tenant"],
    )
    count = len(layout.rows)
    return Handover(
        request, layout, header["version"], header["first_token"], header["first_logprob"], header["cached_tokens"], tuple(tensors[:count]), tuple(tensors[count:]),
        flat[at:].view("<i2").reshape(of_routes) if of_routes else None,
    )


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _malformed(problem: str, value: object) -> MalformedMessage:
    return MalformedMessage(problem, field="hand-over", value=value, remedy="send it again")
