"""Which files a sandbox hides and which it shows: rules on paths, no effects.

Guarantees: a path that must be read is shown even below one that is hidden, and nothing else there is; what is named private is hidden
even inside a folder that is shown; steps come parents first, so that applying them in order has that result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["below", "processes_of", "steps"]

# Where secrets, sockets and other users' files usually are. /tmp is private anyway.
_PRIVATE = ("/root", "/home", "/run", "/boot", "/var/log", "/var/spool", "/var/lib/docker", "/etc/shadow", "/etc/shadow-", "/etc/gshadow",
            "/etc/gshadow-", "/etc/ssh", "/etc/sudoers", "/etc/sudoers.d", "/etc/ssl/private", "/etc/krb5.keytab")
_TOO_WIDE = ("/", "/tmp")
# A private file may lie there, and only the file can be hidden.
_NEEDED = {*_TOO_WIDE, "/etc", "/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/var", "/dev", "/proc", "/sys"}


def steps(readable: Iterable[str], hidden: Iterable[str]) -> list[tuple[str, str]]:
    """("hide" | "show", path) in the order to apply them."""
    shown = {path for item in (*_python(), *readable) for path in _both_names(item)}
    private = {os.path.realpath(path) for path in (*_PRIVATE, *hidden) if os.path.lexists(path)} - _NEEDED
    home = os.path.realpath(os.path.expanduser("~"))
    if any(below(home, [path]) for path in shown):  # somebody's tasks lie in it: then all but its dot files is shown
        private.discard(home)
        private |= {entry.path for entry in _entries(home) if entry.name.startswith(".")}
    elif home not in _TOO_WIDE:
        private.add(home)
    private -= shown
    private -= {path for path in private if path in {"/root", "/home"} and any(below(path, [item]) for item in shown)}
    useful = {path for path in shown if below(path, [*private, "/tmp"]) or any(below(item, [path]) for item in private)}
    tagged = [*(("hide", path) for path in private), *(("show", path) for path in useful if not _inside_shown(path, useful, private))]
    return sorted(tagged, key=lambda step: (step[1].count("/"), step))


def below(path: str, folders: Iterable[str]) -> bool:
    """Whether `path` is one of these or inside one."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def processes_of(user: int) -> int:
    """How many threads a user has: what RLIMIT_NPROC counts."""
    count = 0
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == user:
                count += len(os.listdir(entry / "task"))
        except OSError:  # ended meanwhile
            continue
    return count


def _inside_shown(path: str, shown: set[str], private: set[str]) -> bool:
    """Already there: inside another shown folder with nothing hidden in between."""
    for outer in shown:
        if path != outer and below(path, [outer]) and not any(below(path, [p]) and below(p, [outer]) for p in private):
            return True
    return False


def _python() -> list[str]:
    """This interpreter, what it imports from, and this package with the folders that its links lead to."""
    import driftline

    package = Path(driftline.__file__).parent
    searched = [path for path in sys.path if os.path.isabs(path) and os.path.exists(path)]
    links = [str(entry) for entry in package.iterdir() if entry.is_symlink()]
    return [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), str(package), *links, *searched]


def _both_names(path: str) -> list[str]:
    """As written and as it really is; of a folder that cannot be shown whole, its Python files."""
    names = {os.path.abspath(path), os.path.realpath(path)}
    if names & set(_TOO_WIDE):
        return [entry.path for entry in _entries(path) if entry.name.endswith(".py")]
    return [name for name in names if os.path.exists(name)]


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []
