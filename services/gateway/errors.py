"""How a refusal looks to a client: OpenAI's error object, a status, and for a full engine when to come back.

Guarantees: what we would not do as asked is refused by its name, never silently done otherwise; a refusal names the parameter and the remedy; nothing of
a failure inside but its sentence leaves.
"""

from __future__ import annotations

from typing import Any

from driftline.messages.errors import ConfigError, DriftlineError
from driftline.services.gateway.client import EngineBusy, EngineFailed

__all__ = ["BadRequest", "error_object", "status_of"]


class BadRequest(DriftlineError):
    """A request that cannot be served as it is. `status` is HTTP's, `code` OpenAI's."""

    def __init__(self, problem: str, *, field: str = "", value: object = None, remedy: str = "", status: int = 400, code: str = "") -> None:
        super().__init__(problem, field=field, value=value, remedy=remedy)
        self.status, self.code = status, code


_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error", 405: "invalid_request_error", 413: "invalid_request_error",
          429: "rate_limit_error", 500: "server_error", 503: "server_error"}


def status_of(error: DriftlineError) -> int:
    match error:
        case BadRequest():
            return error.status
        case EngineBusy():
            return 429
        case ConfigError():  # of the tokenizer: a conversation that the template refuses
            return 400
        case EngineFailed():
            return 503
        case _:
            return 500


def error_object(error: DriftlineError) -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}"""
    status = status_of(error)
    code = error.code if isinstance(error, BadRequest) else "engine_busy" if isinstance(error, EngineBusy) else ""
    return {"error": {"message": str(error), "type": _KINDS.get(status, "server_error"), "param": error.field or None, "code": code or None}}
