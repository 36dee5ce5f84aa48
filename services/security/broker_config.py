"""The part of nats-server's configuration that says who may do what: accounts, users, permissions and TLS, from the grants.

A run is an account that holds its streams and the admin. Each other role has an account of its own, which imports what the role
is granted and nothing else (`permissions` says why). Passwords are here as bcrypt hashes only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from driftline.services.security.permissions import ANSWERED_IN_PARTS, Role, grant

__all__ = ["Account", "auth_conf", "user_name"]

# How long the server waits for a client that starts with TLS before it greets in plaintext one that does not, only to refuse it
# with a sentence. A client of ours that is later than this fails its handshake and connects again.
GREETING_AFTER: Final = "1s"


@dataclass(frozen=True)
class Account:
    """A run on this broker. `hashes`: each role's password, hashed."""

    name: str
    run: str
    hashes: Mapping[Role, str]


def user_name(account: str, role: Role) -> str:
    return f"{account}.{role}"


def auth_conf(accounts: Iterable[Account], *, certificate: Path, key: Path) -> str:
    """To be included at the top level of nats-server's configuration."""
    sections: dict[str, Any] = {}
    for account in accounts:
        sections |= _sections(account)
    tls = {"cert_file": str(certificate), "key_file": str(key), "min_version": "1.2", "timeout": 5, "handshake_first": GREETING_AFTER}
    return (
        "# Made by `driftline keys`; `driftline keys rotate` writes it anew. Include it from nats-server's configuration.\n"
        f"tls: {json.dumps(tls, indent=2)}\naccounts: {json.dumps(sections, indent=2)}\n"
    )


def _sections(account: Account) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    exported: dict[str, list[str]] = {}
    for role in account.hashes:
        if role is Role.ADMIN:
            continue
        name = user_name(account.name, role)
        subjects = grant(role, account.run, account.name).publish
        imports = [{"service": {"account": account.name, "subject": subject}} for subject in subjects]
        sections[name] = {"users": [_user(account, role)], "imports": imports}
        for subject in subjects:
            exported.setdefault(subject, []).append(name)
    exports = [
        {"service": subject, "accounts": names, **({"response_type": "stream"} if subject.startswith(ANSWERED_IN_PARTS) else {})}
        for subject, names in sorted(exported.items())
    ]
    return {account.name: {"jetstream": "enabled", "users": [_user(account, Role.ADMIN)], "exports": exports}, **sections}


def _user(account: Account, role: Role) -> dict[str, Any]:
    given = grant(role, account.run, account.name)
    permissions = {"publish": {"allow": list(given.publish)}, "subscribe": {"allow": list(given.subscribe)}}
    return {"user": user_name(account.name, role), "password": account.hashes[role], "permissions": permissions}
