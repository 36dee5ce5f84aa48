"""The few Linux system calls that confinement needs and Python's `os` lacks.

Guarantees: a call that fails raises OSError with the call's name; nothing here has an effect when imported. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any, NamedTuple

__all__ = [
    "AT_RECURSIVE", "MOUNT_NODEV", "MOUNT_NOSUID", "MOUNT_RDONLY", "MS_BIND", "MS_NODEV", "MS_NOSUID", "MS_PRIVATE", "MS_RDONLY",
    "MS_REC", "MS_REMOUNT", "NAMESPACES", "become_subreaper", "close_to_tracing", "die_with_parent", "drop_capabilities", "machine",
    "mount", "no_new_privileges", "pivot_root", "protect_mounts", "seccomp", "unmount", "unshare",
]  # fmt: skip

# <sched.h>: user, mount, pid, net, ipc, uts
NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MOUNT_RDONLY, MOUNT_NOSUID, MOUNT_NODEV = 1, 2, 4
AT_RECURSIVE = 0x8000
_AT_FDCWD = -100
_MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522


class _Numbers(NamedTuple):
    audit: int
    pivot_root: int
    capset: int


# System call numbers, and the constant by which a seccomp filter knows the architecture (<linux/audit.h>).
_MACHINES = {"x86_64": _Numbers(0xC000003E, 155, 126), "aarch64": _Numbers(0xC00000B7, 41, 91)}
_MOUNT_SETATTR = 442  # the same everywhere, as all calls since 5.1


class _Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def machine() -> str:
    """The architecture whose numbers are known. Raises OSError on any other."""
    name = platform.machine()
    if os.uname().sysname != "Linux" or name not in _MACHINES:
        raise OSError(f"system calls of {os.uname().sysname} on {name} are not known here")
    return name


def audit_architecture() -> int:
    return _MACHINES[machine()].audit


def _call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _syscall(name: str, number: int, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(ctypes.c_long(number), *arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _prctl(option: int, value: int = 0) -> None:
    _call("prctl", ctypes.c_int(option), *(ctypes.c_ulong(v) for v in (value, 0, 0, 0)))


def die_with_parent(signal: int) -> None:
    """The kernel sends `signal` here when the thread that made this process ends."""
    _prctl(_PR_SET_PDEATHSIG, signal)


def become_subreaper() -> None:
    """Orphans below this process become its children, however often they forked."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def close_to_tracing() -> None:
    """No process of the same user may read this one's memory, environment or descriptors, or trace it."""
    _prctl(_PR_SET_DUMPABLE, 0)


def unshare(flags: int) -> None:
    _call("unshare", ctypes.c_int(flags))


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    try:
        _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({target})") from None


def unmount(target: str) -> None:
    _call("umount2", os.fsencode(target), ctypes.c_int(_MNT_DETACH))


def protect_mounts(target: str, attributes: int) -> None:
    """Set attributes on the mount and everything below it, which no single remount does. Linux 5.12."""
    wanted = _Attributes(set=attributes)
    _syscall("mount_setattr", _MOUNT_SETATTR, ctypes.c_int(_AT_FDCWD), os.fsencode(target), ctypes.c_uint(AT_RECURSIVE),
             ctypes.byref(wanted), ctypes.c_size_t(ctypes.sizeof(wanted)))


def pivot_root(new: str, old: str) -> None:
    _syscall("pivot_root", _MACHINES[machine()].pivot_root, os.fsencode(new), os.fsencode(old))


def drop_capabilities() -> None:
    """All of them, for good: also the bounding set, out of which root's programs would get them back."""
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last one, or not ours to drop: then nothing below can gain it either
            break
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _syscall("capset", _MACHINES[machine()].capset, ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def seccomp(program: bytes) -> None:
    """Install a filter, for this process and all it starts. Needs `no_new_privileges` first."""
    kept = ctypes.create_string_buffer(program, len(program))
    filter_ = _Program(len(program) // 8, ctypes.cast(kept, ctypes.c_void_p))
    _call("prctl", ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(filter_), ctypes.c_ulong(0), ctypes.c_ulong(0))
