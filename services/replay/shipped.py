"""The shipped checkpoint as a state, read without torch: what a recording may name instead of holding."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np

import driftline
from driftline.messages.errors import IntegrityError
from driftline.policy_store.tensor import DTYPES, HostTensor, State, tensor_digest

__all__ = ["read_safetensors", "shipped_digests", "shipped_state"]

_LENGTH_BYTES = 8
_DTYPE_NAMES = {dtype.safetensors: name for name, dtype in DTYPES.items()}


@cache
def shipped_state() -> State:
    """Treat it as read-only: it is shared."""
    return read_safetensors(Path(driftline.__file__).parent / "models" / "base" / "model.safetensors")


@cache
def shipped_digests() -> dict[str, str]:
    return {name: tensor_digest(name, tensor) for name, tensor in shipped_state().items()}


def read_safetensors(path: Path) -> State:
    """Every tensor of a safetensors file. An absent file is an empty state: an installation may lack the checkpoint."""
    try:
        data = np.fromfile(path, np.uint8)
    except FileNotFoundError:
        return {}
    first = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    if first > data.size:
        raise IntegrityError("not a safetensors file", field="checkpoint", value=str(path))
    state: State = {}
    for name, entry in json.loads(data[_LENGTH_BYTES:first].tobytes()).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            state[name] = HostTensor(_DTYPE_NAMES[entry["dtype"]], tuple(entry["shape"]), data[first + start : first + stop])
    return state
