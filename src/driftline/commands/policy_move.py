"""`driftline policy get | export | import`: versions on their way out of a run and into one."""

from __future__ import annotations

import glob
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from driftline.commands.common import BROKER, AsJson, RunName, Url
from driftline.commands.policy_open import Endpoint, OpenRun, Store, VersionName, leased, opened, settings_of
from driftline.commands.policy_text import emit, size, size_of
from driftline.commands.progress import in_thread
from driftline.messages.errors import ConfigError

if TYPE_CHECKING:
    from driftline.policy_store.manifest import Manifest
    from driftline.policy_store.mapped import Allocate
    from driftline.policy_store.tensor import State
    from driftline.services.config import Config

__all__ = ["add_to"]

Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to make; it appears when it is whole.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the folder if it is there.")]
RunFile = Annotated[Path | None, typer.Option("--run-file", help="The run's settings (config.toml of its run folder): where its model's files are, and the scale of its adapters.")]
Files = Annotated[Path | None, typer.Option("--files", metavar="DIR", help="A folder with config.json and a tokenizer, if the run has none of its own.")]


def add_to(policy: typer.Typer) -> None:
    """Add the commands to `policy`."""
    from driftline.commands import policy_import

    policy.command("get")(get)
    policy.command("export")(export)
    policy.command("import")(policy_import.import_)


def get(
    name: RunName, version: VersionName, out: Out, url: Url = BROKER, force: Force = False, run_file: RunFile = None, files: Files = None,
    as_json: AsJson = False, store: Store = "", endpoint: Endpoint = None,
) -> None:
    """Take a version home as it is: model.safetensors and, where it is known, config.json.

    Interrupted, it goes on where it was: packs that were read lie in DIR.packs until the folder is whole."""
    config, packs = settings_of(name, run_file), Path(f"{os.path.abspath(out)}.packs")

    async def body(run: OpenRun) -> int:
        from driftline.policy_store.blobs import DirectoryBlobs
        from driftline.policy_store.cache import CachedBlobs

        manifest = await run.manifest(version)
        beside = await _beside(run, files, config)
        if not beside:
            typer.echo("no config.json is known of this run: weights only (--files or --run-file say where one is)", err=True)
        async with leased(run, manifest):
            local = CachedBlobs(run.origin, DirectoryBlobs(packs), max_bytes=2**62)
            taken = await _write(run.through(local), manifest, out, Wanted(beside, sys.maxsize, force))
        shutil.rmtree(packs, ignore_errors=True)
        return _said(taken, as_json)

    sys.exit(opened(name, url, body, store=store, endpoint=endpoint))


def export(
    name: RunName, version: VersionName, out: Out, url: Url = BROKER,
    shard_size: Annotated[str, typer.Option("--shard-size", help="Weights per file; more are split, with an index.")] = "5GB",
    merge: Annotated[bool, typer.Option("--merge", help="Fold adapters into the weights instead of exporting them alone.")] = False,
    lora_alpha: Annotated[float | None, typer.Option("--lora-alpha", min=0.0, help="The adapters' alpha, where nothing else says it.")] = None,
    base: Annotated[str, typer.Option("--base", help="What the adapters are of, for adapter_config.json: a folder or a name on a hub.")] = "",
    force: Force = False, run_file: RunFile = None, files: Files = None, as_json: AsJson = False, store: Store = "", endpoint: Endpoint = None,
) -> None:
    """Write a version as transformers, vLLM and PEFT load it: weights, config.json, tokenizer, generation config; or adapters alone."""
    config, file_bytes = settings_of(name, run_file), size_of(shard_size, "--shard-size")

    async def body(run: OpenRun) -> int:
        manifest = await run.manifest(version)
        beside = await _beside(run, files, config)
        wanted = Wanted(beside, file_bytes, force, _lora(manifest, beside, config, merge, lora_alpha, base))
        if "config.json" not in beside and (wanted.lora is None or wanted.lora.merge):
            raise ConfigError("the run does not have one, and nothing loads weights without it", field="config.json", value=name,
                              remedy=f"--files DIR (a folder that holds it), or --run-file {_run_file_here(name)}")
        async with leased(run, manifest):
            return _said(await _write(run, manifest, out, wanted), as_json)

    sys.exit(opened(name, url, body, store=store, endpoint=endpoint))


@dataclass(frozen=True)
class Lora:
    """How a policy with adapters leaves: `merge`d into its weights, or alone, described by `document`."""

    merge: bool
    alpha: float
    document: bytes


@dataclass(frozen=True)
class Wanted:
    """What a folder is to hold beside the weights, and in which form they come."""

    beside: Mapping[str, bytes]
    file_bytes: int
    force: bool
    lora: Lora | None = None


@dataclass(frozen=True)
class Taken:
    """What was written."""

    manifest: Manifest
    folder: Path
    files: tuple[str, ...]
    read: int


async def _write(run: OpenRun, manifest: Manifest, final: Path, wanted: Wanted) -> Taken:
    from driftline.policy_store.checkpoint import whole_folder, write_file
    from driftline.policy_store.exchange import METADATA, OutFiles
    from driftline.policy_store.model_files import ADAPTER_CONFIG

    lora = wanted.lora
    beside = dict(wanted.beside) if lora is not None and not lora.merge else {n: c for n, c in wanted.beside.items() if n != ADAPTER_CONFIG}
    if lora is not None and not lora.merge:
        beside = {n: c for n, c in beside.items() if n not in ("config.json", "generation_config.json")} | {ADAPTER_CONFIG: lora.document}
    metadata = {**METADATA, "run": manifest.run, "version": str(manifest.version), "digest": manifest.digest, "learner_step": str(manifest.learner_step)}
    try:
        with whole_folder(final, replace=wanted.force) as partial:
            if lora is None:
                out = OutFiles(partial, manifest.layouts(), file_bytes=wanted.file_bytes, metadata=metadata)
                state = await _weights(run, manifest, out.allocate)
                with run.meter.stage("write", manifest.nbytes):
                    written = await in_thread(run.meter, lambda: out.settle(state, run.meter.add))
            else:
                written = await _write_lora(run, manifest, partial, lora, wanted.file_bytes, metadata)
            for name, content in beside.items():
                write_file(partial / name, content)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", field="--out", value=str(final), remedy="name another place, or free space there") from error
    return Taken(manifest, final, (*written, *sorted(beside)), run.meter.total)


async def _write_lora(run: OpenRun, manifest: Manifest, folder: Path, lora: Lora, file_bytes: int, metadata: Mapping[str, str]) -> list[str]:
    from driftline.policy_store.adapters import is_adapter, merged, modules, to_peft
    from driftline.policy_store.exchange import ADAPTER_WEIGHTS, write_model
    from driftline.policy_store.mapped import mapped_in
    from driftline.policy_store.tensor import HostTensor
    from driftline.policy_store.tensor_file import write_tensors

    layouts = manifest.layouts()
    state = await _weights(run, manifest, mapped_in(folder))
    if not lora.merge:
        adapters = to_peft(layouts)
        named = {name: layout for name, (layout, _) in adapters.items()}

        def adapter(name: str) -> HostTensor:
            source = adapters[name][1]
            return source.of(state[source.name])

        with run.meter.stage("write", sum(layout.nbytes for layout in named.values())):
            await in_thread(run.meter, lambda: write_tensors(folder / ADAPTER_WEIGHTS, named, adapter, metadata, run.meter.add))
        return [ADAPTER_WEIGHTS]
    updates = modules(layouts)
    plain = {name: layout for name, layout in layouts.items() if not is_adapter(name)}
    if missing := sorted(module for module in updates if f"{module}.weight" not in plain):
        raise ConfigError(f"the versions hold no weights to merge {len(missing)} adapters into", field="--merge", value=missing[0],
                          remedy="export the adapters, and merge them into a checkpoint: driftline model merge DIR ADAPTER OUT")

    def tensor(name: str) -> HostTensor:
        pair = updates.get(name.removesuffix(".weight"))
        if pair is None or not name.endswith(".weight"):
            return state[name]
        return merged(state[name], pair.a.of(state[pair.a.name]), pair.b.of(state[pair.b.name]), lora.alpha)

    with run.meter.stage("merge", sum(layout.nbytes for layout in plain.values())):
        return await in_thread(
            run.meter, lambda: write_model(folder, plain, tensor, file_bytes=file_bytes, metadata=metadata, on_bytes=run.meter.add))


async def _weights(run: OpenRun, manifest: Manifest, allocate: Allocate) -> State:
    """The version's weights, in the room that `allocate` gives."""
    paths = await run.reader.paths(manifest)
    with run.meter.stage(f"version {manifest.version}", paths[0].nbytes if paths else None):
        return await run.into(allocate).materialise_manifest(manifest)


def _lora(manifest: Manifest, beside: Mapping[str, bytes], config: Config | None, merge: bool, alpha: float | None, base: str) -> Lora | None:
    """How the adapters leave; None for a policy without. ConfigError when it would need what nobody said."""
    from driftline.policy_store.adapters import AdapterConfig, is_adapter
    from driftline.policy_store.model_files import ADAPTER_CONFIG

    layouts = manifest.layouts()
    if not any(is_adapter(name) for name in layouts):
        if merge:
            raise ConfigError("this policy has no adapters", field="--merge", value=manifest.version, remedy="leave it out")
        return None
    stored = AdapterConfig.parse(beside[ADAPTER_CONFIG]) if ADAPTER_CONFIG in beside else None
    if alpha is None and stored is not None:
        alpha = stored.alpha
        if not base:
            return Lora(merge, alpha, beside[ADAPTER_CONFIG])
    if alpha is None and config is not None and config.learner.lora_rank:
        alpha = config.learner.peft_alpha
    made = AdapterConfig.of(layouts, alpha or None, base or (stored.base if stored is not None else ""))
    return Lora(merge, made.alpha, made.document(layouts))


def _run_file_here(name: str) -> str:
    """The settings of the newest folder of the run, if there is one where the command was called."""
    copies = sorted(Path("runs").glob(f"{glob.escape(name)}-*/config.toml"))
    return str(copies[-1]) if copies else "FILE (the run's settings)"


async def _beside(run: OpenRun, files: Path | None, config: Config | None) -> dict[str, bytes]:
    """The files beside the weights: of the folder given, else of the run, else of the model the run started from."""
    from driftline.models.tokenizer_files import byte_tokenizer_files, generation_config
    from driftline.policy_store.model_files import CONFIG, GENERATION, TOKENIZERS, files_in, load_files

    found = files_in(files) if files is not None else await load_files(run.bus, run.name)
    if files is not None and not found:
        raise ConfigError("holds no config.json and no tokenizer", field="--files", value=str(files), remedy="name the folder of a model")
    if not found and config is not None:
        from driftline.services.starting import starting_files

        found = starting_files(config)
    if CONFIG not in found:
        return found
    if not found.keys() & TOKENIZERS:
        found |= byte_tokenizer_files(found[CONFIG])
    if GENERATION not in found:
        found |= {GENERATION: made} if (made := generation_config(found[CONFIG])) else {}
    return found


def _said(taken: Taken, as_json: bool) -> int:
    manifest = taken.manifest
    if as_json:
        emit({"run": manifest.run, "version": manifest.version, "digest": manifest.digest, "folder": str(taken.folder), "files": list(taken.files),
              "bytes_raw": manifest.nbytes})
    else:
        typer.echo(f"{taken.folder}: version {manifest.version} of {manifest.run}, {size(manifest.nbytes)}, {', '.join(taken.files)}")
    return 0
