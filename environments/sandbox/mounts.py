"""The files that confined code sees, built by hand where bubblewrap is not there to do it.

Guarantees, once `enter` returned: the whole tree is read-only but for /tmp (private, of a bounded size) and /dev/shm (likewise); /dev has
the harmless devices only; what was to be hidden is empty; the old tree cannot be reached. Needs its own user and mount namespace.
Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from driftline.environments.sandbox import kernel
from driftline.environments.sandbox.kernel import (
    MOUNT_NODEV,
    MOUNT_NOSUID,
    MOUNT_RDONLY,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_REC,
)

__all__ = ["enter"]

_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
_PLAIN = MS_NOSUID | MS_NODEV
_OLD, _NEW = "/old", "/new"


def enter(steps: Sequence[tuple[str, str]], *, scratch_mb: int, folder: str) -> None:
    """`steps` are ("hide" | "show", path) in the order to apply; `folder` is where to be afterwards."""
    kernel.mount("none", "/", None, MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", _PLAIN, "size=1m")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    kernel.mount(_OLD, _NEW, None, MS_BIND | MS_REC)
    kernel.protect_mounts(_NEW, MOUNT_RDONLY | MOUNT_NOSUID)
    _devices(scratch_mb)
    _processes()
    kernel.mount("tmpfs", f"{_NEW}/tmp", "tmpfs", _PLAIN, f"size={scratch_mb}m,mode=1777")
    hidden = [path for verb, path in steps if _apply(verb, path)]
    if not os.path.isdir(_NEW + folder):
        os.makedirs(_NEW + folder)
    for path in hidden:
        kernel.protect_mounts(_NEW + path, MOUNT_RDONLY)
    kernel.unmount(_OLD)
    os.chdir(_NEW)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir(folder)


def _devices(scratch_mb: int) -> None:
    kernel.mount("tmpfs", f"{_NEW}/dev", "tmpfs", MS_NOSUID, "size=64k,mode=755")
    for name in _DEVICES:
        _bind(f"{_OLD}/dev/{name}", f"{_NEW}/dev/{name}")
    for name, target in _LINKS.items():
        os.symlink(target, f"{_NEW}/dev/{name}")
    os.mkdir(f"{_NEW}/dev/shm")
    kernel.mount("tmpfs", f"{_NEW}/dev/shm", "tmpfs", _PLAIN, f"size={scratch_mb}m,mode=1777")
    kernel.mount("none", f"{_NEW}/dev", None, kernel.MS_REMOUNT | MS_BIND | kernel.MS_RDONLY | MS_NOSUID)


def _processes() -> None:
    """A /proc of the new pid namespace. Where the kernel does not allow one (inside a container whose /proc is partly covered) the
    old one stays, read-only: names of processes are seen then, their memory and environment are not, across user namespaces."""
    try:
        kernel.mount("proc", f"{_NEW}/proc", "proc", _PLAIN)
    except PermissionError:
        return


def _apply(verb: str, path: str) -> bool:
    """One step; whether it left an empty folder that is still writable."""
    new, old = _NEW + path, _OLD + path
    if verb == "show":
        _bind(old, new)
        kernel.protect_mounts(new, MOUNT_RDONLY | MOUNT_NOSUID | MOUNT_NODEV)
        return False
    if not os.path.lexists(new):
        return False
    if os.path.isdir(new):
        kernel.mount("tmpfs", new, "tmpfs", _PLAIN, "size=256k,mode=755")
        return True
    kernel.mount(f"{_OLD}/dev/null", new, None, MS_BIND)
    return False


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.lexists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    kernel.mount(source, target, None, MS_BIND | MS_REC)
