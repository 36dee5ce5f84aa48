"""Who a connection is to the broker, read from a file that `driftline keys` made; its secrets never reach a log.

Guarantees: a connection with a certificate authority speaks TLS 1.2 or newer from its first byte, so nobody on the way can talk
it out of TLS, and refuses a broker whose certificate that authority did not sign for the broker's name. Neither `repr` nor any
error names a password or token, and `redacted` takes them out of an address. A file that others can read is used with a warning.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from driftline.messages.errors import ConfigError

__all__ = ["CREDENTIALS_FILE", "CREDENTIALS_FORMAT", "CREDENTIALS_VARIABLE", "Credentials", "credentials_file", "load_credentials", "redacted"]

log = structlog.get_logger(__name__)

CREDENTIALS_VARIABLE: Final = "DRIFTLINE_CREDENTIALS"
CREDENTIALS_FILE: Final = "credentials.json"
CREDENTIALS_FORMAT: Final = 1
_REMEDY: Final = "make one with `driftline keys make`"
_USERINFO = re.compile(r"(?<=//)[^/\s]*@")


def redacted(url: str) -> str:
    """An address without the user and password it may hold."""
    return _USERINFO.sub("***@", url)


@dataclass(frozen=True)
class Credentials:
    """How to authenticate. Users with different rights need different inbox prefixes, or one can read another's replies."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    inbox_prefix: str = "_INBOX"

    def __reduce__(self) -> str:
        raise TypeError("credentials do not leave the process")


def credentials_file(named: str | os.PathLike[str], role: str) -> Path:
    """The file for `role`: the one named, or the role's own in a folder of `driftline keys` (an account's, of those there)."""
    path = Path(named)
    return path / role / CREDENTIALS_FILE if path.is_dir() else path


def load_credentials(path: str | os.PathLike[str]) -> Credentials:
    """Raises ConfigError, which names the file and never its content."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from None
    except ValueError:
        raise _wrong(path, "not a credentials file") from None
    if stat.S_IMODE(mode) & 0o077:
        log.warning("credentials can be read by others", path=str(path), mode=oct(stat.S_IMODE(mode)), remedy=f"chmod 600 {path}")
    if not isinstance(document, dict) or document.get("format") != CREDENTIALS_FORMAT:
        raise _wrong(path, f"not a credentials file of format {CREDENTIALS_FORMAT}")
    user, password, prefix, ca = (_text(document, key, path) for key in ("user", "password", "inbox_prefix", "ca"))
    return Credentials(user=user, password=password, tls=_context(path, path.parent / ca, document), inbox_prefix=prefix)


def _text(document: dict[str, Any], key: str, path: Path) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise _wrong(path, f"{key} is missing")
    return value


def _context(path: Path, ca: Path, document: dict[str, Any]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which checks certificates and host names
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(cafile=ca)
        if document.get("certificate"):
            context.load_cert_chain(path.parent / _text(document, "certificate", path), path.parent / _text(document, "key", path))
    except (OSError, ValueError) as error:
        raise _wrong(path, f"its certificates cannot be used: {error}") from None
    return context


def _wrong(path: Path, problem: str) -> ConfigError:
    return ConfigError(problem, field="broker.credentials", value=str(path), remedy=_REMEDY)
