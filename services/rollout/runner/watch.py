"""What a captured step may not do, found before it is captured: a look at a device's value on the host, a copy from memory of the host, a shape that a value decides.

A graph replays launches. What the host read while it was recorded would be read never again, and the driver refuses some of it with an error that names no line; so the
step runs once under this watch, which names the operation. It also keeps what the step reads and did not make: memory of a table that is replaced later stays as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["HostRead", "Watch"]

_READS = frozenset((
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount", "_unique", "_unique2",
    "unique_dim", "unique_consecutive",
))
"""Operations whose results, or their shapes, the host waits for."""


class HostRead(RuntimeError):
    """A step looks at values on the host, so it cannot be captured."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises HostRead within. `outside`: every tensor that was read and not made within, once a memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outside: dict[int, torch.Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        given = _tensors((args, kwargs))
        refusal = _refusal(func, args, kwargs, given)
        if refusal:
            raise HostRead(f"aten.{func.overloadpacket.__name__} {refusal}{_place()}")
        out = func(*args, **kwargs)
        for tensor in given:
            if _memory(tensor) not in self._made:
                self.outside.setdefault(_memory(tensor), tensor)
        self._made.update(_memory(t) for t in _tensors(out) if _memory(t) not in self.outside)
        return out


def _refusal(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Sequence[torch.Tensor]) -> str:
    """Why the operation may not be captured; empty when it may."""
    name = func.overloadpacket.__name__
    by_mask = name in ("index", "index_put", "index_put_") and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    if name in _READS or by_mask or (name == "where" and len(args) == 1):
        return "waits for a value"
    if name == "repeat_interleave" and func._overloadname != "self_int" and kwargs.get("output_size") is None:
        return "waits for a length"
    if name in ("copy_", "_to_copy", "to"):
        wanted = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, (torch.device, torch.Tensor))]
        kinds = {(x if isinstance(x, torch.device) else x.device).type for x in wanted}
        if given and kinds - {given[0].device.type}:
            return "copies between the host and the device"
    return ""


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _place() -> str:
    """The innermost line of this project's own code."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("driftline.") and module != __name__:
            return f", at {module}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
