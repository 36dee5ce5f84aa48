"""Recording a run: its start and every batch it trained on, from the broker into a file that needs neither.

Guarantees: the file appears under its name whole or not at all; it is written as `<name>.partial`, and a recording that was cut off
is continued from there. Every batch is compared with the digest the learner gave it. What the broker no longer holds is an error
that says which versions could be recorded and which setting keeps more; nothing is left out without a word.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import driftline
from driftline.messages.blobs import get_blob, has_blob
from driftline.messages.bus import Bus
from driftline.messages.errors import ConfigError, IntegrityError, MalformedMessage
from driftline.messages.recording import RecordedVersion, load_version, record_space, unpack_batch
from driftline.policy_store.blobs import BlobStore, sync_directory
from driftline.policy_store.manifest import Link, Manifest, PolicyHead
from driftline.policy_store.reader import PolicyReader
from driftline.services.config import Config, to_toml
from driftline.services.replay.format import Header, Step, StepFacts
from driftline.services.replay.writer import RecordingWriter
from driftline.services.runtime import finished

__all__ = ["Recorded", "portable", "record"]

Say = Callable[[str], None]
START = 0
"""Steps can be made again only from the policy that no step has touched: later ones need the optimizer's state too."""

_USER_INFO = re.compile(r"(\w+://)[^/@\s\"]+@")


@dataclass(frozen=True)
class Recorded:
    """What a finished recording holds."""

    path: Path
    run: str
    last_version: int
    groups: int
    trajectories: int
    nbytes: int

    def __str__(self) -> str:
        return (f"{self.path}: run {self.run}, versions {START} to {self.last_version}, {self.groups} groups, "
                f"{self.trajectories} trajectories, {self.nbytes} bytes")


def portable(config: Config) -> str:
    """The run file as TOML, without credentials, addresses and places of the machine it ran on."""
    broker = config.broker.model_copy(update={"url": "", "store_dir": "", "credentials": "", "provision": True})
    learner = config.learner.model_copy(update={"checkpoint_dir": ""})
    return _USER_INFO.sub(r"\1", to_toml(config.model_copy(update={"broker": broker, "learner": learner})))


async def record(
    bus: Bus, blobs: BlobStore, config: Config, model: str, out: Path, *, to: int | None = None, follow: bool = False,
    say: Say = lambda _: None,
) -> Recorded:
    """Record the run of `config` into `out`, up to version `to`, or the head; with `follow` until the run is finished.

    `model` is the checkpoint's config.json. Cut off, it leaves `<out>.partial`, which the next call continues.
    """
    if await asyncio.to_thread(out.exists):
        raise ConfigError("there already", field="output", value=str(out), remedy="name another file, or remove it")
    return await _Recorder(bus, blobs, config, model, out, say).run(to, follow)


class _Recorder:
    def __init__(self, bus: Bus, blobs: BlobStore, config: Config, model: str, out: Path, say: Say) -> None:
        self._bus, self._config, self._model, self._out, self._say = bus, config, model, out, say
        self._run = config.run.name
        self._reader = PolicyReader(bus, blobs, self._run)
        self._partial = out.with_name(out.name + ".partial")

    async def run(self, to: int | None, follow: bool) -> Recorded:
        writer: RecordingWriter | None = None
        try:
            async with aclosing(self._targets(to, follow)) as targets:  # type: ignore[type-var]
                async for target in targets:
                    writer = writer or await self._begin()
                    for version in range(writer.next_version, target + 1):
                        step = await self._step(version)
                        await asyncio.to_thread(writer.add, step)
                        self._say(f"version {version} of {target}: {len(step.batch)} bytes")
            assert writer is not None
            await asyncio.to_thread(writer.close)
        except BaseException:
            if writer is not None:
                writer.leave()
            raise
        os.replace(self._partial, self._out)
        sync_directory(self._out.resolve().parent)
        return Recorded(self._out, self._run, writer.next_version - 1, writer.groups, writer.trajectories, self._out.stat().st_size)

    async def _targets(self, to: int | None, follow: bool) -> AsyncIterator[int]:
        """Versions that exist to record up to, growing; at least one."""
        if not follow:
            head = await self._reader.head()
            if head is None or (to is not None and to > head.version):
                problem = "nothing is published" if head is None else f"the head is at version {head.version}"
                raise ConfigError(problem, field="run", value=self._run, remedy="record with --follow while the run goes on")
            yield head.version if to is None else to
            return
        end = asyncio.ensure_future(finished(self._bus, self._run))
        async with aclosing(self._reader.watch()) as heads:  # type: ignore[type-var]
            following = asyncio.ensure_future(anext(heads))
            try:
                while not end.done():
                    await asyncio.wait({end, following}, return_when=asyncio.FIRST_COMPLETED)
                    if following.done():
                        newest = following.result().version
                        yield newest if to is None else min(newest, to)
                        if to is not None and newest >= to:
                            return
                        following = asyncio.ensure_future(anext(heads))
                last = await self._reader.head()
                newest = end.result().version if last is None else last.version
                yield newest if to is None else min(newest, to)
            finally:
                for task in (end, following):
                    task.cancel()
                await asyncio.wait({end, following})

    async def _begin(self) -> RecordingWriter:
        """Continue a partial file of this very run, or begin a new one."""
        manifest = await self._start()
        header = Header(
            run=self._run, driftline=driftline.__version__, created_at=time.time(), start_version=START, start_digest=manifest.digest,
            config=portable(self._config), model=self._model, numerics=manifest.numerics,
        )
        writer = await asyncio.to_thread(RecordingWriter.resume, self._partial) if self._partial.exists() else None
        if writer is None:
            state = await self._reader.materialise_manifest(manifest)
            return await asyncio.to_thread(RecordingWriter.create, self._partial, header, state)
        same = header.model_copy(update={"created_at": writer.header.created_at, "driftline": writer.header.driftline})
        if same != writer.header:
            writer.leave()
            raise ConfigError("is of another run, start or configuration", field="partial recording", value=str(self._partial),
                              remedy="remove it, or name another output")
        self._say(f"continuing {self._partial} from version {writer.next_version}")
        return writer

    async def _start(self) -> Manifest:
        kept = await load_version(self._bus, self._run, START)
        try:
            if kept is not None:
                return await self._reader.load(Link(version=START, seal=kept.seal))
            return await self._reader.manifest(START)
        except IntegrityError as error:
            raise IntegrityError(f"version {START}, where a recording starts, is gone: {error}", field="run", value=self._run,
                                 remedy="keep policy_store.keep_start on, or record with --follow while the run goes on") from error

    async def _step(self, version: int) -> Step:
        made = await self._made(version)
        ref = made.batch
        if ref is None:
            raise IntegrityError("its learner recorded no batch", field="version", value=version,
                                 remedy="a version published without one, by an older learner or by hand, cannot be made again")
        try:
            batch = await get_blob(self._bus, self._run, ref, space=record_space(version))
        except IntegrityError as error:
            raise await self._gone(version, str(error)) from error
        try:
            groups = unpack_batch(batch)
        except MalformedMessage as error:
            raise IntegrityError(f"its batch cannot be read: {error}", field="version", value=version) from error
        facts = StepFacts(
            version=version, digest=made.digest, seal=made.seal, learner_step=made.learner_step, batch=ref.digest,
            groups=len(groups), trajectories=sum(len(group.members) for group in groups), numerics=made.numerics, at=made.at,
        )
        return Step(facts, batch)

    async def _made(self, version: int) -> RecordedVersion:
        """What the learner kept of a version beside its batch; of one just made, what its manifest says."""
        made = await load_version(self._bus, self._run, version)
        if made is not None:
            return made
        try:
            return (await self._reader.manifest(version)).recorded
        except IntegrityError as error:
            raise await self._gone(version, str(error)) from error

    async def _gone(self, version: int, cause: str) -> IntegrityError:
        """The error for a version that the broker has dropped: what it still has, and what to do."""
        head = await self._reader.head()
        newest = head.version if isinstance(head, PolicyHead) else version
        held = [later for later in range(version + 1, newest + 1) if await self._holds(later)]
        has = f"the record stream holds versions {held[0]} to {held[-1]}" if held else "the record stream holds none after it"
        can = f"versions {START} to {version - 1} can be recorded" if version > START + 1 else "no version can be recorded"
        return IntegrityError(
            f"its batch is no longer there ({cause}); {has}, {can}", field="version", value=version,
            remedy=("" if version == START + 1 else f"--to {version - 1} records what can be; ")
            + "raise broker.record_bytes, or record with --follow while the run goes on",
        )

    async def _holds(self, version: int) -> bool:
        made = await load_version(self._bus, self._run, version)
        return made is not None and made.batch is not None and await has_blob(self._bus, self._run, made.batch, space=record_space(version))
