"""Which class a schema name and version decode to. A name and version mean one class for ever; a second claim is refused."""

from __future__ import annotations

import re
from typing import TypeVar

from driftline.messages import types
from driftline.messages.errors import ConfigError, UnknownSchema
from driftline.messages.types import Message

__all__ = ["register", "registered", "schema"]

M = TypeVar("M", bound=type[Message])

_NAME = re.compile(r"^[a-z][a-z0-9_]{0,31}$")
_CLASSES: dict[tuple[str, int], type[Message]] = {}


def register(cls: M) -> M:
    """Class decorator: makes `cls` decodable under its `schema_name` and `schema_version`."""
    name, version = cls.schema_name, cls.schema_version
    if not _NAME.match(name):
        raise ConfigError("a schema name is lower case letters, digits and _, at most 32", field="schema_name", value=name)
    if not 1 <= version < 2**16:
        raise ConfigError("a schema version is between 1 and 65535", field="schema_version", value=version)
    known = _CLASSES.get((name, version))
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigError(
            f"{known.__qualname__} already has it", field="schema", value=f"{name}/{version}", remedy="raise the version"
        )
    _CLASSES[name, version] = cls
    return cls


def schema(name: str, version: int) -> type[Message]:
    """The class of a schema, or UnknownSchema."""
    cls = _CLASSES.get((name, version))
    if cls is not None:
        return cls
    versions = sorted(v for n, v in _CLASSES if n == name)
    known = f"this build knows versions {versions}" if versions else "no message of that name is registered"
    raise UnknownSchema(
        known, field="schema", value=f"{name}/{version}", remedy="upgrade the receiver or import the package that defines it"
    )


def registered() -> dict[tuple[str, int], type[Message]]:
    return dict(_CLASSES)


for _cls in (
    types.Group,
    types.Admitted,
    types.Retried,
    types.Trajectory,
    types.Graded,
    types.Taken,
    types.OutcomeEvent,
    types.Divergence,
    types.RunFinished,
    types.LearnerOwner,
    types.RelayPeer,
    types.Metrics,
    types.EvalResult,
):
    register(_cls)
