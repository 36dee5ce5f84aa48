"""Which system calls confined code may not make, as a seccomp program.

Guarantees: no socket is ever opened, in any family and by no detour (io_uring); no other process is traced or its memory read by
a call; no signal reaches a protected process by number, nor all processes at once. A refused call fails with EPERM; it ends nothing.
Calls of another architecture's numbering are refused as a whole. Standard library only.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence

from driftline.environments.sandbox import kernel

__all__ = ["program"]

# Name: (x86_64, aarch64).
_REFUSED = {
    "socket": (41, 198), "io_uring_setup": (425, 425), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "tkill": (200, 130),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}  # fmt: skip
# Their first argument is a process.
_AIMED = {
    "kill": (62, 129), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "prlimit64": (302, 261),
}  # fmt: skip

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_X32 = 0x40000000  # the second numbering of x86_64
_EVERYONE = -1


def program(protected: Sequence[int]) -> bytes:
    """The filter; `protected` are process numbers (negative: process groups) that may not be signalled."""
    machine = 0 if kernel.machine() == "x86_64" else 1
    targets = [_EVERYONE, *protected]
    refused = [numbers[machine] for numbers in _REFUSED.values()]
    aimed = [numbers[machine] for numbers in _AIMED.values()]
    # Laid out as: head, refused calls, aimed calls, allow, targets, allow, refuse.
    check = 1 + len(targets)  # instructions from the start of the check to its `allow`
    code: list[bytes] = []

    def left() -> int:
        """Instructions between the next one and the last, which refuses."""
        return total - len(code) - 2

    total = 3 + (machine == 0) + len(refused) + len(aimed) + 1 + check + 1 + 1
    code.append(_instruction(_LOAD, _ARCHITECTURE_AT))
    code.append(_instruction(_EQUAL, kernel.audit_architecture(), 0, left()))
    code.append(_instruction(_LOAD, _NUMBER_AT))
    if machine == 0:
        code.append(_instruction(_AT_LEAST, _X32, left(), 0))
    for number in refused:
        code.append(_instruction(_EQUAL, number, left(), 0))
    for number in aimed:
        code.append(_instruction(_EQUAL, number, left() - check - 1, 0))
    code.append(_instruction(_RETURN, _ALLOW))
    code.append(_instruction(_LOAD, _ARGUMENT_AT))
    for target in targets:
        code.append(_instruction(_EQUAL, target & 0xFFFFFFFF, left(), 0))
    code.append(_instruction(_RETURN, _ALLOW))
    code.append(_instruction(_RETURN, _ERROR | errno.EPERM))
    assert len(code) == total, (len(code), total)
    return b"".join(code)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """`struct sock_filter`; the jumps are relative to the next instruction."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
