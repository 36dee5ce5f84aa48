"""`driftline policy import`: a folder of weights as version 0 of a run, or as the next version of one that no learner owns.

For as long as it takes, the import is the run's learner: it holds the same claim, so neither works beside the other, and the head moves
by the same compare-and-set. Tensors go from the mapped files to the store one by one; what stays in memory is the writer's base
(with --scratch not even that).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftline.commands.common import BROKER, AsJson, Url, with_bus
from driftline.commands.policy_open import Endpoint, Store, explained, owned, settings_of, where
from driftline.commands.policy_text import emit, size
from driftline.commands.progress import Meter
from driftline.messages.errors import BrokerDenied, ConfigError, IntegrityError

if TYPE_CHECKING:
    from driftline.messages.nats_bus import NatsBus
    from driftline.policy_store.blobs import BlobStore
    from driftline.policy_store.exchange import ModelFolder
    from driftline.policy_store.manifest import Manifest, PolicyHead
    from driftline.policy_store.tensor import HostTensor, Layout
    from driftline.policy_store.writer import PolicyWriter
    from driftline.services.config import Config

__all__ = ["import_"]

def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Safetensors files in the layout of save_pretrained, or a PEFT adapter.")],
    run: Annotated[str, typer.Option("--run", help="The run's name (run.name).")],
    url: Url = BROKER,
    as_next: Annotated[bool, typer.Option("--as-next", help="The next version of a run that has some, instead of the first of a new one.")] = False,
    version: Annotated[int | None, typer.Option("--version", min=0, help="The number it must get; refused if it would be another.")] = None,
    onto: Annotated[Path | None, typer.Option("--onto", metavar="DIR", help="For an adapter: the folder of the weights it is of; both are taken.")] = None,
    reshape: Annotated[bool, typer.Option("--reshape", help="With --as-next: tensors may be added, removed, or of another dtype or shape.")] = False,
    run_file: Annotated[Path | None, typer.Option("--run-file", help="The run's settings, for its store and the sizes of its streams.")] = None,
    scratch: Annotated[Path | None, typer.Option("--scratch", metavar="DIR", help="Keep the writer's copy of the weights in a file there, not in memory.")] = None,
    as_json: AsJson = False, store: Store = "", endpoint: Endpoint = None,
) -> None:
    """Take weights in, bit for bit: a model or an adapter becomes a version."""
    from driftline.policy_store.exchange import ModelFolder

    config = settings_of(run, run_file)
    if scratch is not None and not scratch.is_dir():
        raise ConfigError("no such folder", field="--scratch", value=str(scratch), remedy="name one with room for the weights")
    incoming = Incoming.of(ModelFolder.open(folder), None if onto is None else ModelFolder.open(onto))
    made: list[Manifest] = []
    meter = Meter()

    async def body(bus: NatsBus) -> None:
        with explained("learner"):
            await _declared(bus, run, config, as_next)
            from driftline.policy_store.forms import DeltaForm
            from driftline.policy_store.mapped import in_memory, mapped_in
            from driftline.policy_store.reader import PolicyReader
            from driftline.policy_store.writer import PolicyWriter

            blobs = await _place(bus, run, config, store, endpoint)
            policy = None if config is None else config.policy
            writer = PolicyWriter(
                bus, blobs, run, policy.full_every if policy else 10, full_share=policy.full_share if policy else 1.0,
                form=policy.delta_form if policy else DeltaForm.SMALL, allocate=in_memory if scratch is None else mapped_in(scratch))
            reader = PolicyReader(bus, blobs, run)
            _check_head(run, await reader.head(), as_next, version)  # before a claim is made and weights are read; again by the head's move
            async with owned(bus, run) as epoch:
                made.append(await _publish(bus, writer, incoming, Expected(as_next, version, reshape, epoch), meter))

    asyncio.run(with_bus(url, body, role="learner"))
    manifest = made[0]
    if as_json:
        encoding = manifest.delta if manifest.delta is not None else manifest.full
        emit({"run": run, "version": manifest.version, "digest": manifest.digest, "tensors": len(manifest.tensors), "bytes_raw": manifest.nbytes,
              "bytes_stored": sum(pack.size for pack in manifest.packs), "elements_changed": encoding.changed if encoding is not None else 0,
              "files": sorted(incoming.beside)})
    else:
        typer.echo(f"version {manifest.version} of {run}: {len(manifest.tensors)} tensors, {size(manifest.nbytes)}, stored as "
                   f"{size(sum(pack.size for pack in manifest.packs))}, digest {manifest.digest}")
    sys.exit(0)


@dataclass(frozen=True)
class Incoming:
    """What is taken in: tensors under our names, each made of some of the folders', and the files beside them."""

    layouts: Mapping[str, Layout]
    beside: Mapping[str, bytes]
    adapter: bool
    source: str
    _parts: Mapping[str, tuple[ModelFolder, tuple[str, ...]]]
    _folders: tuple[ModelFolder, ...]

    @classmethod
    def of(cls, folder: ModelFolder, onto: ModelFolder | None) -> Incoming:
        """ConfigError when an adapter is not plain LoRA, or a base is given for what is none."""
        from driftline.policy_store.adapters import AdapterConfig, from_peft
        from driftline.policy_store.model_files import ADAPTER_CONFIG

        if onto is not None and (not folder.adapter or onto.adapter):
            raise ConfigError("only an adapter is put onto a model", field="--onto", value=str(onto.path), remedy="leave it out, or name the model's folder")
        layouts = dict(onto.layouts) if onto is not None else {}
        parts: dict[str, tuple[ModelFolder, tuple[str, ...]]] = {name: (onto, (name,)) for name in layouts if onto is not None}
        if folder.adapter:
            AdapterConfig.parse(folder.beside[ADAPTER_CONFIG])
            for name, (layout, names) in from_peft(folder.layouts).items():
                layouts[name], parts[name] = layout, (folder, names)
        else:
            layouts |= folder.layouts
            parts |= {name: (folder, (name,)) for name in folder.layouts}
        beside = {**(onto.beside if onto is not None else {}), **folder.beside}
        return cls(layouts, beside, folder.adapter, folder.path.name, parts, (folder,) if onto is None else (folder, onto))

    def tensor(self, name: str) -> HostTensor:
        """Over the mapped file; stacked experts of an adapter are put together."""
        import numpy as np

        from driftline.policy_store.tensor import HostTensor

        folder, names = self._parts[name]
        if len(names) == 1:
            return folder.tensor(names[0])
        layout = self.layouts[name]
        return HostTensor(layout.dtype, layout.shape, np.concatenate([folder.tensor(part).data for part in names]))

    def check_unchanged(self) -> None:
        for folder in self._folders:
            folder.check_unchanged()

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts.values())


@dataclass(frozen=True)
class Expected:
    """What whoever imports takes the run for."""

    as_next: bool
    version: int | None
    reshape: bool
    epoch: int


async def _publish(bus: NatsBus, writer: PolicyWriter, incoming: Incoming, expected: Expected, meter: Meter) -> Manifest:
    from driftline.messages.recording import store_version
    from driftline.policy_store.model_files import store_files
    from driftline.policy_store.reader import PolicyReader

    head = await writer.resume(fence=str(expected.epoch))
    number = _check_head(writer.run, head, expected.as_next, expected.version)
    before = {} if head is None else (await PolicyReader(bus, writer.blobs, writer.run).load(head.link)).layouts()
    # An adapter alone goes to the weights that are there; a model replaces them.
    layouts = {**before, **incoming.layouts} if incoming.adapter else dict(incoming.layouts)
    if head is not None and not expected.reshape:
        _check_same(before, layouts)
    if head is None:
        await store_files(bus, writer.run, incoming.beside)
    numerics: dict[str, Any] = {"imported": incoming.source}
    with meter.stage(f"version {number}", incoming.nbytes):
        async with writer.draft(layouts, version=number, learner_step=number) as draft:
            for name in sorted(layouts):
                if name not in incoming.layouts:
                    await draft.put_changes(name, [None] * layouts[name].shard_count)
                    continue
                tensor = incoming.tensor(name)
                await draft.put(name, tensor)
                meter.add(tensor.data.size)
            incoming.check_unchanged()
            manifest = await draft.commit(numerics=numerics)
    if head is not None and incoming.beside:
        await store_files(bus, writer.run, incoming.beside)
    await store_version(bus, manifest.recorded)
    return manifest


def _check_head(run: str, head: PolicyHead | None, as_next: bool, version: int | None) -> int:
    """The number the import gets. ConfigError when the run is not as whoever imports takes it to be."""
    number = 0 if head is None else head.version + 1
    if head is not None and not as_next:
        raise ConfigError(f"it has versions, up to {head.version}", field="run", value=run, remedy="--as-next makes it the next version; or name a new run")
    if head is None and as_next:
        raise ConfigError("it has no version yet", field="--as-next", value=run, remedy="leave it out: this is version 0")
    if version not in (None, number):
        raise ConfigError(f"it would be version {number}", field="--version", value=version, remedy="`driftline policy ls` says what is there")
    return number


def _check_same(before: Mapping[str, Layout], after: Mapping[str, Layout]) -> None:
    odd = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if odd:
        raise ConfigError(f"{len(odd)} tensors are not as in the version before, e.g. {_layout(after.get(odd[0]))} instead of {_layout(before.get(odd[0]))}",
                          field=f"tensor {odd[0]}", value=_layout(after.get(odd[0])), remedy="is it another model? --reshape takes it all the same")


def _layout(layout: Layout | None) -> str:
    return "none" if layout is None else f"{layout.dtype}{list(layout.shape)}"


async def _declared(bus: NatsBus, run: str, config: Config | None, as_next: bool) -> None:
    """The run's streams are there. Those of a new run are made, with the sizes of its settings."""
    from driftline.messages.subjects import topology
    from driftline.services.runtime import run_topology

    wanted = topology(run) if config is None else run_topology(config)
    missing = await bus.missing(wanted)
    if not missing:
        return
    if as_next:
        raise ConfigError("the broker has no such run", field="run", value=run, remedy="without --as-next this becomes version 0 of a new one")
    try:
        await bus.declare(wanted)
    except BrokerDenied as error:
        raise BrokerDenied("these credentials may not make the run's streams", field="run", value=run,
                           remedy="`driftline provision` with the admin's credentials first") from error


async def _place(bus: NatsBus, run: str, config: Config | None, store: str, endpoint: str | None) -> BlobStore:
    """The run's store. A new run's is said from now on: what was asked for, else what its settings say, else the broker."""
    from driftline.policy_store.location import locate, located, open_store

    said = await located(bus, run)
    if said is not None and not store and config is None:
        return await where(bus, run, "", endpoint)
    policy = None if config is None or store else config.policy
    named = store or (policy.store if policy else "jetstream")
    at, region = endpoint or (policy.s3_endpoint if policy else ""), policy.s3_region if policy else ""
    opened = open_store(named, bus, run, endpoint=at, region=region)
    if said is None:
        await _check_place(bus, run, opened, named)
    await locate(bus, run, named, endpoint=at, region=region)
    return opened


async def _check_place(bus: NatsBus, run: str, store: BlobStore, named: str) -> None:
    """An old run does not say where its bytes are; what is said for it now stays said, so they must be there."""
    from driftline.policy_store.reader import PolicyReader

    reader = PolicyReader(bus, store, run)
    head = await reader.head()
    if head is None:
        return
    try:
        await reader.reachable(head.link)
    except IntegrityError as error:
        raise ConfigError(f"version {head.version} is not there", field="--store", value=named, remedy="name the store the run was trained with") from error
