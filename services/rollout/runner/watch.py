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

_READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
"""Operations whose results, or their shapes, the host waits for."""


class HostRead(RuntimeError):
    """A step looks at values on the host, so it cannot be captured."""


class Watch(TorchDispatchMode):
    """Raises HostRead within. `outside`: every tensor that was read and not made within, once a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[int, torch.Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, dict(kwargs or {}))) if isinstance(x, torch.Tensor)]
        if name in _READS or (name == "index" and any(t.dtype in (torch.bool, torch.uint8) for t in given[1:])):
            raise HostRead(f"aten.{name} waits for a value{_place()}")
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None and func._overloadname != "self_int":
            raise HostRead(f"aten.repeat_interleave without output_size waits for a length{_place()}")
        out = func(*args, **(kwargs or {}))
        for tensor in given:
            memory = _memory(tensor)
            if memory not in self._made:
                self.outside.setdefault(memory, tensor)
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        kinds = {t.device.type for t in given}
        crosses = name == "copy_" and len(kinds) > 1 if given and made and made[0] is given[0] else bool(given) and not {t.device.type for t in made} <= kinds
        if crosses:
            raise HostRead(f"aten.{name} copies between the host and the device{_place()}")
        self._made.update(_memory(t) for t in made if _memory(t) not in self.outside)
        return out


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
