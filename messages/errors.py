"""Every error Driftline raises on purpose says which field, which value, and what to do about it.

A caller catches by kind; a person reads one sentence. Nothing here depends on the rest of the package.
"""

from __future__ import annotations

__all__ = [
    "BrokerDenied",
    "BrokerFull",
    "BrokerUnavailable",
    "ConfigError",
    "DriftlineError",
    "HeadConflict",
    "IntegrityError",
    "LeaseLost",
    "MalformedMessage",
    "PayloadTooLarge",
    "StoreUnavailable",
    "UnknownSchema",
]


class DriftlineError(Exception):
    """Base of the hierarchy: `field` names what is wrong, `value` is what was found, `remedy` says what to do."""

    def __init__(self, problem: str, *, field: str = "", value: object = None, remedy: str = "") -> None:
        self.problem, self.field, self.value, self.remedy = problem, field, value, remedy
        where = f"{field} = {_short(value)}: " if field else ""
        super().__init__(f"{where}{problem}" + (f" ({remedy})" if remedy else ""))


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class ConfigError(DriftlineError):
    """A setting is unknown, malformed, or would deadlock with another."""


class MalformedMessage(DriftlineError):
    """Bytes that are not a valid message: dead-lettered with this reason, never retried."""


class UnknownSchema(MalformedMessage):
    """A schema name or major version this build does not know."""


class PayloadTooLarge(DriftlineError):
    """A payload beyond a declared limit; refused before anything is allocated or sent."""


class BrokerUnavailable(DriftlineError):
    """No answer from the broker within the deadline."""


class BrokerDenied(DriftlineError):
    """The broker refused the credentials, or the permission to use a subject: no retry will help."""


class LeaseLost(BrokerUnavailable):
    """The broker answers, but does not confirm this delivery: it may be delivered again, to us or to another."""


class StoreUnavailable(BrokerUnavailable):
    """A blob store outside the broker (a folder, an object store) does not answer: whoever waits for a broker waits for it too."""


class BrokerFull(DriftlineError):
    """A stream with discard-new refused the message: back-pressure, the publisher must wait and retry."""


class HeadConflict(DriftlineError):
    """A compare-and-set lost: another writer advanced the subject first."""


class IntegrityError(DriftlineError):
    """A digest, base or size does not match: the bytes are refused and the holder must fall back to a full."""
