"""The folder of `driftline keys`: an authority, the broker's half, and a credentials file for each role of each run.

    authority/   ca.crt, ca.key, authority.json (hosts, runs, password hashes)   stays with who administers
    server/      server.crt, server.key, auth.conf                              goes to nats-server
    ACCOUNT/ROLE/  credentials.json, ca.crt                                     goes to that role's service, and nowhere else

Guarantees: files are 0600 and folders 0700 from the moment they exist, and are replaced whole or not at all; a password is 32 random
bytes and exists in its role's file only; nothing that exists is overwritten unless asked. `authority.json` is written last, so a
folder that has it is complete.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import bcrypt

from driftline.messages.credentials import CREDENTIALS_FILE, CREDENTIALS_FORMAT
from driftline.messages.errors import ConfigError
from driftline.policy_store.blobs import write_whole
from driftline.services.security.broker_config import Account, auth_conf, user_name
from driftline.services.security.certificates import Pair, expires, make_authority, make_server
from driftline.services.security.permissions import Role, inbox_prefix

__all__ = ["SERVER", "Existing", "Keys", "auth_file", "make_keys"]

SERVER: Final = "server"
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")
_NAME = re.compile(r"^[A-Za-z0-9_-]{1,64}$")
_RESERVED: Final = ("authority", SERVER)
# The least that bcrypt has. A password of 256 random bits is not guessed at any speed, and the server pays the cost at every
# connection: at bcrypt's usual one, the services that come back after its restart would wait in line for it.
_ROUNDS: Final = 4


@dataclass(frozen=True)
class Existing:
    """What to do about a folder that holds keys: refuse (the default), leave them, start over, or add a run to them."""

    leave: bool = False
    replace: bool = False
    add: bool = False


class Keys:
    """An existing folder."""

    def __init__(self, folder: Path, hosts: Sequence[str], days: int) -> None:
        self.folder, self.hosts, self.days = folder, list(hosts), days
        self.accounts: list[Account] = []
        self._made: dict[str, float] = {}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Raises ConfigError when there are none."""
        try:
            document = json.loads(_document(folder).read_text())
            keys = cls(folder, document["hosts"], int(document["days"]))
            keys.accounts = [_account(entry) for entry in document["accounts"]]
            keys._made = dict(document["made"])
        except FileNotFoundError:
            raise _wrong(folder, "no keys are there", "make them with `driftline keys make`") from None
        except OSError as error:
            raise _wrong(folder, f"cannot be read: {error.strerror}", "keys belong to who made them") from None
        except (ValueError, KeyError, TypeError):
            raise _wrong(folder, "authority/authority.json is damaged", "make the keys again with --force") from None
        return keys

    def account(self, name: str = "") -> Account:
        """The account of this name; the only one, when there is only one and none is named."""
        found = [account for account in self.accounts if name in ("", account.name)]
        if len(found) != 1:
            known = ", ".join(account.name for account in self.accounts)
            raise ConfigError("no such account" if name else "there are several", field="--account", value=name, remedy=f"one of {known}")
        return found[0]

    def credentials(self, role: Role, account: str = "") -> Path:
        return self.folder / self.account(account).name / role / CREDENTIALS_FILE

    def lines(self) -> list[str]:
        """What `driftline keys show` prints: no secrets and no hashes."""
        lines = [
            f"server certificate  for {', '.join(self.hosts)}  {_until(self.folder / SERVER / 'server.crt')}",
            f"authority           {_until(self.folder / 'authority' / 'ca.crt')}",
        ]
        for account in self.accounts:
            lines.append(f"account {account.name}  run {account.run}")
            for role in account.hashes:
                name = user_name(account.name, role)
                made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._made.get(name, 0.0)))
                lines.append(f"  {name:<32} password made {made}, valid until rotated")
        return lines

    def rotate(self, role: Role, account: str = "") -> Path:
        """A new password for a role: its file, and the server's configuration, which the server has to read again."""
        chosen = self.account(account)
        changed = Account(chosen.name, chosen.run, {**chosen.hashes, role: self._issue(chosen.name, chosen.run, role)})
        self.accounts = [changed if known is chosen else known for known in self.accounts]
        self._save()
        return self.folder / chosen.name / role / CREDENTIALS_FILE

    def renew_server(self, days: int | None = None) -> Path:
        """A new certificate for the same hosts, by the same authority."""
        self.days = self.days if days is None else days
        authority = self.folder / "authority"
        made = make_server(Pair((authority / "ca.crt").read_bytes(), (authority / "ca.key").read_bytes()), self.hosts, self.days)
        _write(self.folder / SERVER / "server.key", made.key)
        _write(self.folder / SERVER / "server.crt", made.certificate)
        self._save()
        return self.folder / SERVER / "server.crt"

    def add(self, name: str, run: str) -> None:
        """A run on the same broker, in an account of its own."""
        if any(account.name == name for account in self.accounts):
            raise ConfigError("there is one of this name", field="--account", value=name, remedy="choose another")
        self.accounts.append(Account(name, run, {role: self._issue(name, run, role) for role in Role}))
        self._save()

    def _issue(self, account: str, run: str, role: Role) -> str:
        """Write a role's file with a new password; returns the hash."""
        password = secrets.token_urlsafe(32)
        place = self.folder / account / role
        _write(place / "ca.crt", (self.folder / "authority" / "ca.crt").read_bytes())
        _write(place / CREDENTIALS_FILE, _json({
            "format": CREDENTIALS_FORMAT, "account": account, "run": run, "role": role.value, "user": user_name(account, role),
            "password": password, "inbox_prefix": inbox_prefix(account, role), "ca": "ca.crt",
        }))  # fmt: skip
        self._made[user_name(account, role)] = round(time.time())
        return bcrypt.hashpw(password.encode(), bcrypt.gensalt(_ROUNDS, prefix=b"2a")).decode()

    def _save(self) -> None:
        server = (self.folder / SERVER).resolve()
        text = auth_conf(self.accounts, certificate=server / "server.crt", key=server / "server.key")
        _write(server / "auth.conf", text.encode())
        accounts = [
            {"name": account.name, "run": account.run, "hashes": {role.value: hash for role, hash in account.hashes.items()}}
            for account in self.accounts
        ]
        document = {"format": 1, "hosts": self.hosts, "days": self.days, "accounts": accounts, "made": self._made}
        _write(_document(self.folder), _json(document))


def auth_file(folder: Path) -> Path:
    """The server's configuration in a folder of keys. Raises ConfigError when there is none."""
    path = folder / SERVER / "auth.conf"
    if not path.is_file():
        raise _wrong(folder, "no keys are there", "make them with `driftline keys make`")
    return path


def make_keys(folder: Path, run: str, *, account: str = "", hosts: Sequence[str] = (), days: int = 365, existing: Existing | None = None) -> Keys:
    """Make the folder for a run. `account` is the run's name when it is not given."""
    how, account = existing or Existing(), account or run
    for field, name in (("--run", run), ("--account", account)):
        if not _NAME.match(name) or name in _RESERVED:
            raise ConfigError("not a name for it", field=field, value=name, remedy="letters, digits, - and _, at most 64")
    try:
        return _make(folder, run, account, hosts, days, how)
    except OSError as error:
        raise _wrong(folder, f"cannot be written: {error.strerror}", "name a folder of your own") from None


def _make(folder: Path, run: str, account: str, hosts: Sequence[str], days: int, how: Existing) -> Keys:
    complete = _document(folder).exists()
    if complete and how.leave:
        return _left(Keys.load(folder), run, account)
    if complete and how.add:
        keys = Keys.load(folder)
        keys.add(account, run)
        return keys
    if not (how.replace or how.leave) and folder.exists() and any(path.is_file() for path in folder.rglob("*")):
        raise _wrong(folder, "something is there", "name another folder, or use --force, --if-absent or --add")
    if how.replace:
        _empty(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = make_authority(account)
    _write(folder / "authority" / "ca.key", authority.key)
    _write(folder / "authority" / "ca.crt", authority.certificate)
    keys = Keys(folder, list(dict.fromkeys((*hosts, *_LOCAL))), days)
    server = make_server(authority, keys.hosts, days)
    _write(folder / SERVER / "server.key", server.key)
    _write(folder / SERVER / "server.crt", server.certificate)
    keys.add(account, run)
    return keys


def _left(keys: Keys, run: str, account: str) -> Keys:
    """What is there is kept, if it is what was asked for."""
    found = keys.account(account)
    if found.run != run:
        raise ConfigError(f"the keys there are for the run {found.run}", field="--run", value=run,
                          remedy="make them again with --force, or add this run with --add and another --account")  # fmt: skip
    return keys


def _empty(folder: Path) -> None:
    """The folder itself stays, and those in it that are mounted."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir() and not path.is_symlink() and (path.name in _RESERVED or any((path / role).is_dir() for role in Role)):
            for file in [file for file in path.rglob("*") if not file.is_dir() or file.is_symlink()]:
                file.unlink()
            shutil.rmtree(path, ignore_errors=True)


def _account(entry: dict[str, Any]) -> Account:
    return Account(entry["name"], entry["run"], {Role(role): hash for role, hash in entry["hashes"].items()})


def _document(folder: Path) -> Path:
    return folder / "authority" / "authority.json"


def _until(certificate: Path) -> str:
    try:
        return f"valid until {expires(certificate.read_bytes()):%Y-%m-%d %H:%M:%S UTC}"
    except (OSError, ValueError) as error:
        return f"unreadable: {error}"


def _write(path: Path, data: bytes) -> None:
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    path.parent.chmod(0o700)
    write_whole(path, data)


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()


def _wrong(folder: Path, problem: str, remedy: str) -> ConfigError:
    return ConfigError(problem, field="keys", value=str(folder), remedy=remedy)
