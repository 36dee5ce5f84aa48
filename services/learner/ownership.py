"""Which process is the run's learner. At most one acts at a time, and one that was replaced cannot do harm afterwards.

The claim is one subject, changed by compare-and-set; its epoch grows with every owner, who renews it every third of `lease_s`. A
second learner takes over when the first released the claim, when it was a process of this machine that is gone, or after
`lease_s` without a renewal; otherwise it is refused with the owner's name. Who finds a later epoch in place of its own stops
(HeadConflict). This keeps learners from working side by side; that a stopped one which wakes up late can do no harm is the
ledger's and the head's doing: `Taken` events and the fenced head (`PolicyWriter.resume`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import structlog

from driftline.messages.bus import Bus, Stored
from driftline.messages.errors import BrokerFull, BrokerUnavailable, HeadConflict
from driftline.messages.subjects import Subjects
from driftline.messages.types import LearnerOwner

__all__ = ["Ownership", "process_identity"]

log = structlog.get_logger("learner")


def process_identity(pid: int) -> str:
    """What tells a process from a later one with its number, and from one of another machine or container; empty if it is gone."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        facts = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        space = os.readlink("/proc/self/ns/pid")
    except (OSError, IndexError):
        return ""
    return "" if facts[0] in "ZX" else f"{boot}/{space}/{facts[19]}"


class Ownership:
    """`await claim()`, then `keep()` in a task beside the work, `release()` at the end."""

    def __init__(self, bus: Bus, run: str, *, lease_s: float) -> None:
        self._bus, self._run, self.lease_s = bus, run, lease_s
        self._subjects = Subjects(run)
        self._stream = self._subjects.stream("CONTROL")
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._boot = process_identity(self._pid)
        self._seq = 0
        self._beat = 0
        self.epoch = 0

    async def claim(self) -> int:
        """The new epoch. Raises HeadConflict when another learner is at work."""
        while True:
            stored = await self._bus.last(self._stream, self._subjects.learner)
            if stored is not None and not self._is_over(stored.message):
                await self._wait_for_silence(stored)
            owner = stored.message if stored is not None else None
            self.epoch = (owner.epoch if isinstance(owner, LearnerOwner) else 0) + 1
            try:
                self._seq = await self._publish(0, stored.seq if stored is not None else 0)
            except HeadConflict:
                continue  # it was renewed, or another was quicker: look again
            log.info("learner of this run", epoch=self.epoch, instead_of=_name(owner) if isinstance(owner, LearnerOwner) else None)
            return self.epoch

    async def keep(self) -> None:
        """Renew until cancelled. Raises HeadConflict when another learner took over."""
        while True:
            await asyncio.sleep(self.lease_s / 3)
            self._beat += 1
            try:
                self._seq = await self._publish(self._beat, self._seq)
            except HeadConflict as error:
                raise await self._fenced() from error
            except (BrokerUnavailable, BrokerFull) as error:
                log.warning("claim not renewed", cause=str(error))
                await self._look_again()

    async def release(self) -> None:
        """Let the next learner in at once. Best effort: without it, it waits."""
        self._beat += 1
        with suppress(HeadConflict, BrokerUnavailable, BrokerFull):
            await self._publish(self._beat, self._seq, released=True)

    async def _look_again(self) -> None:
        """After a renewal of unknown fate: the claim's sequence, if it is still ours."""
        with suppress(BrokerUnavailable):
            stored = await self._bus.last(self._stream, self._subjects.learner)
            if stored is not None:
                if not self._mine(stored.message):
                    raise await self._fenced()
                self._seq = stored.seq

    def _mine(self, owner: object) -> bool:
        return isinstance(owner, LearnerOwner) and (owner.epoch, owner.host, owner.pid) == (self.epoch, self._host, self._pid)

    async def _fenced(self) -> HeadConflict:
        stored = await self._bus.last(self._stream, self._subjects.learner)
        by = _name(stored.message) if stored is not None and isinstance(stored.message, LearnerOwner) else "another process"
        return HeadConflict(f"{by} has taken over as the learner of this run", field="run.name", value=self._run,
                            remedy="let that one go on; start one learner for a run")

    def _is_over(self, owner: object) -> bool:
        """Whether the owner certainly does not work any more."""
        if not isinstance(owner, LearnerOwner) or owner.released:
            return True
        if owner.host != self._host or not owner.boot or not self._boot:
            return False
        boot, space, _ = owner.boot.split("/", 2)
        if (boot, space) != tuple(self._boot.split("/", 2)[:2]):
            return False  # another container: its process numbers mean nothing here
        # The same process as ours is an earlier life of this service: a process has one learner.
        return owner.pid == self._pid or process_identity(owner.pid) != owner.boot

    async def _wait_for_silence(self, stored: Stored) -> None:
        """Returns after `lease_s` without a change; HeadConflict as soon as there is one."""
        assert isinstance(stored.message, LearnerOwner)
        log.info("another learner owned this run: waiting for a sign of it", owner=_name(stored.message), lease_s=self.lease_s)
        until = time.monotonic() + self.lease_s
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, self.lease_s / 10))
            now = await self._bus.last(self._stream, self._subjects.learner)
            if now is not None and now.seq != stored.seq:
                if isinstance(now.message, LearnerOwner) and now.message.released:
                    return
                by = _name(now.message) if isinstance(now.message, LearnerOwner) else "another process"
                raise HeadConflict(f"{by} is the learner of this run", field="run.name", value=self._run, remedy="start one learner for a run")

    async def _publish(self, beat: int, expect: int, *, released: bool = False) -> int:
        owner = LearnerOwner(run=self._run, epoch=self.epoch, beat=beat, host=self._host, pid=self._pid, boot=self._boot,
                             at=time.time(), released=released)
        id = f"{self._run}/learner/{self.epoch}/{beat}/{self._host}/{self._pid}"
        return (await self._bus.publish(self._subjects.learner, owner, id=id, expect_last=expect)).seq


def _name(owner: LearnerOwner) -> str:
    return f"process {owner.pid} on {owner.host} (epoch {owner.epoch})"
