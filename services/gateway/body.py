"""A request's JSON object, taken apart name by name: what nobody took is refused by name.

Guarantees: a parameter that would change the sampling is either honoured or refused; a parameter that changes nothing at its neutral value (top_p = 1) may be
given at that value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from driftline.services.gateway.errors import BadRequest

__all__ = ["Body"]

_MISSING = object()


class Body:
    def __init__(self, document: Mapping[str, Any], inside: str = "") -> None:
        """`inside` names the object this one lies in."""
        self._left, self._inside = dict(document), inside

    @classmethod
    def of(cls, raw: bytes) -> Body:
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"not JSON: {error}", field="body", remedy="send one JSON object") from None
        if not isinstance(document, dict):
            raise BadRequest("not an object", field="body", value=type(document).__name__, remedy="send one JSON object")
        return cls(document)

    def name(self, field: str) -> str:
        return f"{self._inside}.{field}" if self._inside else field

    def take(self, field: str) -> Any:
        """The value, or None."""
        return self._left.pop(field, None)

    def integer(self, field: str, default: int | None = None, *, low: int | None = None, high: int | None = None) -> int | None:
        value = self.take(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(field, value, "not a whole number")
        return int(self._bounded(field, value, low, high))

    def number(self, field: str, default: float, *, low: float | None = None, high: float | None = None) -> float:
        value = self.take(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(field, value, "not a finite number")
        return float(self._bounded(field, value, low, high))

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(field, value, "not true or false")
        return value

    def string(self, field: str, default: str = "") -> str:
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(field, value, "not a string")
        return value

    def strings(self, field: str, *, most: int) -> tuple[str, ...]:
        """One string or several, none of them empty."""
        value = self.take(field)
        found = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(found, list) or not all(isinstance(item, str) and item for item in found):
            raise self.wrong(field, value, "not a string, nor a list of strings, none of them empty")
        if len(found) > most:
            raise self.wrong(field, len(found), "too many", f"at most {most}")
        return tuple(found)

    def inner(self, field: str) -> Body:
        """An object inside this one; empty where there is none."""
        value = self.take(field)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(field, value, "not an object")
        return Body(value or {}, self.name(field))

    def neutral(self, values: Mapping[str, tuple[object, ...]]) -> None:
        """What may be there only at a value that changes nothing."""
        for field, allowed in values.items():
            value = self._left.pop(field, _MISSING)
            if value is _MISSING or value is None or value == [] or value == {}:
                continue
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
                shown = " or ".join(json.dumps(each) for each in allowed)
                raise self.wrong(field, value, "not supported", f"leave it out{f', or {shown}' if shown else ''}: the model's whole distribution is sampled")

    def ignore(self, fields: Iterable[str]) -> None:
        """What changes nothing at any value."""
        for field in fields:
            self._left.pop(field, None)

    def done(self) -> None:
        """Refuse what is left."""
        for field, value in self._left.items():
            raise self.wrong(field, value, "not a parameter of this route", "leave it out")

    def wrong(self, field: str, value: object, problem: str, remedy: str = "") -> BadRequest:
        return BadRequest(problem, field=self.name(field), value=value, remedy=remedy)

    def _bounded(self, field: str, value: float, low: float | None, high: float | None) -> float:
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"from {low}" if high is None else f"at most {high}" if low is None else f"from {low} to {high}"
            raise self.wrong(field, value, "out of range", bounds)
        return value
